"""safetensors, the tensors of a directory: a JSON header, then bytes. Checked first, then read through a memory map.

    length of the header (u64) · {"name": {"dtype", "shape", "data_offsets": [begin, end]}, …} · the tensors' bytes
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from unspool import strict_json
from unspool.errors import ModelError
from unspool.weights.fields import Fields, is_text, read_json
from unspool.weights.formats import STORED
from unspool.weights.gguf import MAX_NAME, MAX_TENSORS
from unspool.weights.gguf_writer import replacing
from unspool.weights.mapping import map_file
from unspool.weights.weight import Weight

MAX_DIMS = 6  # tensors of non-text parts may be convolutions over time too
DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8_e4m3", "U8": "u8"}
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the format's own limit


def open_safetensors_directory(path: str | Path) -> dict[str, Weight]:
    """Every tensor of a directory, by its name in the files. An index file lists the tensors of several files."""
    path = Path(path)
    if not (path / INDEX).exists():
        return open_safetensors(_only_file(path))
    index = Fields(path / INDEX, read_json(path / INDEX))
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        index.fail("weight_map", "an object that maps tensors to files was expected")
    tensors: dict[str, Weight] = {}
    for file in sorted({_plain_name(index, name, file) for name, file in files.items()}):
        for name, weight in open_safetensors(path / file).items():
            if files.get(name) != file:
                raise ModelError(f"{path / file}: tensor {name!r}: {INDEX} says it is in {files.get(name)!r}")
            tensors[name] = weight
    for name, file in files.items():
        if name not in tensors:
            raise ModelError(f"{path / file}: tensor {name!r} is missing, though {INDEX} says it is there")
    return tensors


def _plain_name(index: Fields, name: str, file: Any) -> str:
    """Require a file name without a directory: the index is untrusted."""
    if not is_text(file) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
        index.fail("weight_map", f"tensor {name[:60]!r} is said to be in {str(file)[:60]!r}, no file beside the index")
    return str(file)


def _only_file(path: Path) -> Path:
    if (path / "model.safetensors").exists():
        return path / "model.safetensors"
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{path} holds {len(files)} safetensors files and no {INDEX} to join them")
    pickles = [*path.glob("*.bin"), *path.glob("*.pth"), *path.glob("*.pt")]
    reason = f"; {pickles[0].name} may be a pickle, which can run code and is never read" if pickles else ""
    raise ModelError(f"{path} holds no model.safetensors{reason}")


def open_safetensors(path: Path) -> dict[str, Weight]:
    """The tensors of one file."""
    buffer = map_file(path)

    def fail(message: str) -> NoReturn:
        raise ModelError(f"{path}: {message}")

    if len(buffer) < 8:
        fail(f"the file ends at {len(buffer)} bytes (is it truncated?)")
    (length,) = struct.unpack_from("<Q", buffer)
    if length > min(MAX_HEADER, len(buffer) - 8):
        fail(f"a header of {length} bytes does not fit a file of {len(buffer)} (is it truncated?)")
    header = _header(path, buffer[8 : 8 + length])
    everything = memoryview(buffer)[8 + length :]
    spans = {name: _span(path, name, entry, everything.nbytes) for name, entry in header.items()}
    previous_end = 0
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin < previous_end:
            fail(f"tensor {name!r}: it begins at {begin}, inside another that ends at {previous_end}")
        previous_end = end
    return {
        name: Weight(name, format, shape, everything[begin:end]) for name, (format, shape, begin, end) in spans.items()
    }


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = strict_json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelError(f"{path}: {len(header)} tensors; at most {MAX_TENSORS} are allowed")
    return header


def _span(path: Path, name: str, entry: Any, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """(format, shape, begin, end) of one entry, after all checks."""

    def fail(message: str) -> NoReturn:
        raise ModelError(f"{path}: tensor {name[:MAX_NAME]!r}: {message}")

    if not is_text(name) or len(name) > MAX_NAME:
        fail(f"its name is not a string of at most {MAX_NAME} characters")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        fail("dtype, shape and data_offsets were expected")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(f"type {str(dtype)[:60]} cannot be read; {', '.join(DTYPES)} can")
    shape = shape or [1]  # a scale may be a number without a shape
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(n) and n for n in shape):
        fail(f"shape {str(shape)[:60]} is not 1 to {MAX_DIMS} positive numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        fail(f"data_offsets {str(offsets)[:60]} are not two positions")
    begin, end = offsets
    wanted = STORED[DTYPES[dtype]].nbytes(math.prod(shape))
    if end - begin != wanted:
        fail(f"{dtype} of shape {shape} takes {wanted} bytes; its offsets span {end - begin}")
    if end > size:
        fail(f"its bytes end at {end}, but the file's end at {size} (is it truncated?)")
    return DTYPES[dtype], tuple(shape), begin, end


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def write_safetensors(path: str | Path, tensors: Mapping[str, Weight]) -> None:
    """Write one file, completely or not at all."""
    names = {format: dtype for dtype, format in DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, weight in tensors.items():
        if weight.format not in names:
            raise ModelError(f"tensor {name!r}: safetensors files hold {', '.join(DTYPES)}, not {weight.format}")
        span = [offset, offset + weight.nbytes]
        header[name] = {"dtype": names[weight.format], "shape": list(weight.shape), "data_offsets": span}
        offset += weight.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # so that the tensors begin at a multiple of 8
    with replacing(Path(path)) as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for weight in tensors.values():
            file.write(weight.raw)

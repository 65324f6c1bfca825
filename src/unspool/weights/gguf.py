"""Reading GGUF, the one-file model: metadata, then tensors, read through a memory map.

    magic "GGUF" · version · num_tensors · num_keys
    key · type · value                            × num_keys
    name · num_dims · dims · type · offset        × num_tensors
    padding to general.alignment, then the tensors' bytes, each at its offset from here

The file is untrusted: every count, length and offset is checked against the file's size before anything is allocated or
read. We do not use the `gguf` package for reading, because importing it and reading the vocabulary take longer than a
whole first token should; our tests compare with it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unspool.errors import ModelError
from unspool.records import record
from unspool.text.texts import read_texts
from unspool.weights.formats import FORMATS
from unspool.weights.gguf_layout import ARRAY, MAGIC, OTHER_FORMATS, SCALARS, STRING, TENSOR_FORMATS
from unspool.weights.gguf_writer import write_gguf
from unspool.weights.mapping import map_file
from unspool.weights.weight import Weight

__all__ = ["GGUFFile", "open_gguf", "write_gguf"]

# Far above any real model (the largest vocabulary has 262,144 tokens), but low enough to detect damaged counts early.
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_ELEMENTS = 1 << 22  # in all arrays of a file together
MAX_NAME = 1024
MAX_DIMS = 4
MAX_NESTING = 2
LARGE = 1024  # elements; longer arrays stay in the file's representation instead of becoming Python objects


@record(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file. The tensors keep the memory map alive."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Weight]
    header: memoryview  # all metadata; long arrays are read from here


def shortest(value: float) -> float:
    """The shortest decimal that gives the same float32: 1e-05, not 9.999999747378752e-06."""
    same = struct.pack("<f", value)
    written = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((short for short in written if _as_f32(short) == same), float(f"{value:.9g}"))


def _as_f32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # rounded up, beyond the largest float32
        return b""


class Reader:
    """A cursor over the header that never passes the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.size = path, buffer, len(buffer)
        self.position = 0
        self.elements = 0
        self.where = "header"  # what is being read, for error messages

    def fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self.path}: {self.where}: {message}")

    def need(self, count: int) -> None:
        if count > self.size - self.position:
            self.fail(f"{count} bytes wanted at {self.position}, but the file ends at {self.size} (is it truncated?)")

    def scalar(self, kind: str) -> Any:
        length = struct.calcsize(kind)
        self.need(length)
        (value,) = struct.unpack_from(kind, self.buffer, self.position)
        if kind == "<?" and self.buffer[self.position] > 1:
            self.fail(f"a boolean is {self.buffer[self.position]}")
        self.position += length
        if kind == "<f" and math.isfinite(value):
            return shortest(value)
        return value

    def string(self, limit: int | None = None) -> str:
        length = self.scalar("<Q")
        if limit is not None and length > limit:
            self.fail(f"a name of {length} bytes; at most {limit} are allowed")
        self.need(length)
        raw = self.buffer[self.position : self.position + length]
        self.position += length
        return self.text(raw)

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"a string is not UTF-8 ({error.reason} at byte {error.start})")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            self.fail(f"unknown value type {kind}")
        return self.array(depth + 1)

    def array(self, depth: int) -> Sequence[Any]:
        if depth > MAX_NESTING:
            self.fail(f"arrays nested deeper than {MAX_NESTING}")
        kind, count = self.scalar("<I"), self.scalar("<Q")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            self.fail(f"arrays of {self.elements} elements in all; at most {MAX_ELEMENTS} are allowed")
        if kind == STRING:
            return self.strings(count)
        if kind in SCALARS:
            return self.numbers(SCALARS[kind], count)
        return [self.value(kind, depth) for _ in range(count)]

    def numbers(self, kind: str, count: int) -> Sequence[Any]:
        size = struct.calcsize(kind)
        self.need(count * size)
        if count > LARGE and kind != "<?" and sys.byteorder == "little":
            start, self.position = self.position, self.position + count * size
            view: Any = memoryview(self.buffer)[start : self.position]
            return view.cast(kind[1])
        data = self.buffer[self.position : self.position + count * size]
        self.position += count * size
        if kind == "<?" and count and max(data) > 1:  # struct would accept any byte as a boolean
            self.fail(f"a boolean is {max(data)}")
        return list(struct.unpack(f"<{count}{kind[1]}", data))

    def strings(self, count: int) -> Sequence[str]:
        """Read `count` strings. A vocabulary has 10⁵ of them: they stay in the file's representation if possible;
        otherwise this loop is minimal: two slices and a decode per string."""
        self.need(8 * count)
        found = read_texts(self.buffer, self.position, count) if count > LARGE else None
        if found is not None:
            self.position = found[1]
            return found[0]
        buffer, size, position = self.buffer, self.size, self.position
        unpack = struct.Struct("<Q").unpack_from
        result: list[str] = []
        append = result.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                if position > size:
                    break
                append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            self.fail(f"string {len(result)} is not UTF-8 ({error.reason} at byte {error.start})")
        except struct.error:
            position = size + 1
        if position > size:
            self.fail(f"string {len(result)} of {count} runs past the end of the file at {size} (is it truncated?)")
        self.position = position
        return result


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file. If `path` is any file of a split model, open all of its files."""
    path = Path(path)
    file = _open_one(path)
    if _integer(file, "split.count", 1) <= 1:
        return file
    return _join(file)


def _open_one(path: Path) -> GGUFFile:
    buffer = map_file(path)
    reader = Reader(path, buffer)
    num_tensors, num_keys = _header(reader)
    metadata = _metadata(reader, num_keys)
    infos = list(_tensor_infos(reader, num_tensors))
    alignment = metadata.get("general.alignment", 32)
    reader.where = "general.alignment"
    if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        reader.fail(f"{alignment!r} is not a power of two from 8 to {1 << 16}")
    start = (reader.position + alignment - 1) // alignment * alignment
    return GGUFFile(path, metadata, _tensors(reader, infos, start, alignment), memoryview(reader.buffer)[:start])


def _header(reader: Reader) -> tuple[int, int]:
    if reader.size < 24 or reader.buffer[:4] != MAGIC:
        if reader.buffer[: min(4, reader.size)] == MAGIC[: min(4, reader.size)]:
            reader.fail(f"the file ends at {reader.size} bytes (is it truncated?)")
        reader.fail(f"not a GGUF file: it begins with {reader.buffer[:4]!r}")
    reader.position = 4
    version = reader.scalar("<I")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            reader.fail("a big-endian GGUF file; only little-endian ones can be read")
        reader.fail(f"GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_keys = reader.scalar("<Q"), reader.scalar("<Q")
    if num_tensors > MAX_TENSORS:
        reader.fail(f"{num_tensors} tensors; at most {MAX_TENSORS} are allowed")
    if num_keys > MAX_KEYS:
        reader.fail(f"{num_keys} keys; at most {MAX_KEYS} are allowed")
    return num_tensors, num_keys


def _metadata(reader: Reader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        reader.where = f"key {index} of {num_keys}"
        key = reader.string(MAX_NAME)
        reader.where = f"key {key!r}"
        if key in metadata:
            reader.fail("it occurs twice")
        metadata[key] = reader.value(reader.scalar("<I"))
    return metadata


@record(frozen=True)
class _TensorInfo:
    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _tensor_infos(reader: Reader, num_tensors: int) -> Iterator[_TensorInfo]:
    seen: set[str] = set()
    for index in range(num_tensors):
        reader.where = f"tensor {index} of {num_tensors}"
        name = reader.string(MAX_NAME)
        reader.where = f"tensor {name!r}"
        if name in seen:
            reader.fail("it occurs twice")
        seen.add(name)
        num_dims = reader.scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            reader.fail(f"{num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        shape = tuple(reader.scalar("<Q") for _ in range(num_dims))[::-1]
        kind, offset = reader.scalar("<I"), reader.scalar("<Q")
        if kind not in TENSOR_FORMATS:
            known = ", ".join(name.upper() for name in TENSOR_FORMATS.values())
            reader.fail(f"tensor type {OTHER_FORMATS.get(kind, kind)} cannot be read; {known} can")
        format = FORMATS[TENSOR_FORMATS[kind]]
        if 0 in shape or shape[-1] % format.block:
            reader.fail(f"shape {shape} does not fit {format.name}, which stores {format.block} values a block")
        yield _TensorInfo(name, format.name, shape, offset, format.nbytes(math.prod(shape)))


def _tensors(reader: Reader, infos: list[_TensorInfo], start: int, alignment: int) -> dict[str, Weight]:
    everything = memoryview(reader.buffer)
    end_of_previous = 0
    for info in sorted(infos, key=lambda info: info.offset):
        reader.where = f"tensor {info.name!r}"
        if info.offset % alignment:
            reader.fail(f"offset {info.offset} is not a multiple of the alignment {alignment}")
        if info.offset < end_of_previous:
            reader.fail(f"it begins at {info.offset}, inside another that ends at {end_of_previous}")
        end_of_previous = info.offset + info.nbytes
        if start + end_of_previous > reader.size:
            reader.fail(
                f"its bytes end at {start + end_of_previous}, but the file ends at {reader.size} (is it truncated?)"
            )
    return {
        info.name: Weight(
            info.name, info.format, info.shape, everything[start + info.offset : start + info.offset + info.nbytes]
        )
        for info in infos
    }


def _integer(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelError(f"{file.path}: key {key!r}: {value!r} is not a count")
    return value


def _join(file: GGUFFile) -> GGUFFile:
    """Join a split model: the first file's metadata, every file's tensors."""
    count = _integer(file, "split.count", 1)
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", file.path.name)
    if match is None or int(match[3]) != count:
        raise ModelError(
            f"{file.path}: one of {count} files of a split model, which are named …-00001-of-{count:05}.gguf and so on"
        )
    tensors: dict[str, Weight] = {}
    first: GGUFFile | None = None
    for number in range(1, count + 1):
        part = _open_one(file.path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf"))
        if _integer(part, "split.no", 0) != number - 1 or _integer(part, "split.count", 1) != count:
            raise ModelError(f"{part.path}: its keys split.no and split.count do not agree with its name")
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise ModelError(f"{part.path}: tensor {min(twice)!r}: an earlier file of the split holds it too")
        tensors |= part.tensors
        first = first or part
    assert first is not None
    expected = _integer(first, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{first.path}: split.tensors.count is {expected}; the files hold {len(tensors)} tensors")
    return GGUFFile(first.path, first.metadata, tensors, first.header)

"""Writes GGUF files, for random models, quantized copies and tests. A file is written completely or not at all."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from unspool.errors import ModelError
from unspool.weights.gguf_layout import ARRAY, MAGIC, SCALARS, STRING, TENSOR_FORMATS
from unspool.weights.weight import Weight

ALIGNMENT = 32
TYPE_OF_FORMAT = {name: kind for kind, name in TENSOR_FORMATS.items()}


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` if the block succeeds, and is deleted if it fails."""
    import tempfile

    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only the owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Mapping[str, Weight]) -> None:
    """Write a GGUF file, version 3. Integers get the smallest of u32, i32, i64 that holds them, floats are f32."""
    path = Path(path)
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    with replacing(path) as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(key, value))
        offset = 0
        for name, weight in tensors.items():
            dims = weight.shape[::-1]
            file.write(_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            file.write(struct.pack("<IQ", TYPE_OF_FORMAT[weight.format], offset))
            offset += weight.nbytes + -weight.nbytes % alignment
        file.write(bytes(-file.tell() % alignment))
        for weight in tensors.values():
            file.write(weight.raw)
            file.write(bytes(-weight.nbytes % alignment))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _kind(key: str, value: Any) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 1 << 32 else 5 if -(1 << 31) <= value < 0 else 11
    if isinstance(value, float):
        return 6
    if isinstance(value, str):
        return STRING
    raise ModelError(f"key {key!r}: GGUF cannot hold a {type(value).__name__}")


def _value(key: str, value: Any) -> bytes:
    if not isinstance(value, list | tuple):
        kind = _kind(key, value)
        return struct.pack("<I", kind) + _payload(kind, value)
    kinds = {_kind(key, element) for element in value}
    if kinds <= {4, 5}:
        kinds = {5} if all(element < 1 << 31 for element in value) else {11}
    if len(kinds) > 1:
        raise ModelError(f"key {key!r}: the elements of a GGUF array have one type")
    (kind,) = kinds
    head = struct.pack("<IIQ", ARRAY, kind, len(value))
    return head + b"".join(_payload(kind, element) for element in value)


def _payload(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack(SCALARS[kind], value)

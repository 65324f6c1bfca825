"""Protocol buffers as they are stored: the numbered fields of one message. Nested messages are read only on request."""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | float | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class ProtobufError(ValueError):
    """An error, with its byte position in the message."""


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Each field's number and value: integers as they are, numbers of four bytes as float32, of eight as float64."""
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        value: Value
        if kind == _VARINT:
            value, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            (value,) = struct.unpack("<f" if kind == _FIXED32 else "<d", _slice(message, at, size))
            at += size
        elif kind == _BYTES:
            size, at = _varint(message, at)
            value = _slice(message, at, size)
            at += size
        else:
            raise ProtobufError(f"byte {start:,}: a field of the unknown kind {kind}")
        if number == 0:
            raise ProtobufError(f"byte {start:,}: a field without a number")
        yield number, value


def _slice(message: bytes, at: int, size: int) -> bytes:
    if size > len(message) - at:
        raise ProtobufError(f"byte {at:,}: {size:,} bytes are announced, {len(message) - at:,} are left")
    return message[at : at + size]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_LONGEST_VARINT):
        if at + index >= len(message):
            raise ProtobufError(f"byte {at:,}: the message ends within a number")
        byte = message[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & (1 << 64) - 1, at + index + 1
    raise ProtobufError(f"byte {at:,}: a number of more than {_LONGEST_VARINT} bytes")

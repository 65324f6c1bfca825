"""8-bit floats (e4m3): 4 bits of exponent, 3 of mantissa, at most 448.

A weight includes its scales: blocks of 128 columns of a row, a float32 and 128 codes each; value = code · scale.
"""

from __future__ import annotations

from functools import cache

from unspool.lazy import np

COLUMNS = 128  # columns that share a scale
LARGEST = 448.0


@cache
def values() -> np.ndarray:
    """The value of each code."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    small = mantissa * 2.0**-9
    worth = np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    worth[(code & 127) == 127] = np.nan
    return np.where(code < 128, worth, -worth).astype(np.float32)


def encode(numbers: np.ndarray) -> np.ndarray:
    """The nearest codes, halves to even; larger values become the largest code."""
    magnitude, known = np.abs(numbers), values()
    middles = (known[:126] + known[1:127]) / 2  # between a positive code and the next one
    code = np.searchsorted(middles, magnitude, side="left")
    is_tie = (code < len(middles)) & (magnitude == middles[np.minimum(code, len(middles) - 1)])
    code = code + (is_tie & (code % 2 == 1))
    return (code | (np.signbit(numbers).astype(np.int64) << 7)).astype(np.uint8)


def unpack_bare(blocks: np.ndarray) -> np.ndarray:
    return values()[blocks]


def pack_bare(numbers: np.ndarray) -> np.ndarray:
    return encode(numbers)


def unpack(blocks: np.ndarray) -> np.ndarray:
    scale = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    return scale * values()[blocks[:, 4:]]


def pack(numbers: np.ndarray) -> np.ndarray:
    scale = (np.abs(numbers).max(axis=1, keepdims=True) / np.float32(LARGEST)).astype(np.float32)
    codes = encode(np.where(scale == 0, np.float32(0), numbers / np.where(scale == 0, np.float32(1), scale)))
    return np.concatenate([np.ascontiguousarray(scale).astype("<f4").view(np.uint8), codes], axis=1)


def interleave(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[rows, columns] codes and [rows, columns / 128] scales as the bytes of an fp8 weight."""
    rows, groups = scales.shape
    out = np.empty((rows, groups, 4 + COLUMNS), np.uint8)
    out[:, :, :4] = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(rows, groups, 4)
    out[:, :, 4:] = codes.reshape(rows, groups, COLUMNS)
    return out.reshape(-1)


def spread(scale: np.ndarray, rows: int, groups: int) -> np.ndarray | None:
    """A checkpoint's scales, expanded to one per row and group of columns; None if their shape does not fit."""
    if scale.size == 1:
        return np.full((rows, groups), scale.reshape(-1)[0], np.float32)
    if scale.size == rows and scale.shape[0] == rows:
        return np.repeat(scale.reshape(rows, 1), groups, axis=1)
    if scale.ndim == 2 and scale.shape == (-(-rows // COLUMNS), groups):
        return np.repeat(scale, COLUMNS, axis=0)[:rows]
    return None

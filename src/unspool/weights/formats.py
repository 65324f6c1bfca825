"""The storage formats of weights: one `Format` for each way in which a tensor is stored, with decoder and encoder.

`decode` is the specification: every kernel is tested against it. Its arithmetic (float32, scale first, then the
quantized value, then the minimum) is that of ggml, bit for bit. `encode` is a simple quantizer, correct but not
optimized.

Formats with 32 values per block are here, those with 256 (the k-quants) in `kquants`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unspool.errors import ModelError
from unspool.lazy import np
from unspool.records import record
from unspool.weights import fp8, kquants
from unspool.weights.kquants import half, half_bytes

if TYPE_CHECKING:
    Blocks = np.ndarray  # decoded: (n, block) float32; encoded: (n, bytes_per_block) uint8


@record(frozen=True)
class Format:
    """A storage format: `block` values in `bytes_per_block` bytes."""

    name: str
    block: int
    bytes_per_block: int
    unpack: Callable[[Blocks], Blocks]
    pack: Callable[[Blocks], Blocks]

    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take; `count` must be whole blocks."""
        if count % self.block:
            raise ModelError(f"{self.name} stores blocks of {self.block} values; {count} values are not whole blocks")
        return count // self.block * self.bytes_per_block

    def decode(self, data: np.ndarray) -> np.ndarray:
        """The float32 values of `data` (uint8, whole blocks), as one flat array."""
        # A damaged scale may be NaN, infinite or subnormal; the values then follow IEEE arithmetic, without a warning.
        with np.errstate(all="ignore"):
            return self.unpack(data.reshape(-1, self.bytes_per_block)).reshape(-1)

    def encode(self, values: np.ndarray) -> bytes:
        """The bytes that store `values` (float32, whole blocks in the last dimension)."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        if self.block > 1:
            self.nbytes(values.shape[-1] if values.ndim else 1)
            if not np.isfinite(values).all():
                raise ModelError(f"{self.name} cannot store values that are not finite")
        with np.errstate(all="ignore"):
            return self.pack(values.reshape(-1, self.block)).astype(np.uint8, copy=False).tobytes()


def nibbles(qs: np.ndarray) -> np.ndarray:
    """16 bytes hold 32 values: the low halves are the first 16, the high halves the last 16."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def nibble_bytes(q: np.ndarray) -> np.ndarray:
    return (q[:, :16] & 15) | ((q[:, 16:] & 15) << 4)


def fifth_bits(qh: np.ndarray) -> np.ndarray:
    return np.unpackbits(qh, axis=1, bitorder="little")


def reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def round_away(x: np.ndarray) -> np.ndarray:
    """C's roundf: halves are rounded away from zero."""
    magnitude = np.abs(x)
    floor = np.floor(magnitude)
    return np.sign(x) * (floor + np.floor(2 * (magnitude - floor)))


# --- plain numbers -----------------------------------------------------------------------------------------------


def _unpack_f32(blocks: Blocks) -> Blocks:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _pack_f32(values: Blocks) -> Blocks:
    return values.astype("<f4").view(np.uint8)


def _unpack_f16(blocks: Blocks) -> Blocks:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _pack_f16(values: Blocks) -> Blocks:
    return values.astype("<f2").view(np.uint8)


def _unpack_bf16(blocks: Blocks) -> Blocks:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _pack_bf16(values: Blocks) -> Blocks:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Round to nearest, ties to even. A NaN keeps its upper bits and is made quiet; rounding could make it infinity.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(np.uint8)


# --- 32 values a block -------------------------------------------------------------------------------------------


def _unpack_q8_0(blocks: Blocks) -> Blocks:
    return half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _pack_q8_0(values: Blocks) -> Blocks:
    d = np.abs(values).max(axis=1, keepdims=True) / 127
    q = round_away(values * reciprocal(d))
    return np.concatenate([half_bytes(d), q.astype(np.int8).view(np.uint8)], axis=1)


def _unpack_q4_0(blocks: Blocks) -> Blocks:
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.int8) - 8).astype(np.float32)


def _unpack_q4_1(blocks: Blocks) -> Blocks:
    return half(blocks, 0) * nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks, 2)


def _unpack_q5_0(blocks: Blocks) -> Blocks:
    q = nibbles(blocks[:, 6:]) | (fifth_bits(blocks[:, 2:6]) << 4)
    return half(blocks, 0) * (q.astype(np.int8) - 16).astype(np.float32)


def _unpack_q5_1(blocks: Blocks) -> Blocks:
    q = nibbles(blocks[:, 8:]) | (fifth_bits(blocks[:, 4:8]) << 4)
    return half(blocks, 0) * q.astype(np.float32) + half(blocks, 2)


def _centred(values: Blocks, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and levels around zero: the value of largest magnitude gets the lowest level, which has no positive
    counterpart."""
    peak = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    d = peak / -(levels // 2)
    q = np.trunc(values * reciprocal(d) + np.float32(levels // 2 + 0.5)).clip(0, levels - 1)
    return d, q.astype(np.uint8)


def _affine(values: Blocks, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, minimum and levels from the smallest value to the largest."""
    low = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - low) / (levels - 1)
    q = np.trunc((values - low) * reciprocal(d) + np.float32(0.5)).clip(0, levels - 1)
    return d, low, q.astype(np.uint8)


def _pack_q4_0(values: Blocks) -> Blocks:
    d, q = _centred(values, 16)
    return np.concatenate([half_bytes(d), nibble_bytes(q)], axis=1)


def _pack_q4_1(values: Blocks) -> Blocks:
    d, low, q = _affine(values, 16)
    return np.concatenate([half_bytes(d), half_bytes(low), nibble_bytes(q)], axis=1)


def _pack_q5_0(values: Blocks) -> Blocks:
    d, q = _centred(values, 32)
    return np.concatenate([half_bytes(d), np.packbits(q >> 4, axis=1, bitorder="little"), nibble_bytes(q)], axis=1)


def _pack_q5_1(values: Blocks) -> Blocks:
    d, low, q = _affine(values, 32)
    high = np.packbits(q >> 4, axis=1, bitorder="little")
    return np.concatenate([half_bytes(d), half_bytes(low), high, nibble_bytes(q)], axis=1)


# --- MXFP4: 4-bit floats (a sign, two bits of exponent, one of mantissa) that share a power of two -------------------

FP4_SIZES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _unpack_mxfp4(blocks: Blocks) -> Blocks:
    sizes = np.array(FP4_SIZES, np.float32)
    return np.ldexp(np.concatenate([sizes, 0 - sizes])[nibbles(blocks[:, 1:])], blocks[:, :1].astype(np.int32) - 127)


def _pack_mxfp4(values: Blocks) -> Blocks:
    largest = np.abs(values).max(axis=1, keepdims=True)
    exponent = np.where(largest > 0, np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2, -127).clip(-127, 127)
    scaled = np.abs(values) / np.exp2(exponent)
    q = np.abs(scaled[:, :, None] - np.array(FP4_SIZES, np.float32)).argmin(axis=2) + np.where(values < 0, 8, 0)
    return np.concatenate([(exponent + 127).astype(np.uint8), nibble_bytes(q.astype(np.uint8))], axis=1)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("f32", 1, 4, _unpack_f32, _pack_f32),
        Format("f16", 1, 2, _unpack_f16, _pack_f16),
        Format("bf16", 1, 2, _unpack_bf16, _pack_bf16),
        Format("f8_e4m3", 1, 1, fp8.unpack_bare, fp8.pack_bare),
        Format("fp8", 128, 132, fp8.unpack, fp8.pack),
        Format("q8_0", 32, 34, _unpack_q8_0, _pack_q8_0),
        Format("q4_0", 32, 18, _unpack_q4_0, _pack_q4_0),
        Format("q4_1", 32, 20, _unpack_q4_1, _pack_q4_1),
        Format("q5_0", 32, 22, _unpack_q5_0, _pack_q5_0),
        Format("q5_1", 32, 24, _unpack_q5_1, _pack_q5_1),
        Format("mxfp4", 32, 17, _unpack_mxfp4, _pack_mxfp4),
        Format("q2_k", 256, 84, kquants.unpack_q2_k, kquants.pack_q2_k),
        Format("q3_k", 256, 110, kquants.unpack_q3_k, kquants.pack_q3_k),
        Format("q4_k", 256, 144, kquants.unpack_q4_k, kquants.pack_q4_k),
        Format("q5_k", 256, 176, kquants.unpack_q5_k, kquants.pack_q5_k),
        Format("q6_k", 256, 210, kquants.unpack_q6_k, kquants.pack_q6_k),
    )
}


def _no_values(blocks: Blocks) -> Blocks:
    raise ModelError("u8: bytes are parts of packed weights and have no values by themselves")


# Formats that files may also store, until `mxfp4_blocks` has joined them.
STORED: dict[str, Format] = {**FORMATS, "u8": Format("u8", 1, 1, _no_values, _no_values)}

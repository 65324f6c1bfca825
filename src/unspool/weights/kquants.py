"""The k-quants: 256 values per block, in sub-blocks whose scales are quantized relative to the block's scale.

    q2_k  scales[16] qs[64] d dmin             16 sub-blocks of 16   y = d·scale·q − dmin·min
    q3_k  hmask[32] qs[64] scales[12] d        16 sub-blocks of 16   y = d·(scale − 32)·(q − 4)
    q4_k  d dmin scales[12] qs[128]             8 sub-blocks of 32   y = d·scale·q − dmin·min
    q5_k  d dmin scales[12] qh[32] qs[128]      8 sub-blocks of 32   y = d·scale·q − dmin·min
    q6_k  ql[128] qh[64] scales[16] d          16 sub-blocks of 16   y = d·scale·(q − 32)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unspool.lazy import np

if TYPE_CHECKING:
    Blocks = np.ndarray


def half(blocks: Blocks, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def half_bytes(column: np.ndarray) -> np.ndarray:
    return column.astype("<f2").reshape(-1, 1).view(np.uint8)


def _spread(data: np.ndarray, group: int, bits: int) -> np.ndarray:
    """Unpack fields of `bits` bits: from every `group` bytes, first all lowest fields, then the next ones. (n,
    fields)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    fields = (data.reshape(len(data), -1, 1, group) >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _gather(fields: np.ndarray, group: int, bits: int) -> np.ndarray:
    """The inverse of `_spread`."""
    parts = fields.astype(np.uint8).reshape(len(fields), -1, 8 // bits, group)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(fields), -1)


def _scaled(scale: np.ndarray, q: np.ndarray) -> np.ndarray:
    """scale (n, sub-blocks) times q (n, 256), by sub-block."""
    n, subs = scale.shape
    return scale[:, :, None] * q.reshape(n, subs, -1).astype(np.float32)


# --- decode ------------------------------------------------------------------------------------------------------


def unpack_q2_k(blocks: Blocks) -> Blocks:
    scales, qs = blocks[:, :16], blocks[:, 16:80]
    scale = half(blocks, 80) * (scales & 15).astype(np.float32)
    low = half(blocks, 82) * (scales >> 4).astype(np.float32)
    return (_scaled(scale, _spread(qs, 32, 2)) - low[:, :, None]).reshape(len(blocks), 256)


def unpack_q3_k(blocks: Blocks) -> Blocks:
    hmask, qs, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = _spread(packed[:, :8], 8, 4) | (_spread(packed[:, 8:], 4, 2) << 4)
    scale = half(blocks, 108) * (scales.astype(np.int8) - 32).astype(np.float32)
    q = (_spread(qs, 32, 2) | (_spread(hmask, 32, 1) << 2)).astype(np.int8) - 4
    return _scaled(scale, q).reshape(len(blocks), 256)


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: a[4] b[4] c[4].

    The first four are the low 6 bits of a and b; the last four are c's halves with the top 2 bits of a and b.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales, mins


def _unpack_with_mins(blocks: Blocks, q: np.ndarray) -> Blocks:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scale = half(blocks, 0) * scales.astype(np.float32)
    low = half(blocks, 2) * mins.astype(np.float32)
    return (_scaled(scale, q) - low[:, :, None]).reshape(len(blocks), 256)


def unpack_q4_k(blocks: Blocks) -> Blocks:
    return _unpack_with_mins(blocks, _spread(blocks[:, 16:], 32, 4))


def unpack_q5_k(blocks: Blocks) -> Blocks:
    return _unpack_with_mins(blocks, _spread(blocks[:, 48:], 32, 4) | (_spread(blocks[:, 16:48], 32, 1) << 4))


def unpack_q6_k(blocks: Blocks) -> Blocks:
    q = _spread(blocks[:, :128], 64, 4) | (_spread(blocks[:, 128:192], 32, 2) << 4)
    scale = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(scale, q.astype(np.int8) - 32).reshape(len(blocks), 256)


# --- encode ------------------------------------------------------------------------------------------------------


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _fit_with_mins(values: Blocks, subs: int, top: int, levels: int) -> tuple[np.ndarray, ...]:
    """Scales and minima up to `top` and values below `levels`: (d, dmin, scales, mins, q)."""
    x = values.reshape(len(values), subs, -1)
    low = np.maximum(-x.min(axis=2), 0)  # a minimum is subtracted, and is never negative
    span = np.maximum(x.max(axis=2), 0) + low
    d = _stored(span.max(axis=1, keepdims=True) / (levels - 1) / top)
    dmin = _stored(low.max(axis=1, keepdims=True) / top)
    scales = np.rint(_divide(span / (levels - 1), d)).clip(0, top)
    mins = np.rint(_divide(low, dmin)).clip(0, top)
    q = np.rint(_divide(x + (dmin * mins)[:, :, None], (d * scales)[:, :, None])).clip(0, levels - 1)
    return d, dmin, scales.astype(np.uint8), mins.astype(np.uint8), q.astype(np.uint8).reshape(len(values), 256)


def _fit_centred(values: Blocks, top: int, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signed scales of magnitude up to `top` and values around zero: (d, scales, q with its offset added)."""
    x = values.reshape(len(values), 16, 16)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    ideal = peak / -(levels // 2)
    d = _stored(np.abs(ideal).max(axis=1, keepdims=True) / top)
    scales = np.rint(_divide(ideal, d)).clip(-top, top)
    q = np.rint(_divide(x, (d * scales)[:, :, None])).clip(-(levels // 2), levels // 2 - 1) + levels // 2
    return d, scales.astype(np.int8), q.astype(np.uint8).reshape(len(values), 256)


def _stored(scale: np.ndarray) -> np.ndarray:
    """The scale as the file stores it, so that values are fitted to the scale that readers get."""
    return scale.astype("<f2").astype(np.float32)


def pack_q2_k(values: Blocks) -> Blocks:
    d, dmin, scales, mins, q = _fit_with_mins(values, 16, 15, 4)
    return np.concatenate([scales | (mins << 4), _gather(q, 32, 2), half_bytes(d), half_bytes(dmin)], axis=1)


def pack_q3_k(values: Blocks) -> Blocks:
    d, signed, q = _fit_centred(values, 31, 8)
    scales = (signed + 32).astype(np.uint8)
    packed = [_gather(scales & 15, 8, 4), _gather(scales >> 4, 4, 2)]
    return np.concatenate([_gather(q >> 2, 32, 1), _gather(q & 3, 32, 2), *packed, half_bytes(d)], axis=1)


def _pack_scales_and_mins(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    a = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    b = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    return np.concatenate([a, b, (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)], axis=1)


def pack_q4_k(values: Blocks) -> Blocks:
    d, dmin, scales, mins, q = _fit_with_mins(values, 8, 63, 16)
    head = [half_bytes(d), half_bytes(dmin), _pack_scales_and_mins(scales, mins)]
    return np.concatenate([*head, _gather(q, 32, 4)], axis=1)


def pack_q5_k(values: Blocks) -> Blocks:
    d, dmin, scales, mins, q = _fit_with_mins(values, 8, 63, 32)
    head = [half_bytes(d), half_bytes(dmin), _pack_scales_and_mins(scales, mins)]
    return np.concatenate([*head, _gather(q >> 4, 32, 1), _gather(q & 15, 32, 4)], axis=1)


def pack_q6_k(values: Blocks) -> Blocks:
    d, scales, q = _fit_centred(values, 127, 64)
    parts = [_gather(q & 15, 64, 4), _gather(q >> 4, 32, 2), scales.view(np.uint8), half_bytes(d)]
    return np.concatenate(parts, axis=1)

# mypy: disallow-untyped-defs=False
"""Dequantization of weights in registers: codes become bf16 weights, which the matrix unit multiplies.

Weights stay in the order of their bytes (plane_layout.py). With FEW tokens, tokens are on the matrix unit's M side and
weights on its N side, and the tokens' columns are read in the bytes' order: every thread decodes the weights that it
multiplies. With many tokens, weights are on the M side, in the columns' order. Either way a product has the same 16
columns, and the sums are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import after_previous, rounds_ahead
from unspool.ops.cuda.plane_layout import column_of, e4m3_bf16, group_columns


@triton.jit
def number_of(code):
    """Convert a code to a float by placing its bits below those of 2^23. The conversion instruction would cost a
    quarter of the speed."""
    shift: tl.constexpr = 128 if code.dtype == tl.int8 else 0
    bits = (code.to(tl.uint8, bitcast=True) ^ shift).to(tl.int32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + shift)


@triton.jit
def spread(pointers, COLUMNS: tl.constexpr, F: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr):
    """Groups' scales or offsets, repeated for each of K bytes. The steps move nothing between threads; otherwise the
    compiler would move weights too."""
    values = tl.load(pointers)
    if AHEAD > 0:
        values = rounds_ahead(values, AHEAD)
    GROUPS: tl.constexpr = 32 // COLUMNS
    values = tl.reshape(values.to(tl.float32), (F, K // 32, GROUPS))
    values = tl.expand_dims(tl.expand_dims(values, 2), 4)
    return tl.reshape(tl.broadcast_to(values, (F, K // 32, 16 // GROUPS, GROUPS, 2)), (F, K))


@triton.jit
def scaled(
    code, scales, offsets, group, COLUMNS: tl.constexpr, F: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """K bytes' codes as weights; `group` points at the first scale of each row, and the next scales are 128 apart."""
    at = group[:, None] + 128 * tl.arange(0, K // COLUMNS)[None, :]
    value = number_of(code) * spread(scales + at, COLUMNS, F, K, AHEAD)
    if offsets is not None:
        value = value + spread(offsets + at, COLUMNS, F, K, AHEAD)
    return value.to(tl.bfloat16)


@triton.jit
def in_columns(x, R: tl.constexpr, K: tl.constexpr):
    """Rows of values in the order of their bytes, rearranged into the order of their columns."""
    return tl.reshape(tl.permute(tl.reshape(x, (R, K // 32, 8, 2, 2)), (0, 1, 3, 2, 4)), (R, K))


@triton.jit
def add_product(acc, w, x, FEW: tl.constexpr, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, HOPPER: tl.constexpr):
    """acc + w · xᵀ, or the transpose of it."""
    if not FEW:
        acc = tl.dot(in_columns(w, F, K), x.T, acc)
    elif HOPPER:  # here the compiler lets a thread's four neighbouring weights take part in two products, two in each
        acc = tl.dot(x, w.T, acc)
    else:
        acc = tl.dot(in_columns(x, T, K), in_columns(w, F, K).T, acc)
    return acc


@triton.jit
def tokens_of(
    x, first_t, k, num_tokens, size, AHEAD: tl.constexpr, FEW: tl.constexpr, T: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The tokens' columns from k on; a token has `size` columns. AHEAD: how many rounds ahead they are loaded; 0: the
    compiler decides."""
    if FEW:
        tokens = first_t + tl.arange(0, T)
        column = k + column_of(tl.arange(0, K))
        at = tl.max_contiguous(tl.multiple_of((tokens * size)[:, None] + column[None, :], (1, 2)), (1, 2))
        inside = (tokens < num_tokens)[:, None] & tl.max_constancy(column < size, 2)[None, :]
        values = tl.load(x + at, mask=inside, other=0.0)
        if AHEAD > 0:
            values = rounds_ahead(values, AHEAD)
    else:
        values = x.load([first_t, k])
    return values


@triton.jit
def add_round(
    acc, codes, scales, offsets, x, first_f, first_t, k, first_k, num_tokens, width, size,
    FORMAT: tl.constexpr, TILE: tl.constexpr, FAR: tl.constexpr, NEAR: tl.constexpr, FEW: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add K more columns to acc. With NEAR, tokens are read after the wait for the previous kernel, which happens in
    the round of first_k. `width` is the number of columns of a row of codes; a token has `size` columns, which may be
    fewer."""
    COLUMNS: tl.constexpr = group_columns(FORMAT)
    HALVES: tl.constexpr = 2 if FORMAT == "u4g32o" else 1
    BYTES: tl.constexpr = K // HALVES
    AHEAD: tl.constexpr = NEAR if PDL else 0
    tile = (first_f // 128 * (width // TILE) + k // TILE) * 128
    code = codes.load([tile + first_f % 128, k % TILE // HALVES])
    if FAR > 0 and PDL:
        code = rounds_ahead(code, FAR)
    group = tile * (TILE // COLUMNS) + k % TILE // COLUMNS * 128 + first_f % 128 + tl.arange(0, F)
    there = num_tokens
    if NEAR > 0:
        there += after_previous(k, first_k, PDL) - k
    if FORMAT == "u4g32o":
        low = scaled(code & 15, scales, offsets, group, COLUMNS, F, BYTES, AHEAD)
        acc = add_product(acc, low, tokens_of(x, first_t, k, there, size, AHEAD, FEW, T, BYTES), FEW, F, T, BYTES, PDL)
        high = scaled(code >> 4, scales, offsets, group + BYTES // COLUMNS * 128, COLUMNS, F, BYTES, AHEAD)
        values = tokens_of(x, first_t, k + BYTES, there, size, AHEAD, FEW, T, BYTES)
        acc = add_product(acc, high, values, FEW, F, T, BYTES, PDL)
    else:
        values = tokens_of(x, first_t, k, there, size, AHEAD, FEW, T, K)
        if FORMAT == "f8g128":
            scale = tl.load(scales + group)
            if AHEAD > 0:
                scale = rounds_ahead(scale, AHEAD)
            part = add_product(tl.zeros_like(acc), e4m3_bf16(code, PDL), values, FEW, F, T, K, PDL)
            acc = acc + part * tl.expand_dims(scale, 0 if FEW else 1)
        else:
            w = scaled(code, scales, offsets, group, COLUMNS, F, K, AHEAD)
            acc = add_product(acc, w, values, FEW, F, T, K, PDL)
    return acc, there

# mypy: disallow-untyped-defs=False
"""Linear layers over quantized weights: codes are read as stored and become bf16 on their way to the matrix unit."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import inverse_root, let_next_start, wait_for_previous
from unspool.ops.cuda.finish import finish
from unspool.ops.cuda.formats import e4m3_bf16
from unspool.ops.cuda.linear import join_splits, own_tile, sum_squares

HALF = tl.constexpr(64)  # columns of the lower or the upper halves of bytes


@triton.jit
def scaled(value, scales, offsets, group, COLUMNS: tl.constexpr, F: tl.constexpr, K: tl.constexpr):
    """K columns of codes as weights; `group` points at the first scale of each row."""
    EACH: tl.constexpr = COLUMNS if COLUMNS < K else K
    at = group[:, None] + tl.arange(0, K // EACH)[None, :]
    value = tl.reshape(value, (F, K // EACH, EACH)) * tl.load(scales + at).to(tl.float32)[:, :, None]
    if offsets is not None:
        value = value + tl.load(offsets + at).to(tl.float32)[:, :, None]
    return tl.reshape(value.to(tl.bfloat16), (F, K))


@triton.jit
def quantized_product(
    codes, scales, offsets, x, first_f, first_t, begin, end, features, width,
    FORMAT: tl.constexpr, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 128 if FORMAT == "f8g128" else 16 if FORMAT == "i8g16" or FORMAT == "i8g16o" else 32
    row = tl.minimum(first_f + tl.arange(0, F), features - 1).to(tl.int64)
    group = row * (width // COLUMNS)
    column = tl.arange(0, K)
    acc = tl.zeros((F, T), tl.float32)
    if FORMAT == "u4g32o":
        tl.static_assert(K == HALF)
        row = row * (width // 2)
        for k in range(begin, end, 2 * HALF):
            byte = tl.load(codes + row[:, None] + k // 2 + column[None, :])
            low = scaled((byte & 15).to(tl.float32), scales, offsets, group + k // COLUMNS, COLUMNS, F, HALF)
            acc = tl.dot(low, x.load([first_t, k]).T, acc)
            high = scaled((byte >> 4).to(tl.float32), scales, offsets, group + (k + HALF) // COLUMNS, COLUMNS, F, HALF)
            acc = tl.dot(high, x.load([first_t, k + HALF]).T, acc)
    elif FORMAT == "f8g128":
        tl.static_assert(K == COLUMNS)
        row = row * width
        for k in range(begin, end, K):
            w = e4m3_bf16(tl.load(codes + row[:, None] + k + column[None, :]), PDL)
            part = tl.dot(w, x.load([first_t, k]).T)
            acc = acc + part * tl.load(scales + group + k // COLUMNS)[:, None]
    else:
        row = row * width
        for k in range(begin, end, K):
            code = tl.load(codes + row[:, None] + k + column[None, :])
            w = scaled(code.to(tl.float32), scales, offsets, group + k // COLUMNS, COLUMNS, F, K)
            acc = tl.dot(w, x.load([first_t, k]).T, acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def quantized_kernel(
    codes, scales, offsets,
    x,  # descriptor [tokens, width]
    parts, inverse_size, eps, bias, residual, out, scaled, next_weight, next_parts, cos, sin, slots, kv, softcap,
    partial, arrivals, num_tokens, features, width, split_width,
    FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, PARALLEL: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
    K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """linear_kernel over planes; its arguments mean the same."""
    tile, split, first_f, first_t = own_tile(features, num_tokens, SPLITS, PARALLEL, F, T)
    let_next_start(PDL)
    wait_for_previous(PDL)
    scale = 1.0
    if PARTS > 0:
        squares = sum_squares(parts, first_t + tl.arange(0, T), num_tokens, T, PARTS, 512 // T)
        scale = inverse_root(squares, inverse_size, eps)
    is_last = True
    if PARALLEL:
        begin = split * split_width
        total = quantized_product(
            codes, scales, offsets, x, first_f, first_t, begin, tl.minimum(begin + split_width, width), features, width,
            FORMAT, F, T, K, PDL,
        )  # fmt: skip
        if SPLITS > 1:
            total, is_last = join_splits(total, partial, arrivals, tile, split, SPLITS, F, T)
    else:
        end = tl.minimum(split_width, width)
        total = quantized_product(
            codes, scales, offsets, x, first_f, first_t, 0, end, features, width, FORMAT, F, T, K, PDL
        )
        for other in tl.static_range(1, SPLITS):
            begin = other * split_width
            end = tl.minimum(begin + split_width, width)
            total = total + quantized_product(
                codes, scales, offsets, x, first_f, first_t, begin, end, features, width, FORMAT, F, T, K, PDL
            )
    if is_last:
        finish(
            total, scale, 0.0, (), bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, PARTS > 0, True, F, T,
        )  # fmt: skip

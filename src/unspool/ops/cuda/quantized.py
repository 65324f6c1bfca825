# mypy: disallow-untyped-defs=False
"""Linear layers over quantized weights: codes are read as stored and decoded to bf16 for the matrix unit."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.decode import add_round
from unspool.ops.cuda.exact import inverse_root, let_next_start, wait_for_previous
from unspool.ops.cuda.finish import finish
from unspool.ops.cuda.linear import add_some, join_splits, load_some, own_tile, sum_squares


@triton.jit
def quantized_product(
    codes, scales, offsets, x, first_f, first_t, begin, end, num_tokens, width,
    FORMAT: tl.constexpr, TILE: tl.constexpr, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((F, T), tl.float32)
    for k in range(begin, end, K):
        acc, _ = add_round(
            acc, codes, scales, offsets, x, first_f, first_t, k, begin, num_tokens, width, width,
            FORMAT, TILE, 0, 0, False, F, T, K, PDL,
        )  # fmt: skip
    return acc


@triton.jit
def quantized_product_ahead(
    codes, scales, offsets, x, parts, first_f, first_t, begin, end, num_tokens, width, size,
    FORMAT: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, FAR: tl.constexpr,
    NEAR: tl.constexpr, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for few tokens, with their sums of squares. As in linear's product_ahead, the first codes are prefetched
    before the wait for the previous kernel."""
    tokens = first_t + tl.arange(0, T)
    acc = tl.zeros((T, F), tl.float32)
    squares = tl.zeros((T,), tl.float32)
    newer = ()
    for _ in tl.static_range(EACH):
        newer = newer + (tl.zeros((T,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 (Triton cannot unpack)
    for k in range(begin, end, K):
        acc, there = add_round(
            acc, codes, scales, offsets, x, first_f, first_t, k, begin, num_tokens, width, size,
            FORMAT, TILE, FAR, NEAR, True, F, T, K, PDL,
        )  # fmt: skip
        if PARTS > 0:
            squares = add_some(squares, newer, EACH)
            newer = load_some(parts, (k - begin) // K * EACH, tokens, there, PARTS, EACH)
    return tl.trans(acc), add_some(squares, newer, EACH)


@triton.jit(do_not_specialize=["num_tokens"])
def quantized_kernel(
    codes,  # descriptor of tiles, [rows, bytes]
    scales, offsets,
    x,  # descriptor [tokens, width], or with NEAR a pointer to the same
    parts, inverse_size, eps, bias, residual, out, scaled, next_weight, next_parts, cos, sin, slots, kv, softcap,
    partial, arrivals, num_tokens, features, width, split_width,
    size,  # columns of a token; `width` includes padding
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,  # columns per tile
    EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, PARTS: tl.constexpr,
    EACH: tl.constexpr,  # groups of squares that a round adds
    SPLITS: tl.constexpr, PARALLEL: tl.constexpr, ALL: tl.constexpr, FAR: tl.constexpr, NEAR: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """linear_kernel for planes; its arguments have the same meaning."""
    tile, split, first_f, first_t = own_tile(features, num_tokens, SPLITS, PARALLEL, ALL, F, T)
    is_last = True
    squares = tl.zeros((T,), tl.float32)
    if NEAR == 0:
        let_next_start(PDL)
        wait_for_previous(PDL)
        if PARTS > 0:
            squares = sum_squares(parts, first_t + tl.arange(0, T), num_tokens, T, PARTS, 512 // T)
    begin = split * split_width
    end = tl.minimum(begin + split_width, width)
    if NEAR > 0:
        total, squares = quantized_product_ahead(
            codes, scales, offsets, x, parts, first_f, first_t, begin, end, num_tokens, width, size,
            FORMAT, TILE, PARTS, EACH, FAR, NEAR, F, T, K, PDL,
        )  # fmt: skip
        let_next_start(PDL)
    else:
        total = quantized_product(
            codes, scales, offsets, x, first_f, first_t, begin, end, num_tokens, width, FORMAT, TILE, F, T, K, PDL
        )
    if PARALLEL and SPLITS > 1:
        total, is_last = join_splits(total, partial, arrivals, tile, split, SPLITS, F, T)
    elif SPLITS > 1:
        for other in tl.static_range(1, SPLITS):
            begin = other * split_width
            end = tl.minimum(begin + split_width, width)
            total = total + quantized_product(
                codes, scales, offsets, x, first_f, first_t, begin, end, num_tokens, width, FORMAT, TILE, F, T, K, PDL
            )  # fmt: skip
    if is_last:
        scale = inverse_root(squares, inverse_size, eps) if PARTS > 0 else 1.0
        finish(
            total, scale, 0.0, (), bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, PARTS > 0, True, False, F, T, PDL,
        )  # fmt: skip

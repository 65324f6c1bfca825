# mypy: disallow-untyped-defs=False
"""Linear layers: weights on the matrix unit's M side, tokens on its N side, one order over K.

    out[t, f] = sum over splits s, in order, of (sum over k in split s, in order, of w[f, k] · x[t, k])

K is split as a function of the weight's shape. With few tokens every split is a program of its own, and the last
program to arrive adds the splits up in order; with many tokens one program processes all splits, each with a fresh
accumulator. The tile's width in tokens, the number of warps and the pipeline's depth do not change an output's order of
addition: the matrix unit adds 16 products at a time to an accumulator, in order of k, for every tile.

The epilogue is fused with the product, see finish.py. A norm before a linear layer needs no kernel here: the input is
the stream times the norm's weight, not yet divided by the root mean square, and the sum is divided per token. A
token's sum of squares comes as sums of groups, which are added one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import (
    after_previous,
    inverse_root,
    let_next_start,
    let_next_start_if,
    rounds_ahead,
    wait_for_previous,
)
from unspool.ops.cuda.finish import finish, load_row, nothing_ahead, read_ahead


@triton.jit
def product(w, x, first_f, first_t, begin, end, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """w[first_f.., begin..end] · x[first_t.., begin..end]^T from a fresh accumulator."""
    tl.assume(begin < end)  # otherwise the compiler would move the sum because of a loop that could be skipped
    acc = tl.zeros((F, T), tl.float32)
    for k in range(begin, end, K):
        acc = tl.dot(w.load([first_f, k]), x.load([first_t, k]).T, acc)
    return acc


@triton.jit
def product_ahead(
    w, x, parts, residual, cos, sin, slots,
    first_f, first_t, begin, end, let_after, num_tokens, features, width,
    PARTS: tl.constexpr, READ: tl.constexpr, EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, EARLY: tl.constexpr,
    FAR: tl.constexpr, NEAR: tl.constexpr, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same, together with the wait for the previous kernel and the loads of what that kernel wrote.

    The compiler issues a loop's copies rounds ahead, in program order, so the first weights are in flight when the wait
    begins. The address or the mask of everything else depends on the value that the wait returns, so these loads can be
    in the loop too, where they cost no time. There is no branch: with one, the matrix unit would finish every product
    before the next.

    With NEAR, the threads copy the few existing tokens themselves. This bypasses the copy engine's queue, where tokens
    would wait behind weights that are still being loaded.
    """
    tokens = first_t + tl.arange(0, T)
    tl.assume(begin < end)
    acc = tl.zeros((F, T), tl.float32)
    squares = tl.zeros((T,), tl.float32)
    EACH: tl.constexpr = K // 32  # groups per round, so that all are loaded after half of the rounds
    newer = ()  # a round's sums, which are added after the next round's loads are issued
    for _ in tl.static_range(EACH):
        newer = newer + (tl.zeros((T,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 (Triton cannot unpack)
    ahead = nothing_ahead(EPILOGUE, NEAR > 0, F, T)
    for k in range(begin, end, K):
        weights = w.load([first_f, k])
        at = after_previous(k, begin, PDL)
        if NEAR > 0:
            column = k + tl.arange(0, K)
            inside = (tokens < num_tokens + (at - k))[:, None] & (column < width)[None, :]
            values = tl.load(x + (tokens * width)[:, None] + column[None, :], mask=inside, other=0.0)
            if PDL:
                weights, values = rounds_ahead(weights, FAR), rounds_ahead(values, NEAR)
        else:
            values = x.load([first_t, at])
        if EARLY:
            let_next_start_if(k - begin == let_after, PDL)
        if PARTS > 0:
            squares = add_some(squares, newer, EACH)
            newer = load_some(parts, (at - begin) // K * EACH, tokens, num_tokens, PARTS, EACH)
        if READ:
            first = tl.where(at == begin, num_tokens, 0)
            ahead = read_ahead(
                ahead, residual, cos, sin, slots, first_f, tokens, first, features, EPILOGUE, DETAIL, NEAR > 0, F
            )  # fmt: skip
        acc = tl.dot(weights, values.T, acc)
    return acc, add_some(squares, newer, EACH), ahead


@triton.jit
def load_squares(parts, group, tokens, num_tokens, PARTS: tl.constexpr):
    """A group's sum of squares for each token; 0 past the last group."""
    inside = (tokens < num_tokens) & (group + tl.zeros_like(tokens) < PARTS)
    return tl.load(parts + group * num_tokens + tokens, mask=inside, other=0.0)


@triton.jit
def load_some(parts, group, tokens, num_tokens, PARTS: tl.constexpr, COUNT: tl.constexpr):
    some = ()
    for i in tl.static_range(COUNT):
        some = some + (load_squares(parts, group + i, tokens, num_tokens, PARTS),)  # type: ignore[assignment]  # noqa: RUF005
    return some


@triton.jit
def add_some(squares, some, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        squares += some[i]
    return squares


@triton.jit
def sum_squares(parts, tokens, num_tokens, T: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Tokens' sums of squares, with the loads of several groups issued at once."""
    COUNT: tl.constexpr = AT_ONCE if AT_ONCE < PARTS else PARTS
    squares = tl.zeros((T,), tl.float32)
    for group in range(0, PARTS, COUNT):
        squares = add_some(squares, load_some(parts, group, tokens, num_tokens, PARTS, COUNT), COUNT)
    return squares


@triton.jit
def place(tile, tiles_f, tiles_t):
    """The tile of a program. Tiles are ordered in groups of 8 feature tiles by all token tiles, so that programs that
    run at the same time share inputs."""
    group = tile // (8 * tiles_t)
    within = tile % (8 * tiles_t)
    size = tl.minimum(tiles_f - group * 8, 8)
    return group * 8 + within % size, within // size


@triton.jit
def own_tile(
    features, num_tokens, SPLITS: tl.constexpr, PARALLEL: tl.constexpr, ALL: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The work of a program: its tile, split, first feature and first token."""
    tile = tl.program_id(0)
    split = 0
    if PARALLEL:
        split = tile % SPLITS
        tile = tile // SPLITS
    tile_f, tile_t = tile, 0
    if not ALL:
        tile_f, tile_t = place(tile, tl.cdiv(features, F), tl.cdiv(num_tokens, T))
    return tile, split, tile_f * F, tile_t * T


@triton.jit
def join_splits(total, partial, arrivals, tile, split, SPLITS: tl.constexpr, F: tl.constexpr, T: tl.constexpr):
    """Store a split's sum. The last program to arrive gets the sum of all splits, added in order, and True."""
    own = tl.arange(0, F)[:, None] * T + tl.arange(0, T)[None, :]
    mine = partial + (tile * SPLITS).to(tl.int64) * (F * T) + own
    tl.store(mine + split * (F * T), total, cache_modifier=".cg")
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(arrivals + tile, 0)
        total = tl.load(mine, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            total = total + tl.load(mine + other * (F * T), cache_modifier=".cg")
    return total, is_last


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    w,  # descriptor [features, width]
    x,  # descriptor [tokens, width], or with NEAR a pointer to the same
    parts,  # [PARTS, tokens] sums of squares of the normed input's groups
    inverse_size,  # 1 / the number of values in those sums
    eps,
    bias,
    residual,
    out,  # stream, plain: float32; gated: bf16; heads: q, f16
    scaled,  # stream: the next linear layer's input, bf16
    next_weight,
    next_parts,
    cos,
    sin,
    slots,
    kv,
    softcap,
    partial,  # float32 [tile, split, F, T]
    arrivals,  # int32 [tile], zero before and after
    num_tokens,
    features,
    width,
    split_width,
    let_after,  # with EARLY, columns after which the next kernel may start; without, it may start at the end
    EPILOGUE: tl.constexpr,
    DETAIL: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    ALL: tl.constexpr,  # a tile contains all tokens
    AHEAD: tl.constexpr,  # the first weights are loaded before the wait for the previous kernel
    EARLY: tl.constexpr,
    FAR: tl.constexpr,  # with NEAR, rounds that weights are prefetched ahead; without, the compiler decides
    NEAR: tl.constexpr,  # rounds that tokens are prefetched ahead, if x is a pointer
    F: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split, first_f, first_t = own_tile(features, num_tokens, SPLITS, PARALLEL, ALL, F, T)
    begin = split * split_width
    end = tl.minimum(begin + split_width, width)
    # If enough registers are free, the epilogue's inputs are read before the sum is complete.
    READ: tl.constexpr = AHEAD and (F * T <= 2048 or (EPILOGUE == "stream" and F * T <= 4096))
    weight, ahead, is_last = 0.0, (), True
    if READ and EPILOGUE == "stream" and next_weight is not None:
        weight = load_row(next_weight, first_f, features, F)
    if AHEAD:
        total, squares, ahead = product_ahead(
            w, x, parts, residual, cos, sin, slots,
            first_f, first_t, begin, end, let_after, num_tokens, features, width,
            PARTS, READ, EPILOGUE, DETAIL, EARLY, FAR, NEAR, F, T, K, PDL,
        )  # fmt: skip
    else:
        wait_for_previous(PDL)
        squares = tl.zeros((T,), tl.float32)
        if PARTS > 0:
            squares = sum_squares(parts, first_t + tl.arange(0, T), num_tokens, T, PARTS, 16)
        total = product(w, x, first_f, first_t, begin, end, F, T, K)
    if not PARALLEL:
        for other in range(1, SPLITS):
            begin = other * split_width
            end = tl.minimum(begin + split_width, width)
            total = total + product(w, x, first_f, first_t, begin, end, F, T, K)
    if not EARLY:
        let_next_start(PDL)
    if PARALLEL and SPLITS > 1:
        total, is_last = join_splits(total, partial, arrivals, tile, split, SPLITS, F, T)
    if is_last:
        scale = inverse_root(squares, inverse_size, eps) if PARTS > 0 else 1.0
        finish(
            total, scale, weight, ahead, bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, PARTS > 0, not READ, NEAR > 0, F, T, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def linear_many_kernel(
    w, x,
    squares,  # [tokens] sums of squares of the normed input, or None
    inverse_size, eps, bias, residual, out, scaled, next_weight, next_parts, cos, sin, slots, kv, softcap,
    num_tokens, features, width,
    EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for many tokens and one split; arguments have the same meaning. Each program processes several tiles in
    one loop, so that a tile's first weights are prefetched while the previous tile is finished. (Not for `heads`, whose
    epilogue has branches.)"""
    tiles_f, tiles_t = tl.cdiv(features, F), tl.cdiv(num_tokens, T)
    wait_for_previous(PDL)
    for tile in tl.range(tl.program_id(0), tiles_f * tiles_t, tl.num_programs(0), flatten=EPILOGUE != "heads"):
        tile_f, tile_t = place(tile, tiles_f, tiles_t)
        first_f, first_t = tile_f * F, tile_t * T
        total = product(w, x, first_f, first_t, 0, width, F, T, K)
        scale = 1.0
        if squares is not None:
            tokens = first_t + tl.arange(0, T)
            scale = inverse_root(load_squares(squares, 0, tokens, num_tokens, 1), inverse_size, eps)
        finish(
            total, scale, 0.0, (), bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, squares is not None, True, False, F, T, PDL,
        )  # fmt: skip
    let_next_start(PDL)


@triton.jit(do_not_specialize=["num_tokens"])
def squares_kernel(parts, out, num_tokens, PARTS: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr):
    """Tokens' sums of squares from those of their groups: computed once for all tiles of many tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    squares = sum_squares(parts, tokens, num_tokens, T, PARTS, PARTS)
    tl.store(out + tokens, squares, mask=tokens < num_tokens)

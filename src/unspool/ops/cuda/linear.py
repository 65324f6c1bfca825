# mypy: disallow-untyped-defs=False
"""Linear layers: weights on the matrix unit's M side, tokens on its N side, one order over K.

    out[t, f] = sum over splits s, in order, of (sum over k in split s, in order, of w[f, k] · x[t, k])

The splits of K are a function of the weight's shape. With few tokens every split is a program of its own and the last
one to arrive adds them up in order; with many tokens one program walks them, each from a fresh accumulator. The tile's
width in tokens, the number of warps and the depth of the pipeline change nothing in an output's order of addition:
the matrix unit adds 16 products at a time to an accumulator, k after k, whatever the tile.

What follows the sum is fused, one `EPILOGUE` each:

    stream   residual + y: the float32 stream, its product with the next norm's weight, its groups' sums of squares
    gated    activation(gate) · up, where rows j and j + 8 of every 16 are gate and up of one feature
    heads    rotate q and k (rows j and j + 8 of every 16 are a pair), store k and v in the cache, q beside
    plain    float32, optionally capped: logits, and whatever a norm comes after

A norm before a linear layer costs nothing here: its input is the stream times the norm's weight, not yet divided by
the root mean square; the division is a factor of each token that is applied to the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import inverse_rms, let_next_start, prefetch_runs, sum_of_squares, wait_for_previous

PAIR = tl.constexpr(16)  # rows of a weight tile in which j and j + 8 belong together
GROUP = tl.constexpr(64)


@triton.jit
def product(w, x, first_f, first_t, begin, end, F: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """w[first_f.., begin..end] · x[first_t.., begin..end]^T from a fresh accumulator."""
    acc = tl.zeros((F, T), tl.float32)
    for k in range(begin, end, K):
        acc = tl.dot(w.load([first_f, k]), x.load([first_t, k]).T, acc)
    return acc


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    else:  # gelu with tanh(z) as 2 · sigmoid(2z) - 1: 0.5 · x · (1 + tanh(z)) = x · sigmoid(2z)
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def tanh(x):
    # Saturates without overflow: exp of a large number is infinite and 1 - 2 / inf is 1.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def place(tile, tiles_f, tiles_t):
    """Tiles in groups of 8 features tiles by all token tiles, so that neighbours in time share what they read."""
    group = tile // (8 * tiles_t)
    within = tile % (8 * tiles_t)
    size = tl.minimum(tiles_f - group * 8, 8)
    return group * 8 + within % size, within // size


@triton.jit
def join_splits(total, partial, arrivals, tile, split, SPLITS: tl.constexpr, F: tl.constexpr, T: tl.constexpr):
    """Keep a split's sum; whoever comes last gets all of them, added in order, and is told so."""
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


@triton.jit
def load_parts(parts, tokens, num_tokens, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    groups = tl.arange(0, PARTS_PADDED)
    inside = (tokens < num_tokens)[:, None] & (groups < PARTS)[None, :]
    return tl.load(parts + tokens[:, None] * PARTS + groups[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "norm_size"])
def linear_kernel(
    w,  # descriptor [features, width]
    w_pointer,
    x,  # descriptor [tokens, width]
    parts,  # [tokens, PARTS] sums of squares of the normed input's groups
    norm_size,
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
    EPILOGUE: tl.constexpr,
    DETAIL: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    OWN: tl.constexpr,  # bytes of each weight row that are asked for before the previous kernel has ended
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_f, tiles_t = tl.cdiv(features, F), tl.cdiv(num_tokens, T)
    tile = tl.program_id(0)
    split = 0
    if PARALLEL:
        split = tile % SPLITS
        tile = tile // SPLITS
    tile_f, tile_t = place(tile, tiles_f, tiles_t)
    first_f, first_t = tile_f * F, tile_t * T
    begin = split * split_width
    tokens = first_t + tl.arange(0, T)
    is_last = True
    if OWN > 0:
        lane = tl.arange(0, THREADS)
        addresses = w_pointer + (first_f + lane).to(tl.int64) * width + begin
        prefetch_runs(addresses, (lane < F) & (first_f + lane < features), OWN)
    weight, before, part = 0.0, 0.0, 0.0
    EAGER: tl.constexpr = EPILOGUE == "stream" and F * T <= 4096  # few registers: have all here when the sum is done
    if EAGER and next_weight is not None:
        weight = load_row(next_weight, first_f, features, F)
    wait_for_previous(PDL)

    if PARTS > 0:
        part = load_parts(parts, tokens, num_tokens, PARTS, PARTS_PADDED)
        if T >= 64:  # many registers: keep the factors alone
            part = inverse_rms(part, norm_size, eps)
    if EAGER:
        before = load_residual(residual, first_f, tokens, num_tokens, features, F)
    end = tl.minimum(begin + split_width, width)
    total = product(w, x, first_f, first_t, begin, end, F, T, K)
    if not PARALLEL:
        for other in range(1, SPLITS):
            begin = other * split_width
            end = tl.minimum(begin + split_width, width)
            total = total + product(w, x, first_f, first_t, begin, end, F, T, K)
    let_next_start(PDL)
    if PARALLEL and SPLITS > 1:
        total, is_last = join_splits(total, partial, arrivals, tile, split, SPLITS, F, T)
    if is_last:
        scale = 1.0
        if PARTS > 0:
            scale = part if T >= 64 else inverse_rms(part, norm_size, eps)
        finish(
            total, scale, before, weight, bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, PARTS > 0, not EAGER, F, T,
        )  # fmt: skip


@triton.jit
def load_row(vector, first_f, features, F: tl.constexpr):
    columns = first_f + tl.arange(0, F)
    return tl.load(vector + columns, mask=columns < features, other=0.0)


@triton.jit
def load_residual(residual, first_f, tokens, num_tokens, features, F: tl.constexpr):
    columns = first_f + tl.arange(0, F)
    inside = (tokens < num_tokens)[:, None] & (columns < features)[None, :]
    return tl.load(residual + tokens.to(tl.int64)[:, None] * features + columns[None, :], mask=inside, other=0.0)


@triton.jit
def finish(
    total, scale, before, weight, bias, residual, out, scaled,
    next_weight, next_parts, cos, sin, slots, kv, softcap, first_f, first_t, num_tokens, features,
    EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, SCALED: tl.constexpr, LOAD: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write a tile. A wide one goes in halves, so that what is computed on the way does not overflow the registers."""
    tokens = first_t + tl.arange(0, T)
    if F * T > 8192:
        first, second = tl.split(tl.permute(tl.reshape(total, (F, 2, T // 2)), (0, 2, 1)))
        first_scale, second_scale = scale, scale
        if SCALED:
            first_scale, second_scale = tl.split(tl.permute(tl.reshape(scale, (2, T // 2, 1)), (1, 2, 0)))
        finish(
            first, first_scale, before, weight, bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, SCALED, LOAD, F, T // 2,
        )  # fmt: skip
        finish(
            second, second_scale, before, weight, bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t + T // 2, num_tokens, features, EPILOGUE, DETAIL, SCALED, LOAD, F, T // 2,
        )  # fmt: skip
    elif EPILOGUE == "stream":
        finish_stream(
            total, scale, before, weight, bias, residual, out, scaled, next_weight, next_parts,
            first_f, tokens, num_tokens, features, SCALED, LOAD, F, T,
        )  # fmt: skip
    elif EPILOGUE == "gated":
        finish_gated(total, scale, out, first_f, tokens, num_tokens, features, DETAIL, SCALED, F, T)
    elif EPILOGUE == "heads":
        finish_heads(
            total, scale, bias, out, cos, sin, slots, kv, first_f, tokens, num_tokens, features,
            DETAIL[0], DETAIL[1], DETAIL[2], DETAIL[3], DETAIL[4], SCALED, F, T,
        )  # fmt: skip
    else:
        tl.static_assert(EPILOGUE == "plain")
        finish_plain(total, scale, bias, out, softcap, first_f, tokens, num_tokens, features, SCALED, F, T)


@triton.jit
def finish_plain(
    total, scale, bias, out, softcap, first_f, tokens, num_tokens, features,
    SCALED: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    y = tl.trans(total)
    if SCALED:
        y = y * scale
    columns = first_f + tl.arange(0, F)
    if bias is not None:
        y = y + load_row(bias, first_f, features, F)[None, :]
    if softcap is not None:
        y = softcap * tanh(y / softcap)
    inside = (tokens < num_tokens)[:, None] & (columns < features)[None, :]
    tl.store(out + tokens.to(tl.int64)[:, None] * features + columns[None, :], y, mask=inside)


@triton.jit
def finish_stream(
    total, scale, before, weight, bias, residual, out, scaled, next_weight, next_parts,
    first_f, tokens, num_tokens, features,
    SCALED: tl.constexpr, LOAD: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    y = tl.trans(total)
    if SCALED:
        y = y * scale
    columns = first_f + tl.arange(0, F)
    if bias is not None:
        y = y + load_row(bias, first_f, features, F)[None, :]
    inside = (tokens < num_tokens)[:, None] & (columns < features)[None, :]
    place = tokens.to(tl.int64)[:, None] * features + columns[None, :]
    if LOAD:
        before = load_residual(residual, first_f, tokens, num_tokens, features, F)
    stream = before + y
    tl.store(out + place, stream, mask=inside)
    if next_weight is not None:
        if LOAD:
            weight = load_row(next_weight, first_f, features, F)
        tl.store(scaled + place, (stream * weight[None, :]).to(tl.bfloat16), mask=inside)
        grouped = tl.reshape(tl.where(inside, stream, 0.0), (T, F // GROUP, GROUP))
        squares = tl.reshape(sum_of_squares(grouped, 2), (T, F // GROUP))
        groups = first_f // GROUP + tl.arange(0, F // GROUP)
        num_groups = tl.cdiv(features, GROUP)
        inside = (tokens < num_tokens)[:, None] & (groups < num_groups)[None, :]
        tl.store(next_parts + tokens[:, None] * num_groups + groups[None, :], squares, mask=inside)


@triton.jit
def finish_gated(
    total, scale, out, first_f, tokens, num_tokens, features,
    ACTIVATION: tl.constexpr, SCALED: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if SCALED:
        total = total * tl.trans(scale)
    gate, up = halves(total, F, T)
    y = tl.trans((activate(gate, ACTIVATION) * up).to(tl.bfloat16))
    columns = first_f // 2 + tl.arange(0, F // 2)
    inside = (tokens < num_tokens)[:, None] & (columns < features // 2)[None, :]
    tl.store(out + tokens.to(tl.int64)[:, None] * (features // 2) + columns[None, :], y, mask=inside)


@triton.jit
def halves(acc, F: tl.constexpr, T: tl.constexpr):
    """The two halves of each pair, [pair, token]; a thread of the matrix unit holds both, so nothing moves."""
    grouped = tl.reshape(acc, (F // PAIR, 2, PAIR // 2, T))
    first, second = tl.split(tl.permute(grouped, (0, 2, 3, 1)))
    return tl.reshape(first, (F // 2, T)), tl.reshape(second, (F // 2, T))


@triton.jit
def whole(first, second, F: tl.constexpr, T: tl.constexpr):
    """halves() undone."""
    joined = tl.reshape(tl.join(first, second), (F // PAIR, PAIR // 2, T, 2))
    return tl.reshape(tl.permute(joined, (0, 3, 1, 2)), (F, T))


@triton.jit
def to_half(x):
    """float16, at most its largest number: a slot of the cache may be read, with weight 0, by others than its owner."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def finish_heads(
    total, scale, bias, out, cos, sin, slots, kv, first_f, tokens, num_tokens, features,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    live = tokens < num_tokens
    column = first_f + tl.arange(0, F)
    if SCALED:
        total = total * tl.trans(scale)
    if bias is not None:
        total = total + load_row(bias, first_f, features, F)[:, None]
    if first_f < (HEADS + KV_HEADS) * HEAD_DIM:
        a, b = halves(total, F, T)
        pair = tl.arange(0, F // 2)
        channel = (first_f + pair // 8 * 16 + pair % 8) % HEAD_DIM
        turn = channel // 16 * 8 + channel % 8  # which pair of its head
        turned = (first_f + pair * 2 < (HEADS + KV_HEADS) * HEAD_DIM) & (turn < ROPE_PAIRS)
        angle = tokens[None, :] * ROPE_PAIRS + turn[:, None]
        c = tl.load(cos + angle, mask=live[None, :] & turned[:, None], other=1.0)
        s = tl.load(sin + angle, mask=live[None, :] & turned[:, None], other=0.0)
        total = whole(a * c - b * s, a * s + b * c, F, T)
    y = tl.trans(to_half(total))
    if first_f < HEADS * HEAD_DIM:
        is_q = live[:, None] & (column < HEADS * HEAD_DIM)[None, :]
        tl.store(out + tokens.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + column[None, :], y, mask=is_q)
    if first_f + F > HEADS * HEAD_DIM:
        slot = tl.load(slots + tokens, mask=live, other=-1)
        head, channel = column // HEAD_DIM - HEADS, column % HEAD_DIM
        # [block, kv head, key or value, slot, channel]
        inner = (head % KV_HEADS * 2 + head // KV_HEADS) * (BLOCK_SIZE * HEAD_DIM) + channel
        outer = slot // BLOCK_SIZE * (2 * KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
        is_kv = (slot >= 0)[:, None] & ((head >= 0) & (column < features))[None, :]
        tl.store(kv + outer.to(tl.int64)[:, None] * HEAD_DIM + inner[None, :], y, mask=is_kv)

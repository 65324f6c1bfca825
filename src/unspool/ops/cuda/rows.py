# mypy: disallow-untyped-defs=False
"""Kernels that work row by row: token lookup, norms that are not fused with a linear layer, norms of heads.

Each row is one program of the same shape, for any number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import GROUP, inverse_rms, let_next_start, sum_of_squares, wait_for_previous
from unspool.ops.cuda.finish import to_half
from unspool.ops.cuda.plane_layout import decode_row


@triton.jit
def emit(stream, column, row, num_rows, size, scaled, next_weight, next_parts, D: tl.constexpr):
    """Write the next linear layer's input: the stream times the norm's weight, and the sums of squares of its
    groups."""
    inside = column < size
    weight = tl.load(next_weight + column, mask=inside, other=0.0)
    tl.store(scaled + row * size + column, (stream * weight).to(tl.bfloat16), mask=inside)
    squares = tl.reshape(sum_of_squares(tl.reshape(stream, (D // GROUP, GROUP)), 1), (D // GROUP,))
    group = tl.arange(0, D // GROUP)
    tl.store(next_parts + group * num_rows + row, squares, mask=group < tl.cdiv(size, GROUP))


@triton.jit(do_not_specialize=["num_rows", "vocab_size"])
def embed_kernel(
    ids,
    sources,  # if >= 0: take the token that the previous step sampled at this index
    sampled,
    positions,
    codes,
    scales,
    offsets,
    factor,
    out,
    scaled,
    next_weight,
    next_parts,
    inv_freq,  # [ropes, pairs]
    rope_scale,  # [ropes]
    cos,  # [ropes, rows, pairs]
    sin,
    num_rows,
    vocab_size,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    size: tl.constexpr,
    D: tl.constexpr,
    ROPES: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Two programs per row, which do not wait for each other: one for its token's embedding, one for its rotations."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        source = tl.load(sources + row)
        token = tl.load(ids + row)
        if source >= 0:
            token = tl.load(sampled + source)
        token = tl.where((token >= 0) & (token < vocab_size), token, 0).to(tl.int64)
        column = tl.arange(0, D)
        stream = decode_row(codes, scales, offsets, token, column, column < size, WIDTH, FORMAT) * factor
        tl.store(out + row * size + column, stream, mask=column < size)
        if next_weight is not None:
            emit(stream, column, row, num_rows, size, scaled, next_weight, next_parts, D)
    else:
        pair = tl.arange(0, PAIRS_PADDED)
        position = tl.load(positions + row).to(tl.float32)
        for rope in tl.static_range(ROPES):
            angle = position * tl.load(inv_freq + rope * PAIRS + pair, mask=pair < PAIRS, other=0.0)
            scale = tl.load(rope_scale + rope)
            place = (rope * num_rows + row) * PAIRS + pair
            tl.store(cos + place, tl.cos(angle) * scale, mask=pair < PAIRS)
            tl.store(sin + place, tl.sin(angle) * scale, mask=pair < PAIRS)


@triton.jit(do_not_specialize=["num_rows"])
def settle_kernel(
    x,  # float32 [row, size]
    weight,
    eps,
    residual,
    out,
    scaled,
    next_weight,
    next_parts,
    num_rows,
    size: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual + x / rms(x) · weight, followed by the next linear layer's input."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    inside = column < size
    y = tl.load(x + row * size + column, mask=inside, other=0.0)
    parts = tl.reshape(sum_of_squares(tl.reshape(y, (D // GROUP, GROUP)), 1), (1, D // GROUP))
    scale = tl.reshape(inverse_rms(parts, 1.0 / size, eps), (1,))
    y = y * scale * tl.load(weight + column, mask=inside, other=0.0)
    y = tl.load(residual + row * size + column, mask=inside, other=0.0) + y
    tl.store(out + row * size + column, y, mask=inside)
    if next_weight is not None:
        emit(y, column, row, num_rows, size, scaled, next_weight, next_parts, D)


@triton.jit
def take_kernel(
    step,
    q,  # of all rows, like x
    x,
    q_taken,
    x_taken,
    Q_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    LOGIT_ROWS: tl.constexpr,  # the place in `step` of the rows to take
    PDL: tl.constexpr,
):
    """Copy what the tail needs of a row whose logits are needed: its queries and its stream."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(step + tl.load(step + LOGIT_ROWS) + row).to(tl.int64)
    wait_for_previous(PDL)
    column = tl.arange(0, D)
    query = tl.load(q + source * Q_SIZE + column, mask=column < Q_SIZE)
    tl.store(q_taken + row * Q_SIZE + column, query, mask=column < Q_SIZE)
    stream = tl.load(x + source * SIZE + column, mask=column < SIZE)
    tl.store(x_taken + row * SIZE + column, stream, mask=column < SIZE)


@triton.jit
def heads_kernel(
    qkv,  # float32 [row, features]
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    slots,
    q,
    kv,
    positions,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # of queries and keys
    VALUE_DIM: tl.constexpr,
    KEPT: tl.constexpr,  # channels of queries, and of keys and values in the cache; those past a head's are zeros
    ROW: tl.constexpr,  # values in a row; there are no keys and values if another layer has stored them
    ROPE_PAIRS: tl.constexpr,  # 0: no rotation
    GROWTH: tl.constexpr,  # queries are multiplied by 1 + GROWTH · log(1 + ⌊position / PERIOD⌋)
    PERIOD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, rotate and store one head of one row. The fused variant, linear's `heads`, always rotates and never
    norms."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, D // 2)
    kept = pair < KEPT // 2
    place = pair // 8 * 16 + pair % 8  # the place of a pair's first half in the cache; the second half is 8 further
    first, second = place, place + 8
    inside, inside_second = first < VALUE_DIM, second < VALUE_DIM
    source = qkv + row * ROW + (HEADS + KV_HEADS) * HEAD_DIM + (head - HEADS - KV_HEADS) * VALUE_DIM
    if head < HEADS + KV_HEADS:
        inside = pair < HEAD_DIM // 2
        inside_second = inside
        source = qkv + row * ROW + head * HEAD_DIM
        rest = 2 * pair  # channels past the rotated ones form pairs in order
        if INTERLEAVED:
            first, second = rest, rest + 1
        else:
            turned = pair < ROPE_PAIRS
            first = tl.where(turned, pair, rest)
            second = tl.where(turned, pair + ROPE_PAIRS, rest + 1)
    a = tl.load(source + first, mask=inside, other=0.0)
    b = tl.load(source + second, mask=inside_second, other=0.0)
    if head < HEADS + KV_HEADS:
        if q_norm is not None:
            squares = tl.join(a, b)  # [pairs, 2]
            SIZE: tl.constexpr = 64 if D >= 64 else D
            parts = tl.reshape(sum_of_squares(tl.reshape(squares, (D // SIZE, SIZE)), 1), (1, D // SIZE))
            scale = tl.reshape(inverse_rms(parts, 1.0 / HEAD_DIM, eps), (1,))
            norm = q_norm if head < HEADS else k_norm
            a = a * scale * tl.load(norm + first, mask=inside, other=0.0)
            b = b * scale * tl.load(norm + second, mask=inside, other=0.0)
        if ROPE_PAIRS > 0:
            turned = inside & (pair < ROPE_PAIRS)
            c = tl.load(cos + row * ROPE_PAIRS + pair, mask=turned, other=1.0)
            s = tl.load(sin + row * ROPE_PAIRS + pair, mask=turned, other=0.0)
            a, b = a * c - b * s, a * s + b * c
    if head < HEADS:
        if GROWTH > 0:
            by = 1.0 + GROWTH * tl.log(1.0 + (tl.load(positions + row) // PERIOD).to(tl.float32))
            a, b = a * by, b * by
        target = q + row * (HEADS * KEPT) + head * KEPT + place
        tl.store(target, to_half(a), mask=kept)
        tl.store(target + 8, to_half(b), mask=kept)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            kv_head = (head - HEADS) % KV_HEADS
            inner = (slot // BLOCK_SIZE * KV_HEADS + kv_head).to(tl.int64) * 2 + (head - HEADS) // KV_HEADS
            target = kv + (inner * BLOCK_SIZE + slot % BLOCK_SIZE) * KEPT + place
            tl.store(target, to_half(a), mask=kept)
            tl.store(target + 8, to_half(b), mask=kept)

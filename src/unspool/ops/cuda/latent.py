# mypy: disallow-untyped-defs=False
"""Kernels of latent attention, where all heads read one key of each token, and values are the keys' last channels.

The arithmetic is that of attention.py, tile by tile and split by split. Groups of heads act as its key heads. A tile is
read once for both keys and values. One kernel computes prompts and decodes, which differ in the number of query rows:
keys are on the matrix unit's M side for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.attention import read_item, read_step
from unspool.ops.cuda.exact import let_next_start, wait_for_previous
from unspool.ops.cuda.experts import expert_product
from unspool.ops.cuda.finish import to_half
from unspool.ops.cuda.softmax import answer_of, enter_split, keep_split, merge, merge_rows, seen_by, weigh, with_sink


@triton.jit
def source_of(a, b, c, which, row, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The address where a row of one of three tensors begins."""
    source = a + row * A
    if which == 1:
        source = b + row * B
    if which == 2:
        source = c + row * C
    return source


@triton.jit
def latent_rows_kernel(
    a, b, c,  # float32 [row, A], [row, B], [row, C]
    table,  # per head, and for the key: the tensor and column of its first channels, then those of its latents
    q,  # f16 [row, heads, KEY]
    keys,  # f16 [slot, KEY]
    cos, sin, slots, positions,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, LATENT: tl.constexpr,
    ROPE_PAIRS: tl.constexpr,  # pairs among the first channels that are rotated
    INTERLEAVED: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr, DT: tl.constexpr, DL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Assemble, rotate and store one head's query of one row, or the row's key."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    TURNED: tl.constexpr = KEY - LATENT
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = table + head * 4
    first = source_of(a, b, c, tl.load(own), row, A, B, C) + tl.load(own + 1)
    rest = source_of(a, b, c, tl.load(own + 2), row, A, B, C) + tl.load(own + 3)
    d, e = tl.arange(0, DT), tl.arange(0, DL)
    x = tl.load(first + d, mask=d < TURNED, other=0.0)
    y = tl.load(rest + e, mask=e < LATENT, other=0.0)
    if ROPE_PAIRS > 0:
        turned = d < 2 * ROPE_PAIRS
        if INTERLEAVED:
            pair, is_second = d // 2, d % 2
            other = d + 1 - 2 * is_second
        else:
            is_second = (d >= ROPE_PAIRS).to(tl.int32)
            pair = d - ROPE_PAIRS * is_second
            other = d + ROPE_PAIRS - 2 * ROPE_PAIRS * is_second
        beside = tl.load(first + other, mask=turned, other=0.0)
        c_turn = tl.load(cos + row * ROPE_PAIRS + pair, mask=turned, other=1.0)
        s_turn = tl.load(sin + row * ROPE_PAIRS + pair, mask=turned, other=0.0)
        x = x * c_turn + tl.where(is_second == 1, beside, -beside) * s_turn
    if head < HEADS:
        if GROWTH > 0:
            by = 1.0 + GROWTH * tl.log(1.0 + (tl.load(positions + row) // PERIOD).to(tl.float32))
            x, y = x * by, y * by
        target = q + (row * HEADS + head) * KEY
        tl.store(target + d, to_half(x), mask=d < TURNED)
        tl.store(target + TURNED + e, to_half(y), mask=e < LATENT)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            target = keys + slot * KEY
            tl.store(target + d, to_half(x), mask=d < TURNED)
            tl.store(target + TURNED + e, to_half(y), mask=e < LATENT)


@triton.jit
def load_latents(
    keys, of_turned, of_latents, table, tile,
    KEY: tl.constexpr, LATENT: tl.constexpr, DT: tl.constexpr, DL: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """A tile's keys in two parts: rotated channels and latents. All slots that a table names hold finite numbers."""
    TURNED: tl.constexpr = KEY - LATENT
    if of_latents is not None:  # a tile lies within a block: TMA copies it
        PARTS: tl.constexpr = BLOCK_SIZE // N
        row = tl.load(table + tile // PARTS) * BLOCK_SIZE + tile % PARTS * N
        turned = of_turned.load([row, 0])
        latents = of_latents.load([row, TURNED])
    else:
        place, d, e = tile * N + tl.arange(0, N), tl.arange(0, DT)[None, :], tl.arange(0, DL)[None, :]
        block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
        source = (keys + (block * BLOCK_SIZE + place % BLOCK_SIZE) * KEY)[:, None]
        exists = tl.full((N, 1), True, tl.int1)
        turned = tl.load(source + d, mask=exists & (d < TURNED), other=0.0)
        latents = tl.load(source + TURNED + e, mask=exists & (e < LATENT), other=0.0)
    return turned, latents


@triton.jit(do_not_specialize=["capacity"])
def latent_attention_kernel(
    q,  # f16 [row, heads, KEY]
    keys,  # f16 [slot, KEY], of one layer
    of_turned,  # descriptors of the same for a tile's first channels and its latents, if a tile lies within a block
    of_latents,
    out,  # bf16 [row, heads, LATENT]
    step,
    header,
    partial,  # float32 [group of heads, capacity, DL + MORE]: all absent before and after
    capacity,
    scale,
    softcap,
    sinks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # groups of heads
    KEY: tl.constexpr,
    LATENT: tl.constexpr,
    DT: tl.constexpr,
    DL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    TABLE: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TURNED: tl.constexpr = KEY - LATENT
    count, items, positions, tables, width = read_step(step, header, KV_HEADS, TABLE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    t, d, e = tl.arange(0, T), tl.arange(0, DT), tl.arange(0, DL)
    ones = tl.full((64, N), 1.0, tl.float16)
    for work in range(tl.program_id(0), count, tl.num_programs(0)):
        head = work % KV_HEADS
        first_row, num_rows, sequence, first_tile, end_tile, place, fresh = read_item(items, work // KV_HEADS, True)
        table = tables + sequence * width
        rows = num_rows * GROUP
        live = t < rows
        row = first_row + t // GROUP
        own = row.to(tl.int64) * HEADS + head * GROUP + t % GROUP
        turned_query = tl.load(
            q + own[:, None] * KEY + d[None, :], mask=live[:, None] & (d < TURNED)[None, :], other=0.0
        )
        query = tl.load(
            q + own[:, None] * KEY + TURNED + e[None, :], mask=live[:, None] & (e < LATENT)[None, :], other=0.0
        )
        position = tl.load(positions + row, mask=live, other=-1)
        of_merge, begin = first_tile, 0
        if WINDOW > 0:
            begin = tl.maximum(tl.load(positions + first_row) + 1 - WINDOW, 0) // N
            first_tile = tl.maximum(first_tile, begin)
        whole_m = tl.full((T,), float("-inf"), tl.float32)
        whole_mass = tl.zeros((64, T), tl.float32)
        whole_acc = tl.zeros((DL, T), tl.float32)
        m, mass, acc = whole_m, whole_mass, whole_acc
        for tile in range(first_tile, end_tile):
            whole_m, whole_mass, whole_acc, m, mass, acc = enter_split(
                tile, first_tile, whole_m, whole_mass, whole_acc, m, mass, acc, SPLIT, 0
            )
            turned, latents = load_latents(
                keys, of_turned, of_latents, table, tile, KEY, LATENT, DT, DL, BLOCK_SIZE, N
            )  # fmt: skip
            scores = tl.dot(latents, query.T, tl.dot(turned, turned_query.T))
            seen = seen_by(tile * N + tl.arange(0, N), position, 0, WINDOW)
            m, part, weights = weigh(scores, seen, m, scale, softcap, 0)
            acc = tl.dot(latents.T, weights, acc * part[None, :])
            mass = tl.dot(ones, weights, mass * part[None, :])
        at = head * capacity + place
        if place < 0:
            whole_m, whole_mass, whole_acc = merge(whole_m, whole_mass, whole_acc, m, mass, acc, 0)
            total = with_sink(tl.max(whole_mass, 0), whole_m, sinks, head * GROUP + t % GROUP)
            answer = tl.trans(answer_of(total[None, :], whole_acc).to(tl.bfloat16))
            tl.store(
                out + own[:, None] * LATENT + e[None, :], answer, mask=live[:, None] & (e < LATENT)[None, :]
            )  # fmt: skip
        elif first_tile < end_tile:
            keep_split(partial, at + first_tile // SPLIT * rows, rows, m, mass, acc, T, DL, ALONE)
        elif end_tile == 0:
            merge_rows(
                partial, out, sinks, at, of_merge, fresh, rows, begin // SPLIT,
                tl.max(position, 0) // (N * SPLIT) + 1, first_row, head, GROUP, HEADS, LATENT, DL, ALONE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def head_products_kernel(
    codes,  # as for experts (experts.py): one matrix per head
    scales,
    offsets,
    x,  # bf16 [row, heads, size]
    out,  # [row, heads, features]
    num_rows,
    features,
    each,  # rows of a head's matrix, including padding
    width,
    size,  # columns of a head's part of a row; `width` includes padding
    HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each head's part of a row, times that head's own matrix."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tiles_f = tl.cdiv(features, F)
    head, first_f = tl.program_id(0) // tiles_f, tl.program_id(0) % tiles_f * F
    row = tl.program_id(1) * T + tl.arange(0, T)
    there = row < num_rows
    own = tl.minimum(row, num_rows - 1).to(tl.int64) * HEADS + head
    total = expert_product(
        codes, scales, offsets, x, own, there, head * each + first_f, width, size,
        FORMAT, TILE, FEW and T == 16, F, T, K, PDL,
    )  # fmt: skip
    column = first_f + tl.arange(0, F)
    inside = there[:, None] & (column < features)[None, :]
    y = tl.trans(total).to(out.dtype.element_ty)
    tl.store(out + own[:, None] * features + column[None, :], y, mask=inside)


@triton.jit
def join_rows_kernel(
    x, y, out,
    X: tl.constexpr, Y: tl.constexpr, size: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each row of x, followed by the same row of y."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    value = tl.load(x + row * X + column, mask=column < X, other=0.0).to(tl.float32)
    behind = (column >= X) & (column < size)
    value = tl.where(behind, tl.load(y + row * Y + column - X, mask=behind, other=0.0).to(tl.float32), value)
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=column < size)

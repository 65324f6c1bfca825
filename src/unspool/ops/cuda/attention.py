# mypy: disallow-untyped-defs=False
"""Attention over paged keys and values, for any mix of prompts, decodes and drafts.

Keys come in tiles of KEYS positions that start at position 0. A tile's result for a query row (largest score, sum of
weights, weighted values) starts from nothing, and tiles are merged from the first to the last:

    m' = max(m, m_tile)    mass' = mass · 2^(m - m') + mass_tile · 2^(m_tile - m')    likewise the values

So one program may walk all tiles, or each tile be a program of its own whose results the last one to arrive merges in
order: the arithmetic is the same. A tile that a row does not see (later than its position, or before its window)
has the weight 0 and changes nothing.

Work comes as items, seven numbers each: first row, number of rows, sequence, first tile, end tile, place, counter. An
item's rows are its tokens times the heads that share a key head; they fill the matrix unit's M side, as many tokens
as fit. At a place of -1 the item is all there is to its tokens: the program walks its tiles and writes the answer. Else
the item is some of several tiles whose results are kept at place + tile · rows, and counted by the counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import let_next_start, load_quietly, prefetch_runs, wait_for_previous
from unspool.ops.cuda.linear import tanh


@triton.jit
def attend_tile(
    query, k, v, key, position, scale, softcap, WINDOW: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One tile's largest score (in base 2), sum of weights and weighted values for each row, from nothing."""
    scores = tl.dot(query, k.T)
    factor = scale * 1.4426950408889634
    if softcap is not None:
        scores = softcap * tanh(scores * scale / softcap)
        factor = 1.4426950408889634
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    m = tl.max(scores, 1) * factor
    base = tl.where(m == float("-inf"), 0.0, m) if MASKED else m
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    return m, tl.sum(weights, 1), tl.dot(weights.to(tl.float16), v)


@triton.jit
def merge(m, mass, acc, tile_m, tile_mass, tile_acc):
    """The state after one more tile. Nothing seen has m = -inf, and counts for nothing."""
    new = tl.maximum(m, tile_m)
    base = tl.where(new == float("-inf"), 0.0, new)
    old_part, tile_part = tl.exp2(m - base), tl.exp2(tile_m - base)
    new_mass = tl.fma(mass, old_part, tile_mass * tile_part)
    return new, new_mass, tl.fma(acc, old_part[:, None], tile_acc * tile_part[:, None])


@triton.jit
def load_tile(
    kv, kv_tiles, table, tile, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
    QUIET: tl.constexpr,
):  # fmt: skip
    """A tile's keys and values, also those past the last position: whatever a slot holds is finite, and has no weight.

    A table may be read past its end for the same reason; whoever makes it puts zeros there.
    """
    if kv_tiles is not None:  # a block is a tile: the copy engine brings it
        block = load_quietly(table + tile) if QUIET else tl.load(table + tile)
        row = (block * KV_HEADS + head) * (2 * N)
        k = kv_tiles.load([row, 0])
        v = kv_tiles.load([row + N, 0])
    else:
        n, d = tl.arange(0, N), tl.arange(0, D)
        block = tl.load(table + tile * (N // BLOCK_SIZE) + n // BLOCK_SIZE)
        head_start = (block * KV_HEADS + head).to(tl.int64) * (2 * BLOCK_SIZE * HEAD_DIM)
        source = kv + (head_start + n % BLOCK_SIZE * HEAD_DIM)[:, None] + d[None, :]
        if D == HEAD_DIM:
            k = tl.load(source)
            v = tl.load(source + BLOCK_SIZE * HEAD_DIM)
        else:
            in_head = tl.full((N, 1), True, tl.int1) & (d < HEAD_DIM)[None, :]
            k = tl.load(source, mask=in_head, other=0.0)
            v = tl.load(source + BLOCK_SIZE * HEAD_DIM, mask=in_head, other=0.0)
    return k, v, tile * N + tl.arange(0, N)


@triton.jit
def ask_for_tile(
    kv, table, tile, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Bring a tile into the L2 cache while others are computed."""
    lane = tl.arange(0, THREADS)
    active = lane < N // BLOCK_SIZE
    block = tl.load(table + tile * (N // BLOCK_SIZE) + lane, mask=active, other=0)
    start = kv + (block * KV_HEADS + head).to(tl.int64) * (2 * BLOCK_SIZE * HEAD_DIM)
    prefetch_runs(start, active, 4 * BLOCK_SIZE * HEAD_DIM)


@triton.jit
def load_partial(partial, partial_m, partial_mass, kept, tile, end, rows, some, D: tl.constexpr):
    """A tile's kept results for 16 rows; past the end, results that change nothing."""
    r, d = some + tl.arange(0, 16), tl.arange(0, D)
    used = (r < rows) & (tile + tl.zeros_like(r) < end)
    at = (kept + tile * rows + r).to(tl.int64)
    acc = tl.load(partial + at[:, None] * D + d[None, :], mask=used[:, None], other=0.0, cache_modifier=".cg")
    m = tl.load(partial_m + at, mask=used, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(partial_mass + at, mask=used, other=0.0, cache_modifier=".cg")
    return m, mass, acc


@triton.jit
def merge_partials(
    partial, partial_m, partial_mass, out, kept, begin, end, rows, some, first_row, head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """16 rows' tiles in order, loaded four at a time so that they wait for memory once."""
    r, d = some + tl.arange(0, 16), tl.arange(0, D)
    m = tl.full((16,), float("-inf"), tl.float32)
    mass = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for tile in range(begin, end, 4):
        m0, mass0, acc0 = load_partial(partial, partial_m, partial_mass, kept, tile, end, rows, some, D)
        m1, mass1, acc1 = load_partial(partial, partial_m, partial_mass, kept, tile + 1, end, rows, some, D)
        m2, mass2, acc2 = load_partial(partial, partial_m, partial_mass, kept, tile + 2, end, rows, some, D)
        m3, mass3, acc3 = load_partial(partial, partial_m, partial_mass, kept, tile + 3, end, rows, some, D)
        m, mass, acc = merge(m, mass, acc, m0, mass0, acc0)
        m, mass, acc = merge(m, mass, acc, m1, mass1, acc1)
        m, mass, acc = merge(m, mass, acc, m2, mass2, acc2)
        m, mass, acc = merge(m, mass, acc, m3, mass3, acc3)
    answer = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = ((first_row + r // GROUP).to(tl.int64) * HEADS + head * GROUP + r % GROUP)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + at, answer.to(tl.bfloat16), mask=(r < rows)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["capacity"])
def attention_kernel(
    q,  # f16 [row, heads, head_dim]
    kv,  # f16 [block, kv head, key or value, slot, head_dim], of one layer
    kv_tiles,  # a descriptor of the same, [rows of head_dim], where a block is a tile
    out,  # bf16 [row, heads, head_dim]
    step,  # int32: the step's description, see steps.py
    positions,
    partial,  # float32 [kv head, capacity, D]
    partial_m,  # float32 [kv head, capacity]
    partial_mass,
    arrivals,  # int32 [kv head, capacity], zero before and after
    capacity,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,  # HEAD_DIM up to a power of two
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ITEM: tl.constexpr,
    HEADER: tl.constexpr,  # where the step tells the items' number and place
    TABLE: tl.constexpr,  # where it tells the tables' place and width
    PARALLEL: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(step + HEADER) * KV_HEADS
    items = step + tl.load(step + HEADER + 1)
    tables = step + tl.load(step + TABLE)
    width = tl.load(step + TABLE + 1)
    let_next_start(PDL)
    if PDL and PARALLEL:  # noqa: SIM102 (decided when this is compiled)
        # Only the newest keys and values come from the kernel before: ask for this program's first tile already.
        if tl.program_id(0) < count:
            item = items + tl.program_id(0) // KV_HEADS * ITEM
            table, head = tables + tl.load(item + 2) * width, tl.program_id(0) % KV_HEADS
            ask_for_tile(kv, table, tl.load(item + 3), head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, N, THREADS)
    wait_for_previous(PDL)
    m_range, d = tl.arange(0, M), tl.arange(0, D)
    token, member = m_range // GROUP, m_range % GROUP
    in_head = d < HEAD_DIM
    for work in range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + work // KV_HEADS * ITEM
        head = work % KV_HEADS
        first_row, num_rows = tl.load(item), tl.load(item + 1)
        table = tables + tl.load(item + 2) * width
        first_tile, end_tile, place = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        live = token < num_rows
        row = first_row + token
        position = tl.load(positions + row, mask=live, other=-1)
        first_position, last = tl.load(positions + first_row), tl.load(positions + first_row + num_rows - 1)
        begin = 0  # the first tile that any of these rows sees
        if WINDOW > 0:
            begin = tl.maximum(first_position + 1 - WINDOW, 0) // N
            first_tile = tl.maximum(first_tile, begin)
        where = (row.to(tl.int64) * HEADS + head * GROUP + member)[:, None] * HEAD_DIM + d[None, :]
        inside = live[:, None] & in_head[None, :]
        query = tl.load(q + where, mask=inside, other=0.0)
        is_kept = False
        if PARALLEL:
            is_kept = place >= 0
        rows = num_rows * GROUP
        kept = head * capacity + place
        m = tl.full((M,), float("-inf"), tl.float32)
        mass = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        full_end = first_tile
        if not PARALLEL:
            # Tiles that every row sees whole need no mask; they are most of a long prompt's.
            full_begin = first_tile
            if WINDOW > 0:
                full_begin = tl.minimum(tl.maximum(tl.cdiv(last + 1 - WINDOW, N), first_tile), end_tile)
                for tile in range(first_tile, full_begin):
                    k, v, key = load_tile(kv, kv_tiles, table, tile, head, KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, N, PDL)
                    tile_m, tile_mass, tile_acc = attend_tile(query, k, v, key, position, scale, softcap, WINDOW, True)
                    m, mass, acc = merge(m, mass, acc, tile_m, tile_mass, tile_acc)
            full_end = tl.maximum(tl.minimum((first_position + 1) // N, end_tile), full_begin)
            for tile in range(full_begin, full_end):
                k, v, key = load_tile(kv, kv_tiles, table, tile, head, KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, N, PDL)
                tile_m, tile_mass, tile_acc = attend_tile(query, k, v, key, position, scale, softcap, WINDOW, False)
                m, mass, acc = merge(m, mass, acc, tile_m, tile_mass, tile_acc)
        for tile in range(full_end, end_tile):
            k, v, key = load_tile(kv, kv_tiles, table, tile, head, KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, N, PDL)
            tile_m, tile_mass, tile_acc = attend_tile(query, k, v, key, position, scale, softcap, WINDOW, True)
            if is_kept:
                keep(partial, partial_m, partial_mass, kept + tile * rows, rows, tile_m, tile_mass, tile_acc, M, D)
            else:
                m, mass, acc = merge(m, mass, acc, tile_m, tile_mass, tile_acc)
        if is_kept:
            if first_tile < end_tile:
                tl.debug_barrier()
                counter = arrivals + head * capacity + tl.load(item + 6)
                num_tiles = tl.cdiv(last + 1, N)
                arrived = tl.atomic_add(counter, end_tile - first_tile, sem="acq_rel") + end_tile - first_tile
                if arrived == num_tiles - begin:
                    tl.store(counter, 0)
                    for some in range(0, rows, 16):
                        merge_partials(
                            partial, partial_m, partial_mass, out, kept, begin, num_tiles, rows, some,
                            first_row, head, GROUP, HEADS, HEAD_DIM, D,
                        )  # fmt: skip
        else:
            answer = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
            tl.store(out + where, answer.to(tl.bfloat16), mask=inside)


@triton.jit
def keep(partial, partial_m, partial_mass, place, rows, m, mass, acc, M: tl.constexpr, D: tl.constexpr):
    """A tile's results, for whoever arrives last."""
    m_range, d = tl.arange(0, M), tl.arange(0, D)
    used = m_range < rows
    mine = (place + m_range).to(tl.int64)
    tl.store(partial + mine[:, None] * D + d[None, :], acc, mask=used[:, None], cache_modifier=".cg")
    tl.store(partial_m + mine, m, mask=used, cache_modifier=".cg")
    tl.store(partial_mass + mine, mass, mask=used, cache_modifier=".cg")

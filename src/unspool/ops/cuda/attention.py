# mypy: disallow-untyped-defs=False
"""Attention over paged keys and values, for any mix of prompts, decodes and drafts.

Keys come in splits of SPLIT tiles of KEYS positions each, all counted from position 0. A split starts from an empty
state and processes its tiles in order; splits are merged from first to last:

    tile    m' = max(m, scores)   w = f16(2^(scores - m'))   mass' = mass · 2^(m - m') + w · 1   acc' likewise, w · v
    merge   m' = max(m, m_split)   mass' = mass · 2^(m - m') + mass_split · 2^(m_split - m')   acc' likewise

So one program may process all splits, or each split is one work item and merging their results is another: the
arithmetic is the same. A tile that a row does not see (later than its position, or before its window) has weight 0 and
changes nothing. The sum of weights is a product with ones, because the matrix unit adds in one fixed order.

There are two kernels. They agree bit by bit, because a sum of the matrix unit depends neither on a side's width nor on
which operand is on which side. The *decode* kernel puts keys on the M side and the few query rows on the N side: little
computation is wasted, and memory bandwidth is the limit. The *prompt* kernel puts query rows on the M side, where the
largest score of a row is found within one warp.

Work is a list of items, seven numbers each: first row, number of rows, sequence, first tile, end tile, place, and the
first tile with keys that this step writes. An item's rows are its tokens times the heads that share a key head. With a
place of -1, the item is all the work of its tokens: the program processes its tiles and writes the result. Otherwise
the item is one of several splits, whose result is stored at place + split · rows. An end tile of 0 marks the item that
merges such splits: as many rows as its last number says (1 or 4), beginning at the row in its fourth number. Merging
items come last in the list, and wait for the splits that they merge (handover.py).

If a step has little work, the time until the first product counts. Keys and values of earlier steps are then prefetched
before the kernel that computes the queries has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import (
    after_previous,
    let_next_start,
    let_next_start_if,
    load_quietly,
    prefetch_runs,
    rounds_ahead,
    wait_for_previous,
)
from unspool.ops.cuda.softmax import (
    answer_of,
    enter_split,
    enter_split_evenly,
    keep_split,
    merge,
    merge_rows,
    seen_by,
    weigh,
    weigh_pair,
    with_sink,
)


@triton.jit
def load_tile(
    kv, kv_tiles, table, tile, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
    QUIET: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Load a tile's keys and values, also those past the last position: every slot holds finite numbers, and such keys
    get weight 0.

    For the same reason a table may be read past its end; the code that writes tables puts zeros there. AHEAD: how many
    tiles ahead the loads are issued; 0: the compiler decides.
    """
    if kv_tiles is not None:  # a tile lies within a block: TMA copies it
        PARTS: tl.constexpr = BLOCK_SIZE // N
        block = load_quietly(table + tile // PARTS) if QUIET else tl.load(table + tile // PARTS)
        row = (block * KV_HEADS + head) * (2 * BLOCK_SIZE) + tile % PARTS * N
        k = kv_tiles.load([row, 0])
        v = kv_tiles.load([row + BLOCK_SIZE, 0])
    else:
        place, d = tile * N + tl.arange(0, N), tl.arange(0, D)
        block = tl.load(table + place // BLOCK_SIZE)
        head_start = (block * KV_HEADS + head).to(tl.int64) * (2 * BLOCK_SIZE * HEAD_DIM)
        source = kv + (head_start + place % BLOCK_SIZE * HEAD_DIM)[:, None] + d[None, :]
        if D == HEAD_DIM:
            k = tl.load(source)
            v = tl.load(source + BLOCK_SIZE * HEAD_DIM)
        else:
            in_head = tl.full((N, 1), True, tl.int1) & (d < HEAD_DIM)[None, :]
            k = tl.load(source, mask=in_head, other=0.0)
            v = tl.load(source + BLOCK_SIZE * HEAD_DIM, mask=in_head, other=0.0)
    if AHEAD > 0:
        k, v = rounds_ahead(k, AHEAD), rounds_ahead(v, AHEAD)
    return k, v, tile * N + tl.arange(0, N)


@triton.jit
def load_pair(
    kv_tiles, kv_pairs, table, pair, head,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Load two neighbouring tiles of one block: their keys as one tensor, their values as two."""
    PARTS: tl.constexpr = BLOCK_SIZE // (2 * N)
    block = load_quietly(table + pair // PARTS) if AHEAD > 0 else tl.load(table + pair // PARTS)
    row = (block * KV_HEADS + head) * (2 * BLOCK_SIZE) + pair % PARTS * (2 * N)
    k = kv_pairs.load([row, 0])
    v0 = kv_tiles.load([row + BLOCK_SIZE, 0])
    v1 = kv_tiles.load([row + BLOCK_SIZE + N, 0])
    if AHEAD > 0:
        k, v0, v1 = rounds_ahead(k, AHEAD), rounds_ahead(v0, AHEAD), rounds_ahead(v1, AHEAD)
    return k, v0, v1, pair * (2 * N) + tl.arange(0, 2 * N)


@triton.jit
def load_query(q, where, rows, T: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr):
    """Load a tile's query rows, inside a loop. They are prefetched one iteration ahead, and their wait comes after the
    keys and values that are prefetched more iterations ahead."""
    there = (tl.arange(0, T) < rows)[:, None] & (tl.arange(0, D) < HEAD_DIM)[None, :]
    query = tl.load(q + where, mask=there, other=0.0)
    if AHEAD > 0:
        query = rounds_ahead(query, 1)
    return query


@triton.jit
def read_step(step, header, KV_HEADS: tl.constexpr, TABLE: tl.constexpr):
    """The number of work items times key heads, the addresses of items, row positions and tables, and a table's
    width."""
    count, items, positions = tl.load(header) * KV_HEADS, step + tl.load(header + 1), step + tl.load(header + 2)
    return count, items, positions, step + tl.load(step + TABLE), tl.load(step + TABLE + 1)


@triton.jit
def read_item(items, index, exists):
    """An item's seven numbers, or zeros if it does not exist."""
    item = items + index * 7
    first_row = tl.load(item, mask=exists, other=0)
    num_rows = tl.load(item + 1, mask=exists, other=0)
    sequence = tl.load(item + 2, mask=exists, other=0)
    first_tile = tl.load(item + 3, mask=exists, other=0)
    end_tile = tl.load(item + 4, mask=exists, other=0)
    place = tl.load(item + 5, mask=exists, other=0)
    fresh = tl.load(item + 6, mask=exists, other=0)
    return first_row, num_rows, sequence, first_tile, end_tile, place, fresh


@triton.jit
def ask_for_tiles(
    kv, table, first_tile, end_tile, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch a split's blocks into the L2 cache."""
    lane = tl.arange(0, THREADS)
    first, end = first_tile * N // BLOCK_SIZE, tl.cdiv(tl.minimum(end_tile, first_tile + SPLIT) * N, BLOCK_SIZE)
    active = first + lane < end
    block = tl.load(table + first + lane, mask=active, other=0)
    start = kv + (block * KV_HEADS + head).to(tl.int64) * (2 * BLOCK_SIZE * HEAD_DIM)
    prefetch_runs(start, active, 4 * BLOCK_SIZE * HEAD_DIM)


@triton.jit(do_not_specialize=["capacity"])
def decode_attention_kernel(
    q,  # f16 [row, heads, head_dim]
    kv,  # f16 [block, kv head, key or value, slot, head_dim], of one layer
    kv_tiles,  # a TMA descriptor of the same, [rows of head_dim], if a tile lies within a block
    kv_pairs,  # the same for two tiles at once
    out,  # bf16 [row, heads, VALUE_DIM]
    step,  # int32: the step's description, see steps.py
    header,  # the place in `step` of the items' number and address, and of the positions
    partial,  # float32 [kv head, capacity, D + MORE]: all absent before and after
    capacity,
    scale,
    softcap,
    sinks,  # float32 [heads], or None
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # channels of a value; the channels after them are zeros
    D: tl.constexpr,  # HEAD_DIM rounded up to a power of two that fits the matrix unit's M side
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    T: tl.constexpr,  # query rows
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    TABLE: tl.constexpr,  # the place in `step` of the tables' address and width
    THREADS: tl.constexpr,
    BATCH: tl.constexpr,  # tiles per iteration, 1 or 2
    BEFORE: tl.constexpr,  # iterations that are prefetched, all but one before the wait; 0: the wait comes first
    LET: tl.constexpr,  # when the next kernel may start: 0 at the beginning, 1 at the first tile, 2 after the tiles
    ALONE: tl.constexpr,  # one program does all the work
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    AHEAD: tl.constexpr = BEFORE if PDL else 0
    # The step's description was written before the previous kernel started, so it is read while that kernel still runs.
    count, items, positions, tables, width = read_step(step, header, KV_HEADS, TABLE)
    first = tl.program_id(0)
    first_row, num_rows, sequence, first_tile, end_tile, place, fresh = read_item(
        items, first // KV_HEADS, first < count
    )
    if LET == 0:
        let_next_start(PDL)
    if PDL and BEFORE == 0:
        # Only the newest keys and values are written by the previous kernel.
        table = tables + sequence * width
        ask_for_tiles(
            kv, table, first_tile, end_tile, first % KV_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, N, SPLIT, THREADS
        )
    # A program without work ends at once, to make room for the next kernel, if another program waits. With BEFORE, a
    # program that has work waits later, after it has issued its prefetches.
    if (count == 0) if BEFORE > 0 else (first < count or count == 0):
        wait_for_previous(PDL)
    t, d = tl.arange(0, T), tl.arange(0, D)
    ones = tl.full((64, N), 1.0, tl.float16)
    is_waiting = count >= 0
    for work in range(first, count, tl.num_programs(0)):
        following = work + tl.num_programs(0)
        (
            next_first_row, next_num_rows, next_sequence, next_first_tile, next_end_tile, next_place, next_fresh,
        ) = read_item(items, following // KV_HEADS, following < count)  # fmt: skip
        head = work % KV_HEADS
        table = tables + sequence * width
        live = t < num_rows * GROUP
        row = first_row + t // GROUP
        where = (row.to(tl.int64) * HEADS + head * GROUP + t % GROUP)[:, None] * HEAD_DIM + d[None, :]
        inside = live[:, None] & (d < HEAD_DIM)[None, :]
        if BEFORE == 0:
            query = tl.load(q + where, mask=inside, other=0.0)
        position = tl.load(positions + row, mask=live, other=-1)
        last = tl.max(position, 0)
        of_merge = first_tile  # for an item that merges, this is the first row
        begin = 0  # the first tile that any of these rows sees
        if WINDOW > 0:
            begin = tl.maximum(tl.load(positions + first_row) + 1 - WINDOW, 0) // N
            first_tile = tl.maximum(first_tile, begin)
        whole_m = tl.full((T,), float("-inf"), tl.float32)
        whole_mass = tl.zeros((64, T), tl.float32)
        whole_acc = tl.zeros((D, T), tl.float32)
        m, mass, acc = whole_m, whole_mass, whole_acc
        # The iterations to wait in, if no wait has happened yet: for the queries, and for the first tile with new keys.
        query_waits = tl.where(is_waiting, first_tile // BATCH, -1)
        tile_waits = tl.where(is_waiting, tl.maximum(fresh, first_tile) // BATCH, -1)
        for turn in range(first_tile // BATCH, tl.cdiv(end_tile, BATCH)):
            whole_m, whole_mass, whole_acc, m, mass, acc = enter_split(
                turn * BATCH, first_tile, whole_m, whole_mass, whole_acc, m, mass, acc, SPLIT, 0
            )
            at = after_previous(turn, tile_waits, AHEAD > 0)
            if BATCH == 2:
                k, v, v_next, key = load_pair(kv_tiles, kv_pairs, table, at, head, KV_HEADS, BLOCK_SIZE, N, AHEAD)
            else:
                k, v, key = load_tile(
                    kv, kv_tiles, table, at, head, KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, N, PDL, AHEAD
                )  # fmt: skip
            if BEFORE > 0:
                rows = num_rows * GROUP + after_previous(turn, query_waits, PDL) - turn
                query = load_query(q, where, rows, T, HEAD_DIM, D, AHEAD)
            if LET == 1:
                let_next_start_if(turn == first_tile // BATCH, PDL)
            seen, scores = seen_by(key, position, 0, WINDOW), tl.dot(k, query.T)
            if BATCH == 2:
                m, part, weights, next_part, next_weights = weigh_pair(scores, seen, m, scale, softcap, T)
            else:
                m, part, weights = weigh(scores, seen, m, scale, softcap, 0)
            acc = tl.dot(v.T, weights, acc * part[None, :])
            mass = tl.dot(ones, weights, mass * part[None, :])
            if BATCH == 2:
                acc = tl.dot(v_next.T, next_weights, acc * next_part[None, :])
                mass = tl.dot(ones, next_weights, mass * next_part[None, :])
        if LET > 0:
            let_next_start(PDL)
        at, rows = head * capacity + place, num_rows * GROUP
        if place < 0:
            whole_m, whole_mass, whole_acc = merge(whole_m, whole_mass, whole_acc, m, mass, acc, 0)
            total = with_sink(tl.max(whole_mass, 0), whole_m, sinks, head * GROUP + t % GROUP)
            answer = answer_of(total[None, :], whole_acc)
            if VALUE_DIM == HEAD_DIM:
                tl.store(out + where, tl.trans(answer.to(tl.bfloat16)), mask=inside)
            else:
                target = (row.to(tl.int64) * HEADS + head * GROUP + t % GROUP)[:, None] * VALUE_DIM + d[None, :]
                tl.store(
                    out + target, tl.trans(answer.to(tl.bfloat16)), mask=live[:, None] & (d < VALUE_DIM)[None, :]
                )
        elif first_tile < end_tile:
            keep_split(partial, at + first_tile // SPLIT * rows, rows, m, mass, acc, T, D, ALONE)
        elif end_tile == 0:
            if is_waiting:  # so that the previous step has read its splits
                wait_for_previous(PDL)
            merge_rows(
                partial, out, sinks, at, of_merge, fresh, rows, begin // SPLIT, last // (N * SPLIT) + 1, first_row,
                head, GROUP, HEADS, VALUE_DIM, D, ALONE,
            )  # fmt: skip
        is_waiting = is_waiting & (first_tile >= end_tile) & (end_tile > 0)
        first_row, num_rows, sequence, fresh = next_first_row, next_num_rows, next_sequence, next_fresh
        first_tile, end_tile, place = next_first_tile, next_end_tile, next_place


@triton.jit
def walk_tiles(
    first_tile, begin, end, kv, kv_tiles, table, head, query, position, scale, softcap,
    whole_m, whole_mass, whole_acc, m, mass, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    N: tl.constexpr, SPLIT: tl.constexpr, MASKED: tl.constexpr, QUIET: tl.constexpr,
):  # fmt: skip
    """The softmax state after the tiles from `begin` to `end`, with query rows on the M side."""
    ones = tl.full((N, 16), 1.0, tl.float16)
    for tile in range(begin, end):
        k, v, key = load_tile(kv, kv_tiles, table, tile, head, KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, N, QUIET, 0)
        seen = seen_by(key, position, 1, WINDOW) if MASKED else None
        scores = tl.dot(query, k.T)
        whole_m, whole_mass, whole_acc, m = enter_split_evenly(
            tile, first_tile, whole_m, whole_mass, whole_acc, m, mass, acc, SPLIT, 1
        )
        m, part, weights = weigh(scores, seen, m, scale, softcap, 1)
        acc = tl.dot(weights, v, acc * part[:, None])
        mass = tl.dot(weights, ones, mass * part[:, None])
    return whole_m, whole_mass, whole_acc, m, mass, acc


@triton.jit
def prompt_attention_kernel(
    q, kv, kv_tiles, out, step, header, scale, softcap, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    TABLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As decode_attention_kernel, for items of many rows, none of which is split."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count, items, positions, tables, width = read_step(step, header, KV_HEADS, TABLE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    r, d = tl.arange(0, M), tl.arange(0, D)
    programs = tl.num_programs(0)
    for turn in range(tl.cdiv(count, programs)):
        # Items come longest first. Programs take them in alternating direction, so that all end at about the same time.
        place = tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
        work = turn * programs + place
        head = work % KV_HEADS
        first_row, num_rows, sequence, first_tile, end_tile, _, _ = read_item(items, work // KV_HEADS, work < count)
        table = tables + sequence * width
        live = r < num_rows * GROUP
        row = first_row + r // GROUP
        position = tl.load(positions + row, mask=live, other=-1)
        first_position, last = tl.load(positions + first_row), tl.load(positions + first_row + num_rows - 1)
        where = (row.to(tl.int64) * HEADS + head * GROUP + r % GROUP)[:, None] * HEAD_DIM + d[None, :]
        inside = live[:, None] & (d < HEAD_DIM)[None, :]
        query = tl.load(q + where, mask=inside, other=0.0)
        whole_m = tl.full((M,), float("-inf"), tl.float32)
        whole_mass = tl.zeros((M, 16), tl.float32)
        whole_acc = tl.zeros((M, D), tl.float32)
        m, mass, acc = whole_m, whole_mass, whole_acc
        # Tiles that every row sees completely need no mask; they are most tiles of a long prompt.
        full_begin = first_tile
        if WINDOW > 0:
            first_tile = tl.maximum(first_tile, tl.maximum(first_position + 1 - WINDOW, 0) // N)
            full_begin = tl.minimum(tl.maximum(tl.cdiv(last + 1 - WINDOW, N), first_tile), end_tile)
            whole_m, whole_mass, whole_acc, m, mass, acc = walk_tiles(
                first_tile, first_tile, full_begin, kv, kv_tiles, table, head, query, position, scale, softcap,
                whole_m, whole_mass, whole_acc, m, mass, acc,
                KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, WINDOW, N, SPLIT, True, PDL,
            )  # fmt: skip
        full_end = tl.maximum(tl.minimum((first_position + 1) // N, end_tile), full_begin)
        whole_m, whole_mass, whole_acc, m, mass, acc = walk_tiles(
            first_tile, full_begin, full_end, kv, kv_tiles, table, head, query, position, scale, softcap,
            whole_m, whole_mass, whole_acc, m, mass, acc,
            KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, WINDOW, N, SPLIT, False, PDL,
        )  # fmt: skip
        whole_m, whole_mass, whole_acc, m, mass, acc = walk_tiles(
            first_tile, full_end, end_tile, kv, kv_tiles, table, head, query, position, scale, softcap,
            whole_m, whole_mass, whole_acc, m, mass, acc,
            KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, WINDOW, N, SPLIT, True, PDL,
        )  # fmt: skip
        whole_m, whole_mass, whole_acc = merge(whole_m, whole_mass, whole_acc, m, mass, acc, 1)
        total = with_sink(tl.max(whole_mass, 1), whole_m, sinks, head * GROUP + r % GROUP)
        answer = answer_of(total[:, None], whole_acc)
        if VALUE_DIM == HEAD_DIM:
            tl.store(out + where, answer.to(tl.bfloat16), mask=inside)
        else:
            target = (row.to(tl.int64) * HEADS + head * GROUP + r % GROUP)[:, None] * VALUE_DIM + d[None, :]
            tl.store(out + target, answer.to(tl.bfloat16), mask=live[:, None] & (d < VALUE_DIM)[None, :])

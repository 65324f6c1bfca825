"""How a step is described to the device: every row meets every tile of keys that it sees, exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from unspool.ops import Batch
from unspool.ops.cuda import steps
from unspool.ops.cuda.steps import ITEM, KEYS, SPLIT, Shape

SHAPE = Shape(num_heads=8, num_kv_heads=2, programs=264, capacity=16384)


def batch_of(sequences: list[tuple[int, int]], wanted: str = "last") -> Batch:
    """Sequences as (first position, rows)."""
    starts = np.concatenate([[0], np.cumsum([rows for _, rows in sequences])]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + rows) for start, rows in sequences]).astype(np.int32)
    rows = len(positions)
    return Batch(
        ids=np.arange(rows, dtype=np.int32),
        positions=positions,
        slots=np.arange(rows, dtype=np.int64) + 5,
        starts=starts,
        tables=np.arange(len(sequences) * 40, dtype=np.int32).reshape(-1, 40),
        logit_rows=(starts[1:] - 1 if wanted == "last" else np.arange(rows)).astype(np.int32),
        states=np.array([], np.int32),
        saves=np.array([], np.int32),
    )


def described(batch: Batch, rows: int, logits: int, shape: Shape = SHAPE, **more: object) -> np.ndarray:
    out = np.full(steps.size_of(batch, rows, logits, [shape]) + 100, -99, np.int32)
    size = steps.describe(out, batch, rows, logits, [shape], **more)
    assert size <= steps.size_of(batch, rows, logits, [shape])
    assert (out[size:] == -99).all(), "nothing is written past what was promised"
    return out[:size]


def items_of(step: np.ndarray, place: int) -> np.ndarray:
    count, start = step[place : place + 2]
    return step[start : start + count * ITEM].reshape(count, ITEM)


def meetings(items: np.ndarray) -> list[tuple[int, int]]:
    return [
        (row, tile)
        for first, count, _, begin, end, *_ in items.tolist()
        for row in range(first, first + count)
        for tile in range(begin, end)
    ]


MIXES = {
    "one decode": [(512, 1)],
    "a long one": [(100_000, 1)],
    "a crowd": [(40 * i, 1) for i in range(100)],
    "a long one among short ones": [(20_000, 1)] + [(10, 1)] * 40,
    "drafts": [(700, 5), (3, 2), (0, 16)],
    "prompts and decodes": [(0, 300), (512, 1), (64, 129), (1000, 17)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("take_all", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7, 32])
def test_every_row_meets_its_tiles_once(mix: str, take_all: bool, group: int) -> None:
    batch = batch_of(MIXES[mix], "all" if take_all else "last")
    rows = -(-len(batch.ids) // 8) * 8
    shape = replace(SHAPE, num_heads=2 * group)
    step = described(batch, rows, rows, shape, take_all=take_all)
    few, many = (items_of(step, place) for place in (steps.FEW_ITEMS, steps.MANY_ITEMS))
    found = meetings(few) + meetings(many)
    # A program computes an item's rows together, so earlier ones may meet a tile that they do not see.
    assert len(found) == len(set(found))
    assert {(r, t) for r, p in enumerate(batch.positions.tolist()) for t in range(p // KEYS + 1)} <= set(found)
    assert (few[:, 1] * group <= shape.decode_rows).all()
    assert (many[:, 1] * group <= shape.prompt_rows).all()
    assert len(many) == 0 or not take_all
    assert (many[:, 5] == -1).all()


@pytest.mark.parametrize("mix", MIXES)
def test_every_wanted_row_meets_its_tiles_once(mix: str) -> None:
    for wanted in ("last", "all"):
        batch = batch_of(MIXES[mix], wanted)
        rows = len(batch.ids)
        step = described(batch, rows, rows)
        items = items_of(step, steps.LAST_ITEMS)
        positions = batch.positions[batch.logit_rows].tolist()
        assert sorted(meetings(items)) == [(r, t) for r, p in enumerate(positions) for t in range(p // KEYS + 1)]
        owners = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))[batch.logit_rows]
        assert all(owners[first] == sequence for first, _, sequence, *_ in items.tolist())
        for list_of, expected in ((steps.LAST_ITEMS, positions), (steps.FEW_ITEMS, batch.positions)):
            place = step[list_of + 2]
            assert (step[place : place + len(expected)] == expected).all()
        assert len(items_of(described(batch, rows, rows, take_all=True), steps.LAST_ITEMS)) == 0


def test_an_item_tells_the_first_tile_that_its_step_makes() -> None:
    """Of its sequence, not of its own rows: what it brings of earlier tiles, nobody writes meanwhile."""
    sequences = [(700, 40), (3, 2), (512, 1), (64, 1)]
    batch = batch_of(sequences, "all")
    items = items_of(described(batch, 48, 48, SHAPE, take_all=True), steps.FEW_ITEMS)
    assert len(set(items[:, 0].tolist())) > len(sequences)  # the first one's tokens are cut into pieces
    reported = {(sequence, fresh) for _, _, sequence, _, end, _, fresh in items.tolist() if end > 0}
    assert reported == {(i, p // KEYS) for i, (p, _) in enumerate(sequences)}


def test_kept_results_never_share_a_place() -> None:
    items = items_of(described(batch_of([(100_000, 1), (3000, 11), (900, 1)]), 16, 16), steps.FEW_ITEMS)
    assert all(end - begin <= SPLIT for _, _, _, begin, end, place, *_ in items.tolist() if place >= 0)
    kept = [
        place + begin // SPLIT * rows * SHAPE.group + r
        for _, rows, _, begin, end, place, _ in items.tolist()
        for r in range(rows * SHAPE.group)
        if place >= 0 and end > 0
    ]
    assert kept
    assert len(kept) == len(set(kept))
    assert max(kept) < SHAPE.capacity


def test_splits_are_merged_after_they_are_made_each_row_once() -> None:
    batch = batch_of([(100_000, 1), (1500, 11), (900, 1), (9, 16)])
    items = items_of(described(batch, 32, 32, replace(SHAPE, capacity=10_000)), steps.FEW_ITEMS).tolist()
    made, merged, at_once = [], [], set()
    for first, tokens, _, begin, end, place, last in items:
        if place >= 0 and end > 0:
            assert not merged, "whoever merges waits for splits"
            made.append((first, tokens))
        elif place >= 0:
            assert (first, tokens) in made
            merged += [(first, row) for row in range(begin, min(begin + last, tokens * SHAPE.group))]
            at_once.add(last)
    assert at_once == {1, 4}
    assert len(merged) == len(set(merged))
    assert set(merged) == {(first, row) for first, tokens in made for row in range(tokens * SHAPE.group)}


def test_where_programs_may_lack_room_nobody_waits_for_one() -> None:
    """Either each piece of work has a program of its own, also where two tiles go at once and half of them run, or no
    piece waits for another."""
    shape = replace(SHAPE, programs=512, capacity=10_000, has_room=False)
    one, crowd = (batch_of([(900 + i, 1) for i in range(count)]) for count in (1, 64))
    for batch, is_divided in ((one, True), (crowd, False)):
        items = steps.divide(batch, shape)[0]
        assert (items[:, 5] >= 0).any() == is_divided
        assert not is_divided or len(items) * shape.num_kv_heads <= shape.programs // 2
    alone = replace(shape, programs=8192, has_room=True)
    assert (steps.divide(crowd, alone)[0][:, 5] >= 0).any()


def test_what_does_not_fit_is_walked() -> None:
    items = items_of(described(batch_of([(100_000, 1)]), 1, 1, replace(SHAPE, capacity=100)), steps.FEW_ITEMS)
    assert items.tolist() == [[0, 1, 0, 0, 100_000 // KEYS + 1, -1, 100_000 // KEYS]]


def test_padding_is_kept_nowhere_and_tables_end_in_zeros() -> None:
    batch = batch_of([(5, 1), (9, 1), (2, 1)])
    params = np.arange(3 * 16, dtype=np.int32).reshape(3, 16)
    step = described(batch, 8, 8, params=params, sources=np.array([2, -1, 0], np.int32), results=77)
    at = steps.places(8)
    assert step[at["slots"] : at["slots"] + 8].tolist() == [5, 6, 7, -1, -1, -1, -1, -1]
    assert step[at["sources"] : at["sources"] + 8].tolist() == [2, -1, 0, -1, -1, -1, -1, -1]
    assert all(place % 4 == 0 for place in at.values()), "aligned for every number of rows"
    start, width = step[steps.TABLES : steps.TABLES + 2]
    assert (step[start : start + 3 * width] == batch.tables.reshape(-1)).all()
    assert (step[start + 3 * width : start + 3 * width + steps.TABLE_SLACK] == 0).all()
    rows = step[step[steps.ROW_PARAMS] :].reshape(8, 16)
    assert (rows[:3] == params).all()
    assert (rows[3:, 12] == -1).all(), "padding counts no tokens"
    assert step[steps.RESULTS] == 77


def test_states_are_told_by_row_and_by_sequence() -> None:
    sequences = [(0, 3), (7, 1), (20, 2)]
    batch = replace(batch_of(sequences), states=np.array([4, 0, 2], np.int32), saves=np.array([-1, 6, -1, -1, 5, -1]))
    step = described(batch, 8, 8)
    place, count = step[steps.STATES : steps.STATES + 2]
    assert count == 3
    assert step[place : place + 8].tolist() == [-1, 6, -1, -1, 5, -1, -1, -1]
    assert step[place + 8 : place + 16].tolist() == [0, 0, 0, 1, 2, 2, -1, -1]
    reported = step[place + 16 : place + 16 + 3 * steps.SEQUENCE].reshape(3, steps.SEQUENCE)
    assert reported.tolist() == [[0, 3, 4, 1], [3, 1, 0, 0], [4, 2, 2, 0]]
    unsaved = described(replace(batch, saves=np.array([], np.int32)), 8, 8)
    assert (unsaved[place : place + 8] == -1).all()
    assert described(batch_of(sequences), 8, 8)[steps.STATES + 1] == 0

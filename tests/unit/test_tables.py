"""Blocks of layers with windows: what is released, in which order it is forgotten, and what a prompt can begin from."""

from __future__ import annotations

import pytest

from unspool.cache.blocks import Blocks, blocks_in_window, borrowed
from unspool.engine.request import Request
from unspool.engine.scheduler import Scheduler
from unspool.errors import EngineError
from unspool.plan import NO_BLOCK


@pytest.mark.parametrize("size", [1, 4, 8, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 24, 128, 1000])
def test_a_sequence_holds_no_more_than_is_said(window: int, size: int) -> None:
    """Step by step, in steps of any length; and it holds at least what its next token sees."""
    for step in (1, 7, 100):
        least = blocks_in_window(window, size, step)
        scheduler = Scheduler(Blocks(least, size, window), step_tokens=step, max_running=1)
        request = Request(0, range(2000))
        scheduler.add(request)
        while request.num_left:
            [work] = scheduler.plan().works
            first = max(0, work.start + 1 - window) // size
            assert NO_BLOCK not in work.blocks[first:]
            assert len(work.tokens) == min(step, 2000 - work.start)
            scheduler.commit(request, work, [1] * work.num_samples)
            scheduler.check()
            if work.num_samples:
                break
        assert scheduler.num_preemptions == 0


def test_what_is_unlikely_to_be_found_again_is_forgotten_first() -> None:
    blocks = Blocks(4, 2, window=2)
    held = [blocks.allocate() for _ in range(4)]
    for place, block in enumerate(held):
        blocks.register(block, bytes([place]), b"", (place, place))
    blocks.release_first(held[0], is_likely=True)
    blocks.release_first(held[1], is_likely=False)
    blocks.release_first(held[2], is_likely=True)
    blocks.release([NO_BLOCK, held[3]])
    blocks.check()
    assert [blocks.allocate() for _ in range(4)] == [held[1], held[0], held[2], held[3]]
    with pytest.raises(EngineError, match="no block is free"):
        blocks.allocate()


def test_one_table_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.cache.blocks.KEY_TILE", 1)
    monkeypatch.setattr("unspool.engine.tables.REWIND", 1)
    groups = Blocks(50, 4), Blocks(9, 4, window=6), Blocks(9, 4, window=2)
    scheduler = Scheduler(groups[0], step_tokens=8, max_running=2, others=groups[1:])
    request = Request(0, range(40))
    scheduler.add(request)
    for _ in range(4):
        [work] = scheduler.plan().works
        scheduler.commit(request, work, [])
        scheduler.check()
    assert len(work.blocks) == 8
    assert NO_BLOCK not in work.blocks
    assert [[block == NO_BLOCK for block in table].index(False) for table in work.others] == [4, 5]
    assert scheduler.tables.stats["window_6_blocks_free"] == 9 - 4
    scheduler.remove(request)
    scheduler.tables.check([])
    assert [group.num_free for group in groups] == [50, 9, 9]
    again = Request(1, [*range(24), 77, 78])
    scheduler.add(again)
    [work] = scheduler.plan().works
    assert work.start == 24, "after six blocks, where the windows are still there"
    assert [table.count(NO_BLOCK) for table in work.others] == [4, 5]


def test_a_measurement_borrows_blocks_and_returns_them() -> None:
    groups = Blocks(60, 4), Blocks(24, 4, window=5)
    with borrowed(groups, 2, 100, 3) as held:
        assert [[len(table) for table in tables] for tables in held] == [[26, 26], [26, 26]]
        assert held[0][1][:16] == (NO_BLOCK,) * 16, "of the first 64 tokens, a whole tile of keys"
        assert NO_BLOCK not in held[0][1][16:]
    for group in groups:
        group.check()
    with pytest.raises(EngineError, match="no block is free"), borrowed(groups, 9, 100, 3):
        pass
    for group in groups:
        group.check()

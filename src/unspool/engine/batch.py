"""From a plan to the batch that a compiled model reads. Python's own arrays: no step needs numpy for this."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import sub

from unspool.ops import Batch
from unspool.plan import Plan, Work

_joined = chain.from_iterable

# The starts of one sequence of one row, and that row's number.
ONE_ROW, FIRST = memoryview(array("i", (0, 1))).toreadonly(), memoryview(array("i", (0,))).toreadonly()


class BatchBuilder:
    """Builds batches of plans that come one after the other. Tables of blocks are kept as long as they stay the same,
    as in most steps of decoding."""

    def __init__(self, block_size: int, unkept_state: int = -1) -> None:
        """`unkept_state` is the slot for works that keep no state; negative: the model has none."""
        self._block_size, self._unkept_state = block_size, unkept_state
        self._blocks: tuple[tuple[int, ...], ...] = ()
        self._tables = memoryview(b"")

    def build(self, plan: Plan) -> Batch:
        """Rows work after work; each work is a sequence of the batch. All works have one kind of output."""
        if len(plan.works) == 1 and self._unkept_state < 0:
            work = plan.works[0]
            if work.num_logits == len(work.tokens) == 1 and not work.others:
                return self._one_row(work)
        _, first, tokens, blocks, num_logits, _, _, _, others, num_hidden = plan.columns
        num_wanted = num_hidden if any(num_hidden) else num_logits
        starts = array("i", accumulate(map(len, tokens), initial=0))
        ends = starts[1:]
        if starts[-1] == len(tokens):  # every work has one row
            size = self._block_size
            positions = array("i", first)
            slots = array("q", [own[at // size] * size + at % size for own, at in zip(blocks, first, strict=True)])
        else:
            positions = array("i", _joined(range(at, at + len(of)) for at, of in zip(first, tokens, strict=True)))
            slots = array("q", _joined(map(self._slots, first, map(len, tokens), blocks)))
        logit_rows = array("i", _joined(map(range, map(sub, ends, num_wanted), ends)))
        if others[0]:
            for group in zip(*others, strict=True):
                slots.extend(_joined(map(self._slots, first, map(len, tokens), group)))
            blocks = (*blocks, *_joined(zip(*others, strict=True)))
        ids = array("i", _joined(tokens))
        tables = self._tables_of(blocks)
        if self._unkept_state < 0:
            return Batch(ids, positions, slots, starts, tables, logit_rows)
        return Batch(ids, positions, slots, starts, tables, logit_rows, self._states_of(plan), _saves_of(plan, starts))

    def _one_row(self, work: Work) -> Batch:
        """One token of one stream, as `build` would make it, in a third of the time: its device waits meanwhile."""
        size, at, blocks = self._block_size, work.start, work.blocks
        slots = array("q", (blocks[at // size] * size + at % size,))
        return Batch(array("i", work.tokens), array("i", (at,)), slots, ONE_ROW, self._tables_of((blocks,)), FIRST)

    def _states_of(self, plan: Plan) -> array[int]:
        return array("i", [self._unkept_state if work.state < 0 else work.state for work in plan.works])

    def _slots(self, start: int, rows: int, blocks: Sequence[int]) -> Iterable[int]:
        """The cache slots of rows at consecutive positions."""
        size, end = self._block_size, start + rows
        first = start // size
        return _joined(
            range(block * size + max(start - at, 0), block * size + min(end - at, size))
            for at, block in zip(range(first * size, end, size), blocks[first:], strict=False)
        )

    def _tables_of(self, blocks: tuple[tuple[int, ...], ...]) -> memoryview:
        if blocks != self._blocks:
            width = max(map(len, blocks))
            padded = (own if len(own) == width else (*own, *[0] * (width - len(own))) for own in blocks)
            tables = array("i", _joined(padded))
            self._blocks, self._tables = blocks, memoryview(tables).cast("B").cast("i", (len(blocks), width))
        return self._tables


def _saves_of(plan: Plan, starts: array[int]) -> array[int]:
    """For each row the slot that states are saved to after it, or -1; empty where there are none."""
    if not any(work.saves for work in plan.works):
        return array("i")
    saves = array("i", (-1,)) * starts[-1]
    for first, work in zip(starts, plan.works, strict=False):
        for offset, slot in work.saves:
            saves[first + offset] = slot
    return saves

"""Plans in, logits out: the model, its KV cache and the step that joins them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from unspool.config import EngineConfig
from unspool.engine.plan import Plan
from unspool.lazy import np
from unspool.models.decoder import Decoder
from unspool.ops import Batch, KVCache

if TYPE_CHECKING:
    from unspool.engine.ahead import Draws, Flight
    from unspool.params import ResolvedParams


class Runner:
    """A step that has a way `plainly` takes any buffers and gives some; one request then needs no numpy."""

    def __init__(self, model: Decoder, kv: KVCache, step: Any) -> None:
        self.model, self.kv, self._step = model, kv, step
        self._compute = getattr(step, "plainly", step)
        self._batches = Batches(kv.block_size, is_plain=self._compute is not step)

    def run(self, plan: Plan) -> Any:
        """Logits [sum of num_logits, vocabulary], work after work; the next run may overwrite them. An array, or what
        has rows and slices of rows like one."""
        return self._compute(self._batch(plan))

    def _batch(self, plan: Plan) -> Batch:
        for source, target in plan.copies:
            self.kv.copy_block(source, target)
        return self._batches.make(plan)


class DeviceRunner(Runner):
    """A runner whose device chooses tokens too, so that the engine can run ahead of it."""

    def can_draw(self, params: ResolvedParams) -> bool:
        """Whether the device has all that shapes these draws; whatever it has not is the host's."""
        can: bool = self._step.can_draw(params)
        return can

    def launch(self, plan: Plan, draws: Draws, sources: Sequence[int]) -> Flight:
        batch, positions = self._batch(plan), draws.positions
        flight: Flight = self._step.launch(batch, draws.samplers, positions, np.array(sources, np.int32))
        return flight


def make_runner(model: Decoder, config: EngineConfig, num_blocks: int) -> Runner:
    kv = model.ops.kv_cache(model.architecture.storage, config, num_blocks)
    step = model.ops.compile(model, kv)
    return (DeviceRunner if hasattr(step, "launch") else Runner)(model, kv, step)


class Batches:
    """Batches of plans that come one after the other. Mostly everyone goes on by one token in the blocks they have, and
    then only positions, slots and tokens are new."""

    def __init__(self, block_size: int, *, is_plain: bool = False) -> None:
        self._block_size, self._is_plain = block_size, is_plain
        self._tables: tuple[tuple[int, ...], ...] = ()
        self._last: Batch | None = None

    def make(self, plan: Plan) -> Batch:
        if len(plan.works) == 1:
            return self._alone(plan)
        _, starts, tokens, tables, num_logits, _ = zip(*plan.works, strict=True)
        rows, last = len(starts), self._last
        is_decode = plan.num_tokens == rows == sum(num_logits)
        if last is None or not is_decode or tables != self._tables:
            batch = make_batch(plan, self._block_size)
            self._tables, self._last = tables, batch if is_decode else None
            return batch
        positions = np.array(starts, np.int32)
        blocks = last.tables[last.logit_rows, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        ids = np.fromiter(chain.from_iterable(tokens), np.int32, rows)
        return replace(last, ids=ids, positions=positions, slots=slots)

    def _alone(self, plan: Plan) -> Batch:
        """One request's step. What it costs is seen there: nothing else goes on meanwhile."""
        _, start, tokens, blocks, num_logits, _ = plan.works[0]
        last, size = self._last, self._block_size
        is_decode = len(tokens) == num_logits == 1
        if last is None or not is_decode or (blocks,) != self._tables:
            batch = plain_batch(plan, size) if self._is_plain else make_batch(plan, size)
            self._tables, self._last = (blocks,), batch if is_decode else None
            return batch
        slot = blocks[start // size] * size + start % size
        if self._is_plain:
            ids, positions, slots = plain_row(tokens, start, slot)
        else:
            ids, positions = np.array(tokens, np.int32), np.array([start], np.int32)
            slots = np.array([slot], np.int64)
        return Batch(ids, positions, slots, last.starts, last.tables, last.logit_rows)


def plain_row(tokens: Sequence[int], position: int, slot: int) -> Any:
    return array("i", tokens), array("i", (position,)), array("q", (slot,))


def plain_batch(plan: Plan, block_size: int) -> Batch:
    """One request's batch, of Python's own arrays."""
    _, start, tokens, blocks, num_logits, _ = plan.works[0]
    rows, first = len(tokens), start // block_size * block_size
    used = blocks[start // block_size : -(-(start + rows) // block_size)]
    places = chain.from_iterable(range(b, b + block_size) for b in map(block_size.__mul__, used))
    parts: Any = {
        "ids": array("i", tokens),
        "positions": array("i", range(start, start + rows)),
        "slots": array("q", islice(places, start - first, start - first + rows)),
        "starts": array("i", (0, rows)),
        "tables": memoryview(array("i", blocks)).cast("B").cast("i", (1, len(blocks))),
        "logit_rows": array("i", range(rows - num_logits, rows)),
    }
    return Batch(**parts)


def make_batch(plan: Plan, block_size: int) -> Batch:
    works = plan.works
    counts = np.fromiter((len(work.tokens) for work in works), np.int32, len(works))
    starts = np.zeros(len(works) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = int(starts[-1])
    first = np.fromiter((work.start for work in works), np.int32, len(works))
    sequence, place = _spread(counts)
    positions = first[sequence] + place
    tables = np.zeros((len(works), max(len(work.blocks) for work in works)), np.int32)
    for table, work in zip(tables, works, strict=True):
        table[: len(work.blocks)] = work.blocks
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_logits = np.fromiter((work.num_logits for work in works), np.int32, len(works))
    logit_sequence, logit_place = _spread(num_logits)
    return Batch(
        ids=np.fromiter(chain.from_iterable(work.tokens for work in works), np.int32, rows),
        positions=positions,
        slots=slots,
        starts=starts,
        tables=tables,
        logit_rows=(starts[1:] - num_logits)[logit_sequence] + logit_place,
    )


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For groups of so many members: the group of each, and its place in it. [2, 1] → [0, 0, 1], [0, 1, 0]"""
    group = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    ends = np.cumsum(counts, dtype=np.int32)
    return group, np.arange(len(group), dtype=np.int32) - (ends - counts)[group]

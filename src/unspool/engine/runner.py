"""Plans in, logits out: the model, its KV cache and the step that joins them."""

from __future__ import annotations

from itertools import chain

import numpy as np

from unspool.config import EngineConfig
from unspool.engine.plan import Plan
from unspool.models.blocks import Decoder
from unspool.ops import Batch


class Runner:
    def __init__(self, model: Decoder, config: EngineConfig, num_blocks: int) -> None:
        self.model = model
        self.kv = model.ops.kv_cache(model.config, config, num_blocks)
        self._step = model.ops.compile(model, self.kv)

    def run(self, plan: Plan) -> np.ndarray:
        """Logits [sum of num_logits, vocabulary], work after work; the next run may overwrite them."""
        for source, target in plan.copies:
            self.kv.copy_block(source, target)
        return self._step(make_batch(plan, self.kv.block_size))


def make_batch(plan: Plan, block_size: int) -> Batch:
    works = plan.works
    counts = np.array([len(work.tokens) for work in works], np.int32)
    starts = np.zeros(len(works) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = int(starts[-1])
    sequence = np.repeat(np.arange(len(works)), counts)
    first = np.array([work.start for work in works], np.int32)
    positions = np.arange(rows, dtype=np.int32) + (first - starts[:-1])[sequence].astype(np.int32)
    tables = np.zeros((len(works), max(len(work.blocks) for work in works)), np.int32)
    for table, work in zip(tables, works, strict=True):
        table[: len(work.blocks)] = work.blocks
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    logit_rows = [np.arange(end - work.num_logits, end) for work, end in zip(works, starts[1:], strict=True)]
    return Batch(
        ids=np.fromiter(chain.from_iterable(work.tokens for work in works), np.int32, rows),
        positions=positions,
        slots=slots,
        starts=starts,
        tables=tables,
        logit_rows=np.concatenate(logit_rows).astype(np.int32),
    )

"""A head that drafts (models/draft_head.py) with its KV cache: works and hidden rows in, logits and rows out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unspool.config import EngineConfig
from unspool.engine.batch import BatchBuilder
from unspool.lazy import np
from unspool.models.draft_head import HeadModel
from unspool.ops import HostRows
from unspool.plan import Plan, Work

if TYPE_CHECKING:
    from unspool.ops import KVCache, Step


class HeadRunner:
    def __init__(self, model: HeadModel, kv: KVCache, step: Step) -> None:
        self.kv, self.width, self.vocab_size = kv, model.hidden_size, model.config.vocab_size
        self._step, self._batches = step, BatchBuilder(kv.block_size)

    def run(self, works: Sequence[Work], given: np.ndarray) -> tuple[HostRows, np.ndarray]:
        """Logits of the wanted rows, which the next run overwrites, and the rows that the head makes of all tokens.
        `given` has a hidden row for each token."""
        batch = self._batches.build(Plan(tuple(works)))
        logits = self._step.run(replace(batch, given=np.ascontiguousarray(given, np.float32).reshape(-1)))
        return logits, np.array(self._step.kept())


def make_head_runner(model: HeadModel, config: EngineConfig, num_blocks: int) -> HeadRunner:
    kv = model.ops.kv_cache(model.storage, config, num_blocks)
    return HeadRunner(model, kv, model.ops.compile(model, kv))

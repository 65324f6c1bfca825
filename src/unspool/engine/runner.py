"""Executes plans: a model, its KV cache and a compiled step. Returns logits, or tokens that the device chose."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from unspool.config import EngineConfig
from unspool.engine.batch import BatchBuilder
from unspool.models.decoder import Decoder
from unspool.ops import Draws, HostRows, KVCache, Launched, Step
from unspool.ops.storage import state_bytes
from unspool.plan import PENDING, Plan

if TYPE_CHECKING:
    from unspool.params import ResolvedParams
    from unspool.sampling.pipeline import Sampler


class StepRows(NamedTuple):
    """Rows of a step, each kind work after work."""

    logits: HostRows
    hidden: HostRows = ()
    kept: HostRows = ()  # hidden rows of all tokens of works that are not pooled, where a drafter reads them


class Runner:
    """Computes plans. Where its device can choose tokens, it also launches them, to be read later."""

    def __init__(self, model: Decoder, kv: KVCache, step: Step, *, keeps_hidden: bool = False) -> None:
        self.model, self.kv, self._keeps_hidden = model, kv, keeps_hidden
        self._step, self._sampling = step, step.sampling
        self._hidden_step: Step | None = None  # compiled when hidden rows are first wanted
        # The last slot is for works that keep no state.
        self._batches = BatchBuilder(kv.block_size, kv.num_states - 1 if kv.state_bytes else -1)
        self._draw_of: dict[int, int] = {}  # by request: the last launch's first draw of it

    def run(self, plan: Plan) -> HostRows:
        """Rows of logits, work after work; the next run may overwrite them. No work may want hidden rows."""
        self.copy(plan)
        return self._step.run(self._batches.build(plan))

    def compute(self, plan: Plan) -> StepRows:
        """What a plan's works want: logits or hidden rows. These are computed apart, with the same bits as together."""
        if not plan.wants_hidden:
            return StepRows(self.run(plan), kept=self._kept())
        self.copy(plan)
        pooled = tuple(work for work in plan.works if work.num_hidden)
        others = tuple(work for work in plan.works if not work.num_hidden)
        logits = self._step.run(self._batches.build(Plan(others))) if others else ()
        kept = self._kept() if others else ()
        return StepRows(logits, self.hidden_step().run(self._batches.build(Plan(pooled))), kept)

    def _kept(self) -> HostRows:
        return self._step.kept() if self._keeps_hidden else ()

    def hidden_step(self) -> Step:
        """The model up to its last norm. Raises a BackendError where the device cannot give hidden rows."""
        if self._hidden_step is None:
            self._hidden_step = self.model.ops.compile(self.model.hidden, self.kv)
        return self._hidden_step

    # Where the device chooses ----------------------------------------------------------------------------------------
    @property
    def can_launch(self) -> bool:
        return self._sampling is not None

    def can_draw(self, params: ResolvedParams) -> bool:
        """Whether the device has a kernel for every stage of these draws; otherwise the host samples."""
        return self._sampling is not None and self._sampling.can_draw(params)

    def add_sampler(self, number: int, sampler: Sampler) -> None:
        """Register a request's sampler with the device. Does nothing if the host samples."""
        if self._sampling is not None:
            self._sampling.add_sampler(number, sampler)

    def remove_sampler(self, number: int) -> None:
        if self._sampling is not None:
            self._sampling.remove_sampler(number)

    def launch(self, plan: Plan) -> Launched:
        """Queue a plan and a draw from each of its samples, work after work. A PENDING token is what the last launch
        drew for that request."""
        assert self._sampling is not None, "only a device that chooses tokens can be launched ahead"
        self.copy(plan)
        return self._sampling.launch(self._batches.build(plan), self._draws(plan))

    def copy(self, plan: Plan) -> None:
        """The plan's copies, which come before all that it computes."""
        for source, target, group in plan.copies:
            self.kv.copy_block(source, target, group)
        for source, target in plan.state_copies:
            self.kv.copy_state(source, target)

    def _draws(self, plan: Plan) -> Draws:
        requests, starts, tokens, _, _, num_samples, *_ = plan.columns
        ends = list(accumulate(map(len, tokens)))
        sources = array("i", (-1,)) * ends[-1]
        for end, request, own in zip(ends, requests, tokens, strict=True):
            if own[-1] == PENDING:  # no other can be: the one before it was read since
                sources[end - 1] = self._draw_of[request]
        self._draw_of = dict(zip(requests, accumulate(num_samples, initial=0), strict=False))
        after = [start + len(own) + 1 for start, own in zip(starts, tokens, strict=True)]
        positions = chain.from_iterable(map(range, map(sub, after, num_samples), after))
        return Draws(list(chain.from_iterable(map(repeat, requests, num_samples))), list(positions), sources)


def make_runner(
    model: Decoder,
    config: EngineConfig,
    num_blocks: int | Sequence[int],
    num_states: int = 0,
    *,
    keeps_hidden: bool = False,
) -> Runner:
    """`num_blocks` of each group of layers, or of all of them together, which then release none.

    `num_states` slots for the states of sequences; a model that has states gets one more, for works that keep none.

    `keeps_hidden`: steps also return the hidden rows of their tokens, for a drafter that reads them.
    """
    storage = model.architecture.storage
    kv = model.ops.kv_cache(storage, config, num_blocks, num_states + 1 if state_bytes(storage) else 0)
    forward = model.with_hidden if keeps_hidden else model
    return Runner(model, kv, model.ops.compile(forward, kv), keeps_hidden=keeps_hidden)

"""The CPU's kernels behind a device that chooses tokens, and says them when it is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.laws.crowd import Crowd
from unspool.models.checkpoint import Checkpoint
from unspool.ops import Batch, Draws, Step
from unspool.ops.cpu import CpuOps
from unspool.plan import PENDING
from unspool.sampling.pipeline import Choice, Sampler, draws_in_turn


class Withheld:
    def __init__(self, choices: list[Choice]) -> None:
        self._choices = choices

    def tokens(self) -> list[int]:
        return [choice.token for choice in self._choices]

    def logprobs(self, draw: int, count: int) -> tuple[float, tuple[tuple[int, float], ...], int]:
        choice = self._choices[draw]
        assert len(choice.top) == count
        assert choice.rank is not None
        return choice.logprob, choice.top, choice.rank


class EmulatedStep:
    """Computes at once, but takes PENDING tokens only from its own last launch, and knows no more of what was written
    than it counted itself."""

    def __init__(self, step: Step) -> None:
        self._step, self._last, self.launches, self.used = step, [], 0, 0
        self._samplers: dict[int, Sampler] = {}
        self._own: dict[int, Sampler] = {}  # forks that have seen what was drawn here

    @property
    def sampling(self) -> EmulatedStep:
        return self

    def run(self, batch: Batch):
        assert PENDING not in batch.arrays().ids, "a step with an unknown token"
        return self._step.run(batch)

    def kept(self):
        return self._step.kept()

    def can_draw(self, params) -> bool:
        return not params.dry_multiplier

    def add_sampler(self, number: int, sampler: Sampler) -> None:
        self._samplers[number] = sampler
        self._own.pop(number, None)

    def remove_sampler(self, number: int) -> None:
        self._samplers.pop(number, None)
        self._own.pop(number, None)

    def launch(self, batch: Batch, draws: Draws) -> Withheld:
        arrays, sources = batch.arrays(), np.asarray(draws.sources)
        ids = arrays.ids.copy()
        assert ((ids == PENDING) == (sources >= 0)).all()
        ids[sources >= 0] = [self._last[source] for source in sources[sources >= 0]]
        self.used += int((sources >= 0).sum())
        logits = self._step.run(replace(arrays, ids=ids))
        assert len(logits) == len(draws)
        choices = [self._choose(*of) for of in zip(draws.samplers, logits, draws.positions, strict=True)]
        self._last = [choice.token for choice in choices]
        self.launches += 1
        return Withheld(choices)

    def _choose(self, number: int, row, position: int) -> Choice:
        own, sampler = self._own.get(number), self._samplers[number]
        if own is None or own.history.tokens.size != position:
            own = self._own[number] = sampler.fork()
            assert not draws_in_turn(sampler.params) or own.history.tokens.size == position
        choice = own.choose(row, position)
        own.accept(choice.token)
        return choice


class EmulatedOps(CpuOps):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[EmulatedStep] = []  # the model's, then its drafter's

    def compile(self, forward, kv) -> EmulatedStep:
        self.steps.append(EmulatedStep(super().compile(forward, kv)))
        return self.steps[-1]


def device_crowd(checkpoint: Checkpoint, **config: object) -> tuple[Crowd, list[EmulatedStep]]:
    """A crowd on an emulated device, and its compiled models."""
    ops = EmulatedOps()
    return Crowd(checkpoint, ops=ops, **config), ops.steps

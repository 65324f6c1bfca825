"""What a step takes, on the backend that it runs on: waited for, with the choice where a device makes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from unspool.params import SamplingParams

if TYPE_CHECKING:
    from unspool.plan import Plan
    from unspool.sampling.pipeline import Sampler
    from unspool.speculate.protocols import Runner


def step_times(runner: Runner, plan: Plan, rounds: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each of some runs of a plan that samples; the first may have to prepare what others find."""
    times = []
    numbers = {work.request for work in plan.works}
    for number in numbers:
        runner.add_sampler(number, _greedy_sampler(runner.model.config.vocab_size))
    for _ in range(rounds):
        begun = clock()
        if runner.can_launch:
            runner.launch(plan).tokens()
        else:
            runner.run(plan)
        times.append(max(clock() - begun, 1e-9))
    for number in numbers:
        runner.remove_sampler(number)
    return times


def _greedy_sampler(vocab_size: int) -> Sampler:
    from unspool.sampling.pipeline import Sampler

    params = SamplingParams(temperature=0).resolve({}, vocab_size=vocab_size)
    return Sampler(params, prompt_ids=(0,), vocab_size=vocab_size, end_ids=frozenset())

"""The scheduler's law as a state machine: Hypothesis chooses what happens next, and shrinks what breaks it."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.laws.test_schedules import World


class Schedules(RuleBasedStateMachine):
    """Arrivals, forks, rewinds, aborts, drafts and steps in any order, on tiny pools of blocks."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.world = World(random.Random(seed))

    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.world.arrive()

    @rule()
    def fork(self) -> None:
        self.world.fork()

    @rule()
    def rewind(self) -> None:
        self.world.rewind()

    @rule()
    def abort(self) -> None:
        self.world.abort()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

"""Whether a draft pays, and how long it should be: by the estimates of drafters, requests and this machine's costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unspool.cache.blocks import borrowed
from unspool.drafter import MAX_DRAFT, BaseDrafter
from unspool.plan import Plan, Work
from unspool.speculate.estimates import (
    MAX_CHANCE,
    Costs,
    DrafterEstimates,
    RequestEstimates,
    draft_length,
)
from unspool.speculate.timing import step_times

if TYPE_CHECKING:
    from unspool.cache.blocks import Blocks
    from unspool.speculate.protocols import Branch, Runner
    from unspool.speculate.speculation import Guess

MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
LIKELY_ANSWER = 512  # tokens, unless the request wants fewer


class DraftPolicy:
    """Decides by what it has learned; every outcome teaches it."""

    def __init__(self, measure: Callable[[], Costs]) -> None:
        self._measure = measure
        self._drafters: dict[str, DrafterEstimates] = {}
        self._requests: dict[int, RequestEstimates] = {}
        self._costs: Costs | None = None

    @property
    def costs(self) -> Costs:
        """What steps take on this machine, measured when it is first asked."""
        if self._costs is None:
            self._costs = self._measure()
        return self._costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        self._costs = costs

    def measure_costs(self) -> None:
        self._costs = self._measure()

    # Decisions ------------------------------------------------------------------------------------------------------
    def can_pay(self, drafter: BaseDrafter, num_rows: int) -> bool:
        """Whether drafts that are surely right would pay in a step of so many rows."""
        tokens_per_step = self._of_drafter(drafter).tokens_per_step
        return draft_length([MAX_CHANCE, MAX_CHANCE], num_rows, 2, self.costs, tokens_per_step) > 0

    def max_length(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int) -> int:
        """How many tokens to ask a drafter for."""
        room = branch.max_output - len(branch.output) - 1
        if drafter.seconds(1) > 0 and not self.is_worth_asking(branch, drafter, num_rows, num_others):
            return 0
        return min(MAX_DRAFT, room, max(2, 2 * MAX_DRAFT // num_rows))  # in a crowd, long drafts never pay

    def is_worth_asking(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int) -> bool:
        """Whether a drafter that costs time is likely to win it back for this request now."""
        record = self._of_request(branch, drafter)
        if not record.may_ask() or not self.should_continue(branch, drafter, num_rows, num_others, ()):
            return False
        if record.has_begun is None:
            record.has_begun = self._is_worth_starting(branch, drafter, num_rows)
        return record.has_begun

    def _is_worth_starting(self, branch: Branch, drafter: BaseDrafter, num_rows: int) -> bool:
        """Whether half of a likely answer would win back what the drafter needs to see the prompt."""
        seconds = drafter.start_seconds(branch.request.tokens)
        if seconds is None:
            return True
        tokens = min(branch.max_output - len(branch.output), LIKELY_ANSWER) / 2
        won = (1 - 1 / self._of_drafter(drafter).expected_speedup()) * self.costs.without_draft(num_rows) / num_rows
        return tokens * won > seconds

    def should_continue(
        self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int, confidences: Sequence[int]
    ) -> bool:
        """Whether one more guess of a costly drafter promises more than it costs; others draft as far, as it seems."""
        estimates, record, costs = self._of_drafter(drafter), self._of_request(branch, drafter), self.costs
        reach = math.prod(_chance(estimates, record, confidence) for confidence in confidences)
        promise = reach * min(estimates.typical * record.trust, MAX_CHANCE)
        rows = num_rows + len(confidences) * num_others
        row = min((costs(rows + more) - costs(rows)) / more for more in (1, 2))
        tokens_per_second = estimates.tokens_per_step * num_rows / costs.without_draft(num_rows)
        return promise > tokens_per_second * (row + drafter.seconds(1))

    def length(self, branch: Branch, drafter: BaseDrafter, guess: Guess, num_rows: int) -> int:
        """How many of the guesses to have checked."""
        room = branch.max_output - len(branch.output) - branch.request.num_pending - 1
        estimates, record = self._of_drafter(drafter), self._of_request(branch, drafter)
        chances = [_chance(estimates, record, each) for each in guess.confidences[: len(guess.tokens)]]
        return draft_length(chances, num_rows, room, self.costs, estimates.tokens_per_step)

    # Learning -------------------------------------------------------------------------------------------------------
    def learn(self, branch: Branch, drafter: BaseDrafter, guess: Guess, chosen: Sequence[int]) -> tuple[int, float]:
        """The model chose these tokens: how many guesses were accepted, and the seconds that this has saved."""
        estimates, record = self._of_drafter(drafter), self._of_request(branch, drafter)
        accepted = 0
        for token, guessed, confidence in zip(chosen, guess.tokens, guess.confidences, strict=False):
            record.observe(estimates.chance(confidence), token == guessed)
            estimates.observe(confidence, token == guessed)
            if token != guessed:
                break
            accepted += 1
        accepted = min(accepted, guess.sent)
        without = self.costs.without_draft(guess.rows)
        taken = self.costs(guess.rows + guess.sent) - without + guess.seconds if guess.sent else guess.seconds
        steps = 1 + taken / without * guess.rows
        estimates.speed.observe(1 + accepted, steps)
        estimates.tried.observe(1 + accepted, steps)
        record.observe_round(1 + accepted, steps)
        return accepted, accepted * without / guess.rows - taken

    def learn_nothing(self, drafter: BaseDrafter) -> None:
        """The drafter was asked and guessed nothing."""
        self._of_drafter(drafter).speed.observe(1, 1.0)

    def observe(self, num_rows: int, seconds: float, *, is_ahead: bool) -> None:
        """What a step without prompts took. Nothing is learned where costs were never needed."""
        if self._costs is not None:
            (self._costs.observe_ahead if is_ahead else self._costs.observe)(num_rows, seconds)

    def forget(self, number: int) -> None:
        self._requests.pop(number, None)

    def _of_drafter(self, drafter: BaseDrafter) -> DrafterEstimates:
        if drafter.name not in self._drafters:
            self._drafters[drafter.name] = DrafterEstimates(drafter.priors)
        return self._drafters[drafter.name]

    def _of_request(self, branch: Branch, drafter: BaseDrafter) -> RequestEstimates:
        number = branch.request.number
        if number not in self._requests:
            self._requests[number] = RequestEstimates(self._of_drafter(drafter).speed.ratio)
        return self._requests[number]


def _chance(estimates: DrafterEstimates, record: RequestEstimates, confidence: int) -> float:
    return min(estimates.chance(confidence) * record.trust, MAX_CHANCE)


def measure(
    runner: Runner, groups: Sequence[Blocks], clock: Callable[[], float] = time.perf_counter, rounds: int = 2
) -> Costs:
    """What steps of a few rows take, on blocks that nobody holds, with the choice where the device makes it."""
    room = min(group.num_free for group in groups) * groups[0].block_size
    points: list[tuple[int, float]] = []
    with borrowed(groups, 1, 0, min(room, MEASURED_ROWS[-1])) as [[table, *others]]:
        for rows in MEASURED_ROWS:
            if rows <= room:
                plan = Plan((Work(0, 0, (0,) * rows, table, rows, rows, others=tuple(others)),))
                points.append((rows, min(step_times(runner, plan, rounds, clock))))
    return Costs(points) if len(points) > 1 else Costs([(1, 1.0), (2, 2.0)])  # nothing known: drafts do not pay

"""Speculation inside the engine: who gets a draft, how long, and what became of it.

Drafts are tokens still to compute, nothing more: the scheduler plans them, the sampler's own choices check them, and
`Scheduler.commit` forgets those that were not chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from unspool.drafter import BaseDrafter, Draft, DraftContext
from unspool.errors import RequestError
from unspool.plan import Plan, Work
from unspool.speculate.estimates import MAX_CHANCE, MAX_DRAFT, Costs, DrafterEstimates, RequestEstimates, draft_length
from unspool.speculate.timing import step_times

if TYPE_CHECKING:
    from unspool.cache.blocks import Blocks
    from unspool.params import ResolvedParams
    from unspool.speculate.protocols import Branch, Runner

MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
LIKELY_ANSWER = 512  # tokens, unless the request wants fewer


@dataclass
class SpeculationStats:
    """What came of drafts: of one request, or of all."""

    steps: int = 0  # steps that had a draft
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)  # by place in the draft
    seconds_saved: float = 0.0  # by the measured costs: the plain steps that were not needed, less what drafting took

    def add(self, drafted: int, accepted: int, saved: float) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        for place in range(min(accepted, MAX_DRAFT)):
            self.accepted_at[place] += 1
        self.seconds_saved += saved

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_at": self.accepted_at[: max((i + 1 for i, n in enumerate(self.accepted_at) if n), default=0)],
            "mean_accepted": self.accepted / self.steps if self.steps else 0.0,
            "seconds_saved": self.seconds_saved,
        }


@dataclass
class Guess:
    """A draft that was proposed: `sent` of it were given to the model to check."""

    tokens: list[int]
    confidences: list[int]
    sent: int
    rows: int  # of the step, without it
    seconds: float  # that proposing it took, the drafter's reading of the prompt left out


class Speculation:
    """Owned by the engine; `draft` before a plan, `learn` from every choice."""

    def __init__(
        self,
        drafters: Mapping[str, BaseDrafter],
        runner: Runner,
        blocks: Blocks,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = drafters
        self.fixed_length: int | None = None  # every draft's, for those who measure; None: as many as pay
        self.total = SpeculationStats()
        self.now = clock
        self._tallies: dict[int, SpeculationStats] = {}
        self._records: dict[int, RequestEstimates] = {}
        self._guesses: dict[int, Guess] = {}
        self._estimates: dict[str, DrafterEstimates] = {}
        self._runner, self._blocks = runner, blocks
        self._costs = measure(runner, blocks, clock) if drafters else None

    @property
    def costs(self) -> Costs:
        if self._costs is None:
            self._costs = measure(self._runner, self._blocks, self.now)
        return self._costs

    # Before a step --------------------------------------------------------------------------------------------------
    def is_due(self, branches: Sequence[Branch], num_rows: int) -> bool:
        """Whether the coming step shall have drafts, for which all tokens must be known.

        Drafters that cost nothing look on meanwhile: their guesses are compared, not sent.
        """
        due = False
        for name, group in self._by_drafter(branches, num_rows).items():
            drafter = self.drafters[name]
            if drafter.seconds(1) > 0:
                fixed = self.fixed_length is not None
                due |= fixed or any(self._is_worth_asking(branch, drafter, num_rows, len(group)) for branch in group)
                continue
            for branch, guess in self._ask(drafter, group, [MAX_DRAFT] * len(group), num_rows):
                due |= self._length(branch, drafter, guess, num_rows) > 0
        return due

    def draft(self, branches: Sequence[Branch], num_rows: int) -> None:
        """Give each branch that decodes and wants it a draft. `num_rows` is what the step has without drafts."""
        for name, group in self._by_drafter(branches, num_rows).items():
            drafter = self.drafters[name]
            counts = [self._most_asked(branch, drafter, num_rows, len(group)) for branch in group]
            for branch, guess in self._ask(drafter, group, counts, num_rows):
                guess.sent = self._length(branch, drafter, guess, num_rows)
                branch.request.draft = guess.tokens[: guess.sent]
                num_rows += guess.sent

    def _by_drafter(self, branches: Sequence[Branch], num_rows: int) -> dict[str, list[Branch]]:
        """Those that decode, by their drafter; nobody where even a sure guess would not pay."""
        groups: dict[str, list[Branch]] = {}
        for branch in branches:
            name = branch.speculate
            if name is not None and name in self.drafters and branch.request.num_left == 1:
                groups.setdefault(name, []).append(branch)
        if self.fixed_length is not None:
            return groups
        costs = self.costs
        sure = [MAX_CHANCE, MAX_CHANCE]
        return {
            name: group
            for name, group in groups.items()
            if draft_length(sure, num_rows, 2, costs, self._estimates_of(self.drafters[name]).tokens_per_step)
        }

    def _drafter_of(self, branch: Branch) -> BaseDrafter | None:
        return self.drafters.get(branch.speculate) if branch.speculate is not None else None

    def _most_asked(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int) -> int:
        room = branch.max_output - len(branch.output) - 1
        if self.fixed_length is not None:
            return min(self.fixed_length, room)
        if drafter.seconds(1) > 0 and not self._is_worth_asking(branch, drafter, num_rows, num_others):
            return 0
        return min(MAX_DRAFT, room, max(2, 2 * MAX_DRAFT // num_rows))  # in a crowd, long drafts never pay

    def _is_worth_asking(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int) -> bool:
        record = self._record(branch)
        if not record.may_ask() or not self._should_continue(branch, drafter, num_rows, num_others, ()):
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
        won = (1 - 1 / self._estimates_of(drafter).expected_speedup()) * self.costs.without_draft(num_rows) / num_rows
        return tokens * won > seconds

    def _ask(
        self, drafter: BaseDrafter, branches: Sequence[Branch], counts: Sequence[int], num_rows: int
    ) -> list[tuple[Branch, Guess]]:
        """What a drafter proposes, as far as it makes sense. A token that is not one spoils the whole draft."""
        is_costly = drafter.seconds(1) > 0
        contexts = [self._context(branch, drafter, num_rows, len(branches) if is_costly else 0) for branch in branches]
        guesses = []
        estimates = self._estimates_of(drafter)
        for branch, draft in zip(branches, drafter.propose(contexts, counts), strict=True):
            tokens, vocab_size = list(draft[:MAX_DRAFT]), branch.sampler.vocab_size
            if not tokens or not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
                estimates.speed.observe(1, 1.0)
                continue
            confidences = draft.confidences[:MAX_DRAFT] if isinstance(draft, Draft) else list(range(MAX_DRAFT))
            guess = Guess(tokens, confidences, 0, num_rows, drafter.seconds(len(tokens)))
            self._guesses[branch.request.number] = guess
            guesses.append((branch, guess))
        return guesses

    def _context(self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_costly: int) -> DraftContext:
        request = branch.request
        tokens = request.tokens[: -request.num_pending] if request.num_pending else request.tokens
        context = DraftContext(request.number, tokens, request.num_prompt, request.blocks, branch.sampler)
        if num_costly:
            should_continue = partial(self._should_continue, branch, drafter, num_rows, num_costly)
            context = replace(context, should_continue=should_continue)
        return context

    def _should_continue(
        self, branch: Branch, drafter: BaseDrafter, num_rows: int, num_others: int, confidences: Sequence[int]
    ) -> bool:
        """Whether one more guess of a costly drafter promises more than it costs; others draft as far, as it seems."""
        if self.fixed_length is not None:
            return True
        estimates, record, costs = self._estimates_of(drafter), self._record(branch), self.costs
        reach = math.prod(_chance(estimates, record, confidence) for confidence in confidences)
        promise = reach * min(estimates.typical * record.trust, MAX_CHANCE)
        rows = num_rows + len(confidences) * num_others
        row = min((costs(rows + more) - costs(rows)) / more for more in (1, 2))
        tokens_per_second = estimates.tokens_per_step * num_rows / costs.without_draft(num_rows)
        return promise > tokens_per_second * (row + drafter.seconds(1))

    def _length(self, branch: Branch, drafter: BaseDrafter, guess: Guess, num_rows: int) -> int:
        room = branch.max_output - len(branch.output) - branch.request.num_pending - 1
        if self.fixed_length is not None:
            return max(0, min(self.fixed_length, room, len(guess.tokens)))
        estimates, record = self._estimates_of(drafter), self._record(branch)
        chances = [_chance(estimates, record, each) for each in guess.confidences[: len(guess.tokens)]]
        return draft_length(chances, num_rows, room, self.costs, estimates.tokens_per_step)

    # After a step ---------------------------------------------------------------------------------------------------
    def learn(self, branch: Branch, chosen: Sequence[int]) -> None:
        """The model chose; compare with what was guessed."""
        guess = self._guesses.pop(branch.request.number, None)
        if guess is None:
            return
        drafter = self._drafter_of(branch)
        assert drafter is not None
        estimates, record = self._estimates_of(drafter), self._record(branch)
        accepted = 0
        for token, guessed, confidence in zip(chosen, guess.tokens, guess.confidences, strict=False):
            record.observe(estimates.chance(confidence), token == guessed)
            estimates.observe(confidence, token == guessed)
            if token != guessed:
                break
            accepted += 1
        accepted = min(accepted, guess.sent)
        plain = self.costs.without_draft(guess.rows)
        taken = self.costs(guess.rows + guess.sent) - plain + guess.seconds if guess.sent else guess.seconds
        steps = 1 + taken / plain * guess.rows
        estimates.speed.observe(1 + accepted, steps)
        estimates.tried.observe(1 + accepted, steps)
        record.observe_round(1 + accepted, steps)
        if guess.sent:
            saved = accepted * plain / guess.rows - taken
            self._tallies.setdefault(branch.request.number, SpeculationStats()).add(guess.sent, accepted, saved)
            self.total.add(guess.sent, accepted, saved)

    def observe(self, plan: Plan, seconds: float, *, is_ahead: bool = False) -> None:
        """A step that only decoded: its rows and its time keep the costs true."""
        if self._costs is not None and all(work.num_samples == len(work.tokens) for work in plan.works):
            (self._costs.observe_ahead if is_ahead else self._costs.observe)(plan.num_tokens, seconds)

    # Estimates ------------------------------------------------------------------------------------------------------
    def _estimates_of(self, drafter: BaseDrafter) -> DrafterEstimates:
        if drafter.name not in self._estimates:
            self._estimates[drafter.name] = DrafterEstimates(drafter.priors)
        return self._estimates[drafter.name]

    def _record(self, branch: Branch) -> RequestEstimates:
        number, drafter = branch.request.number, self._drafter_of(branch)
        if number not in self._records:
            assert drafter is not None
            self._records[number] = RequestEstimates(self._estimates_of(drafter).speed.ratio)
        return self._records[number]

    # Requests -------------------------------------------------------------------------------------------------------
    def choose(self, params: ResolvedParams, configured: object) -> str | None:
        """The drafter for a request: what it asks for, else the engine's own, which its configuration names."""
        if params.speculate == "off" or params.beam is not None:
            return None
        if params.speculate in (None, "auto", configured):
            return next(iter(self.drafters), None)
        if params.speculate not in self.drafters:
            have = ", ".join(self.drafters) or "none; the engine's option speculate names them"
            raise RequestError(f"speculate is {params.speculate!r}; this engine's drafters: {have}", "speculate")
        return params.speculate

    def tally(self, branch: Branch) -> SpeculationStats | None:
        return self._tallies.get(branch.request.number)

    def forget(self, branch: Branch) -> None:
        number = branch.request.number
        self._records.pop(number, None)
        self._guesses.pop(number, None)
        self._tallies.pop(number, None)
        for drafter in self.drafters.values():
            drafter.forget(number)


def _chance(estimates: DrafterEstimates, record: RequestEstimates, confidence: int) -> float:
    return min(estimates.chance(confidence) * record.trust, MAX_CHANCE)


# The machine --------------------------------------------------------------------------------------------------------
def measure(runner: Runner, blocks: Blocks, clock: Callable[[], float] = time.perf_counter, rounds: int = 2) -> Costs:
    """What steps of a few rows take, on blocks that nobody holds, with the choice where the device makes it."""
    size = blocks.block_size
    taken = [blocks.allocate() for _ in range(min(blocks.num_free, -(-MEASURED_ROWS[-1] // size)))]
    points: list[tuple[int, float]] = []
    try:
        for rows in MEASURED_ROWS:
            if rows <= len(taken) * size:
                plan = Plan((Work(0, 0, (0,) * rows, tuple(taken), rows, rows),))
                points.append((rows, min(step_times(runner, plan, rounds, clock))))
    finally:
        blocks.release(taken)
    return Costs(points) if len(points) > 1 else Costs([(1, 1.0), (2, 2.0)])  # nothing known: drafts do not pay

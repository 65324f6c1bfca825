"""Speculation inside the engine: who gets a draft, how long, and what became of it.

Drafts are tokens still to compute, nothing more: the scheduler plans them, the sampler's own choices check them, and
`Scheduler.commit` forgets those that were not chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from unspool.drafter import MAX_DRAFT, BaseDrafter, Draft, DraftContext
from unspool.errors import RequestError
from unspool.events import DraftStats
from unspool.lazy import np
from unspool.records import record

if TYPE_CHECKING:
    from unspool.cache.blocks import Blocks
    from unspool.ops import HostRows
    from unspool.params import ResolvedParams
    from unspool.plan import Work
    from unspool.speculate.policy import DraftPolicy
    from unspool.speculate.protocols import Branch, Runner


@record
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
        groups: Sequence[Blocks],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = drafters
        self._measured = runner, groups, clock
        if drafters:
            self.policy.measure_costs()  # before anything runs
        self.total = DraftStats()
        self._stats: dict[int, DraftStats] = {}
        self._guesses: dict[int, Guess] = {}

    @cached_property
    def policy(self) -> DraftPolicy:
        """Made, and its module imported, when drafters first ask for it."""
        from unspool.speculate.policy import DraftPolicy, measure

        return DraftPolicy(partial(measure, *self._measured))

    @property
    def watches(self) -> bool:
        """Whether a drafter reads the hidden rows of steps."""
        return bool(self.drafters) and any(drafter.watches for drafter in self.drafters.values())

    # Before a step --------------------------------------------------------------------------------------------------
    def is_due(self, branches: Sequence[Branch], num_rows: int) -> bool:
        """Whether the coming step shall have drafts, for which all tokens must be known.

        Drafters that cost nothing look on meanwhile: their guesses are compared, not sent.
        """
        due = False
        for name, group in self._by_drafter(branches, num_rows).items():
            drafter = self.drafters[name]
            if drafter.seconds(1) > 0:
                due |= any(self.policy.is_worth_asking(branch, drafter, num_rows, len(group)) for branch in group)
                continue
            for branch, guess in self._ask(drafter, group, [MAX_DRAFT] * len(group), num_rows):
                due |= self.policy.length(branch, drafter, guess, num_rows) > 0
        return due

    def draft(self, branches: Sequence[Branch], num_rows: int) -> None:
        """Give each branch that decodes and wants it a draft. `num_rows` is what the step has without drafts."""
        for name, group in self._by_drafter(branches, num_rows).items():
            drafter = self.drafters[name]
            counts = [self.policy.max_length(branch, drafter, num_rows, len(group)) for branch in group]
            for branch, guess in self._ask(drafter, group, counts, num_rows):
                guess.sent = self.policy.length(branch, drafter, guess, num_rows)
                branch.request.draft = guess.tokens[: guess.sent]
                num_rows += guess.sent

    def _by_drafter(self, branches: Sequence[Branch], num_rows: int) -> dict[str, list[Branch]]:
        """Those that decode, by their drafter; nobody where even a sure guess would not pay."""
        groups: dict[str, list[Branch]] = {}
        for branch in branches:
            name = branch.speculate
            if name is not None and name in self.drafters and branch.request.num_left == 1:
                groups.setdefault(name, []).append(branch)
        return {name: group for name, group in groups.items() if self.policy.can_pay(self.drafters[name], num_rows)}

    def _drafter_of(self, branch: Branch) -> BaseDrafter | None:
        return self.drafters.get(branch.speculate) if branch.speculate is not None else None

    def _ask(
        self, drafter: BaseDrafter, branches: Sequence[Branch], counts: Sequence[int], num_rows: int
    ) -> list[tuple[Branch, Guess]]:
        """What a drafter proposes, as far as it makes sense. A token that is not one spoils the whole draft."""
        is_costly = drafter.seconds(1) > 0
        contexts = [self._context(branch, drafter, num_rows, len(branches) if is_costly else 0) for branch in branches]
        guesses = []
        for branch, draft in zip(branches, drafter.propose(contexts, counts), strict=True):
            tokens, vocab_size = list(draft[:MAX_DRAFT]), branch.sampler.vocab_size
            if not tokens or not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
                self.policy.learn_nothing(drafter)
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
            should_continue = partial(self.policy.should_continue, branch, drafter, num_rows, num_costly)
            context = replace(context, should_continue=should_continue)
        return context

    # During a step --------------------------------------------------------------------------------------------------
    def watch(self, branches: Mapping[int, Branch], works: Sequence[Work], rows: HostRows) -> None:
        """These works were computed, with these hidden rows, of branches by their requests' numbers."""
        end = 0
        for work in works:
            start, end = end, end + len(work.tokens)
            branch = branches.get(work.request)
            drafter = None if branch is None else self._drafter_of(branch)
            if branch is not None and drafter is not None and drafter.watches:
                drafter.watch(work.request, branch.request.tokens, work, np.asarray(rows[start:end]))

    # After a step ---------------------------------------------------------------------------------------------------
    def learn(self, branch: Branch, chosen: Sequence[int], num_drafted: int) -> None:
        """The model chose; compare with what was guessed. So much of the draft was in the step: there may have been no
        room for more."""
        guess = self._guesses.pop(branch.request.number, None)
        if guess is None:
            return
        guess.sent = min(guess.sent, num_drafted)
        drafter = self._drafter_of(branch)
        assert drafter is not None
        accepted, saved = self.policy.learn(branch, drafter, guess, chosen)
        if guess.sent:
            number = branch.request.number
            self._stats[number] = self._stats.get(number, DraftStats()).plus(guess.sent, accepted, saved)
            self.total = self.total.plus(guess.sent, accepted, saved)

    def observe(self, num_rows: int, seconds: float, *, is_ahead: bool) -> None:
        """A step that only decoded: its rows and its time keep the costs true."""
        self.policy.observe(num_rows, seconds, is_ahead=is_ahead)

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

    def stats_of(self, branch: Branch) -> DraftStats | None:
        return self._stats.get(branch.request.number)

    def forget(self, branch: Branch) -> None:
        if not self.drafters:
            return
        number = branch.request.number
        self.policy.forget(number)
        self._guesses.pop(number, None)
        self._stats.pop(number, None)
        for drafter in self.drafters.values():
            drafter.forget(number)

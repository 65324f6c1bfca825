"""The branches of one user's request, and which of their events are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from unspool.engine.branch import Branch
from unspool.engine.outcome import Ending, Outcome
from unspool.events import Event, Failed, Finished, Text, Token
from unspool.lazy import np
from unspool.ops import HostRows
from unspool.params import ResolvedParams
from unspool.plan import Work
from unspool.records import record
from unspool.sampling.native import describe, native_sampling


def branch_seed(seed: int, choice: int) -> int:
    """The seed of the choice-th answer: the request's own for the first, else 53 bits that SplitMix64 makes of both."""
    if choice == 0:
        return seed
    mask = 2**64 - 1
    x = (seed + choice * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 11


@record
class Group:
    """`num_branches` answers, of which the `n` best are delivered: at once if all are, else after ranking them."""

    id: str
    prompt: tuple[int, ...]
    params: ResolvedParams
    arrived: float
    matcher: Any = None  # the constraint at its start; each branch walks a fork of it
    is_chat: bool = False  # the answer is a text of its own and does not continue the prompt's
    branches: list[Branch] = field(default_factory=list)
    prompt_logprobs: list[Token | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.has_forked = self.params.best_of == 1
        self.is_ranked = self.params.best_of > self.params.n
        self.deadline = None
        if self.params.deadline_ms is not None:
            self.deadline = self.arrived + self.params.deadline_ms / 1000
        self._held: dict[int, list[Event]] = {}
        self._num_ended = 0
        self._pooled: np.ndarray | None = None  # the sum of hidden rows of the prompt
        self._num_pooled = self._next_pooled = 0  # how many rows, and the first position that is not among them

    @property
    def continued_ids(self) -> tuple[int, ...]:
        """The tokens whose text the answer continues. A constraint says what the text is to the last character, so
        nothing is taken off then either."""
        return () if self.is_chat and self.params.constraint is None else self.prompt

    @property
    def is_done(self) -> bool:
        return self._num_ended == self.params.best_of

    def deliver(self, event: Event) -> Sequence[Event]:
        """The events to deliver because of this event."""
        is_end = isinstance(event, Finished | Failed)
        self._num_ended += is_end
        if not self.is_ranked:
            return (event if event.choice else self._with_prompt(event),)
        self._held.setdefault(event.choice, []).append(event)
        return self._ranked() if self.is_done else ()

    def _ranked(self) -> list[Event]:
        """The n answers with the best mean logprob, renumbered best first; a failure goes before any answer."""

        def rank(branch: Branch) -> tuple[bool, float, int]:
            failed = isinstance(self._held[branch.choice][-1], Failed)
            mean = branch.logprob_sum / branch.num_given if branch.num_given else float("-inf")
            return (not failed, -mean, branch.choice)

        best = sorted(self.branches, key=rank)[: self.params.n]
        out: list[Event] = []
        for place, branch in enumerate(best):
            for event in self._held[branch.choice]:
                if isinstance(event, Text):
                    out.append(event._replace(choice=place))
                elif isinstance(event, Failed):
                    out.append(replace(event, choice=place))
                else:
                    ranked = replace(event, choice=place, mean_logprob=-rank(branch)[1])
                    out.append(self._with_prompt(ranked) if place == 0 else ranked)
        return out

    def _with_prompt(self, event: Event) -> Event:
        """The ending of choice 0 also carries the prompt's logprobs, if they were requested."""
        if isinstance(event, Finished) and (self.prompt_logprobs or self._num_pooled):
            return replace(event, prompt_logprobs=tuple(self.prompt_logprobs), pooled=self.pooled)
        return event

    def pool(self, work: Work, rows: HostRows) -> Outcome:
        """Add hidden rows of the prompt, token by token: the sum has one order, however the prompt was cut."""
        for position, row in enumerate(rows, work.start + len(work.tokens) - work.num_hidden):
            if self._next_pooled <= position:  # else a preempted prompt, computed again
                self._next_pooled = position + 1
                self._num_pooled += 1
                values = np.asarray(row, np.float64)
                self._pooled = values if self._pooled is None else self._pooled + values
        is_whole = work.start + len(work.tokens) == len(self.prompt)
        return [], "", (), Ending("length") if is_whole else None

    @property
    def pooled(self) -> tuple[float, ...]:
        """The mean of the rows that were added; empty where there are none."""
        if self._pooled is None:
            return ()
        mean = (self._pooled / self._num_pooled).astype(np.float32)
        return tuple(mean.tolist())

    def score(self, branch: Branch, work: Work, rows: HostRows) -> None:
        """Note the logprobs of the prompt tokens that these rows predict."""
        if branch.output:
            return
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)  # nothing predicts the first token
        for position, row in enumerate(rows, work.start + 1):
            if position < len(self.prompt):
                token = self.prompt[position]
                if len(self.prompt_logprobs) == position:  # else a preempted prompt, computed again
                    self.prompt_logprobs.append(_score(np.asarray(row), token, self.params.prompt_logprobs or 0))


def _score(row: np.ndarray, token: int, num_top: int) -> Token:
    stats, rank, best = describe(row, token, num_top, native_sampling())
    top = tuple((other, stats.logprob(row[other])) for other in best)
    return Token(token, stats.logprob(row[token]), top, rank=rank)

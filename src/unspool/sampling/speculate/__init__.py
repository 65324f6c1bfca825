"""Speculation: guess the next tokens cheaply, let the model check them in one step, keep what it would have chosen.

A draft is accepted exactly when it equals the token that the target samples at that position with its own noise. So
what comes out is what plain decoding gives, bit for bit, at any temperature and under any stage; a bad drafter costs
time, never correctness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from unspool.sampling.pipeline import Sampler


@dataclass(frozen=True, slots=True)
class Sight:
    """What a drafter sees of a request: its tokens so far, and a sampler that it may fork but must not change.

    `goes_on(marks)` tells a drafter whose every guess costs time whether one more is worth it after a draft with these
    marks.
    """

    number: int
    tokens: Sequence[int]
    num_prompt: int
    blocks: Sequence[int]
    sampler: Sampler
    goes_on: Callable[[Sequence[int]], bool] = lambda marks: True


class Draft(list[int]):
    """Guesses, and for each a mark: how sure it looks, as a small number of the drafter's own. How often guesses of a
    mark are right is learnt. A plain list will do: then a guess's place in the draft is its mark."""

    def __init__(self, tokens: Sequence[int] = (), marks: Sequence[int] | None = None) -> None:
        super().__init__(tokens)
        self.marks = list(range(len(self)) if marks is None else marks)


@runtime_checkable
class Drafter(Protocol):
    """What a drafter of one's own needs."""

    def propose(self, sights: Sequence[Sight], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each request at most `count` tokens that may come next; fewer, or none, is fine."""

    def seconds(self, count: int) -> float:
        """What proposing `count` tokens costs, as far as is known; 0 where it is not worth counting."""

    def forget(self, number: int) -> None:
        """The request has ended."""


class BaseDrafter(ABC):
    """A drafter with all that the engine asks of one. Only `name` and `propose` have no default."""

    name: str  # by which a request chooses it
    priors: Sequence[float] = (0.6, 0.7, 0.75, 0.8)  # by mark: how often a guess is right, before any was seen

    @abstractmethod
    def propose(self, sights: Sequence[Sight], counts: Sequence[int]) -> Sequence[Sequence[int]]: ...

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None:  # noqa: B027  # most have nothing to forget
        pass

    def start_seconds(self, tokens: Sequence[int]) -> float | None:
        """What it takes before the first guess for a request that it has not seen; None: nothing."""
        return None


class OwnDrafter(BaseDrafter):
    """A caller's drafter, with the engine's defaults for the rest. If it fails it is asked no more: answers do not
    depend on it."""

    name = "own"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._has_failed = False

    def propose(self, sights: Sequence[Sight], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        if not self._has_failed:
            try:
                drafts = self._drafter.propose(sights, counts)
                if len(drafts) == len(sights):
                    return drafts
                raise ValueError(f"{len(drafts)} drafts for {len(sights)} requests")
            except Exception as error:
                import logging

                self._has_failed = True
                logging.getLogger("unspool.engine").warning("the drafter failed; it is asked no more", exc_info=error)
        return [()] * len(sights)

    def seconds(self, count: int) -> float:
        return self._drafter.seconds(count)

    def forget(self, number: int) -> None:
        self._drafter.forget(number)

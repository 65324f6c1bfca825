"""What a drafter is: it guesses the next tokens of requests, which the model then checks in one step.

A draft is accepted exactly where it equals the token that the model itself samples at that position with its own noise.
So answers are the same with and without drafts, bit for bit, at any temperature and under any stage: a bad drafter
costs time, never correctness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from unspool.records import record

if TYPE_CHECKING:
    from unspool.lazy import np
    from unspool.plan import Work
    from unspool.sampling.pipeline import Sampler

MAX_DRAFT = 16  # tokens in one draft


@record(frozen=True, slots=True)
class DraftContext:
    """What a drafter sees of a request: its tokens so far, and a sampler that it may fork but must not change.

    A drafter whose guesses cost time calls `should_continue(confidences)`: whether one more guess is worth its time
    after a draft with these confidences.
    """

    number: int
    tokens: Sequence[int]
    num_prompt: int
    blocks: Sequence[int]  # of the model's first group of layers; -1 where one was released behind a window
    sampler: Sampler
    should_continue: Callable[[Sequence[int]], bool] = lambda confidences: True


class Draft(list[int]):
    """Guesses, each with a confidence: how sure it looks, as a small integer that the drafter chooses.

    The engine learns how often guesses of each confidence are right. A plain list will do: then a guess's place in the
    draft is its confidence.
    """

    def __init__(self, tokens: Sequence[int] = (), confidences: Sequence[int] | None = None) -> None:
        super().__init__(tokens)
        self.confidences = list(range(len(self)) if confidences is None else confidences)


@runtime_checkable
class Drafter(Protocol):
    """The interface of a drafter."""

    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each request at most `count` tokens that may come next; fewer, or none, is fine."""

    def seconds(self, count: int) -> float:
        """What proposing `count` tokens costs, as far as is known; 0 where it is not worth counting."""

    def forget(self, number: int) -> None:
        """The request has ended."""


class BaseDrafter(ABC):
    """A drafter with all that the engine asks of one. Only `name` and `propose` have no default."""

    name: str  # by which a request chooses it
    watches = False  # whether it reads the hidden rows of every step
    priors: Sequence[float] = (0.6, 0.7, 0.75, 0.8)  # by confidence: how often a guess is right, before any was seen

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext], counts: Sequence[int]) -> Sequence[Sequence[int]]: ...

    def seconds(self, count: int) -> float:
        return 0.0

    def forget(self, number: int) -> None:  # noqa: B027  # most have nothing to forget
        pass

    def watch(self, number: int, tokens: Sequence[int], work: Work, rows: np.ndarray) -> None:  # noqa: B027
        """A step has computed this part of a request, whose tokens these are so far, with these hidden rows, which the
        next step overwrites."""

    def start_seconds(self, tokens: Sequence[int]) -> float | None:
        """What it takes before the first guess for a request that it has not seen; None: nothing."""
        return None

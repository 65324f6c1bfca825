"""Speculation: guess the next tokens cheaply, let the model check them in one step, keep what it would have chosen.

A draft is accepted exactly when it equals the token that the target samples at that position with its own noise. So
what comes out is what plain decoding gives, bit for bit, at any temperature and under any stage; a bad drafter costs
time, never correctness. A drafter is anything with these three methods:
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


class Drafter(Protocol):
    name: str

    def propose(self, sights: Sequence[Sight], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each request at most `count` tokens that may come next; fewer, or none, is fine."""

    def seconds(self, count: int) -> float:
        """What proposing `count` tokens costs, as far as is known; 0 where it is not worth counting."""

    def forget(self, number: int) -> None:
        """The request has ended."""

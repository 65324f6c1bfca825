"""Speculation: guess the next tokens cheaply, let the model check them in one step, keep what it would have chosen.

A draft is accepted exactly when it equals the token that the target samples at that position with its own noise. So
what comes out is what plain decoding gives, bit for bit, at any temperature and under any stage; a bad drafter costs
time, never correctness. A drafter is anything with these three methods:
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from unspool.sampling.pipeline import Sampler


@dataclass(frozen=True, slots=True)
class Sight:
    """What a drafter sees of a request: its tokens so far, and a sampler that it may fork but must not change."""

    number: int
    tokens: Sequence[int]
    num_prompt: int
    blocks: Sequence[int]
    sampler: Sampler


class Drafter(Protocol):
    name: str

    def propose(self, sights: Sequence[Sight], counts: Sequence[int]) -> list[list[int]]:
        """For each request at most `count` tokens that may come next; fewer, or none, is fine."""

    def seconds(self, count: int) -> float:
        """What proposing `count` tokens costs, as far as is known."""

    def forget(self, number: int) -> None:
        """The request has ended."""

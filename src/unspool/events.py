"""What an engine tells whoever asked: text as it comes, then exactly one ending for each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "eos", "constraint", "abort", "deadline", "repetition"]


# There is one of each for every token of every stream, so these two are tuples: what is made soonest.
class Token(NamedTuple):
    """One generated token.

    `logprob`, `top` (id, logprob) and `rank` (1: the likeliest) are there when logprobs were asked for, and `trace`
    when a trace was.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    trace: Any = None
    rank: int | None = None


@lru_cache(maxsize=1 << 15)
def plain_token(id: int) -> Token:
    """A token of which nothing but its id is told: one object for all that are alike."""
    return Token(id)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `queue` + `prefill` = `first_token`; decode covers the tokens after the first."""

    queue: float
    prefill: float
    decode: float
    total: float
    first_token: float | None  # None: no token came
    tokens_per_second: float | None  # decode rate; None: fewer than two tokens


class Text(NamedTuple):
    """Text that is final, and the tokens whose text is thereby wholly out."""

    request: str
    choice: int
    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    request: str
    choice: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | int | None = None  # the stop string or end token that matched
    seed: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # what an extension adds: beam score, speculation counts


@dataclass(frozen=True, slots=True)
class Failed:
    request: str
    choice: int
    error: Exception


Event = Text | Finished | Failed

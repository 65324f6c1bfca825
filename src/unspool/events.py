"""The events of a request: text as it is generated, then exactly one ending for each choice."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from unspool.records import record

FinishReason = Literal["stop", "length", "eos", "constraint", "abort", "deadline", "repetition"]


# There is one of each for every token of every stream, so these two are NamedTuples: cheapest to construct.
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
def bare_token(id: int) -> Token:
    """A token with its id alone: one object for all that are equal."""
    return Token(id)


@record(frozen=True, slots=True)
class Usage:
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@record(frozen=True, slots=True)
class Timings:
    """Seconds. `queue` + `prefill` = `first_token`; decode covers the tokens after the first."""

    queue: float
    prefill: float
    decode: float
    total: float
    first_token: float | None  # None: no token came
    tokens_per_second: float | None  # decode rate; None: fewer than two tokens


@record(frozen=True, slots=True)
class StepWork:
    """The least that the engine's steps had to read and compute during an answer, for it and all requests beside it."""

    prefill_flops: float  # from its first step to its first token
    decode_bytes: float  # weights and cache that were read after that


class Text(NamedTuple):
    """Text that is final, and the tokens whose text is now complete.

    `held` is the text after it that is held back because it may become a stop or a banned string. It is set only if a
    trace was requested, also in events without text.
    """

    request: str
    choice: int
    text: str
    tokens: tuple[Token, ...]
    held: str = ""


@record(frozen=True, slots=True)
class DraftStats:
    """How many drafted tokens were accepted: in one answer, or in all."""

    steps: int = 0  # that had a draft
    drafted: int = 0  # tokens
    accepted: int = 0  # of those, the ones that the model chose itself
    accepted_at: tuple[int, ...] = ()  # the same by their place in the draft
    seconds_saved: float = 0.0  # by the measured costs: the steps that were not needed, less what drafting took

    @property
    def mean_accepted(self) -> float:
        return self.accepted / self.steps if self.steps else 0.0

    def plus(self, drafted: int, accepted: int, seconds_saved: float) -> DraftStats:
        """With one more draft."""
        places = range(max(accepted, len(self.accepted_at)))
        padded = (*self.accepted_at, *[0] * accepted)
        return DraftStats(
            self.steps + 1,
            self.drafted + drafted,
            self.accepted + accepted,
            tuple(padded[place] + (place < accepted) for place in places),
            self.seconds_saved + seconds_saved,
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accepted_at": list(self.accepted_at), "mean_accepted": self.mean_accepted}


@record(frozen=True, slots=True)
class Finished:
    """The end of one answer. Fields that were not requested or do not apply are None or empty."""

    request: str
    choice: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | int | None = None  # the stop string or end token that matched
    seed: int | None = None
    prompt_logprobs: tuple[Token | None, ...] = ()  # of the prompt's tokens; choice 0 has them. None: the first token's
    pooled: tuple[float, ...] = ()  # the prompt's hidden rows as one, where that was asked for
    mean_logprob: float | None = None  # of the answer's tokens, where the best of several answers were asked for
    beam_score: float | None = None  # of a beam search: summed logprobs over length to the power of length_penalty
    speculation: DraftStats | None = None  # None: no draft was made
    work: StepWork | None = None  # None: no token came


@record(frozen=True, slots=True)
class Failed:
    """A choice that the engine could not finish."""

    request: str
    choice: int
    error: Exception


Event = Text | Finished | Failed

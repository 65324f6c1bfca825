"""What `generate` returns: the fold of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.events import Event, Finished, FinishReason, Text, Timings, Token, Usage
from unspool.params import ResolvedParams


@dataclass(frozen=True)
class Completion:
    """One answer. `tokens` carry what was asked for of each: logprob, alternatives, trace."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | int | None = None  # the stop string or end token that ended it
    seed: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float] | None:
        """Of the chosen tokens; None unless the request asked for logprobs."""
        if any(token.logprob is None for token in self.tokens):
            return None
        return [token.logprob for token in self.tokens if token.logprob is not None]


@dataclass(frozen=True)
class Receipt:
    """What the answer is a function of, besides the prompt and the parameters."""

    model: str  # fingerprint of the weights
    version: str
    kernels: str
    seed: int

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "version": self.version, "kernels": self.kernels, "seed": self.seed}


@dataclass(frozen=True)
class Result:
    """All answers to one prompt; the first one's fields are the result's own."""

    prompt_ids: tuple[int, ...]
    params: ResolvedParams
    choices: tuple[Completion, ...]
    receipt: Receipt

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.choices[0].tokens

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[float] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def timings(self) -> Timings:
        return self.choices[0].timings

    @property
    def usage(self) -> Usage:
        """Of all answers together: the prompt counts once."""
        first = self.choices[0].usage
        return Usage(first.prompt_tokens, sum(c.usage.completion_tokens for c in self.choices), first.cached_tokens)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.params.warnings

    @property
    def prompt_logprobs(self) -> list[Token | None] | None:
        """For each prompt token its logprob given those before it; None for the first, which nothing predicts."""
        return self.choices[0].details.get("prompt_logprobs")


class Fold:
    """Collects the events of a request; `result` once every choice has ended. There is no other way from events to a
    result."""

    def __init__(self, prompt_ids: Sequence[int], params: ResolvedParams, receipt: Receipt) -> None:
        self._prompt_ids, self._params, self._receipt = tuple(prompt_ids), params, receipt
        self._text: list[list[str]] = [[] for _ in range(params.n)]
        self._tokens: list[list[Token]] = [[] for _ in range(params.n)]
        self._finished: dict[int, Finished] = {}

    def push(self, event: Event) -> None:
        """Take in an event; a failure is raised."""
        if isinstance(event, Text):
            self._text[event.choice].append(event.text)
            self._tokens[event.choice].extend(event.tokens)
        elif isinstance(event, Finished):
            self._finished[event.choice] = event
        else:
            raise event.error

    @property
    def is_done(self) -> bool:
        return len(self._finished) == len(self._text)

    def result(self) -> Result:
        choices = tuple(self._completion(self._finished[choice]) for choice in range(self._params.n))
        return Result(self._prompt_ids, self._params, choices, self._receipt)

    def _completion(self, end: Finished) -> Completion:
        return Completion(
            text="".join(self._text[end.choice]),
            tokens=tuple(self._tokens[end.choice]),
            finish_reason=end.reason,
            usage=end.usage,
            timings=end.timings,
            stop=end.stop,
            seed=end.seed,
            details=end.details,
        )

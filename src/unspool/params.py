"""SamplingParams: what a request asks for; frozen, checked field by field, and aware of where each value came from.

A field left at None is unset: the model's generation config may set it, else its default holds. `resolve` returns
ResolvedParams, in which every value is concrete and `origins` says who set it. docs/sampling.md has the formulas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.errors import RequestError
from unspool.sampling import validate as check
from unspool.sampling.order import Scope, Stage, check_order

Origin = Literal["request", "model", "default", "drawn"]
LogprobsStage = Literal["raw", "final"]
ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")
MAX_STRINGS = 1024
MAX_SEED = 2**53 - 1  # larger integers do not survive JSON in every language


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(7), "little") & MAX_SEED


@dataclass(frozen=True)
class Constraint:
    """What an answer must look like: `value` is a schema, an expression, the choices or a grammar, by `kind`."""

    kind: ConstraintKind
    value: Any = None  # json_object needs none

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise RequestError(f"constraint is {self.kind!r}; allowed: {', '.join(CONSTRAINT_KINDS)}", "constraint")
        if self.kind in ("regex", "grammar") and (not isinstance(self.value, str) or not self.value):
            raise RequestError(f"a {self.kind} constraint needs a non-empty string, not {self.value!r}", "constraint")
        if self.kind == "json_schema" and not isinstance(self.value, dict | bool | str):
            raise RequestError(f"a json_schema constraint needs a schema, not {self.value!r}", "constraint")
        if self.kind == "choice":
            choices = check.strings("constraint", self.value, MAX_STRINGS)
            if not choices:
                raise RequestError("a choice constraint needs at least one choice", "constraint")
            object.__setattr__(self, "value", choices)


@dataclass(frozen=True)
class BeamParams:
    """Beam search instead of a draw: the `width` best prefixes, by their logprobs' sum over length**length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False  # as in transformers

    def __post_init__(self) -> None:
        check.integer("beam.width", self.width, 1, 256)
        check.number("beam.length_penalty", self.length_penalty, -100, 100)
        if self.early_stopping not in (True, False, "never"):
            raise check.refuse("beam.early_stopping", self.early_stopping, "true, false or 'never'")


@dataclass(frozen=True)
class RepetitionDetector:
    """Finish (reason `repetition`) when the output ends in one run of at most `period` tokens, `repeats` times over."""

    period: int = 32
    repeats: int = 8

    def __post_init__(self) -> None:
        check.integer("repetition_detector.period", self.period, 1, 4096)
        check.integer("repetition_detector.repeats", self.repeats, 2, 4096)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer's tokens are chosen and where it ends."""

    # length and stops
    max_tokens: int | None = None  # None: until the context ends; 0: the prompt is read and nothing written
    min_tokens: int | None = None  # end tokens cannot be chosen before this many
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str: bool = False
    ignore_eos: bool = False  # end tokens may be chosen but do not finish the answer
    bad_words: Sequence[str] | str | None = None  # strings that never appear in the answer
    deadline_ms: float | None = None
    repetition_detector: RepetitionDetector | None = None
    # what the draw is from
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0 (or -1): off
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    # penalties
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_window: int | None = None  # tokens looked back on; -1: all; None: the preset's rule
    penalty_scope: Scope | None = None  # None: the preset's rule
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    dry_window: int | None = None  # -1: all
    no_repeat_ngram: int | None = None
    # which tokens
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    constraint: Constraint | None = None
    # how many, from which noise
    seed: int | None = None  # None: one is drawn, and reported
    n: int = 1
    best_of: int | None = None  # None: n
    beam: BeamParams | None = None
    # what is told
    logprobs: int | None = None  # how many alternatives; 0: the chosen token's alone
    logprobs_stage: LogprobsStage | None = None  # None: raw
    prompt_logprobs: int | None = None
    trace: bool = False
    # how it is run
    order: str | Sequence[Stage] | None = None
    priority: int = 0
    cache_salt: str | None = None
    speculate: str | None = None  # a drafter, or "off"; None: the engine's choice; no answer changes

    def __post_init__(self) -> None:
        for name, checker in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checker(name, value))
        object.__setattr__(self, "order", check_order(self.order))
        for name, kind in _OBJECTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise check.refuse(name, value, f"a {kind.__name__}")
        for name in _NEVER_NONE:
            if getattr(self, name) is None:
                raise check.refuse(name, None, "a value")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens:,} but max_tokens is {self.max_tokens:,}", "min_tokens")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of is {self.best_of} but n is {self.n}; best_of must be at least n", "best_of")
        if self.beam is not None and self.n > self.beam.width:
            raise RequestError(f"n is {self.n} but beam.width is {self.beam.width}; a beam has width answers", "n")
        if self.beam is not None and self.best_of not in (None, self.n):
            raise RequestError("best_of draws answers and beam searches for them; give one of the two", "best_of")

    def resolve(
        self,
        generation: Mapping[str, Any],
        *,
        vocab_size: int,
        draw_seed: Callable[[], int] = fresh_seed,
    ) -> ResolvedParams:
        """Every value made concrete: the request's, else the model's generation config's, else the default."""
        from unspool.sampling.resolve import resolve

        return resolve(self, generation, vocab_size=vocab_size, draw_seed=draw_seed)


def _top_k(name: str, value: object) -> int:
    return max(0, check.integer(name, value, 0, 2**31 - 1, also=-1))


def _strings(name: str, value: object) -> tuple[str, ...]:
    return check.strings(name, value, MAX_STRINGS)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise check.refuse(name, value, "a string")
    return value


_OBJECTS: dict[str, type] = {"constraint": Constraint, "beam": BeamParams, "repetition_detector": RepetitionDetector}
_NEVER_NONE = ("include_stop_str", "ignore_eos", "n", "trace", "priority")
_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "max_tokens": lambda name, value: check.integer(name, value, 0),
    "min_tokens": lambda name, value: check.integer(name, value, 0),
    "stop": _strings,
    "stop_token_ids": check.token_ids,
    "include_stop_str": check.flag,
    "ignore_eos": check.flag,
    "bad_words": _strings,
    "deadline_ms": lambda name, value: check.number(name, value, 0, 1e12, above=True),
    # Below 1e-6 a float32 logit could overflow; nobody can tell such a temperature from 0.
    "temperature": lambda name, value: check.number(name, value, 1e-6, 1e6, also=0),
    "top_k": _top_k,
    "top_p": lambda name, value: check.number(name, value, 0, 1, above=True),
    "min_p": lambda name, value: check.number(name, value, 0, 1),
    "typical_p": lambda name, value: check.number(name, value, 0, 1, above=True),
    "top_n_sigma": lambda name, value: check.number(name, value, 0, 1e6),
    "xtc_probability": lambda name, value: check.number(name, value, 0, 1),
    "xtc_threshold": lambda name, value: check.number(name, value, 0, 1, above=True),
    # Below 0.001 a float32 logit could overflow, as with the temperature.
    "repetition_penalty": lambda name, value: check.number(name, value, 1e-3, 100),
    "frequency_penalty": lambda name, value: check.number(name, value, -2, 2),
    "presence_penalty": lambda name, value: check.number(name, value, -2, 2),
    "penalty_window": lambda name, value: check.integer(name, value, 1, also=-1),
    "penalty_scope": lambda name, value: check.word(name, value, ("all", "output", "mixed")),
    "dry_multiplier": lambda name, value: check.number(name, value, 0, 100),
    "dry_base": lambda name, value: check.number(name, value, 1, 100),
    "dry_allowed_length": lambda name, value: check.integer(name, value, 1),
    "dry_sequence_breakers": _strings,
    "dry_window": lambda name, value: check.integer(name, value, 1, also=-1),
    "no_repeat_ngram": lambda name, value: check.integer(name, value, 0),
    "logit_bias": check.bias,
    "allowed_token_ids": check.token_ids,
    "seed": lambda name, value: check.integer(name, value, 0, MAX_SEED),
    "n": lambda name, value: check.integer(name, value, 1, 1024),
    "best_of": lambda name, value: check.integer(name, value, 1, 1024),
    "logprobs": lambda name, value: check.integer(name, value, 0),
    "logprobs_stage": lambda name, value: check.word(name, value, ("raw", "final")),
    "prompt_logprobs": lambda name, value: check.integer(name, value, 0),
    "trace": check.flag,
    "priority": lambda name, value: check.integer(name, value, -(2**31), 2**31 - 1),
    "cache_salt": _text,
    "speculate": _text,
}


@dataclass(frozen=True, kw_only=True)
class ResolvedParams:
    """Parameters in force: every value concrete, each with its origin, and warnings about combinations that cancel."""

    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str: bool
    ignore_eos: bool
    bad_words: tuple[str, ...]
    deadline_ms: float | None
    repetition_detector: RepetitionDetector | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_window: int
    penalty_scope: Scope
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: tuple[str, ...]
    dry_window: int
    no_repeat_ngram: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...] | None
    constraint: Constraint | None
    seed: int
    n: int
    best_of: int
    beam: BeamParams | None
    logprobs: int | None
    logprobs_stage: LogprobsStage
    prompt_logprobs: int | None
    trace: bool
    order: tuple[Stage, ...]
    priority: int
    cache_salt: str | None
    speculate: str | None
    origins: Mapping[str, Origin] = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def request(self, **changes: Any) -> SamplingParams:
        """The request for these very values, whatever defaults a model has."""
        values = {name: getattr(self, name) for name in self.origins}
        return SamplingParams(**values | changes)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """JSON-ready: {field: {"value": …, "origin": …}}."""
        from unspool.sampling.resolve import jsonable

        return {name: {"value": jsonable(getattr(self, name)), "origin": who} for name, who in self.origins.items()}

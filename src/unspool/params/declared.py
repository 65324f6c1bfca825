"""The typed fields of SamplingParams, ResolvedParams and SamplingOptions.

Written by `python -m unspool.params.generate` from the registry; change that instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from unspool.params.values import BeamParams, Constraint, RepetitionDetector, ThinkingMarks
from unspool.records import record

if TYPE_CHECKING:
    from unspool.params.rules import Stage, StopRule


@record(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SamplingFields:
    """What a request may set."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    bad_words: Sequence[str] | str | None = None
    stop_rules: StopRule | Sequence[StopRule] | None = None
    deadline_ms: float | None = None
    repetition_detector: RepetitionDetector | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_window: int | None = None
    penalty_scope: Literal["all", "output", "mixed"] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Sequence[str] | str | None = None
    dry_window: int | None = None
    no_repeat_ngram: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    constraint: Constraint | None = None
    thinking_budget: int | None = None
    thinking_marks: ThinkingMarks | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam: BeamParams | None = None
    logprobs: int | None = None
    logprobs_stage: Literal["raw", "final"] | None = None
    prompt_logprobs: int | None = None
    trace: bool = False
    trace_top: int = 8
    trace_tokens: Sequence[int] | None = None
    order: str | Sequence[Stage] | None = None
    priority: int = 0
    cache_salt: str | None = None
    speculate: str | None = None


@record(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ResolvedFields:
    """What is in force for a request."""

    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str: bool
    skip_special_tokens: bool
    ignore_eos: bool
    bad_words: tuple[str, ...]
    stop_rules: tuple[StopRule, ...]
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
    penalty_scope: Literal["all", "output", "mixed"]
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: tuple[str, ...]
    dry_window: int
    no_repeat_ngram: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...] | None
    constraint: Constraint | None
    thinking_budget: int | None
    thinking_marks: ThinkingMarks | None
    seed: int
    n: int
    best_of: int
    beam: BeamParams | None
    logprobs: int | None
    logprobs_stage: Literal["raw", "final"]
    prompt_logprobs: int | None
    trace: bool
    trace_top: int
    trace_tokens: tuple[int, ...]
    order: tuple[Stage, ...]
    priority: int
    cache_salt: str | None
    speculate: str | None


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters as keyword arguments."""

    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | str | None
    stop_token_ids: Sequence[int] | None
    include_stop_str: bool
    skip_special_tokens: bool
    ignore_eos: bool
    bad_words: Sequence[str] | str | None
    stop_rules: StopRule | Sequence[StopRule] | None
    deadline_ms: float | None
    repetition_detector: RepetitionDetector | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    penalty_window: int | None
    penalty_scope: Literal["all", "output", "mixed"] | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_sequence_breakers: Sequence[str] | str | None
    dry_window: int | None
    no_repeat_ngram: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    constraint: Constraint | None
    thinking_budget: int | None
    thinking_marks: ThinkingMarks | None
    seed: int | None
    n: int
    best_of: int | None
    beam: BeamParams | None
    logprobs: int | None
    logprobs_stage: Literal["raw", "final"] | None
    prompt_logprobs: int | None
    trace: bool
    trace_top: int
    trace_tokens: Sequence[int] | None
    order: str | Sequence[Stage] | None
    priority: int
    cache_salt: str | None
    speculate: str | None

"""Keyword arguments of the library, with types that a type checker sees, and what becomes of them.

Each class has the fields of a dataclass, all optional; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from unspool.config import Device, EngineConfig, Isa, KVDtype, Quantize
from unspool.errors import RequestError
from unspool.params import BeamParams, Constraint, LogprobsStage, RepetitionDetector, SamplingParams
from unspool.sampling.order import Scope, Stage
from unspool.sampling.speculate import Drafter


class EngineOptions(TypedDict, total=False):
    """The options of `LLM`: those of EngineConfig."""

    device: Device
    threads: int | None
    isa: Isa
    quantize: Quantize
    block_size: int
    kv_tokens: int | None
    kv_dtype: KVDtype
    gpu_memory: float
    step_tokens: int
    chunk_tokens: int
    max_running: int
    max_waiting: int
    prefix_cache: bool
    speculate: str | Drafter | None


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters as keyword arguments: those of SamplingParams."""

    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | str | None
    stop_token_ids: Sequence[int] | None
    include_stop_str: bool
    ignore_eos: bool
    bad_words: Sequence[str] | str | None
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
    penalty_scope: Scope | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_sequence_breakers: Sequence[str] | None
    dry_window: int | None
    no_repeat_ngram: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    constraint: Constraint | None
    seed: int | None
    n: int
    best_of: int | None
    beam: BeamParams | None
    logprobs: int | None
    logprobs_stage: LogprobsStage | None
    prompt_logprobs: int | None
    trace: bool
    order: str | Sequence[Stage] | None
    priority: int
    cache_salt: str | None
    speculate: str | None


Params = SamplingParams | SamplingOptions | None  # how an answer is asked for


def engine_config(options: EngineOptions) -> EngineConfig:
    """EngineConfig from keyword arguments; an unknown one is refused by name."""
    check_names(options, [field.name for field in fields(EngineConfig)], "option")
    return EngineConfig(**options)


def sampling_params(params: Params, options: SamplingOptions) -> SamplingParams:
    """What is asked for by `params`, changed by `options`; an unknown name is refused."""
    known = [field.name for field in fields(SamplingParams)]
    check_names(options, known, "sampling parameter")
    if params is None:
        return SamplingParams(**options)
    if isinstance(params, SamplingParams):
        return replace(params, **options) if options else params
    if isinstance(params, Mapping):
        check_names(params, known, "sampling parameter")
        merged: SamplingOptions = {**params, **options}
        return SamplingParams(**merged)
    raise RequestError(
        f"params is {params!r:.80}; allowed: SamplingParams, or a dictionary of its fields; single parameters may be "
        "given by name, as in temperature=0",
        "params",
    )


def check_names(given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Refuse a name that does not exist, and suggest the nearest one that does."""
    for name in given:
        if name not in known:
            from difflib import get_close_matches

            close = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
            raise RequestError(f"unknown {what} {name!r}; {hint}", str(name))

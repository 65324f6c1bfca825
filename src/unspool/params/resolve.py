"""From a request's parameters to those in force: who sets each value, and which combinations deserve a warning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from unspool.errors import ModelError, RequestError
from unspool.params import checks
from unspool.params.order import DRAW_STAGES, PRESETS, STAGES, preset_of
from unspool.params.registry import PARAMETERS
from unspool.params.sampling import Origin, ResolvedParams, SamplingParams

if TYPE_CHECKING:
    from unspool.params.rules import Stage

# What holds when neither the request nor the model says anything: the model's own distribution.
DEFAULTS: Mapping[str, Any] = MappingProxyType({parameter.name: parameter.default for parameter in PARAMETERS})


def resolve(
    params: SamplingParams, generation: Mapping[str, Any], *, vocab_size: int, draw_seed: Callable[[], int]
) -> ResolvedParams:
    model = _from_model(generation)
    preset = preset_of(params.order)  # type: ignore[arg-type]  # in its normal form
    defaults = {**DEFAULTS, "penalty_window": preset.penalty_window, "penalty_scope": preset.penalty_scope}
    defaults |= {"order": preset.stages, "best_of": params.n}
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for parameter in PARAMETERS:
        name, asked = parameter.name, getattr(params, parameter.name)
        if asked is not None and asked != parameter.unset:
            values[name], origins[name] = asked, "request"
        elif name in model:
            values[name], origins[name] = model[name], "model"
        else:
            values[name], origins[name] = defaults[name], "default"
    if origins["logit_bias"] == "request" and "logit_bias" in model:  # the model's bans hold for other tokens
        values["logit_bias"] = {**model["logit_bias"], **values["logit_bias"]}
    if values["seed"] is None:
        values["seed"], origins["seed"] = draw_seed(), "drawn"
    if isinstance(values["order"], str):
        values["order"] = PRESETS[values["order"]].stages
    _check_vocab(values, vocab_size)
    warnings = (*_left_out(values, origins), *_warnings(values, origins))
    return ResolvedParams(**values, origins=origins, warnings=warnings)


def _from_model(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The model's values, checked; the error for a wrong one says that it is the model's."""
    names = [parameter.name for parameter in PARAMETERS if parameter.is_from_model]
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample") is False and "temperature" not in given:
        given["temperature"] = 0
    try:
        checked = SamplingParams(**given)
    except RequestError as error:
        raise ModelError(f"the model's generation config: {error}") from error
    return {name: getattr(checked, name) for name in given}


def _check_vocab(values: Mapping[str, Any], vocab_size: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "trace_tokens"):
        checks.within_vocab(name, tuple(values[name] or ()), vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is not None and values[name] > vocab_size:
            raise RequestError(f"{name} is {values[name]:,}; the vocabulary has {vocab_size:,} tokens", name)
    if values["allowed_token_ids"] == ():
        raise RequestError("allowed_token_ids is empty; then no token could be chosen", "allowed_token_ids")


def _left_out(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    """Stages left out of the caller's own order: an error where the request set their parameter, else a warning."""
    order: tuple[Stage, ...] = values["order"]
    warnings = []
    for name in {name for names in STAGES.values() for name in names}:
        homes = [stage for stage, names in STAGES.items() if name in names]
        if any(home in order for home in homes) or not is_on(name, values[name]):
            continue
        if origins[name] == "request":
            raise RequestError(f"{name} is {values[name]!r} but order has no stage {' or '.join(homes)}", name)
        warnings.append(f"the {origins[name]}'s {name} {values[name]!r} does nothing: order has no stage {homes[0]}")
    return sorted(warnings)


def is_on(name: str, value: Any) -> bool:
    """Whether a parameter's value turns its stage on. Temperature 1 divides by 1: absent; 0 is greedy, not a stage."""
    return value is not None and value != DEFAULTS.get(name)


def _warnings(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    warnings = []

    def on(name: str) -> bool:
        return is_on(name, values[name])

    drawing = [name for stage in sorted(DRAW_STAGES) for name in STAGES[stage] if name != "temperature" and on(name)]
    drawing = list(dict.fromkeys(name for name in drawing if origins[name] == "request"))
    if values["temperature"] == 0 and drawing:
        warnings.append(f"temperature 0 takes the best token: {', '.join(drawing)} can do nothing")
    if values["temperature"] == 0 and values["best_of"] > 1 and values["beam"] is None:
        warnings.append(f"temperature 0 gives the same answer {values['best_of']} times")
    if values["temperature"] > 0 and values["top_k"] == 1:
        warnings.append(f"top_k 1 (from the {origins['top_k']}) leaves one token: the temperature can do nothing")
    if values["temperature"] >= 1.5 and values["top_p"] <= 0.5:
        temperature, top_p = values["temperature"], values["top_p"]
        warnings.append(f"temperature {temperature:g} flattens what top_p {top_p:g} then cuts to a few")
    if values["repetition_penalty"] > 1.3:
        warnings.append(f"repetition_penalty {values['repetition_penalty']:g} is above 1.3: answers tend to fall apart")
    if values["logprobs_stage"] != "raw" and values["logprobs"] is None:
        warnings.append("logprobs_stage does nothing without logprobs")
    if not values["trace"]:
        for name in ("trace_top", "trace_tokens"):
            if origins[name] == "request":
                warnings.append(f"{name} does nothing without trace")
    if values["beam"] is not None and values["temperature"] != 1 and origins["temperature"] == "request":
        warnings.append("beam search draws nothing: temperature can do nothing")
    warnings += _idle(values, origins, "dry_multiplier", ("dry_base", "dry_allowed_length", "dry_window"))
    warnings += _idle(values, origins, "dry_multiplier", ("dry_sequence_breakers",))
    warnings += _idle(values, origins, "xtc_probability", ("xtc_threshold",))
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    if not any(on(name) for name in penalties):
        for name in ("penalty_window", "penalty_scope"):
            if origins[name] == "request":
                warnings.append(f"{name} does nothing: no penalty is on")
    return warnings


def _idle(values: Mapping[str, Any], origins: Mapping[str, Origin], main: str, details: tuple[str, ...]) -> list[str]:
    if is_on(main, values[main]):
        return []
    return [f"{name} does nothing: {main} is 0" for name in details if origins[name] == "request"]


def jsonable(value: Any) -> Any:
    """Values as JSON can hold them: stages by name, minus infinity as a word."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if callable(value):
        from unspool.params.rules import name_of

        return name_of(value)
    return value

"""The sampling defaults in a model's files, by SamplingParams' names. The number of tokens to write is not one of them.

A setting without an exact equivalent here is not used; `ignored` lists it, and every answer carries it as a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unspool.params.kinds import Integer, Number
from unspool.params.registry import PARAMETERS, Parameter
from unspool.weights.fields import Fields, is_text

# Parameters whose value is used as it is; the others have different forms and are read one by one below.
NUMBERS = tuple(parameter for parameter in PARAMETERS if isinstance(parameter.kind, Integer | Number))
# Parameters that also apply at temperature 0.
WITHOUT_DRAW = {parameter.name for parameter in PARAMETERS if not any(stage.shapes_draw for stage in parameter.stages)}
MAX_STRINGS = 1024

# Fields of generation_config.json that other programs read, with the values that turn them off there. Those that affect
# only random draws come first.
DRAWS = {"epsilon_cutoff": (0, 1), "eta_cutoff": (0, 1), "top_h": (1,)}
NOT_TAKEN: dict[str, tuple[Any, ...]] = DRAWS | {
    "num_beams": (0, 1),
    "num_beam_groups": (0, 1),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "min_length": (0,),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "guidance_scale": (0, 1),
    "watermarking_config": ({},),
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "max_time": (),
}
GGUF_NOT_TAKEN: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "sequence": ("",)}


def generation_from_gguf(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    fields = Fields(path, metadata, "general.sampling.")
    given = [each for each in NUMBERS if each.gguf_key and fields.get(each.gguf_key) is not None]
    generation = {each.name: _value(fields, each.gguf_key, each) for each in given if each.name != "penalty_window"}
    window = fields.integer("penalty_last_n", low=-1) if fields.get("penalty_last_n") is not None else None
    if window == 0:  # a window of 0 tokens: nothing is penalized
        generation.pop("repetition_penalty", None)
    elif window is not None:
        generation["penalty_window"] = window
    return generation


def ignored_of_gguf(path: Path, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_ignored(Fields(path, metadata, "general.sampling."), GGUF_NOT_TAKEN))


def generation_from_json(path: Path, values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The defaults of a generation_config.json. With `do_sample: false` decoding is greedy whatever else is set, as in
    transformers."""
    fields = Fields(path, values)
    given = [each for each in NUMBERS if each.hf_key and fields.get(each.hf_key) is not None]
    generation: dict[str, Any] = {each.name: _value(fields, each.hf_key, each) for each in given}
    if generation.get("min_tokens") == 0:
        del generation["min_tokens"]  # a value by which files say that there is no minimum
    if banned := _banned(fields, vocab_size):
        generation["logit_bias"] = dict.fromkeys(banned, -math.inf)
    if stops := _stop_strings(fields):
        generation["stop"] = stops
    if not fields.boolean("do_sample", True):
        generation = {name: value for name, value in generation.items() if name in WITHOUT_DRAW}
        generation["temperature"] = 0.0
    return generation


def ignored_of_json(path: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings of generation_config.json that are not supported, one text per field."""
    fields = Fields(path, values)
    idle = () if fields.boolean("do_sample", True) else DRAWS
    notes = [*_ignored(fields, {name: off for name, off in NOT_TAKEN.items() if name not in idle})]
    longer = sum(len(each) > 1 for each in _bad_words(fields))
    if longer:
        notes.append(f"{path.name}: bad_words_ids: {longer} of several tokens each are not supported and are ignored")
    return tuple(notes)


def _ignored(fields: Fields, not_taken: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for name, off in not_taken.items():
        value = fields.get(name)
        if value is not None and value is not False and value not in off:
            shown = f" {value}" if isinstance(value, int | float | str) and len(str(value)) < 40 else ""
            yield f"{fields.source.name}: {fields.prefix}{name}{shown} is not supported and is ignored"


def _banned(fields: Fields, vocab_size: int) -> list[int]:
    """Tokens that are never chosen. Files may also list ids of no token (-1 for none)."""
    suppressed = fields.get("suppress_tokens") or []
    if not isinstance(suppressed, list) or not all(type(each) is int for each in suppressed):
        fields.fail("suppress_tokens", "a list of token ids was expected")
    ends = fields.token_ids("eos_token_id")  # bad words that are end tokens are ignored
    words = {each[0] for each in _bad_words(fields) if len(each) == 1 and each[0] not in ends}
    return sorted(token for token in {*suppressed, *words} if 0 <= token < vocab_size)


def _bad_words(fields: Fields) -> list[list[int]]:
    """Sequences of tokens that must not be generated."""
    value = fields.get("bad_words_ids") or []
    if not isinstance(value, list) or not all(
        isinstance(each, list) and each and all(type(token) is int for token in each) for each in value
    ):
        fields.fail("bad_words_ids", "a list of lists of token ids was expected")
    return value


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop_strings")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STRINGS or not all(is_text(each) and each for each in stops):
        fields.fail("stop_strings", f"a text or a list of at most {MAX_STRINGS} texts was expected")
    return tuple(stops)


def _value(fields: Fields, key: str, parameter: Parameter) -> float | int:
    if isinstance(parameter.kind, Integer):
        return fields.integer(key, low=0)  # 0: off
    assert isinstance(parameter.kind, Number)
    if fields.get(key) == 0 and parameter.name != "repetition_penalty":
        return 0.0
    return fields.number(key, low=0, high=1.0 if parameter.kind.high == 1 else 1e3)

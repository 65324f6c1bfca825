"""The sampling defaults that a model's files carry, by SamplingParams' names. How many tokens to write is not one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unspool.weights.fields import Fields

GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
NAMES = (*GGUF_KEYS.values(), "typical_p", "no_repeat_ngram_size")
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")


def generation_from_gguf(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    fields = Fields(path, metadata, "general.sampling.")
    return {name: _value(fields, key, name) for key, name in GGUF_KEYS.items() if fields.get(key) is not None}


def generation_from_json(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json. `do_sample: false` asks for greedy decoding whatever else is set, as it does there."""
    fields = Fields(path, values)
    generation = {name: _value(fields, name, name) for name in NAMES if fields.get(name) is not None}
    if not fields.boolean("do_sample", True):
        generation = {name: value for name, value in generation.items() if name in PENALTIES}
        generation["temperature"] = 0.0
    return generation


def _value(fields: Fields, key: str, name: str) -> float | int:
    if name in ("top_k", "no_repeat_ngram_size"):
        return fields.integer(key, low=0)  # 0: off
    high = 1.0 if name.endswith("_p") else 1e3
    return 0.0 if fields.get(key) == 0 and name != "repetition_penalty" else fields.number(key, low=0, high=high)

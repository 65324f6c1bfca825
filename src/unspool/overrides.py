"""What a caller may set instead of a model's own files: as values of EngineConfig, checked and in one normal form."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from unspool.errors import RequestError
from unspool.params import checks

KV_TYPES = ("int", "float", "bool", "str")
KV_FORM = "KEY=TYPE:VALUE with a type of int, float, bool or str, as in llama.rope.freq_base=float:500000"
SCALING_FORM = "none, KIND:FACTOR or KIND:FACTOR:ORIGINAL, as in yarn:4 or yarn:4:32768, or the JSON of a rope_scaling"
SCALING_KEYS = (
    "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip
SCALING_KINDS = ("linear", "yarn", "llama3", "default")


class Override(NamedTuple):
    """One value that a caller has set. `before` is what the model's files say; None: nothing."""

    option: str
    value: str
    before: str | None
    is_input: bool = False  # it changes what the prompt is, or how long; not what follows from a prompt

    def __str__(self) -> str:
        return f"{self.option}={self.value}"

    def as_dict(self) -> dict[str, str | None]:
        return {"option": self.option, "value": self.value, "before": self.before}


# RoPE scaling -------------------------------------------------------------------------------------------------------
def rope_scaling(value: object) -> str:
    """A scaling by its short form, as JSON or as a mapping; JSON with the keys of Hugging Face's `rope_scaling`."""
    import json

    if isinstance(value, str) and not value.lstrip().startswith("{"):
        values = _short_scaling(value)
    elif isinstance(value, str):
        try:
            values = json.loads(value)
        except ValueError as error:
            raise RequestError(f"rope_scaling is not JSON: {error}", "rope_scaling") from None
    elif isinstance(value, Mapping):
        values = dict(value)
    else:
        raise checks.refuse("rope_scaling", value, SCALING_FORM)
    for key in values:
        if key not in SCALING_KEYS:
            raise RequestError(f"rope_scaling has {key!r:.60}; known: {', '.join(SCALING_KEYS)}", "rope_scaling")
    kind = values.pop("type", None) if "rope_type" not in values else values["rope_type"]
    if kind not in SCALING_KINDS:
        raise RequestError(
            f"rope_scaling is of the kind {kind!r:.60}; allowed: {', '.join(SCALING_KINDS)}", "rope_scaling"
        )
    return json.dumps({**values, "rope_type": kind}, sort_keys=True)


def _short_scaling(text: str) -> dict[str, Any]:
    kind, *numbers = text.split(":")
    if kind == "none" and not numbers:
        return {"rope_type": "default"}
    try:
        factor, *original = numbers
        values: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
        if original:
            [length] = original
            values["original_max_position_embeddings"] = int(length)
    except ValueError:
        raise checks.refuse("rope_scaling", text, SCALING_FORM) from None
    return values


# GGUF keys ----------------------------------------------------------------------------------------------------------
def kv_overrides(value: object) -> tuple[str, ...]:
    """KEY=TYPE:VALUE, each once, from a list of such texts or a mapping of keys to values."""
    if isinstance(value, Mapping):
        value = [f"{key}={typed(key, each)}" for key, each in value.items()]
    texts = checks.strings("override_kv", value, 1024)
    seen: dict[str, str] = {}
    for text in texts:
        key, found = parse_kv(text)
        if key in seen:
            raise RequestError(f"override_kv sets {key} twice", "override_kv")
        seen[key] = f"{key}={typed(key, found)}"
    return tuple(seen.values())


def parse_kv(text: str) -> tuple[str, bool | int | float | str]:
    """A key and its value."""
    match = re.fullmatch(r"([^=\s]+)=(\w+):(.*)", text, re.DOTALL)
    if match is None or match[2] not in KV_TYPES:
        raise checks.refuse("override_kv", text[:200], KV_FORM)
    key, kind, written = match.groups()
    try:
        if kind == "bool":
            return key, {"true": True, "false": False}[written]
        if kind == "str":
            return key, written
        number = int(written) if kind == "int" else float(written)
    except (KeyError, ValueError):
        raise checks.refuse("override_kv", text[:200], f"{written[:60]!r} is not a value of type {kind}") from None
    if not math.isfinite(number):
        raise checks.refuse("override_kv", text[:200], "a finite number")
    return key, number


def typed(key: object, value: object) -> str:
    """TYPE:VALUE."""
    if isinstance(value, bool):
        return f"bool:{str(value).lower()}"
    if isinstance(value, int):
        return f"int:{value}"
    if isinstance(value, float):
        return f"float:{value!r}"
    if isinstance(value, str):
        return f"str:{value}"
    raise RequestError(f"override_kv: {key!r:.60} is {value!r:.60}; a number, a text or a truth value was expected",
                       "override_kv")  # fmt: skip


"""Helpers for families with both recurrent and attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unspool.weights.fields import Fields
from unspool.weights.weight import Weight


def with_values(keys: Fields, values: Mapping[str, Any]) -> Fields:
    """The same fields, with some values replaced."""
    changed = {f"{keys.prefix}{name}": value for name, value in values.items()}
    return Fields(keys.source, {**keys.values, **changed}, keys.prefix)


def by_layer(keys: Fields, key: str, num_layers: int) -> list[int]:
    """One number per layer, from a list or from a single number for all layers."""
    value = keys.get(key)
    if not isinstance(value, list):
        return [keys.integer(key, low=0)] * num_layers
    if len(value) != num_layers or any(type(each) is not int or each < 0 for each in value):
        keys.fail(key, f"a list of {num_layers} whole numbers was expected")
    return list(value)


def kinds_of(fields: Fields, key: str, num_layers: int, known: Sequence[str]) -> list[str]:
    """The kind of each layer."""
    kinds = fields.get(key)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        fields.fail(key, f"a list of the kinds of {num_layers} layers was expected")
    for kind in kinds:
        if kind not in known:
            fields.fail(key, f"only {', '.join(known)} are supported")
    return list(kinds)


def squeezed(weight: Weight) -> Weight:
    """A convolution's weight [channels, 1, taps] as [channels, taps]."""
    if len(weight.shape) != 3 or weight.shape[1] != 1:
        return weight
    return Weight(weight.name, weight.format, (weight.shape[0], weight.shape[2]), weight.raw)

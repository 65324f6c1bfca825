"""The values of `const` and `enum`: checked, scalars kept together, arrays and objects as schemas of their own."""

from __future__ import annotations

import math
from typing import Any

from unspool.sampling.constraint.limits import Limits, Place, Refused


class Scalars:
    """A node that holds for these values only: null, booleans, numbers and strings."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


def constants(node: dict[str, Any], key: str, place: Place, limits: Limits) -> tuple[list[Any], Place]:
    """The values of a const or an enum."""
    place = (*place, key)
    values = node[key] if key == "enum" else [node[key]]
    if not isinstance(values, list) or not values:
        raise Refused("needs a list of at least one value", place)
    if len(values) > limits.max_values:
        raise Refused(f"has {len(values):,} values; at most {limits.max_values:,} are accepted", place)
    pending = [(value, (*place, number) if key == "enum" else place, 0) for number, value in enumerate(values)]
    while pending:
        value, at, depth = pending.pop()
        if depth > limits.max_depth:
            raise Refused(f"a constant nests deeper than {limits.max_depth}", at[:8])
        if isinstance(value, str) and len(value) > limits.max_constant:
            raise Refused(f"has {len(value):,} characters; at most {limits.max_constant:,}", at)
        if (isinstance(value, int) and value.bit_length() > 1023) or (isinstance(value, float) and math.isinf(value)):
            raise Refused("is too large for a number", at)
        if isinstance(value, list):
            pending += [(item, (*at, number), depth + 1) for number, item in enumerate(value)]
        elif isinstance(value, dict):
            pending += [(item, (*at, name), depth + 1) for name, item in value.items()]
    return values, place


def constant_schema(value: Any) -> dict[str, Any]:
    """A schema that only this array or object satisfies."""
    if isinstance(value, list):
        items = {"prefixItems": [{"const": item} for item in value]} if value else {}
        return {"type": "array", **items, "minItems": len(value), "maxItems": len(value)}
    members = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}

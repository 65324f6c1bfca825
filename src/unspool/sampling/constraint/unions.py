"""Whether two schemas can both accept one value: `oneOf` is `anyOf` exactly where no two of its options can.

The proof runs on the schemas' full meaning, not on what is generated from them, and errs towards "perhaps".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.limits import Place

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAX_DEPTH = 8  # of properties within properties that a proof looks into
_MAX_PARTS = 64


def overlapping(options: list[Any], document: Document, place: Place) -> tuple[int, int] | None:
    """Two options that may both accept one value; None if every pair is proved apart."""
    for first in range(len(options)):
        for second in range(first + 1, len(options)):
            if not _apart(options[first], options[second], document, place, 0):
                return first, second
    return None


def _apart(left: Any, right: Any, document: Document, place: Place, depth: int) -> bool:
    if left is False or right is False:
        return True
    if depth > _MAX_DEPTH:
        return False
    one, two = list(_parts(left, document, place)), list(_parts(right, document, place))
    if len(one) > _MAX_PARTS or len(two) > _MAX_PARTS:
        return False
    for parts, other in ((one, right), (two, left)):
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                branches = part.get(keyword)
                if not isinstance(branches, list) or not branches:
                    continue
                if all(_apart(branch, other, document, place, depth + 1) for branch in branches):
                    return True
    types = _types(one) & _types(two)
    if not types:
        return True
    values = _values(one), _values(two)
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    if types == {"number"} and _beyond(one, two):
        return True
    return types == {"object"} and _objects_apart(one, two, document, place, depth)


def _parts(node: Any, document: Document, place: Place) -> Iterator[dict[str, Any]]:
    """The schema and all that it demands besides: through `$ref` and `allOf`."""
    pending, seen = [node], 0
    while pending and seen <= _MAX_PARTS:
        part = pending.pop()
        seen += 1
        if not isinstance(part, dict):
            continue
        if "$ref" in part:
            pending.append(document.resolve(part["$ref"], place)[0])
            if document.draft <= 7:  # where nothing beside a reference counts
                continue
        yield part
        if isinstance(part.get("allOf"), list):
            pending += part["allOf"]


def _types(parts: list[dict[str, Any]]) -> frozenset[str]:
    """JSON types that every part allows; integers count as numbers."""
    types = _TYPES
    for part in parts:
        names = part.get("type")
        if names is not None:
            listed = [names] if isinstance(names, str) else names if isinstance(names, list) else []
            types &= {"number" if name == "integer" else name for name in listed if isinstance(name, str)}
        finite = _values([part])
        if finite is not None:
            types &= {_type_of(json.loads(value)) for value in finite}
    return types


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _values(parts: list[dict[str, Any]]) -> frozenset[str] | None:
    """The values that `const` and `enum` leave, as canonical JSON; None if they do not say."""
    left: frozenset[str] | None = None
    for part in parts:
        for listed in ([part["const"]] if "const" in part else None, part.get("enum")):
            if isinstance(listed, list):
                values = frozenset(json.dumps(_canonical(value), sort_keys=True) for value in listed)
                left = values if left is None else left & values
    return left


def _canonical(value: Any) -> Any:
    """1 and 1.0 are one value."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return value


def _beyond(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    def bound(parts: list[dict[str, Any]], name: str) -> list[float]:
        values = [part[name] for part in parts if name in part]
        return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]

    for low, high in ((one, two), (two, one)):
        for least in bound(low, "minimum"):
            if any(most < least for most in bound(high, "maximum")):
                return True
            if any(most <= least for most in bound(high, "exclusiveMaximum")):
                return True
        for least in bound(low, "exclusiveMinimum"):
            if any(most <= least for most in bound(high, "maximum") + bound(high, "exclusiveMaximum")):
                return True
    return False


def _objects_apart(
    one: list[dict[str, Any]], two: list[dict[str, Any]], document: Document, place: Place, depth: int
) -> bool:
    """A property that one side demands and the other refuses, or wants otherwise."""
    for demanding, other in ((one, two), (two, one)):
        for name in _required(demanding):
            here, there = _property(demanding, name), _property(other, name)
            if any(schema is False for schema in there):
                return True
            if any(_apart(a, b, document, place, depth + 1) for a in here for b in there):
                return True
    return False


def _required(parts: list[dict[str, Any]]) -> list[str]:
    lists = [part["required"] for part in parts if isinstance(part.get("required"), list)]
    return [name for names in lists for name in names if isinstance(name, str)]


def _property(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """What the parts say of a property; a part with patterns may say more, which is left out."""
    schemas = []
    for part in parts:
        named = part.get("properties")
        if isinstance(named, dict) and name in named:
            schemas.append(named[name])
        elif "additionalProperties" in part and not part.get("patternProperties"):
            schemas.append(part["additionalProperties"])
    return schemas

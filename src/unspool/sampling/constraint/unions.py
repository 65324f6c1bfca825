"""Whether two schemas can both accept one value: `oneOf` is `anyOf` exactly where no two of its options can.

The proof runs on the schemas' full meaning, not on what is generated from them, and errs towards "perhaps".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.limits import Budget, Place

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAX_DEPTH = 8  # of properties within properties that a proof looks into
_MAX_PARTS = 64
_Parts = list[dict[str, Any]]


class _Known(NamedTuple):
    """What a proof looks at in a schema."""

    parts: _Parts
    types: frozenset[str]
    values: frozenset[str] | None


class Unions:
    """Proofs about one document, within one budget."""

    def __init__(self, document: Document, budget: Budget) -> None:
        self._document = document
        self._budget = budget
        self._known: dict[int, _Known] = {}  # by the identity of a part of the document

    def overlaps(self, options: list[Any], place: Place) -> list[set[int]]:
        """For each option the others that may accept a value which it accepts too."""
        found: list[set[int]] = [set() for _ in options]
        constants = [self._look(option, place).values for option in options]
        known: dict[str, list[int]] = {}
        for second, values in enumerate(constants):
            for first in range(second):
                if values is not None and constants[first] is not None:
                    continue
                if not self._apart(options[first], options[second], place, 0):
                    found[first].add(second)
                    found[second].add(first)
            for value in values or ():
                for first in known.setdefault(value, []):
                    found[first].add(second)
                    found[second].add(first)
                known[value].append(second)
        return found

    def _look(self, node: Any, place: Place) -> _Known:
        if id(node) not in self._known:
            parts = list(_parts(node, self._document, place))
            self._budget.spend(len(parts))
            self._known[id(node)] = _Known(parts, _types(parts), _values(parts))
        return self._known[id(node)]

    def _apart(self, left: Any, right: Any, place: Place, depth: int) -> bool:
        self._budget.spend()
        if left is False or right is False:
            return True
        one, two = self._look(left, place), self._look(right, place)
        if depth > _MAX_DEPTH or len(one.parts) > _MAX_PARTS or len(two.parts) > _MAX_PARTS:
            return False
        types = one.types & two.types
        if not types:
            return True
        if one.values is not None and two.values is not None and not one.values & two.values:
            return True
        if types == {"number"} and _beyond(one.parts, two.parts):
            return True
        if types == {"object"} and self._objects_apart(one.parts, two.parts, place, depth):
            return True
        return any(
            all(self._apart(branch, other, place, depth + 1) for branch in branches)
            for parts, other in ((one.parts, right), (two.parts, left))
            for branches in _branches(parts)
        )

    def _objects_apart(self, one: _Parts, two: _Parts, place: Place, depth: int) -> bool:
        """A property that one side demands and the other refuses, or wants otherwise."""
        for demanding, other in ((one, two), (two, one)):
            for name in _required(demanding):
                here, there = _property(demanding, name), _property(other, name)
                self._budget.spend(1 + len(demanding) + len(other))
                if any(schema is False for schema in there):
                    return True
                if any(self._apart(a, b, place, depth + 1) for a in here for b in there):
                    return True
        return False


def _parts(node: Any, document: Document, place: Place) -> Iterator[dict[str, Any]]:
    """The schema and all that it demands besides: through `$ref` and `allOf`."""
    pending, seen = [node], 0
    while pending and seen <= _MAX_PARTS:
        part = pending.pop()
        seen += 1
        if not isinstance(part, dict):
            continue
        if "$ref" in part:
            pending.append(document.resolve(part, place)[0])
        yield part
        if isinstance(part.get("allOf"), list):
            pending += part["allOf"]


def _types(parts: _Parts) -> frozenset[str]:
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


def _values(parts: _Parts) -> frozenset[str] | None:
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


def _beyond(one: _Parts, two: _Parts) -> bool:
    def bound(parts: _Parts, name: str) -> list[float]:
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


def _branches(parts: _Parts) -> Iterator[list[Any]]:
    for part in parts:
        for keyword in ("anyOf", "oneOf"):
            if isinstance(part.get(keyword), list) and part[keyword]:
                yield part[keyword]


def _required(parts: _Parts) -> list[str]:
    lists = [part["required"] for part in parts if isinstance(part.get("required"), list)]
    return [name for names in lists for name in names if isinstance(name, str)]


def _property(parts: _Parts, name: str) -> list[Any]:
    """What the parts say of a property; a part with patterns may say more, which is left out."""
    schemas = []
    for part in parts:
        named = part.get("properties")
        if isinstance(named, dict) and name in named:
            schemas.append(named[name])
        elif "additionalProperties" in part and not part.get("patternProperties"):
            schemas.append(part["additionalProperties"])
    return schemas

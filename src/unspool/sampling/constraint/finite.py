"""Whether a (rewritten) schema has a document that ends.

`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}` accepts endless documents only: a matcher would never be
stuck and never be done. The schemas that can end are found from the leaves up, as the least fixed point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unspool.sampling.constraint.limits import Budget
from unspool.sampling.constraint.schema import Lowered

_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_MAX_PARTS = 256


def endless(schema: dict[str, Any], budget: Budget) -> Lowered | None:
    """A subschema that no finite document satisfies because it needs itself; None if there is none."""
    nodes = [node for node in _subschemas(schema) if isinstance(node, dict)]
    ending = _Ending()
    pending = list(reversed(nodes))
    waiting: dict[int, list[dict[str, Any]]] = {}
    while pending:
        node = pending.pop()
        if id(node) in ending.known:
            continue
        ending.missed.clear()
        if _ends(node, schema, ending, budget):
            ending.known.add(id(node))
            pending += waiting.pop(id(node), [])
        else:
            for other in ending.missed:
                waiting.setdefault(other, []).append(node)
    return next((node for node in nodes if id(node) not in ending.known), None)


class _Ending:
    """The schemas known to end, and those that were asked about in vain."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.missed: set[int] = set()

    def holds(self, node: Lowered) -> bool:
        if node is True or id(node) in self.known:
            return True
        if node is not False:
            self.missed.add(id(node))
        return False


def _subschemas(node: Lowered) -> Iterator[Lowered]:
    """Depth first, definitions first, so that most end in the first round."""
    if isinstance(node, dict):
        for key in ("$defs", "properties", "patternProperties"):
            for child in node.get(key, {}).values():
                yield from _subschemas(child)
        for key in ("prefixItems", "allOf", "anyOf"):
            for child in node.get(key, []):
                yield from _subschemas(child)
        for key in ("items", "additionalProperties"):
            if key in node:
                yield from _subschemas(node[key])
    yield node


def _demands(node: dict[str, Any], root: dict[str, Any]) -> list[Lowered]:
    """What else a value of this schema must satisfy."""
    named = [root["$defs"][node["$ref"].removeprefix("#/$defs/")]] if "$ref" in node else []
    return [*named, *node.get("allOf", [])]


def _parts(node: Lowered, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema and all its demands, and theirs."""
    found: list[dict[str, Any]] = []
    pending: list[Lowered] = [node]
    seen: set[int] = set()
    while pending and len(found) < _MAX_PARTS:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            found.append(part)
            pending += _demands(part, root)
    return found


def _ends(node: dict[str, Any], root: dict[str, Any], ending: _Ending, budget: Budget) -> bool:
    """Whether some value of this schema ends, as far as is known. Each part must end by itself, and all together: one
    may name a property that another demands."""
    parts = _parts(node, root)
    budget.spend(1 + len(parts))
    if not all(ending.holds(other) or other is False for other in _demands(node, root)):
        return False
    if not _end_together(parts, ending, budget):
        return False
    for options in (part["anyOf"] for part in parts if "anyOf" in part):
        if all(option is False for option in options):
            return True  # refused elsewhere, for what it is
        known = [option for option in options if ending.holds(option)]
        if not any(_end_together([*parts, *_parts(option, root)], ending, budget) for option in known):
            return False
    return True


def _end_together(parts: list[dict[str, Any]], ending: _Ending, budget: Budget) -> bool:
    types = _types(parts)
    budget.spend(len(parts))
    if not types or types & _SCALARS or any("const" in part or "enum" in part for part in parts):
        return True
    if "object" in types and _object_ends(parts, ending, budget):
        return True
    return "array" in types and _array_ends(parts, ending)


def _types(parts: list[dict[str, Any]]) -> frozenset[str]:
    types = _SCALARS | {"array", "object"}
    for part in parts:
        if "type" in part:
            named = part["type"]
            listed = frozenset([named] if isinstance(named, str) else named)
            types &= listed | ({"integer"} if "number" in listed else set())
    return types


def _object_ends(parts: list[dict[str, Any]], ending: _Ending, budget: Budget) -> bool:
    required = {name for part in parts for name in part.get("required", [])}
    budget.spend(len(required) * len(parts))
    for name in required:
        for part in parts:
            named = part.get("properties", {})
            value = named[name] if name in named else part.get("additionalProperties", True)
            if isinstance(value, dict) and not ending.holds(value):
                return False
    if any(part.get("minProperties", 0) for part in parts):  # one that may be any property
        values = [value for part in parts for value in (*part.get("properties", {}).values(), *_others(part))]
        budget.spend(len(values))
        return any(ending.holds(value) for value in values) or not any(isinstance(value, dict) for value in values)
    return True


def _others(part: dict[str, Any]) -> list[Lowered]:
    return [*part.get("patternProperties", {}).values(), part.get("additionalProperties", True)]


def _array_ends(parts: list[dict[str, Any]], ending: _Ending) -> bool:
    least = max(part.get("minItems", 0) for part in parts)
    for part in parts:
        prefix = part.get("prefixItems", [])
        needed = prefix[:least] + ([part["items"]] if least > len(prefix) and "items" in part else [])
        if any(isinstance(item, dict) and not ending.holds(item) for item in needed):
            return False
    return True

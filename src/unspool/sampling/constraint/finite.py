"""Whether a (rewritten) schema has a document that ends.

`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}` accepts endless documents only: a matcher would never be
stuck and never be done. The schemas that can end are found from the leaves up, as the least fixed point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unspool.sampling.constraint.schema import Lowered

_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_MAX_PARTS = 256


def endless(schema: dict[str, Any]) -> Lowered | None:
    """A subschema that no finite document satisfies because it needs itself; None if there is none."""
    nodes = [node for node in _subschemas(schema) if isinstance(node, dict)]
    ending: set[int] = set()
    changed = True
    while changed:
        changed = False
        for node in nodes:
            if id(node) not in ending and _ends(_parts(node, schema), schema, ending):
                ending.add(id(node))
                changed = True
    return next((node for node in nodes if id(node) not in ending), None)


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


def _parts(node: Lowered, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema and all that it demands besides, through `$ref` and `allOf`."""
    found: list[dict[str, Any]] = []
    pending, seen = [node], set()
    while pending and len(found) < _MAX_PARTS:
        part = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        if "$ref" in part:
            pending.append(root["$defs"][part["$ref"].removeprefix("#/$defs/")])
        pending += part.get("allOf", [])
    return found


def _ends(parts: list[dict[str, Any]], root: dict[str, Any], ending: set[int]) -> bool:
    """Whether a value of these parts ends, if the subschemas in `ending` do."""
    if any("$ref" in part and len(part) == 1 and len(parts) == 1 for part in parts):
        return False  # a reference that only leads back to itself
    for part in parts:
        if "anyOf" in part:
            rest = [other for other in parts if other is not part]
            alone = {key: value for key, value in part.items() if key != "anyOf"}
            return any(_ends([*rest, alone, *_parts(option, root)], root, ending) for option in part["anyOf"])
    types = _types(parts)
    if types & _SCALARS or any("const" in part or "enum" in part for part in parts):
        return True
    return ("object" in types and _object_ends(parts, ending)) or ("array" in types and _array_ends(parts, ending))


def _types(parts: list[dict[str, Any]]) -> frozenset[str]:
    types = _SCALARS | {"array", "object"}
    for part in parts:
        if "type" in part:
            named = part["type"]
            listed = frozenset([named] if isinstance(named, str) else named)
            types &= listed | ({"integer"} if "number" in listed else set())
    return types


def _object_ends(parts: list[dict[str, Any]], ending: set[int]) -> bool:
    for name in {name for part in parts for name in part.get("required", [])}:
        for part in parts:
            if name in part.get("properties", {}):
                value = part["properties"][name]
            else:
                value = part.get("additionalProperties", True)
            if isinstance(value, dict) and id(value) not in ending:
                return False
    least = max(part.get("minProperties", 0) for part in parts)
    if least:  # one that may be any property
        values = [value for part in parts for value in (*part.get("properties", {}).values(), *_others(part))]
        return any(not isinstance(value, dict) or id(value) in ending for value in values)
    return True


def _others(part: dict[str, Any]) -> list[Lowered]:
    return [*part.get("patternProperties", {}).values(), part.get("additionalProperties", True)]


def _array_ends(parts: list[dict[str, Any]], ending: set[int]) -> bool:
    least = max(part.get("minItems", 0) for part in parts)
    for part in parts:
        prefix = part.get("prefixItems", [])
        needed = prefix[:least] + ([part["items"]] if least > len(prefix) and "items" in part else [])
        if any(isinstance(item, dict) and id(item) not in ending for item in needed):
            return False
    return True

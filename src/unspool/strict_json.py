"""JSON as its standard has it: no NaN, no Infinity, and no key twice in an object, where readers would disagree."""

from __future__ import annotations

import json
from typing import Any


def loads(data: str | bytes) -> Any:
    """The value of a JSON text; ValueError says what is wrong with it, RecursionError that it nests too deeply."""
    return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:80]!r} comes twice in one object")
            seen.add(name)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

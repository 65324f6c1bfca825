"""What a schema that must fail means: one of its keywords fails. `not`, `if` and `oneOf` need it.

What fails a keyword is said by other keywords (`minLength: 3` fails where `maxLength: 2` holds, on a string). Some
failures have no such form (some item is not a number): they are left out, which only narrows. Where none is left, the
schema is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from unspool.sampling.constraint.facts import ATOMS, Claim, Goal, types_of
from unspool.sampling.constraint.limits import Refused

if TYPE_CHECKING:
    from unspool.sampling.constraint.reading import Reader

_BELOW = {"minLength": "string", "minItems": "array", "minProperties": "object"}
_ABOVE = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}
# Keywords of which no failure can be written.
_UNWRITTEN = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "uniqueItems", "patternProperties", "additionalProperties"),
        *("propertyNames", "multipleOf"),
    }
)


class NotPattern:
    """A node that holds for what this pattern finds nothing in."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern


class OfType:
    """A node that holds for values of these types."""

    def __init__(self, types: frozenset[str]) -> None:
        self.types = types


class Excluded:
    """A node that holds for all but these values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


def failing(reader: Reader, claim: Claim) -> tuple[Goal, ...]:
    """The ways in which a value can fail a node; none for a node that always holds."""
    node = claim.node
    if not isinstance(node, dict):
        return ()
    ways: list[Goal] = []
    for key in node:
        for number, parts in enumerate(_failures(reader, claim, key)):
            goal = []
            for index, part in enumerate(parts):
                if not isinstance(part, Claim):
                    made = reader.made(node, f"not {key} {number} {index}", part)
                    part = Claim(made, (*claim.place, key), True, claim.depth + 1)
                goal.append(part)
            ways.append(tuple(goal))
    unwritten = [key for key in node if key in _UNWRITTEN and node[key] is not True]
    if not ways and unwritten:
        raise Refused(f"must fail here, and what fails {unwritten[0]!r} cannot be ensured", claim.place)
    return tuple(ways)


def _failures(reader: Reader, claim: Claim, key: str) -> Iterator[list[Any]]:
    """Each way to fail one keyword: claims, and nodes to be claimed."""
    node, place = claim.node, (*claim.place, key)
    value = node[key]
    match key:
        case "type":
            yield [OfType(ATOMS - types_of(value, place))]
        case "enum":
            yield [Excluded(tuple(value) if isinstance(value, list) else ())]
        case "const":
            yield [Excluded((value,))]
        case "pattern":
            reader.terminal(value, place)
            yield [{"type": "string"}, NotPattern(value)]
        case "required":
            for name in value if isinstance(value, list) else ():
                yield [{"type": "object", "properties": {name: False}}]
        case "properties":
            for name, child in (value if isinstance(value, dict) else {}).items():
                wrong = Claim(child, (*place, name), False, claim.depth + 1)
                yield [{"type": "object", "required": [name], "properties": {name: wrong}}]
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            yield from _beyond(node, key)
        case _ if key in _BELOW or key in _ABOVE:
            yield from _counted(reader, claim, key)
        case _:
            yield from _combined(reader, claim, key)


def _beyond(node: dict[str, Any], key: str) -> Iterator[list[Any]]:
    value = node[key]
    if isinstance(value, bool):  # draft 4: it sharpens minimum or maximum, whose failure says it
        return
    low = key.lower().endswith("minimum")
    strict = key.startswith("exclusive") or node.get("exclusiveMinimum" if low else "exclusiveMaximum") is True
    other = {(True, True): "maximum", (True, False): "exclusiveMaximum"}.get((low, strict))
    other = other or ("minimum" if strict else "exclusiveMinimum")
    yield [{"type": "number", other: value}]


def _counted(reader: Reader, claim: Claim, key: str) -> Iterator[list[Any]]:
    noun = key[3:]
    least, most = reader.range(claim.node, noun, claim.place)
    if key in _BELOW and least > 0:
        yield [{"type": _BELOW[key], f"max{noun}": least - 1}]
    if key in _ABOVE and most is not None:
        yield [{"type": _ABOVE[key], f"min{noun}": most + 1}]


def _combined(reader: Reader, claim: Claim, key: str) -> Iterator[list[Any]]:
    node, place = claim.node, claim.place
    match key:
        case "$ref":
            target, where = reader.document.resolve(node, place)
            yield [Claim(target, where, False)]
        case "not":
            yield [Claim(node[key], (*place, key), True, claim.depth + 1)]
        case "allOf":
            yield from ([option._replace(holds=False)] for option in reader.options(claim, key))
        case "anyOf":
            yield [option._replace(holds=False) for option in reader.options(claim, key)]
        case "oneOf":
            options = reader.options(claim, key)
            yield [option._replace(holds=False) for option in options]
            yield from ([one, two] for index, one in enumerate(options) for two in options[:index])
        case "if":
            test, then, other = (
                Claim(node.get(name, True), (*place, name), True, claim.depth + 1) for name in ("if", "then", "else")
            )
            yield [test, then._replace(holds=False)]
            yield [test._replace(holds=False), other._replace(holds=False)]
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            yield from _undepended(claim, key)


def _undepended(claim: Claim, key: str) -> Iterator[list[Any]]:
    value = claim.node[key]
    for name, child in (value if isinstance(value, dict) else {}).items():
        there = {"type": "object", "required": [name]}
        if isinstance(child, list):
            for other in child:
                yield [{**there, "properties": {other: False}}]
        else:
            yield [there, Claim(child, (*claim.place, key, name), False, claim.depth + 1)]

"""What is known about a value once a conjunction of schemas was read: the form that grammars are written from.

Claim: "the schema at this place holds" (or fails) ─► reading ─► Facts: types, bounds, rules for items and members
Goal: several claims about one value                            └► Choice: one of several conjunctions more
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from unspool.sampling.constraint.limits import Place, Refused
from unspool.sampling.constraint.rendering import Terminal

# Types as the drafts have them, with numbers in two: `number` is `integer` or `fraction`.
ATOMS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
Key = tuple[int, bool]


class Claim(NamedTuple):
    """A schema that a value satisfies or, if not `holds`, fails."""

    node: Any
    place: Place
    holds: bool = True
    depth: int = 0  # subschemas around it

    @property
    def key(self) -> Key:
        return id(self.node), self.holds


Goal = tuple[Claim, ...]


def goal_key(goal: Goal) -> tuple[Key, ...]:
    """Equal for goals that mean the same claims in the same order."""
    return tuple(dict.fromkeys(claim.key for claim in goal))


class Choice(NamedTuple):
    """One of several conjunctions holds. `path`: the claims that led here; one that leads back to them never ends."""

    options: tuple[Goal, ...]
    path: frozenset[Key]


@dataclass(frozen=True)
class ListRule:
    """What one schema says of items: of the first ones, and of the rest."""

    first: Goal
    rest: Claim | None


@dataclass(frozen=True)
class MemberRule:
    """What one schema says of members. `names_members`: it names some, so that others are not meant."""

    named: dict[str, Claim]
    patterns: tuple[tuple[Terminal, Claim], ...]
    rest: Claim | None
    names_members: bool


@dataclass
class Facts:
    """One conjunction, as it is known so far. `copy` to go on in several ways."""

    place: Place
    types: frozenset[str] | None = None
    spoken: frozenset[str] = frozenset()  # types that some keyword speaks of
    values: tuple[Any, ...] | None = None  # null, booleans, numbers and strings of an enum
    excluded: tuple[Any, ...] = ()
    low: Decimal | None = None
    high: Decimal | None = None
    multiples: frozenset[Fraction] = frozenset()
    is_binary: bool = False  # a divisor was written with a point: validators divide in binary
    strings: tuple[str, ...] = ()  # terminals that a string must match, all of them
    other_strings: tuple[str, ...] = ()  # terminals that it must not match, any of them
    min_length: int = 0
    max_length: int | None = None
    items: tuple[ListRule, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    unique: Place | None = None
    members: tuple[MemberRule, ...] = ()
    required: tuple[str, ...] = ()
    min_members: int = 0
    max_members: int | None = None
    names: Goal = ()
    choices: tuple[Choice, ...] = ()
    seen: set[Key] = field(default_factory=set)

    def copy(self) -> Facts:
        return replace(self, seen=set(self.seen))

    def allow(self, types: Iterable[str]) -> None:
        self.types = (ATOMS if self.types is None else self.types) & frozenset(types)

    def at_least(self, name: str, value: Any) -> None:
        known = getattr(self, name)
        setattr(self, name, value if known is None else max(known, value))

    def at_most(self, name: str, value: Any) -> None:
        known = getattr(self, name)
        setattr(self, name, value if known is None else min(known, value))

    @property
    def possible_types(self) -> frozenset[str]:
        """The types that are not ruled out. Where no type is given, those that the keywords speak of are meant."""
        types = self.types if self.types is not None else self.spoken or ATOMS
        if self.values is not None:
            types &= {atom(value) for value in self.values}
        if self.low is not None and self.high is not None and self.low > self.high:
            types -= {"integer", "fraction"}
        if self.max_length is not None and self.max_length < self.min_length:
            types -= {"string"}
        if self.max_items is not None and self.max_items < self.min_items:
            types -= {"array"}
        if self._refuses_members():
            types -= {"object"}
        return types

    def _refuses_members(self) -> bool:
        if self.max_members is not None and self.max_members < max(self.min_members, len(self.required)):
            return True
        for rule in self.members:
            closed = not rule.patterns and rule.rest is not None and rule.rest.node is False and rule.rest.holds
            for name in self.required:
                claim = rule.named.get(name)
                if claim is None and closed:
                    return True
                if claim is not None and claim.node is (not claim.holds):
                    return True
        return False


def atom(value: Any) -> str:
    """The type of a constant."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def types_of(value: Any, place: Place) -> frozenset[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise Refused(f"is {value!r}; a type or a list of types is needed", place)
    for name in listed:
        if name not in TYPES:
            raise Refused(f"{name!r} is no type; types are {', '.join(TYPES)}", place)
    return ATOMS & frozenset(listed) | (frozenset({"integer", "fraction"}) if "number" in listed else frozenset())

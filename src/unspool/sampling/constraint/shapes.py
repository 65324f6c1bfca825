"""From facts about a value to its shapes: scalars as terminals, lists and objects as the goals of what they hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from unspool.sampling.constraint import members, numbers
from unspool.sampling.constraint.facts import Facts, Goal, Key, atom, goal_key
from unspool.sampling.constraint.lexicon import Lexicon
from unspool.sampling.constraint.limits import Place, Refused
from unspool.sampling.constraint.members import ObjectShape
from unspool.sampling.constraint.reading import Reader
from unspool.sampling.constraint.rendering import JSON_CHAR, JSON_STRING, literals, quoted

_FRACTION = r"/-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*/"
_MAX_EXCLUDED = 100


@dataclass(frozen=True)
class Scalar:
    """One lexeme: a terminal's definition, or a number's schema as llguidance takes it."""

    definition: str
    is_number: bool = False


@dataclass(frozen=True)
class ListShape:
    """`values`: the texts of which each may come once, where items are unique; the goals are then unused."""

    first: tuple[Goal, ...]
    rest: Goal
    low: int
    high: int | None
    values: tuple[str, ...] | None = None


Shape = Scalar | ListShape | ObjectShape


class Shaper:
    """The shapes of any goal of one document."""

    def __init__(self, reader: Reader, lexicon: Lexicon, *, open_objects: bool) -> None:
        self._reader = reader
        self._lexicon = lexicon
        self._open_objects = open_objects
        self.reasons: dict[tuple[Key, ...], str] = {}  # why a goal has no shapes

    def shapes(self, goal: Goal) -> list[Shape]:
        """What a value that satisfies the goal can look like; nothing where none can."""
        place = goal[0].place if goal else ()
        try:
            found = [shape for facts in self._reader.ways(goal, place) for shape in self._of(facts)]
        except Refused as refused:
            raise refused if refused.place else Refused(str(refused), place) from None
        if not found:
            self.reasons[goal_key(goal)] = self._reason(goal)
        scalars = dict.fromkeys(shape for shape in found if isinstance(shape, Scalar))
        return [*scalars, *(shape for shape in found if not isinstance(shape, Scalar))]

    def _of(self, facts: Facts) -> list[Shape]:
        types = facts.possible_types
        texts = self._texts(facts, types)
        if texts is not None:
            return [Scalar(literals(texts))] if texts else []
        found: list[Shape] = []
        words = [word for word in self._words(facts) if atom(json.loads(word)) in types]
        if words:
            found.append(Scalar(literals(words)))
        if types & {"integer", "fraction"}:
            found += self._numbers(facts, types)
        if "string" in types and (terminal := self.string(facts)):
            found.append(Scalar(terminal))
        if "array" in types:
            found += self._lists(facts)
        if "object" in types:
            shape = members.shape_of(facts, self._lexicon, self.names(facts.names), open_objects=self._open_objects)
            found += [shape] if shape is not None else []
        return found

    def _reason(self, goal: Goal) -> str:
        ways = self._reader.ways(goal, ())
        if not ways and self._reader.is_circular:
            return "every document that satisfies this is endless"
        if any("string" in facts.possible_types and (facts.strings or facts.other_strings) for facts in ways):
            return "no string satisfies pattern, format and lengths together"
        return "no value satisfies all that is said here"

    # ---- scalars

    @staticmethod
    def _words(facts: Facts) -> list[str]:
        known = [(None, "null"), (True, "true"), (False, "false")]
        return [word for value, word in known if not numbers.is_among(value, facts.excluded)]

    def _texts(self, facts: Facts, types: frozenset[str]) -> list[str] | None:
        """The constants that are left of an enum, as JSON; None without an enum."""
        if facts.values is None:
            return None
        return [json_text(value) for value in facts.values if atom(value) in types and self._fits(value, facts)]

    def _fits(self, value: Any, facts: Facts) -> bool:
        if numbers.is_among(value, facts.excluded):
            return False
        if isinstance(value, str):
            long_enough = (
                facts.min_length <= len(value) <= (len(value) if facts.max_length is None else facts.max_length)
            )
            if not long_enough or any(self._lexicon.matches(term, quoted(value)) for term in facts.other_strings):
                return False
            return all(self._lexicon.matches(term, quoted(value)) for term in facts.strings)
        if isinstance(value, bool) or value is None:
            return True
        exact = Decimal(repr(value))
        if (facts.low is not None and exact < facts.low) or (facts.high is not None and exact > facts.high):
            return False
        return all(Fraction(exact) % divisor == 0 for divisor in facts.multiples)

    def string(self, facts: Facts) -> str | None:
        """The terminal of a string; None where no string satisfies all that is known."""
        parts = sorted(set(facts.strings))
        if facts.min_length or facts.max_length is not None:
            most = "" if facts.max_length is None else facts.max_length
            parts.insert(0, f'/"{JSON_CHAR}{{{facts.min_length},{most}}}"/')
        parts = parts or [JSON_STRING]
        # One complement of all: several are explored together, which takes their product.
        refused = [f"({terminal})" for terminal in sorted(set(facts.other_strings))]
        excluded = [quoted(value) for value in facts.excluded if isinstance(value, str)]
        refused += [literals(excluded)] if excluded else []
        parts += [f"~({' | '.join(refused)})"] if refused else []
        terminal = " & ".join(parts)
        needs_check = facts.strings or facts.other_strings
        return None if needs_check and self._lexicon.is_empty(terminal) else terminal

    def names(self, goal: Goal) -> str | None:
        """The terminal of names that satisfy a goal; empty where none does, None where all do."""
        if not goal:
            return None
        found = []
        for facts in self._reader.ways(goal, goal[0].place):
            types = facts.possible_types
            texts = self._texts(facts, types & {"string"})
            if texts:
                found.append(literals(texts))
            elif texts is None and "string" in types and (terminal := self.string(facts)):
                found.append(f"({terminal})")
        return " | ".join(found)

    def _numbers(self, facts: Facts, types: frozenset[str]) -> list[Shape]:
        kind = "number" if types >= {"integer", "fraction"} else "integer" if "integer" in types else "fraction"
        low, high, place = facts.low, facts.high, facts.place
        divisors = set(facts.multiples) | ({Fraction(1)} if kind == "integer" and facts.multiples else set())
        divisor = numbers.common(divisors, place)
        if facts.is_binary:
            low, high = _clamped(low, high, Decimal(numbers.EXACT))
        if divisor is not None and not numbers.is_exact_divisor(divisor):
            listed = numbers.multiples(divisor, low, high, (*place, "multipleOf"))
            texts = [json_text(value) for value in listed if kind in ("number", atom(value))]
            return [Scalar(literals(texts))] if texts else []
        if kind == "fraction":
            is_free = low is None and high is None and divisor is None and not facts.excluded
            return [Scalar(_FRACTION)] if is_free else []
        excluded = [value for value in facts.excluded if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(excluded) > _MAX_EXCLUDED:
            raise Refused(f"{len(excluded)} numbers are excluded; at most {_MAX_EXCLUDED} are supported", place)
        found: list[Shape] = []
        for start, end in numbers.apart_from(low, high, set(excluded)):
            found += _interval(kind, start, end, divisor, place)
        return found

    # ---- lists

    def _lists(self, facts: Facts) -> list[Shape]:
        low, high = facts.min_items, facts.max_items
        length = max((len(rule.first) for rule in facts.items), default=0)
        first = [_at(facts, number) for number in range(length)]
        rest = _at(facts, length)
        refused = next((number for number, goal in enumerate([*first, rest]) if not members.is_possible(goal)), None)
        if refused is not None:
            high = refused if high is None else min(high, refused)
        excluded = [value for value in facts.excluded if isinstance(value, list)]
        if [] in excluded:
            low = max(low, 1)
        if any(excluded) or (high is not None and low > high):
            return []
        if facts.unique is None or (high is not None and high <= 1):
            return [ListShape(tuple(first[:high]), rest, low, high)]
        values = None if first else self._finite(rest)
        if values is None:
            reason = "true is supported where items come from a fixed set of values, and where at most one is allowed"
            raise Refused(reason, facts.unique)
        high = len(values) if high is None else min(high, len(values))
        return [ListShape((), (), low, high, tuple(values))] if low <= high else []

    def _finite(self, goal: Goal) -> list[str] | None:
        """All values that satisfy a goal, as JSON; None where there are too many to list."""
        found: list[str] = []
        for facts in self._reader.ways(goal, goal[0].place if goal else ()):
            types = facts.possible_types
            texts = self._texts(facts, types)
            if texts is None:
                if not types <= {"null", "boolean"}:
                    return None
                texts = [word for word in self._words(facts) if atom(json.loads(word)) in types]
            found += texts
        return list(dict.fromkeys(found))


def _at(facts: Facts, number: int) -> Goal:
    """What is claimed of the item at a position."""
    claims = [rule.first[number] if number < len(rule.first) else rule.rest for rule in facts.items]
    return tuple(claim for claim in claims if claim is not None)


def _interval(
    kind: str, low: numbers.Bound, high: numbers.Bound, divisor: Fraction | None, place: Place
) -> list[Shape]:
    if kind == "integer":
        low, high = _rounded(low, math.ceil), _rounded(high, math.floor)
        divisor = None if divisor == 1 else divisor
    if low is not None and high is not None and low > high:
        return []
    if divisor is not None and not numbers.holds_multiple(divisor, low, high):
        return []
    bounds = numbers.limits_of(low, high, place)
    schema: dict[str, Any] = {"type": kind, **bounds}
    if divisor is not None:
        schema["multipleOf"] = int(divisor) if divisor.denominator == 1 else float(divisor)
    found: list[Shape] = [Scalar(json.dumps(schema), is_number=True)]
    short = numbers.shorter(bounds) if kind == "number" and divisor is None else []
    return [*found, Scalar(literals([json_text(value) for value in short]))] if short else found


def _rounded(bound: numbers.Bound, how: Callable[[Decimal], int]) -> numbers.Bound:
    return None if bound is None else Decimal(how(bound))


def _clamped(low: numbers.Bound, high: numbers.Bound, widest: Decimal) -> tuple[Decimal, Decimal]:
    return max(-widest, -widest if low is None else low), min(widest, widest if high is None else high)


def json_text(value: Any) -> str:
    match value:
        case str():
            return quoted(value)
        case None | bool():
            return json.dumps(value)
        case _:
            return numbers.text(value)

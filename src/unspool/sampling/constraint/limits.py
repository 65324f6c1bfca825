"""How much a constraint may ask for, and how a refusal says what and where.

Constraints come from strangers and compile in native code that cannot be interrupted, so every quantity that costs
time or memory there is bounded here, before it is handed over. A bound that is met refuses that request alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Place = tuple[str | int, ...]  # the keys that lead from the root of a schema to a value inside it


@dataclass(frozen=True)
class Limits:
    """Defaults hold ordinary and large real schemas; docs/constraints.md says what each was measured to cost."""

    max_bytes: int = 262_144  # of the schema, expression, choices or grammar as given
    max_depth: int = 40  # subschemas inside one another, groups inside one another
    max_nodes: int = 10_000  # subschemas in all
    max_rules: int = 1_000  # definitions of a grammar
    max_values: int = 10_000  # values of one enum, choices
    max_constant: int = 4_096  # characters of one constant string
    max_properties: int = 1_000  # named properties of one object
    max_patterns: int = 32  # patternProperties of one object: each pair must be proved apart
    max_ways: int = 1_000  # conjunctions that one schema's anyOf, oneOf, if and dependent keywords multiply to
    max_goals: int = 10_000  # values that a schema describes, each by the claims it must satisfy
    max_definitions: int = 30_000  # rules of the grammar that a schema becomes
    max_work: int = 1_000_000  # steps of reading and proving: about a microsecond each
    max_repeat: int = 10_000  # parts of an expression once its repetitions are written out
    max_multiple: int = 10_000  # multipleOf
    max_count: int = 1_000_000  # minLength, minItems, minProperties
    lexer_fuel: int = 1_000_000  # building the lexer: about 50,000 a millisecond
    step_fuel: int = 500_000  # one mask: about 14,000 a millisecond
    step_items: int = 50_000  # parser items of one mask: about 20,000 a millisecond
    row_items: int = 8_000  # parser items of one position
    lexer_states: int = 50_000  # 1 to 2 kB each
    grammar_size: int = 500_000  # symbols
    seconds: float = 10.0  # how long `compile_async` waits


DEFAULT = Limits()


class Budget:
    """Work that proofs may take: what nests and branches freely can keep them busy for ever."""

    def __init__(self, limits: Limits) -> None:
        self._left = limits.max_work

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise Refused("the schema is too intricate to be checked", "$")


class Refused(Exception):
    """A constraint that cannot be honoured: why, and where in it."""

    def __init__(self, reason: str, place: str | Place = "") -> None:
        self.place = place if isinstance(place, str) else path(place)
        super().__init__(f"{self.place}: {reason}" if self.place else reason)


def path(place: Place) -> str:
    """`$.properties.a[0]`; keys that are no plain word are quoted."""
    text = "$"
    for key in place:
        if isinstance(key, int):
            text += f"[{key}]"
        elif re.fullmatch(r"[A-Za-z_$][\w$-]*", key):
            text += f".{key}"
        else:
            text += f"[{key!r}]"
    return text

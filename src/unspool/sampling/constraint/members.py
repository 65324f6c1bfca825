"""The members of objects: which names there may be, and what is claimed of the value of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from unspool.sampling.constraint.facts import Claim, Facts, Goal, MemberRule
from unspool.sampling.constraint.lexicon import Lexicon
from unspool.sampling.constraint.limits import Refused
from unspool.sampling.constraint.rendering import JSON_STRING, Terminal, literals, quoted

_MAX_CELLS = 64


@dataclass(frozen=True)
class Member:
    name: str
    goal: Goal
    required: bool


@dataclass(frozen=True)
class ObjectShape:
    """Members come in this order, then any number of others. `others`: the terminals of their names, and their goals;
    no name is in two of them."""

    members: tuple[Member, ...]
    others: tuple[tuple[str, Goal], ...]
    low: int
    high: int | None


def shape_of(facts: Facts, lexicon: Lexicon, names: str | None, *, open_objects: bool) -> ObjectShape | None:
    """`names`: the terminal that every name must match; None if any may be. None if no object satisfies the facts."""
    low = facts.min_members
    excluded = [value for value in facts.excluded if isinstance(value, dict)]
    if {} in excluded:
        low = max(low, 1)
    if any(excluded):
        return None
    members: list[Member] = []
    known = dict.fromkeys([*(name for rule in facts.members for name in rule.named), *facts.required])
    for name in known:
        goal = [claim for rule in facts.members for claim in _claims(rule, name, lexicon)]
        is_required = name in facts.required
        if not is_possible(goal) or (names is not None and not (names and lexicon.matches(names, quoted(name)))):
            if is_required:
                return None
        else:
            members.append(Member(name, tuple(goal), is_required))
    closed = not open_objects and any(rule.names_members for rule in facts.members) and low <= len(members)
    others = _others(facts, lexicon, list(known), names, closed=closed)
    if low > len(members) + 1 and others:
        raise Refused(
            f"is {low:,}; at most one more than the {len(members):,} named properties is supported, because other "
            "names may come twice and count once",
            (*facts.place, "minProperties"),
        )
    if low > len(members) + bool(others):
        return None
    return ObjectShape(tuple(members), tuple(others), low, facts.max_members)


def is_possible(goal: Iterable[Claim]) -> bool:
    """Whether no claim of a goal is impossible by itself."""
    return all(claim.node is not (not claim.holds) for claim in goal)


def _claims(rule: MemberRule, name: str, lexicon: Lexicon) -> list[Claim]:
    """What one schema says of the member with this name."""
    found = [rule.named[name]] if name in rule.named else []
    for terminal, claim in rule.patterns:
        text = quoted(name)
        if lexicon.matches(terminal.narrow, text):
            found.append(claim)
        elif not terminal.is_exact and lexicon.matches(terminal.wide, text):
            raise Refused(f"validators disagree whether the name {name!r} matches", claim.place)
    return found or ([rule.rest] if rule.rest is not None else [])


class _Cell(NamedTuple):
    """Names that match some terminals and not others."""

    inside: tuple[str, ...]
    outside: tuple[str, ...]

    @property
    def terminal(self) -> str:
        parts = [f"({terminal})" for terminal in self.inside] or [JSON_STRING]
        # One complement of all: several are explored together, which takes their product.
        refused = " | ".join(f"({terminal})" for terminal in self.outside)
        return " & ".join([*parts, *([f"~({refused})"] if refused else [])])


def _others(
    facts: Facts, lexicon: Lexicon, known: list[str], names: str | None, *, closed: bool
) -> list[tuple[str, Goal]]:
    """Names beyond the known ones, by what is claimed of their values: one cell for each set of patterns that a name
    can match. Names on which dialects disagree are in none."""
    if names == "":
        return []
    cells = [_Cell((names,) if names else (), (literals([quoted(name) for name in known]),) if known else ())]
    patterns = {terminal.narrow: terminal for rule in facts.members for terminal, _ in rule.patterns}
    for pattern in patterns.values():
        cells = [part for cell in cells for part in _split(cell, pattern, lexicon)]
        if len(cells) > _MAX_CELLS:
            raise Refused(f"patternProperties overlap in more than {_MAX_CELLS} ways", facts.place)
    found = []
    for cell in cells:
        goal = [claim for rule in facts.members for claim in _said(rule, cell.inside)]
        if (closed and not goal) or not is_possible(goal):
            continue
        if not (patterns or names) or not lexicon.is_empty(cell.terminal):
            found.append((cell.terminal, tuple(goal)))
    return found


def _split(cell: _Cell, pattern: Terminal, lexicon: Lexicon) -> list[_Cell]:
    inside = _Cell((*cell.inside, pattern.narrow), cell.outside)
    outside = _Cell(cell.inside, (*cell.outside, pattern.wide))
    # Two patterns that exclude each other are the usual case, and quickly found.
    apart = any(lexicon.is_empty(f"({other}) & ({pattern.narrow})") for other in cell.inside)
    if apart or lexicon.is_empty(inside.terminal):
        return [cell if pattern.is_exact else outside]
    return [inside, outside]


def _said(rule: MemberRule, inside: tuple[str, ...]) -> list[Claim]:
    found = [claim for terminal, claim in rule.patterns if terminal.narrow in inside]
    return found or ([rule.rest] if rule.rest is not None else [])

"""From a JSON Schema to a grammar that no more is accepted by than the schema says.

    document ─► reading ─► facts ─► shapes ─► productive ─► writing ─► text for llguidance
    (JSON)      (claims)   (of a     (scalars, (what can     (rules)
                            value)    lists,    end)
                                      objects)

A grammar may narrow (a format's rare spellings, a bound's last digit, the order of members) and never widens: every
finished document validates. What cannot be said so is refused by name. docs/constraints.md lists both.

Why not leave it to llguidance: a name spelled `"\\u0061"` would escape the rule for `"a"`, a key given twice would
count twice towards minProperties, text above an exclusive bound can read as that bound, and blanks would not be those
that models write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.facts import Claim, Goal, goal_key
from unspool.sampling.constraint.layout import WHITESPACE, Whitespace
from unspool.sampling.constraint.lexicon import Lexicon
from unspool.sampling.constraint.limits import Budget, Limits, Refused
from unspool.sampling.constraint.productive import GoalKey, explain, goals_of, productive
from unspool.sampling.constraint.reading import Reader
from unspool.sampling.constraint.shapes import Shape, Shaper
from unspool.sampling.constraint.writing import Writer

_OPTIONS = "x-unspool"


@dataclass(frozen=True)
class JsonOptions:
    """`additional_properties`: whether objects that name their members and do not say may hold others."""

    whitespace: Whitespace = "model"
    additional_properties: bool = False


def grammar_of(value: Any, limits: Limits, options: JsonOptions | None = None) -> str:
    """The grammar of a schema's documents. What the schema's own `x-unspool` says goes before `options`."""
    document = Document(value, limits)
    chosen = _options(document.root, options or JsonOptions())
    budget = Budget(limits)
    shaper = Shaper(
        Reader(document, limits, budget), Lexicon(limits, budget), open_objects=chosen.additional_properties
    )
    start: Goal = (Claim(document.root, ()),)
    table: dict[GoalKey, tuple[Goal, list[Shape]]] = {}
    pending = [start]
    while pending:
        goal = pending.pop()
        key = goal_key(goal)
        if key in table:
            continue
        shapes = shaper.shapes(goal)
        table[key] = goal, shapes
        budget.spend(10)
        pending += [inner for shape in reversed(shapes) for inner in goals_of(shape) if goal_key(inner) not in table]
        if len(table) > limits.max_goals:
            raise Refused(f"the schema describes more than {limits.max_goals:,} different values", "$")
    known = productive(table)
    if goal_key(start) not in known:
        raise explain(start, table, known, shaper.reasons)
    return Writer(start, table, known, chosen.whitespace, limits).grammar()


def _options(root: Any, default: JsonOptions) -> JsonOptions:
    given = root.get(_OPTIONS, {}) if isinstance(root, dict) else {}
    if not isinstance(given, dict) or set(given) - {"whitespace", "additional_properties"}:
        raise Refused("takes an object with 'whitespace' and 'additional_properties'", (_OPTIONS,))
    whitespace = given.get("whitespace", default.whitespace)
    if whitespace not in WHITESPACE:
        raise Refused(f"is {whitespace!r}; allowed: {', '.join(WHITESPACE)}", (_OPTIONS, "whitespace"))
    is_open = given.get("additional_properties", default.additional_properties)
    if not isinstance(is_open, bool):
        raise Refused(f"is {is_open!r}; true or false is needed", (_OPTIONS, "additional_properties"))
    return JsonOptions(whitespace, is_open)

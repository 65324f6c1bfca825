"""Which goals some finite document satisfies.

`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}` accepts endless documents only: a matcher would never be
stuck and never be done. The goals that can end are found from the leaves up, as the least fixed point; what cannot is
left out of the grammar, so that no answer walks into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from unspool.sampling.constraint.facts import Goal, Key, goal_key
from unspool.sampling.constraint.limits import Refused
from unspool.sampling.constraint.members import ObjectShape
from unspool.sampling.constraint.shapes import ListShape, Scalar, Shape

GoalKey = tuple[Key, ...]
Table = Mapping[GoalKey, tuple[Goal, list[Shape]]]


def goals_of(shape: Shape) -> Iterator[Goal]:
    """The goals that a shape may need, most important first."""
    match shape:
        case ListShape(first, rest, _, _, None):
            yield from first
            yield rest
        case ObjectShape(members, others):
            yield from (member.goal for member in members)
            yield from (goal for _, goal in others)


def productive(table: Table) -> set[GoalKey]:
    known: set[GoalKey] = set()
    waiting: dict[GoalKey, set[GoalKey]] = {}
    for key, (_, shapes) in table.items():
        for shape in shapes:
            for goal in goals_of(shape):
                waiting.setdefault(goal_key(goal), set()).add(key)
    pending = list(table)[::-1]
    while pending:
        key = pending.pop()
        if key not in known and any(ends(shape, known) for shape in table[key][1]):
            known.add(key)
            pending += waiting.get(key, ())
    return known


def ends(shape: Shape, known: Collection[GoalKey]) -> bool:
    """Whether some value of this shape is finite, as far as is known."""
    if any(goal_key(goal) not in known for goal in _needed(shape)):
        return False
    if isinstance(shape, ObjectShape) and shape.low:
        count = sum(goal_key(member.goal) in known for member in shape.members)
        return count + any(goal_key(goal) in known for _, goal in shape.others) >= shape.low
    return True


def _needed(shape: Shape) -> list[Goal]:
    """Goals that every value of this shape satisfies somewhere."""
    match shape:
        case ListShape(first, rest, low, _, None):
            return [*first[:low], *([rest] if low > len(first) else [])]
        case ObjectShape(members):
            return [member.goal for member in members if member.required]
    return []


def nesting(start: Goal, table: Table, most: int) -> int:
    """How many lists and objects can stand within one another, counted up to `most`."""
    around = {goal_key(start)}
    for depth in range(most):
        shapes = [shape for key in around for shape in table[key][1] if not isinstance(shape, Scalar)]
        if not shapes:
            return depth
        around = {goal_key(goal) for shape in shapes for goal in goals_of(shape)}
    return most


def explain(start: Goal, table: Table, known: Collection[GoalKey], reasons: Mapping[GoalKey, str]) -> Refused:
    """Why nothing satisfies a goal: the place that no value satisfies, or that only endless ones do."""
    goal, seen = start, set[GoalKey]()
    while (key := goal_key(goal)) not in seen:
        seen.add(key)
        place = goal[0].place if goal else ()
        shapes = table[key][1]
        if not shapes:
            return Refused(reasons[key], place)
        inner = [lacking for shape in shapes for lacking in [*_needed(shape), *goals_of(shape)]]
        goal = next(lacking for lacking in inner if goal_key(lacking) not in known)
    return Refused("every document that satisfies this is endless", place)

"""Writes the shapes of values as a grammar: one rule for each goal, brackets and commas as the layout has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from unspool.sampling.constraint.cfg import SAME, Alternative, Cfg, Symbol
from unspool.sampling.constraint.facts import Goal, goal_key
from unspool.sampling.constraint.layout import DEEPEST, LAYOUT_BITS, START, Layout, Whitespace
from unspool.sampling.constraint.limits import Limits
from unspool.sampling.constraint.members import ObjectShape
from unspool.sampling.constraint.productive import GoalKey, Table, ends, nesting
from unspool.sampling.constraint.rendering import literals, quoted
from unspool.sampling.constraint.shapes import ListShape, Scalar, Shape

_COUNT = "[8:28]"
_ADD = f"incr({_COUNT})"
_FIRST_MARK, _MARKS = 16, 40  # bits that say which values were used, where each may come once
_LONG = 6  # symbols that are not written twice


class Part(NamedTuple):
    """One of a sequence: what it is written as, and whether it must be there."""

    symbols: tuple[Symbol, ...]
    required: bool


class Writer:
    def __init__(
        self, start: Goal, table: Table, known: Collection[GoalKey], whitespace: Whitespace, limits: Limits
    ) -> None:
        self._table = table
        self._known = known
        self._cfg = Cfg(limits)
        self._layout = Layout(self._cfg, whitespace, nesting(start, table, DEEPEST))
        self._start = start
        self._names: dict[GoalKey, str] = {}
        self._pending: list[GoalKey] = []

    def grammar(self) -> str:
        """The grammar's text; its `start` is a value that satisfies the goal."""
        root = self._value(self._start)
        while self._pending:
            key = self._pending.pop()
            shapes = [shape for shape in self._table[key][1] if ends(shape, self._known)]
            self._cfg.define(self._names[key], [Alternative((self._shape(shape),)) for shape in shapes])
        return self._cfg.text(root.name, START)

    def _value(self, goal: Goal, parameter: str = SAME) -> Symbol:
        key = goal_key(goal)
        if key not in self._names:
            self._names[key] = self._cfg.new_name()
            self._pending.append(key)
        return Symbol(self._names[key], parameter)

    def _shape(self, shape: Shape) -> Symbol:
        match shape:
            case Scalar(definition, is_number):
                return self._cfg.number(definition) if is_number else self._cfg.terminal(definition)
            case ListShape():
                return self._list(shape)
            case ObjectShape():
                return self._object(shape)

    def _lives(self, goal: Goal) -> bool:
        return goal_key(goal) in self._known

    # ---- lists

    def _list(self, shape: ListShape) -> Symbol:
        name = self._cfg.new_name()
        body = self._items(shape) if shape.values is None else self._each_once(shape)
        self._layout.container(name, "[]", body, may_be_empty=shape.low == 0)
        return Symbol(name)

    def _items(self, shape: ListShape) -> str | None:
        """The items of a list that is not empty; None if there is no such list."""
        first = list(shape.first)
        cut = next((number for number, goal in enumerate(first) if not self._lives(goal)), None)
        high = shape.high
        if cut is not None:
            first, high = first[:cut], cut if high is None else min(high, cut)
        elif not self._lives(shape.rest):
            high = len(first) if high is None else min(high, len(first))
        if high == 0:
            return None
        parts = [Part((self._value(goal),), number < max(shape.low, 1)) for number, goal in enumerate(first)]
        least, most = max(shape.low - len(first), 0), None if high is None else high - len(first)
        if most == 0:
            return self._in_order(parts)
        item = self._value(shape.rest)
        more = self._cfg.rule([Alternative((self._layout.comma, item))])
        if not parts:
            more_of = (Symbol(more, times=_times(max(least, 1) - 1, None if most is None else most - 1)),)
            return self._cfg.rule([Alternative((item, *(() if most == 1 else more_of)))])
        return self._in_order(parts, (Symbol(more, times=_times(least, most)),))

    def _in_order(self, parts: Sequence[Part], tail: tuple[Symbol, ...] = ()) -> str:
        """A list's first items: each only after the one before it."""
        rest = tail
        for number in range(len(parts) - 1, -1, -1):
            comma = (self._layout.comma,) if number else ()
            here = (*comma, *parts[number].symbols, *rest)
            optional = not parts[number].required and number > 0
            rest = (Symbol(self._cfg.rule([Alternative(here), Alternative(())])),) if optional else here
            if len(rest) > _LONG:
                rest = (Symbol(self._cfg.rule([Alternative(rest)])),)
        return self._cfg.rule([Alternative(rest)])

    def _each_once(self, shape: ListShape) -> str:
        """Values of which each comes at most once: in any order, or in the given one where there are many."""
        values = [self._cfg.terminal(literals([text])) for text in shape.values or ()]
        if len(values) > _MARKS:
            parts = [Part((value,), False) for value in values]
            return self._sequence(parts, (), shape.low, shape.high)
        used = f"[{_FIRST_MARK}:{_FIRST_MARK + _MARKS}]"
        rest = self._cfg.new_name()
        low, high = shape.low, len(values) if shape.high is None else shape.high
        comma = Symbol(self._layout.comma.name, LAYOUT_BITS)
        first, more = [], [Alternative((), f"bit_count_ge({used}, {low})")]
        for number, value in enumerate(values, _FIRST_MARK):
            marked = Symbol(rest, f"set_bit({number})")
            first.append(Alternative((value, marked)))
            free = f"and(bit_clear({number}), bit_count_lt({used}, {high}))"
            more.append(Alternative((comma, value, marked), free))
        self._cfg.define(rest, more)
        return self._cfg.rule(first)

    # ---- objects

    def _object(self, shape: ObjectShape) -> Symbol:
        members = [member for member in shape.members if self._lives(member.goal)]
        others = [(names, goal) for names, goal in shape.others if self._lives(goal)]
        required = sum(member.required for member in members)
        is_counted = shape.high is not None and (bool(others) or shape.high < len(members))
        is_counted |= shape.low > required
        given = LAYOUT_BITS if is_counted else SAME
        parts = [
            Part(self._pair(literals([quoted(member.name)]), member.goal, given), member.required) for member in members
        ]
        tail = [self._pair(names, goal, given) for names, goal in others]
        low, high = (shape.low, shape.high) if is_counted else (0, None)
        name = self._cfg.new_name()
        body = self._sequence(parts, tail, low, high) if (parts or tail) and high != 0 else None
        self._layout.container(name, "{}", body, may_be_empty=required == 0 and shape.low == 0)
        return Symbol(name)

    def _pair(self, names: str, goal: Goal, given: str) -> tuple[Symbol, ...]:
        return (self._cfg.terminal(names), self._layout.colon, self._value(goal, given))

    def _sequence(self, parts: Sequence[Part], tail: Sequence[tuple[Symbol, ...]], low: int, high: int | None) -> str:
        """Parts in this order, each at most once, then any number of the tail's; at least one in all. `low` and `high`
        count them, where a tail counts once towards `low`: its names may repeat."""
        if low <= sum(part.required for part in parts) and high is None:
            return self._uncounted(parts, tail)
        return self._counted(parts, tail, low, high)

    def _uncounted(self, parts: Sequence[Part], tail: Sequence[tuple[Symbol, ...]]) -> str:
        comma = self._layout.comma
        rest: tuple[Symbol, ...] = ()
        if tail:
            more = self._cfg.rule([Alternative((comma, *one)) for one in tail])
            rest = (Symbol(more, times="*"),)
        first = [Alternative((*one, *rest)) for one in tail]
        for part in reversed(parts):
            if len(rest) > _LONG:
                rest = (Symbol(self._cfg.rule([Alternative(rest)])),)
            here = Alternative((*part.symbols, *rest))
            first = [here] if part.required else [here, *first]
            with_it = (comma, *part.symbols, *rest)
            rest = with_it if part.required else (Symbol(self._cfg.rule([Alternative(with_it), Alternative(rest)])),)
        return self._cfg.rule(first)

    def _counted(self, parts: Sequence[Part], tail: Sequence[tuple[Symbol, ...]], low: int, high: int | None) -> str:
        comma = Symbol(self._layout.comma.name, LAYOUT_BITS)
        room = f"lt({_COUNT}, {high})" if high is not None else "true"
        more = self._cfg.new_name() if tail else ""
        rest = self._cfg.new_name()
        again = [Alternative((comma, *one, Symbol(more, _ADD)), room) for one in tail]
        if tail:
            self._cfg.define(more, [Alternative(()), *again])
        enter = f"and(ge({_COUNT}, {max(low - 1, 0)}), {room})"
        ending = [Alternative((), f"ge({_COUNT}, {low})")]
        self._cfg.define(rest, [*ending, *(Alternative(one.symbols, enter) for one in again)])
        first = [Alternative((*one, Symbol(more, _ADD)), enter) for one in tail]
        must, may = 0, 1 if tail else 0  # of those that come after
        for part in reversed(parts):
            # Those before leave room for what must come, and enough is left to reach `low`.
            guards = [f"ge({_COUNT}, {max(low - 1 - must - may, 0)})"]
            if high is not None:
                guards.append(f"lt({_COUNT}, {max(high - must, 0)})")
            guard = f"and({guards[0]}, {guards[1]})" if len(guards) > 1 else guards[0]
            after = Symbol(rest, _ADD)
            here = Alternative((*part.symbols, after), guard)
            first = [here] if part.required else [here, *first]
            options = [Alternative((comma, *part.symbols, after), guard)]
            rest = self._cfg.rule(options if part.required else [*options, Alternative((Symbol(rest),))])
            must, may = (must + 1, may) if part.required else (must, may + 1)
        return self._cfg.rule(first)


def _times(low: int, high: int | None) -> str:
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"

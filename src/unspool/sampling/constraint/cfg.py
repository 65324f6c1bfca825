"""A context-free grammar in the making, and its text in llguidance's Lark dialect.

Rules may take llguidance's parameter, a number of 64 bits that conditions look at and references change: here its low
bits say how a document is laid out, the others count members or mark values that were used. Whether a rule takes it
follows from what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unspool.sampling.constraint.limits import Limits, Refused

SAME = "_"
_IN_ONE_LEXEME = '"x-guidance": {"whitespace_flexible": false}'


class Symbol(NamedTuple):
    """A terminal or a rule, by its name; `parameter`: what a rule is given, `times`: how often it comes."""

    name: str
    parameter: str = SAME
    times: str = ""


class Alternative(NamedTuple):
    symbols: tuple[Symbol, ...]
    condition: str = ""


@dataclass
class Cfg:
    limits: Limits
    _rules: dict[str, list[Alternative]] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)  # name by definition
    _numbers: dict[str, str] = field(default_factory=dict)
    _size: int = 0

    def terminal(self, definition: str) -> Symbol:
        return Symbol(self._terminals.setdefault(definition, f"T{len(self._terminals)}"))

    def number(self, schema: str) -> Symbol:
        """A number, by the JSON Schema that llguidance enforces."""
        return Symbol(self._numbers.setdefault(schema, f"number_{len(self._numbers)}"))

    def new_name(self) -> str:
        """A rule's name, to be defined later."""
        name = f"r{len(self._rules)}"
        self._rules[name] = []
        return name

    def rule(self, alternatives: Sequence[Alternative]) -> str:
        name = self.new_name()
        self.define(name, alternatives)
        return name

    def define(self, name: str, alternatives: Sequence[Alternative]) -> None:
        self._size += sum(1 + len(alternative.symbols) for alternative in alternatives)
        if self._size > self.limits.grammar_size or len(self._rules) > self.limits.max_definitions:
            raise Refused("the grammar that this schema needs is too large", "$")
        self._rules[name] = list(alternatives)

    def text(self, start: str, parameter: str) -> str:
        """Everything that `start` needs, with `start` given this parameter."""
        self._shorten()
        parametric = self._parametric()

        def written(symbol: Symbol) -> str:
            given = f"::{symbol.parameter}" if symbol.name in parametric else ""
            return f"{symbol.name}{given}{symbol.times}"

        lines = ["%llguidance {}", f"start: {written(self._final(Symbol(start, parameter)))}"]
        used = self._used(start)
        for name, alternatives in self._rules.items():
            if name not in used:
                continue
            options = []
            for symbols, condition in alternatives:
                body = " ".join(written(symbol) for symbol in symbols) or '""'
                options.append(f"{body} %if {condition}" if condition else body)
            lines.append(f"{name}{'::_' if name in parametric else ''}: {' | '.join(options)}")
        lines += [f"{name}: {definition}" for definition, name in self._terminals.items() if name in used]
        for schema, name in self._numbers.items():
            if name in used:
                lines.append(f"{name}: %json {schema[:-1]}, {_IN_ONE_LEXEME}}}")
        return "\n".join(lines)

    def _shorten(self) -> None:
        """References to rules that only name another symbol become references to that symbol."""
        for alternatives in self._rules.values():
            for number, (symbols, condition) in enumerate(alternatives):
                alternatives[number] = Alternative(tuple(self._final(symbol) for symbol in symbols), condition)

    def _final(self, symbol: Symbol) -> Symbol:
        seen = set()
        while symbol.name in self._rules and symbol.name not in seen:
            seen.add(symbol.name)
            alternatives = self._rules[symbol.name]
            if len(alternatives) != 1 or alternatives[0].condition or len(alternatives[0].symbols) != 1:
                break
            other = alternatives[0].symbols[0]
            if other.times or (other.parameter != SAME and other.name in self._rules):
                break
            symbol = other._replace(parameter=symbol.parameter, times=symbol.times)
        return symbol

    def _used(self, start: str) -> set[str]:
        used, pending = set[str](), [self._final(Symbol(start)).name]
        while pending:
            name = pending.pop()
            if name not in used:
                used.add(name)
                pending += [symbol.name for one in self._rules.get(name, ()) for symbol in one.symbols]
        return used

    def _parametric(self) -> set[str]:
        """The rules that have conditions, or refer to one that does with something made of their own parameter."""
        users: dict[str, list[str]] = {}
        found = set()
        for name, alternatives in self._rules.items():
            if any(alternative.condition for alternative in alternatives):
                found.add(name)
            for alternative in alternatives:
                for symbol in alternative.symbols:
                    if not symbol.parameter.isdigit():
                        users.setdefault(symbol.name, []).append(name)
        pending = list(found)
        while pending:
            for name in users.get(pending.pop(), ()):
                if name not in found:
                    found.add(name)
                    pending.append(name)
        return found

"""GBNF, the grammars of llama.cpp (and SGLang's EBNF): read, and written in llguidance's Lark dialect.

    root ::= "yes" | "no" [.!]{0,3}        start: T        T: "yes" | "no" (/[\\x{2e}\\x{21}]/){0,3}

The translation is exact. A grammar that refers to itself nowhere is one regular expression, so it becomes one lexeme.
Others are written character by character: with lexemes of one character each, where one ends is no question, so
llguidance's rule that the longest lexeme wins changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from unspool.sampling.constraint.limits import Limits, Refused

IS_GBNF = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
MAX_CHARACTER = 0x10FFFF


@dataclass(frozen=True)
class Text:
    """These characters, one after another."""

    text: str


@dataclass(frozen=True)
class Set:
    """One character of some ranges, or of all others."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True)
class Token:
    """A special token, in the words that Lark has for it."""

    mark: str


@dataclass(frozen=True)
class Name:
    """A rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None


Node = Text | Set | Token | Name | Sequence | Choice | Repeat

_BLANK = re.compile(r"(?:[ \t]|#[^\n]*)*")
_BLANK_OR_LINE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
_BOUNDS = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_TOKEN = re.compile(r"!?<[^<>\s]+>")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}


class Reader:
    """Reads a grammar's rules. Raises Refused with the line of what it cannot represent."""

    def __init__(self, text: str, limits: Limits) -> None:
        self._text, self._limits = text, limits
        self._at = self._depth = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._match(_NAME)
            self._skip(lines=True)
            if not name or not self._text.startswith("::=", self._at):
                raise self._wrong("expected a rule, name ::= …")
            if name in found:
                raise self._wrong(f"the rule {name} is defined twice")
            self._at += 3
            self._skip(lines=True)
            found[name] = self._choice()
            if len(found) > self._limits.max_rules:
                raise self._wrong(f"there are more than {self._limits.max_rules:,} rules")
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._wrong(f"unexpected {self._text[self._at]!r}")
            self._skip(lines=True)
        if "root" not in found:
            raise Refused("a grammar begins with the rule root, and there is none")
        for node in found.values():
            for name in names_in(node):
                if name not in found:
                    raise Refused(f"the rule {name} is used and not defined")
        return found

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > self._limits.max_depth:
            raise self._wrong(f"groups nest deeper than {self._limits.max_depth}")
        options = [self._sequence()]
        while self._at < len(self._text) and self._text[self._at] == "|":
            self._at += 1
            self._skip(lines=True)
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            parts.append(self._repeated(part))
            self._skip(lines=self._depth > 1)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node | None:
        sign = self._text[self._at : self._at + 1]
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._set()
        if sign == ".":
            self._at += 1
            return Set((), is_negated=True)
        if sign == "(":
            self._at += 1
            self._skip(lines=True)
            inner = self._choice()
            if self._text[self._at : self._at + 1] != ")":
                raise self._wrong("expected )")
            self._at += 1
            return inner
        if sign in ("<", "!") and sign:
            mark = self._match(_TOKEN)
            if not mark or mark.startswith("!"):
                raise self._wrong("all tokens but one (!<…>) cannot be represented" if mark else f"unexpected {sign!r}")
            return Token(mark)
        name = self._match(_NAME)
        return Name(name) if name else None

    def _repeated(self, part: Node) -> Node:
        self._skip()
        sign = self._text[self._at : self._at + 1]
        if sign and sign in "*+?":
            self._at += 1
            part = Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
        elif sign == "{":
            bounds = _BOUNDS.match(self._text, self._at)
            if bounds is None or not (bounds[1] or bounds[2]):
                raise self._wrong("expected {m}, {m,} or {m,n}")
            self._at = bounds.end()
            least = int(bounds[1] or 0)
            most = (int(bounds[3]) if bounds[3] else None) if bounds[2] else least
            if max(least, most or 0) > self._limits.max_repeat or (most is not None and most < least):
                raise self._wrong(f"repetitions go from m to n, up to {self._limits.max_repeat:,}")
            part = Repeat(part, least, most)
        else:
            return part
        return self._repeated(part)

    def _literal(self) -> Node:
        self._at += 1
        text = ""
        while (character := self._character('"')) is not None:
            text += character
            if len(text) > self._limits.max_constant:
                raise self._wrong(f"a text has more than {self._limits.max_constant:,} characters")
        return Text(text)

    def _set(self) -> Node:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while (first := self._character("]")) is not None:
            last: str | None = first
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character("]")
            if last is None or last < first:
                raise self._wrong("a range of characters goes from the lower to the higher")
            ranges.append((ord(first), ord(last)))
        if not ranges and not is_negated:
            raise self._wrong("a set without characters matches nothing")
        return Set(tuple(ranges), is_negated)

    def _character(self, end: str) -> str | None:
        """The next character of a text or a set, an escape resolved; None at its end."""
        sign = self._text[self._at : self._at + 1]
        if not sign or sign == "\n":
            raise self._wrong(f"expected {end}")
        self._at += 1
        if sign == end:
            return None
        if sign != "\\":
            return sign
        sign = self._text[self._at : self._at + 1]
        self._at += 1
        if sign in _HEX:
            digits = self._text[self._at : self._at + _HEX[sign]]
            self._at += _HEX[sign]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[sign]}}}", digits):
                raise self._wrong(f"\\{sign} takes {_HEX[sign]} digits")
            code = int(digits, 16)
            if code > MAX_CHARACTER or 0xD800 <= code < 0xE000:
                raise self._wrong(f"U+{code:X} is no character")
            return chr(code)
        if sign not in _ESCAPES or not sign:
            raise self._wrong(f"unknown escape \\{sign}")
        return _ESCAPES[sign]

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found[0] if found else ""

    def _skip(self, *, lines: bool = False) -> None:
        self._match(_BLANK_OR_LINE if lines else _BLANK)

    def _wrong(self, reason: str) -> Refused:
        line = self._text.count("\n", 0, self._at) + 1
        return Refused(reason, f"line {line}")


def names_in(node: Node) -> Iterator[str]:
    """The rules that a node refers to."""
    if isinstance(node, Name):
        yield node.name
    for part in _parts(node):
        yield from names_in(part)


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()


def _has_token(node: Node) -> bool:
    return isinstance(node, Token) or any(map(_has_token, _parts(node)))


def to_lark(text: str, limits: Limits) -> str:
    """The same grammar in Lark."""
    rules = Reader(text, limits).rules()
    used = _reachable(rules)
    numbers = {name: number for number, name in enumerate(used)}
    is_regular = not any(_has_token(rules[name]) for name in used) and _is_acyclic(rules, used)
    prefix = "T_" if is_regular else "r_"
    write = Writer({name: f"{prefix}{number}" for name, number in numbers.items()}, by_character=not is_regular)
    lines = [f"start: {write.names['root']}"]
    lines += [f"{write.names[name]}: {write.node(rules[name])}" for name in used]
    return "\n".join(lines) + "\n"


def _reachable(rules: dict[str, Node]) -> list[str]:
    used, left = ["root"], ["root"]
    while left:
        for name in names_in(rules[left.pop()]):
            if name not in used:
                used.append(name)
                left.append(name)
    return used


def _is_acyclic(rules: dict[str, Node], used: list[str]) -> bool:
    done: set[str] = set()
    while len(done) < len(used):
        ready = [name for name in used if name not in done and set(names_in(rules[name])) <= done]
        if not ready:
            return False
        done |= set(ready)
    return True


class Writer:
    """Writes nodes in Lark. `by_character`: a text is one lexeme for each of its characters."""

    def __init__(self, names: dict[str, str], *, by_character: bool) -> None:
        self.names, self._by_character = names, by_character

    def node(self, node: Node) -> str:
        match node:
            case Text(text):
                return " ".join(_set_text(((ord(c), ord(c)),), False) for c in text) or '""'
            case Set(ranges, is_negated):
                return _set_text(ranges, is_negated)
            case Token(mark):
                return mark
            case Name(name):
                return self.names[name]
            case Sequence(parts):
                return " ".join(self._grouped(part) for part in parts) or '""'
            case Choice(options):
                return " | ".join(self._grouped(option) for option in options)
            case Repeat(part, least, most):
                return f"({self.node(part)}){_times(least, most)}"

    def _grouped(self, node: Node) -> str:
        return f"({self.node(node)})" if isinstance(node, Choice) else self.node(node)


def _times(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "*" if least == 0 else "+"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least},{'' if most is None else most}}}"


def _set_text(ranges: tuple[tuple[int, int], ...], is_negated: bool) -> str:
    if not ranges:
        return r"/(.|\n)/"
    written = "".join(f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
    return f"/[{'^' if is_negated else ''}{written}]/"

"""Regular expressions: one dialect for `regex` constraints, `pattern` and `patternProperties`.

ECMAScript (what JSON Schema asks for) and Python (what `jsonschema` checks with) agree on most of the language and
differ on the rest: `\\d` and `\\w` beyond ASCII, `\\s`, what `.` skips. Where they differ, a set of characters has two
readings: `narrow` holds what both accept, `wide` what either accepts. What only one of them has is refused by name.
`rendering` writes what is parsed here as a terminal of a grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unspool.sampling.constraint.limits import Limits, Refused

_SURROGATES = 0xD800, 0xDFFF
JSON_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"}
_ESCAPED = frozenset(JSON_ESCAPES)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SPACES = r" \t\n\r\x0B\x0C\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_CLASSES = {
    "d": ("0-9", r"0-9\p{Nd}\p{Cn}"),
    "w": ("0-9A-Za-z_", r"0-9A-Za-z_\p{L}\p{M}\p{N}\p{Pc}\p{Cn}"),
    "s": (_SPACES, _SPACES + r"\x1C-\x1F\u{85}\u{180E}\u{FEFF}"),
}
_ESCAPED_IN = {"d": frozenset[str](), "w": frozenset[str](), "s": frozenset("\t\n\f\r")}
_COUNTED = re.compile(r"\{([0-9]*)(?:(,)([0-9]*))?\}")


@dataclass(frozen=True)
class Body:
    """A set of characters: what stands between the brackets of a set in the syntax of Rust's regex crate."""

    text: str
    escaped: frozenset[str]  # those of its characters that JSON writes with a backslash


@dataclass(frozen=True)
class Char:
    """One character of a set, by both readings."""

    narrow: Body
    wide: Body


@dataclass(frozen=True)
class Anchor:
    sign: str  # ^ or $


@dataclass(frozen=True)
class Group:
    options: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Repeat:
    item: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Look:
    """What must, or must not, stand at the beginning of the text."""

    group: Group
    holds: bool


Node = Char | Anchor | Group | Repeat | Look


def parse(pattern: str, *, json: bool, limits: Limits) -> Group:
    """`json`: the text that the expression is about stands in a JSON string."""
    group = _Parser(pattern, json, limits).parse()
    size = _size(group)
    if size > limits.max_repeat:
        raise Refused(f"the expression has {size:,} parts with repetitions written out; at most {limits.max_repeat:,}")
    return group


def literal(text: str) -> str:
    """An expression, in Rust's syntax, for exactly this text."""
    return "".join(spell(ord(char)) for char in text)


def spell(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char in " _,:;=@'\"%!") else f"\\u{{{code:X}}}"


def _size(node: Node) -> int:
    match node:
        case Group(options):
            return max(1, sum(_size(item) for option in options for item in option))
        case Repeat(item, low, high):
            return _size(item) * max(1, low if high is None else high)
        case Look(group):
            return _size(group)
        case _:
            return 1


class _Parser:
    """Reads the dialect; what it does not know, it refuses with the offset."""

    def __init__(self, text: str, json: bool, limits: Limits) -> None:
        self._text = text
        self._json = json
        self._limits = limits
        self._at = 0

    def parse(self) -> Group:
        group = self._group(0)
        if self._at < len(self._text):
            raise self._refused("a parenthesis is closed that was never opened")
        return group

    def _refused(self, reason: str, at: int | None = None) -> Refused:
        return Refused(f"{reason} (at character {self._at if at is None else at} of {self._text!r})")

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self, count: int = 1) -> str:
        taken = self._peek(count)
        if len(taken) < count:
            raise self._refused("the expression ends too soon")
        self._at += count
        return taken

    def _group(self, depth: int) -> Group:
        if depth > self._limits.max_depth:
            raise self._refused(f"groups nest deeper than {self._limits.max_depth}")
        options: list[tuple[Node, ...]] = []
        items: list[Node] = []
        while self._peek() not in ("", ")"):
            if self._peek() == "|":
                self._take()
                options.append(tuple(items))
                items = []
            else:
                items.append(self._repeated(self._item(depth)))
        return Group((*options, tuple(items)))

    def _item(self, depth: int) -> Node:
        at, char = self._at, self._take()
        if char == "(":
            return self._bracketed(depth, at)
        if char in "^$":
            return Anchor(char)
        if char == "[":
            return self._set()
        if char == ".":
            separators = r"\u{2028}\u{2029}"
            return Char(Body(rf"^\n\r{separators}", _ESCAPED - {"\n", "\r"}), Body(r"^\n", _ESCAPED - {"\n"}))
        if char == "\\":
            name = self._peek()
            if name and name in "dwsDWS":
                self._take()
                return _class(name)
            return self._character(self._escaped(at), at)
        if char in "*+?" or (char == "{" and _COUNTED.match(self._text, at)):
            raise self._refused(f"nothing to repeat before {char}", at)
        return self._character(ord(char), at)

    def _bracketed(self, depth: int, at: int) -> Group | Look:
        kind = ""
        if self._peek() == "?":
            kind = self._peek(2)
            if kind not in ("?:", "?=", "?!"):
                raise self._refused(f"({kind} is not supported: no lookbehind, flags or named groups", at)
            self._take(2)
        group = self._group(depth + 1)
        if self._peek() != ")":
            raise self._refused("a parenthesis is never closed", at)
        self._take()
        return Look(group, kind == "?=") if kind in ("?=", "?!") else group

    def _character(self, code: int, at: int) -> Char:
        if _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._refused("half a surrogate pair is no character", at)
        if self._json and chr(code) not in _ESCAPED and (code < 32 or code == 127):
            raise self._refused(f"U+{code:04X} is not written in JSON strings here", at)
        body = Body(spell(code), _ESCAPED & {chr(code)})
        return Char(body, body)

    def _escaped(self, at: int) -> int:
        """The code point of an escape that stands for one character."""
        char = self._take()
        if char in _ESCAPES:
            return ord(_ESCAPES[char])
        if char in "xu":
            digits = self._peek(2 if char == "x" else 4)
            if len(digits) != (2 if char == "x" else 4) or any(d not in "0123456789abcdefABCDEF" for d in digits):
                raise self._refused(f"\\{char} needs {2 if char == 'x' else 4} hexadecimal digits", at)
            self._take(len(digits))
            return int(digits, 16)
        if char == "0" and not self._peek().isdigit():
            return 0
        if char.isascii() and char.isalnum():
            what = "back-references are" if char.isdigit() else f"\\{char} is"
            raise self._refused(f"{what} not supported", at)
        return ord(char)

    def _repeated(self, item: Node) -> Node:
        at = self._at
        bounds = self._quantifier()
        if bounds is None:
            return item
        if isinstance(item, Anchor):
            raise self._refused(f"{item.sign} cannot be repeated", at)
        if self._peek() == "?":  # lazy: which match is found first does not matter to which texts match
            self._take()
        if self._quantifier() is not None:
            raise self._refused("a repetition of a repetition needs a group", at)
        low, high = bounds
        if high is not None and low > high:
            raise self._refused(f"the repetition {{{low},{high}}} is backwards", at)
        return Repeat(item, low, high)

    def _quantifier(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char and char in "*+?":
            self._take()
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        found = _COUNTED.match(self._text, self._at)
        if found is None:
            return None  # { by itself
        low, comma, high = found.groups()
        if not low or len(low) > 9 or len(high or "") > 9:
            raise self._refused(f"the repetition {found.group()} needs bounds from 0 to 999,999,999")
        self._at = found.end()
        return int(low), (int(high) if high else None if comma else int(low))

    def _set(self) -> Char:
        at = self._at - 1
        negated = self._peek() == "^"
        if negated:
            self._take()
        if self._peek() == "]":
            raise self._refused("a set that starts with ] means two things; escape the ]", at)
        items: list[Char] = []
        while (char := self._take()) != "]":
            if char == "\\" and self._peek() in tuple("dwsDWS"):
                items.append(_class(self._take()))
                if self._peek() == "-" and self._peek(2) != "-]":
                    raise self._refused("a class of characters cannot start a range")
                continue
            low = self._member(char)
            high = low
            if self._peek() == "-" and self._peek(2) != "-]":
                self._take()
                if self._peek() == "\\" and self._peek(2)[1:] in tuple("dwsDWS"):
                    raise self._refused("a class of characters cannot end a range")
                high = self._member(self._take())
            if low > high:
                raise self._refused("a range is backwards")
            body = Body(_range(low, high), frozenset(char for char in _ESCAPED if low <= ord(char) <= high))
            items.append(Char(body, body))
        narrow, wide = _union([item.narrow for item in items]), _union([item.wide for item in items])
        return Char(_without(wide), _without(narrow)) if negated else Char(narrow, wide)

    def _member(self, char: str) -> int:
        if char != "\\":
            return ord(char)
        if self._peek() == "b":
            raise self._refused("\\b is not supported")
        return self._escaped(self._at - 1)


def _class(name: str) -> Char:
    """`\\d`, `\\w`, `\\s` and their complements, of which the wide reading is the complement of the narrow one."""
    narrow, wide = (Body(text, _ESCAPED_IN[name.lower()]) for text in _CLASSES[name.lower()])
    return Char(narrow, wide) if name.islower() else Char(_nested(_without(wide)), _nested(_without(narrow)))


def _union(bodies: list[Body]) -> Body:
    return Body("".join(body.text for body in bodies), frozenset().union(*(body.escaped for body in bodies)))


def _without(body: Body) -> Body:
    return Body(f"^{body.text}", _ESCAPED - body.escaped)


def _nested(body: Body) -> Body:
    return Body(f"[{body.text}]", body.escaped)


def _range(low: int, high: int) -> str:
    parts = []
    for start, end in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
        if start <= end:
            parts.append(spell(start) if start == end else f"{spell(start)}-{spell(end)}")
    return "".join(parts)

"""Regular expressions: one dialect for `regex` constraints, `pattern` and `patternProperties`.

ECMAScript (what JSON Schema asks for) and Python (what `jsonschema` checks with) agree on most of the language and
differ on the rest: `\\d` and `\\w` beyond ASCII, `\\s`, what `.` skips. Where they differ, a translation keeps to
what both accept, so that no validator can object; what only one of them has is refused by name. An expression is
rewritten to match a whole text and handed on in the syntax of Rust's regex crate, with every odd character spelled
as a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unspool.sampling.constraint.limits import DEFAULT, Limits, Refused

_SURROGATES = 0xD800, 0xDFFF
# What a JSON string cannot carry without \u escapes, which are not produced: one text, one spelling (see schema.py).
_UNWRITTEN = r"\x00-\x07\x0B\x0E-\x1F\x7F"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SPACES = r" \t\n\r\x0B\x0C\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
# For each class: what every validator takes, what some validator takes.
_CLASSES = {
    "d": ("0-9", r"0-9\p{Nd}\p{Cn}"),
    "w": ("0-9A-Za-z_", r"0-9A-Za-z_\p{L}\p{M}\p{N}\p{Pc}\p{Cn}"),
    "s": (_SPACES, _SPACES + r"\x1C-\x1F\u{85}\u{180E}\u{FEFF}"),
}
_ANYTHING = "(?s:.*)"
PRINTABLE = r"[\x20-\x7E]"
_COUNTED = re.compile(r"\{([0-9]*)(?:(,)([0-9]*))?\}")


@dataclass(frozen=True)
class Translation:
    regex: str  # matches whole texts
    exact: bool  # no validator matches a text that this does not


@dataclass(frozen=True)
class _Char:
    regex: str
    exact: bool = True


@dataclass(frozen=True)
class _Anchor:
    sign: str  # ^ or $


@dataclass(frozen=True)
class _Group:
    options: tuple[tuple[_Node, ...], ...]


@dataclass(frozen=True)
class _Repeat:
    item: _Node
    low: int
    high: int | None


_Node = _Char | _Anchor | _Group | _Repeat


def translate(pattern: str, *, whole: bool, json: bool, ascii: bool = False, limits: Limits = DEFAULT) -> Translation:
    """`whole`: the expression must match all of a text; else anywhere in it. `json`: the text is a JSON string's.
    `ascii`: only texts of printable ASCII count, on which all dialects agree."""
    group = _Parser(pattern, json, ascii, limits).parse()
    size = _size(group)
    if size > limits.max_repeat:
        raise Refused(f"the expression has {size:,} parts with repetitions written out; at most {limits.max_repeat:,}")
    renderer = _Renderer(f"{PRINTABLE}*" if ascii else _ANYTHING)
    edge = _AT if whole else _FREE
    return Translation(renderer.options(group, edge, edge), renderer.exact or ascii)


def literal(text: str) -> str:
    """An expression, in Rust's syntax, for exactly this text."""
    return "".join(_spell(ord(char)) for char in text)


def _spell(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char in " _,:;=@'\"%!") else f"\\u{{{code:X}}}"


def _size(node: _Node) -> int:
    match node:
        case _Group(options):
            return max(1, sum(_size(item) for option in options for item in option))
        case _Repeat(item, low, high):
            return _size(item) * max(1, low if high is None else high)
        case _:
            return 1


class _Parser:
    """Reads the dialect; what it does not know, it refuses with the offset."""

    def __init__(self, text: str, json: bool, ascii: bool, limits: Limits) -> None:
        self._text = text
        self._json = json
        self._ascii = ascii
        self._limits = limits
        self._at = 0

    def parse(self) -> _Group:
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

    def _group(self, depth: int) -> _Group:
        if depth > self._limits.max_depth:
            raise self._refused(f"groups nest deeper than {self._limits.max_depth}")
        options: list[tuple[_Node, ...]] = []
        items: list[_Node] = []
        while self._peek() not in ("", ")"):
            if self._peek() == "|":
                self._take()
                options.append(tuple(items))
                items = []
            else:
                items.append(self._repeated(self._item(depth)))
        return _Group((*options, tuple(items)))

    def _item(self, depth: int) -> _Node:
        at, char = self._at, self._take()
        if char == "(":
            if self._peek() == "?":
                if self._peek(2) != "?:":
                    raise self._refused(f"({self._peek(2)} is not supported: no lookaround, flags or named groups", at)
                self._take(2)
            group = self._group(depth + 1)
            if self._peek() != ")":
                raise self._refused("a parenthesis is never closed", at)
            self._take()
            return group
        if char in "^$":
            return _Anchor(char)
        if char == "[":
            return self._set()
        if char == ".":
            return self._bounded(r"^\n\r\u{2028}\u{2029}", exact=False)
        if char == "\\":
            name = self._peek()
            if name and name in "dwsDWS":
                self._take()
                return self._bounded(_class(name, negated=False), exact=False)
            return self._character(self._escaped(at), at)
        if char in "*+?" or (char == "{" and _COUNTED.match(self._text, at)):
            raise self._refused(f"nothing to repeat before {char}", at)
        return self._character(ord(char), at)

    def _character(self, code: int, at: int) -> _Char:
        if _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._refused("half a surrogate pair is no character", at)
        if self._json and ((code < 32 and chr(code) not in "\b\t\n\f\r") or code == 127):
            raise self._refused(f"U+{code:04X} is not written in JSON strings here", at)
        return self._bounded(_spell(code), exact=True) if self._ascii else _Char(_spell(code))

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

    def _repeated(self, item: _Node) -> _Node:
        at = self._at
        bounds = self._quantifier()
        if bounds is None:
            return item
        if isinstance(item, _Anchor):
            raise self._refused(f"{item.sign} cannot be repeated", at)
        if self._peek() == "?":  # lazy: which match is found first does not matter to which texts match
            self._take()
        if self._quantifier() is not None:
            raise self._refused("a repetition of a repetition needs a group", at)
        low, high = bounds
        if high is not None and low > high:
            raise self._refused(f"the repetition {{{low},{high}}} is backwards", at)
        return _Repeat(item, low, high)

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

    def _set(self) -> _Char:
        at = self._at - 1
        negated = self._peek() == "^"
        if negated:
            self._take()
        if self._peek() == "]":
            raise self._refused("a set that starts with ] means two things; escape the ]", at)
        body, exact = "", True
        while (char := self._take()) != "]":
            if char == "\\" and self._peek() in tuple("dwsDWS"):
                body += _class(self._take(), negated)
                exact = False
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
            body += _range(low, high)
        return self._bounded(("^" if negated else "") + body, exact)

    def _member(self, char: str) -> int:
        if char != "\\":
            return ord(char)
        if self._peek() == "b":
            raise self._refused("\\b is not supported")
        return self._escaped(self._at - 1)

    def _bounded(self, body: str, exact: bool) -> _Char:
        if self._ascii:
            return _Char(f"[[{body}]&&{PRINTABLE}]", exact)
        return _Char(f"[[{body}]&&[^{_UNWRITTEN}]]" if self._json else f"[{body}]", exact)


def _class(name: str, negated: bool) -> str:
    """The body of a class inside a set. In a negated set the wider reading is the safe one, in \\D the other."""
    surely, perhaps = _CLASSES[name.lower()]
    if name.islower():
        return perhaps if negated else surely
    return f"[^{surely}]" if negated else f"[^{perhaps}]"


def _range(low: int, high: int) -> str:
    parts = []
    for start, end in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
        if start <= end:
            parts.append(_spell(start) if start == end else f"{_spell(start)}-{_spell(end)}")
    return "".join(parts)


# What lies beyond an end of a sequence: anything at all, nothing (the end of the text), or more of the expression.
_FREE, _AT, _INSIDE = "free", "at", "inside"


class _Renderer:
    """Writes an expression that matches whole texts; anchors become the absence of `.*` at that end."""

    def __init__(self, anything: str) -> None:
        self.exact = True
        self._anything = anything

    def options(self, group: _Group, before: str, after: str) -> str:
        options = [self._sequence(list(option), before, after) for option in group.options]
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self, items: list[_Node], before: str, after: str) -> str:
        while items and items[0] == _Anchor("^") and before != _INSIDE:
            before = _AT
            items.pop(0)
        while items and items[-1] == _Anchor("$") and after != _INSIDE:
            after = _AT
            items.pop()
        # `x*` beside "anything" adds nothing
        while items and before == _FREE and isinstance(items[0], _Repeat) and items[0].low == 0:
            items.pop(0)
        while items and after == _FREE and isinstance(items[-1], _Repeat) and items[-1].low == 0:
            items.pop()
        if not items:
            return self._anything if _FREE in (before, after) else ""
        text = ""
        for number, item in enumerate(items):
            left = before if number == 0 else _INSIDE
            right = after if number == len(items) - 1 else _INSIDE
            text += self._item(item, left, right)
        return text

    def _item(self, item: _Node, before: str, after: str) -> str:
        match item:
            case _Group():  # its ends are the sequence's ends, so anchors may stand in it
                return f"(?:{self.options(item, before, after)})"
            case _Anchor(sign):
                raise Refused(f"{sign} is only supported at the ends of the expression or of an alternative")
            case _Char(regex, exact):
                self.exact &= exact
                text = regex
            case _Repeat(inner, low, high):
                times = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
                text = f"(?:{self._item(inner, _INSIDE, _INSIDE)}){times}"
        return (self._anything if before == _FREE else "") + text + (self._anything if after == _FREE else "")

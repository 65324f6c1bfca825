"""Writes a parsed expression as a terminal of a grammar: in Rust's regex syntax, for a text or for a JSON string.

`narrow` matches only what every dialect matches, `wide` all that some dialect matches: the first is what may be
generated, the second what must be excluded. A string is matched as it stands in a document, quotes and escapes
included, and every character has one spelling: no `\\u0061` can pass for an `a`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from unspool.sampling.constraint.expression import (
    JSON_ESCAPES,
    Anchor,
    Body,
    Char,
    Group,
    Look,
    Node,
    Repeat,
    literal,
    parse,
)
from unspool.sampling.constraint.limits import DEFAULT, Limits, Refused

_DIRECT = r'[^"\\\x00-\x1F\x7F]'  # characters that stand for themselves in a JSON string
JSON_CHAR = rf'(?:{_DIRECT}|\\["\\bfnrt])'
JSON_STRING = f'/"{JSON_CHAR}*"/'
_SINGLE = re.compile(r"[^^]|\\u\{[0-9A-F]+\}")


@dataclass(frozen=True)
class Terminal:
    """Definitions of terminals: expressions between slashes, joined by `&`, `|` and `~`."""

    narrow: str
    wide: str

    @property
    def is_exact(self) -> bool:
        """Whether all dialects match the same texts."""
        return self.narrow == self.wide


def text_terminal(pattern: str, limits: Limits = DEFAULT) -> Terminal:
    """Texts that the expression matches as a whole."""
    group = parse(pattern, json=False, limits=limits)
    return Terminal(*(_whole(group, _text, "(?s:.*)", wide, edge=_AT) for wide in (False, True)))


def string_terminal(pattern: str, *, whole: bool = False, limits: Limits = DEFAULT) -> Terminal:
    """JSON strings in which the expression finds something; with `whole`, that it matches as a whole."""
    group = parse(pattern, json=True, limits=limits)
    edge = _AT if whole else _FREE
    return Terminal(*(_whole(group, _string, f"{JSON_CHAR}*", wide, edge, quote='"') for wide in (False, True)))


def quoted(text: str) -> str:
    """The JSON string of this text, as one spells it here."""
    return f'"{"".join(_quoted(char) for char in text)}"'


def literals(texts: list[str]) -> str:
    """A terminal for exactly these texts."""
    return f"/(?:{'|'.join(literal(text) for text in sorted(set(texts)))})/"


def _quoted(char: str) -> str:
    if char in JSON_ESCAPES:
        return f"\\{JSON_ESCAPES[char]}"
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


def _text(body: Body) -> str:
    return body.text if _SINGLE.fullmatch(body.text) else f"[{body.text}]"


def _string(body: Body) -> str:
    escapes = [literal(f"\\{JSON_ESCAPES[char]}") for char in sorted(body.escaped)]
    if _SINGLE.fullmatch(body.text):
        return f"(?:{escapes[0]})" if escapes else body.text
    parts = [f"[[{body.text}]&&{_DIRECT}]", *escapes]
    return f"(?:{'|'.join(parts)})" if escapes else parts[0]


# What lies beyond an end of a sequence: anything at all, nothing (the end of the text), or more of the expression.
_FREE, _AT, _INSIDE = "free", "at", "inside"
_LINE_BREAK = Body(r"\u{A}", frozenset("\n"))


def _whole(group: Group, chars: Callable[[Body], str], anything: str, wide: bool, edge: str, quote: str = "") -> str:
    looks, rest = _lookaheads(group)
    text = _Renderer(chars, anything, wide).options(rest, edge, edge)
    parts = [f"/{quote}(?:{text}){quote}/"]
    for look in looks:
        seen = _Renderer(chars, anything, wide is look.holds).options(look.group, _AT, _FREE)
        parts.append(f"{'' if look.holds else '~'}/{quote}(?:{seen}){quote}/")
    return " & ".join(parts)


def _lookaheads(group: Group) -> tuple[list[Look], Group]:
    """The lookaheads at the beginning of the text, and the expression without them."""
    if len(group.options) != 1:
        return [], group
    items = list(group.options[0])
    start = next((number for number, item in enumerate(items) if item != Anchor("^")), len(items))
    end = next((number for number in range(start, len(items)) if not isinstance(items[number], Look)), len(items))
    if start == end or start == 0:
        return [], group
    looks = [item for item in items[start:end] if isinstance(item, Look)]
    return looks, Group(((*items[:start], *items[end:]),))


class _Renderer:
    """Writes an expression that matches whole texts; anchors become the absence of "anything" at that end."""

    def __init__(self, chars: Callable[[Body], str], anything: str, wide: bool) -> None:
        self._chars = chars
        self._anything = anything
        self._wide = wide

    def options(self, group: Group, before: str, after: str) -> str:
        options = [self._sequence(list(option), before, after) for option in group.options]
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self, items: list[Node], before: str, after: str) -> str:
        while items and items[0] == Anchor("^") and before != _INSIDE:
            before = _AT
            items.pop(0)
        ends = False
        while items and items[-1] == Anchor("$") and after != _INSIDE:
            ends, after = True, _AT
            items.pop()
        # `x*` beside "anything" adds nothing
        while items and before == _FREE and isinstance(items[0], Repeat) and items[0].low == 0:
            items.pop(0)
        while items and after == _FREE and isinstance(items[-1], Repeat) and items[-1].low == 0:
            items.pop()
        if not items and _FREE in (before, after):
            return self._anything
        text = ""
        for number, item in enumerate(items):
            left = before if number == 0 else _INSIDE
            right = after if number == len(items) - 1 else _INSIDE
            text += self._item(item, left, right)
        # Python's `$` also matches before a line break at the end.
        return f"{text}(?:{self._chars(_LINE_BREAK)})?" if ends and self._wide else text

    def _item(self, item: Node, before: str, after: str) -> str:
        match item:
            case Group():  # its ends are the sequence's ends, so anchors may stand in it
                return f"(?:{self.options(item, before, after)})"
            case Anchor(sign):
                raise Refused(f"{sign} is only supported at the ends of the expression or of an alternative")
            case Look(holds=holds):
                sign = "(?=" if holds else "(?!"
                raise Refused(f"{sign} is only supported right after a ^ that begins the expression")
            case Char():
                text = self._chars(item.wide if self._wide else item.narrow)
            case Repeat(inner, low, high):
                times = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
                text = f"(?:{self._item(inner, _INSIDE, _INSIDE)}){times}"
        return (self._anything if before == _FREE else "") + text + (self._anything if after == _FREE else "")

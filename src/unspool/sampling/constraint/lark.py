"""Grammars in llguidance's Lark dialect: checked, bounded, their inline schemas rewritten like any other.

What a grammar may not do: hide text from the answer, change how tokens are drawn, or forbid going back. A special token
may be named (`<|python_tag|>`, `<[49153]>`), one at a time; text never stands for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from unspool.sampling.constraint.limits import Limits, Refused

_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<special><[^<>\s]+>)
    |(?P<directive>%[a-z]+)
    |(?P<grammar>@[\w-]+)
    |(?P<repeat>\{[\d\s,]+\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<name>[!?]*_?[A-Za-z][\w-]*)
    |(?P<line>(?:\s*\n)+\s*)
    |(?P<blank>[ \t\r]+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_REGEX_PART = re.compile(
    r"(?P<set>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|(?P<repeat>\{[\d\s,]+\})"
    r"|(?P<char>\\.|[^+*?|])|(?P<other>.)",
    re.DOTALL,
)
_REFUSED_DIRECTIVES = ("%lark", "%declare", "%override")
_REFUSED_ATTRIBUTES = ("temperature", "max_tokens", "stop", "stop_capture")


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class Lark:
    """`named` are the special tokens that the grammar names, once it was rewritten."""

    def __init__(
        self, text: str, limits: Limits, special: Mapping[str, int], rewrite_schema: Callable[[Any], str]
    ) -> None:
        self._text = text
        self._limits = limits
        self._special = special
        self._rewrite_schema = rewrite_schema
        self.named: frozenset[int] = frozenset()
        if text.lstrip().startswith("{"):
            raise Refused("a grammar is Lark text, not JSON")

    def rewritten(self) -> str:
        tokens = [self._checked(token) for token in self._tokens()]
        self._check_sizes(tokens)
        return "".join(token.text for token in tokens)

    def _refused(self, reason: str, at: int) -> Refused:
        line = self._text.count("\n", 0, at) + 1
        return Refused(reason, f"line {line}, column {at - self._text.rfind(chr(10), 0, at)}")

    def _tokens(self) -> Iterator[_Token]:
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            assert match is not None, "the last alternative matches any character"
            token = _Token(str(match.lastgroup), match.group(), at)
            at = match.end()
            if token.text in ("%json", "%regex", "%llguidance"):
                text, at = self._with_json(token.text, at)
                token = token._replace(text=text)
            yield token

    def _with_json(self, directive: str, at: int) -> tuple[str, int]:
        """The directive with the JSON after it; a schema is rewritten."""
        start = at + len(self._text[at:]) - len(self._text[at:].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(self._text, start)
        except (ValueError, RecursionError) as error:
            raise self._refused(f"{directive} needs JSON after it: {error}", at) from error
        if directive == "%llguidance" and value != {}:
            raise self._refused("%llguidance: its options are not supported", at)
        if directive != "%json":
            return f"{directive} {json.dumps(value)}", end
        try:
            return self._rewrite_schema(value), end
        except Refused as refused:
            raise self._refused(str(refused), start) from None

    def _checked(self, token: _Token) -> _Token:
        kind, text, at = token
        if kind == "special":
            number = self._special_token(text, at)
            self.named |= {number}
            return token._replace(text=f"<[{number}]>")
        if kind == "grammar":
            raise self._refused(f"{text}: there is one grammar", at)
        if kind == "directive" and text in _REFUSED_DIRECTIVES:
            raise self._refused(f"{text} is not supported", at)
        if kind == "name" and text in _REFUSED_ATTRIBUTES and self._text[at + len(text) :].lstrip().startswith("="):
            raise self._refused(f"the attribute {text!r} is not supported", at)
        if kind == "string" and len(text) > self._limits.max_constant:
            raise self._refused(f"a text of {len(text):,} characters; at most {self._limits.max_constant:,}", at)
        return token

    def _special_token(self, text: str, at: int) -> int:
        number = re.fullmatch(r"<\[(\d{1,9})\]>", text)
        if number is not None and int(number.group(1)) in self._special.values():
            return int(number.group(1))
        if text in self._special:
            return self._special[text]
        raise self._refused(f"{text} is not one special token of this vocabulary (ends come by themselves)", at)

    def _check_sizes(self, tokens: list[_Token]) -> None:
        """A definition, its repetitions and the terminals in it written out, must stay small: repetitions of
        repetitions are what makes a lexer explode, and it cannot be interrupted."""
        bodies = {body[0].text.lstrip("!?"): body[1:] for body in _definitions(tokens)}
        if len(bodies) > self._limits.max_rules:
            most = f"at most {self._limits.max_rules:,} are accepted"
            raise Refused(f"the grammar has {len(bodies):,} definitions; {most}")
        inner = {name: {t.text for t in body if _is_terminal(t)} & bodies.keys() for name, body in bodies.items()}
        sizes: dict[str, int] = {}
        try:
            for name in TopologicalSorter(inner).static_order():
                sizes[name] = _weight(_events(bodies[name], sizes))
        except CycleError as error:
            raise Refused(f"the terminal {error.args[1][0]} holds itself") from None
        for name, body in bodies.items():
            if sizes[name] > self._limits.max_repeat:
                parts = f"{name} has {sizes[name]:,} parts with repetitions written out"
                raise self._refused(f"{parts}; at most {self._limits.max_repeat:,}", body[0].at)


def _is_terminal(token: _Token) -> bool:
    return token.kind == "name" and token.text.lstrip("_")[:1].isupper()


def _definitions(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Each definition's tokens, its name first. A line that starts with `|` goes on with the one before."""
    body: list[_Token] = []
    fresh = True
    for token in tokens:
        if token.kind in ("comment", "blank"):
            continue
        if token.kind == "line":
            fresh = True
            continue
        if fresh and token.text != "|":
            if len(body) > 1 and body[0].kind == "name":
                yield body
            body = []
        fresh = False
        body.append(token)
    if len(body) > 1 and body[0].kind == "name":
        yield body


_Event = tuple[str, int]  # item, its size · times, how many · open · close


def _events(body: list[_Token], sizes: Mapping[str, int]) -> Iterator[_Event]:
    for token in body:
        kind, text, _ = token
        if kind == "name":
            yield "item", sizes.get(text, 1) if _is_terminal(token) else 1
        elif kind == "regex":
            yield "item", _weight(_regex_events(text[1 : text.rindex("/")]))
        elif kind in ("string", "special", "directive"):
            yield "item", 1
        elif kind == "repeat":
            yield "times", _most(text)
        elif text in "([":
            yield "open", 0
        elif text in ")]":
            yield "close", 0


def _regex_events(text: str) -> Iterator[_Event]:
    for match in _REGEX_PART.finditer(text):
        if match.lastgroup in ("set", "char"):
            yield "item", 1
        elif match.lastgroup == "repeat":
            yield "times", _most(match.group())
        elif match.lastgroup in ("open", "close"):
            yield match.lastgroup, 0


def _most(repeat: str) -> int:
    return max((int(digits[:12]) for digits in re.findall(r"\d+", repeat)), default=1)


def _weight(events: Iterable[_Event]) -> int:
    """How many parts there are once repetitions are written out."""
    totals, last = [0], [0]
    for kind, value in events:
        if kind == "item":
            totals[-1] += last[-1]
            last[-1] = value
        elif kind == "times":
            last[-1] *= max(1, value)
        elif kind == "open":
            totals.append(0)
            last.append(0)
        elif len(totals) > 1:
            inner = totals.pop() + last.pop()
            totals[-1] += last[-1]
            last[-1] = inner
    while len(totals) > 1:
        inner = totals.pop() + last.pop()
        totals[-1] += inner
    return totals[0] + last[0]

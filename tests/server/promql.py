"""Which metrics and labels a PromQL expression names: enough of its grammar for dashboards and alerts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<duration>\[[^\]]*\])|(?P<number>\d[\d.]*)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)'
    r"|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>]))"
)
GROUPS = ("by", "without", "on", "ignoring", "group_left", "group_right")
WORDS = ("and", "or", "unless", "bool", "offset")


@dataclass
class Expression:
    metrics: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)  # matchers: label, sign, value
    labels: set[str] = field(default_factory=set)  # that it groups by


def tokens(text: str) -> Iterator[str]:
    position = 0
    while text[position:].strip():
        found = TOKEN.match(text, position)
        assert found, f"not PromQL: {text[position:]!r}"
        position = found.end()
        if found["duration"] is None:
            yield found[found.lastgroup or ""]


def parse(text: str) -> Expression:
    """The names in an expression; one that is torn is an AssertionError."""
    parsed, left = Expression(), list(tokens(text))
    assert left.count("(") == left.count(")"), text
    while left:
        word = left.pop(0)
        if word in GROUPS:
            parsed.labels |= set(_within(left, "(", ")")) - {","}
        elif re.match(r"[a-zA-Z_:]", word) and word not in WORDS and left[:1] not in (["("], ["by"], ["without"]):
            inside = _within(left, "{", "}") if left[:1] == ["{"] else []
            parsed.metrics.setdefault(word, []).extend(_matchers(inside))
    return parsed


def _within(left: list[str], opening: str, closing: str) -> list[str]:
    assert left.pop(0) == opening
    end = left.index(closing)
    inside, left[: end + 1] = left[:end], []
    return inside


def _matchers(inside: list[str]) -> Iterator[tuple[str, str, str]]:
    parts = [inside[start : start + 4] for start in range(0, len(inside), 4)]
    for label, sign, value, *comma in parts:
        assert sign in ("=", "!=", "=~", "!~")
        assert comma in ([], [","])
        yield label, sign, value.strip('"')

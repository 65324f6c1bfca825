"""Constraints as text for llguidance: a schema, an expression, choices, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unspool.sampling.constraint.gbnf import IS_GBNF, to_lark
from unspool.sampling.constraint.lark import Lark
from unspool.sampling.constraint.limits import Limits, Refused
from unspool.sampling.constraint.rendering import literals, text_terminal
from unspool.sampling.constraint.schema import JsonOptions, grammar_of


@dataclass(frozen=True)
class Source:
    """`text` is what llguidance compiles; `special` are the special tokens that a grammar names."""

    text: str
    special: frozenset[int] = frozenset()


def source(
    kind: str, value: Any, limits: Limits, special: Mapping[str, int], options: JsonOptions | None = None
) -> Source:
    """Checked and rewritten; `special` has the special tokens by name. Raises Refused."""
    match kind:
        case "json_schema":
            return _source(grammar_of(value, limits, options))
        case "json_object":
            own = {"x-unspool": value} if value else {}
            return _source(grammar_of({"type": "object", **own}, limits, options))
        case "regex":
            _check_size(value, limits, "expression")
            return _source(_whole(text_terminal(value, limits).narrow))
        case "choice":
            return _choice(value, limits)
        case "grammar":
            return _grammar(value, limits, special, options)
        case _:
            raise Refused(f"{kind!r} is no kind of constraint")


def _source(*grammars: str, special: frozenset[int] = frozenset()) -> Source:
    """The first grammar is the whole answer's; it refers to the others as `@json_0`, `@json_1`, …"""
    named = [{"name": f"json_{number}", "lark_grammar": text} for number, text in enumerate(grammars[1:])]
    return Source(json.dumps({"grammars": [{"lark_grammar": grammars[0]}, *named]}), special)


def _grammar(value: str, limits: Limits, special: Mapping[str, int], options: JsonOptions | None) -> Source:
    """A grammar in Lark or GBNF. Each schema in a Lark one becomes a grammar of its own, in which what the first one
    ignores counts."""
    _check_size(value, limits, "grammar")
    if IS_GBNF.search(value):
        value = to_lark(value, limits)
    inner: list[str] = []

    def add(schema: Any) -> str:
        inner.append(grammar_of(schema, limits, options))
        return f"@json_{len(inner) - 1}"

    lark = Lark(value, limits, special, add)
    return _source(lark.rewritten(), *inner, special=lark.named)


def _choice(value: Any, limits: Limits) -> Source:
    if isinstance(value, str) or not all(isinstance(text, str) and text for text in value):
        raise Refused("choices are non-empty strings")
    _check_size("".join(value), limits, "list of choices")
    if len(value) > limits.max_values:
        raise Refused(f"there are {len(value):,} choices; at most {limits.max_values:,} are accepted")
    if any(len(text) > limits.max_constant for text in value):
        raise Refused(f"a choice has more than {limits.max_constant:,} characters")
    return _source(_whole(literals(list(value))))


def _whole(terminal: str) -> str:
    return f"start: T\nT: {terminal}"


def _check_size(text: str, limits: Limits, noun: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise Refused(f"the {noun} holds half a surrogate pair, which is no character") from error
    if size > limits.max_bytes:
        raise Refused(f"the {noun} has {size:,} bytes; at most {limits.max_bytes:,} are accepted")

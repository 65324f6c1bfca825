"""Constraints as text for llguidance: a schema, an expression, choices, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.expression import literal, translate
from unspool.sampling.constraint.finite import endless
from unspool.sampling.constraint.lark import Lark
from unspool.sampling.constraint.limits import Budget, Limits, Place, Refused
from unspool.sampling.constraint.schema import Lowering

WHITESPACE = ("model", "compact", "flexible")
# \u escapes are left out: a name has one spelling, so "\u0061" cannot pass for a name other than "a".
_ESCAPES = 'nrbtf\\"'
_BLANKS = r"[\x20\x0A\x0D\x09]{1,64}"


@dataclass(frozen=True)
class Source:
    """`text` is what llguidance compiles. `schema` and `places` let a failure be traced to a part of the schema."""

    text: str
    special: frozenset[int] = frozenset()  # special tokens that a grammar names
    schema: dict[str, Any] | None = None
    places: dict[int, Place] | None = None
    whitespace: str = WHITESPACE[0]


def source(kind: str, value: Any, limits: Limits, special: Mapping[str, int]) -> Source:
    """Checked and rewritten; `special` has the special tokens by name. Raises Refused."""
    match kind:
        case "json_schema":
            return _json_schema(value, limits)
        case "json_object":
            options = {"x-unspool": value} if value else {}
            return _json_schema({"type": "object", **options}, limits)
        case "regex":
            _check_size(value, limits, "expression")
            return Source(_whole(translate(value, whole=True, json=False, limits=limits).regex))
        case "choice":
            return _choice(value, limits)
        case "grammar":
            _check_size(value, limits, "grammar")
            lark = Lark(value, limits, special, lambda schema: _inline(schema, limits))
            return Source(_lark(lark.rewritten()), lark.named)
        case _:
            raise Refused(f"{kind!r} is no kind of constraint")


def schema_text(schema: dict[str, Any], whitespace: str) -> str:
    """A rewritten schema as llguidance takes it."""
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": _guidance(whitespace)}}]})


def _guidance(whitespace: str) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
    if whitespace == "flexible":
        return options | {"whitespace_pattern": _BLANKS}
    return options | ({"item_separator": ", ?", "key_separator": ": ?"} if whitespace == "model" else {})


def _json_schema(value: Any, limits: Limits) -> Source:
    document = Document(value, limits)
    whitespace = _whitespace(document.root)
    budget = Budget(limits)
    lowering = Lowering(document, limits, budget)
    schema = lowering.run()
    lowering.places[id(schema)] = ()
    unending = endless(schema, budget)
    if unending is not None:
        raise Refused("every document that satisfies this is endless", lowering.places.get(id(unending), ()))
    return Source(schema_text(schema, whitespace), frozenset(), schema, lowering.places, whitespace)


def _whitespace(root: Any) -> str:
    options = root.get("x-unspool", {}) if isinstance(root, dict) else {}
    if not isinstance(options, dict) or set(options) - {"whitespace"}:
        raise Refused("takes an object with 'whitespace'", ("x-unspool",))
    whitespace = options.get("whitespace", WHITESPACE[0])
    if whitespace not in WHITESPACE:
        raise Refused(f"is {whitespace!r}; allowed: {', '.join(WHITESPACE)}", ("x-unspool", "whitespace"))
    return str(whitespace)


def _choice(value: Any, limits: Limits) -> Source:
    if isinstance(value, str) or not all(isinstance(text, str) and text for text in value):
        raise Refused("choices are non-empty strings")
    _check_size("".join(value), limits, "list of choices")
    if len(value) > limits.max_values:
        raise Refused(f"there are {len(value):,} choices; at most {limits.max_values:,} are accepted")
    if any(len(text) > limits.max_constant for text in value):
        raise Refused(f"a choice has more than {limits.max_constant:,} characters")
    return Source(_whole("|".join(literal(text) for text in sorted(set(value)))))


def _whole(regex: str) -> str:
    """A grammar for one expression. Backslashes and slashes are already spelled as numbers."""
    return _lark(f"start: /(?:{regex})/")


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _inline(value: Any, limits: Limits) -> str:
    """A schema within a grammar."""
    made = _json_schema(value, limits)
    return json.dumps({**(made.schema or {}), "x-guidance": _guidance(made.whitespace)})


def _check_size(text: str, limits: Limits, noun: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise Refused(f"the {noun} holds half a surrogate pair, which is no character") from error
    if size > limits.max_bytes:
        raise Refused(f"the {noun} has {size:,} bytes; at most {limits.max_bytes:,} are accepted")

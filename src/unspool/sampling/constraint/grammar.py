"""Constraints as text for llguidance: a schema, an expression, choices, a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.expression import literal, translate
from unspool.sampling.constraint.finite import endless
from unspool.sampling.constraint.limits import Limits, Place, Refused, path
from unspool.sampling.constraint.schema import Lowering

WHITESPACE = ("compact", "flexible")
# \u escapes are left out: a name has one spelling, so "\u0061" cannot pass for a name other than "a".
_ESCAPES = 'nrbtf\\"'
_BLANKS = r"[\x20\x0A\x0D\x09]{1,64}"


@dataclass(frozen=True)
class Source:
    """`text` is what llguidance compiles. `schema` and `places` let a failure be traced to a part of the schema."""

    text: str
    schema: dict[str, Any] | None = None
    places: dict[int, Place] | None = None
    whitespace: str = "compact"


def source(kind: str, value: Any, limits: Limits) -> Source:
    """Checked and rewritten. Raises Refused."""
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
            return Source(_Lark(value, limits).rewritten())
        case _:
            raise Refused(f"{kind!r} is no kind of constraint")


def schema_text(schema: dict[str, Any], whitespace: str) -> str:
    """A rewritten schema as llguidance takes it."""
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": _guidance(whitespace)}}]})


def _guidance(whitespace: str) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
    return options | ({"whitespace_pattern": _BLANKS} if whitespace == "flexible" else {})


def _json_schema(value: Any, limits: Limits) -> Source:
    document = Document(value, limits)
    whitespace = _whitespace(document.root)
    lowering = Lowering(document, limits)
    schema = lowering.run()
    lowering.places[id(schema)] = ()
    unending = endless(schema)
    if unending is not None:
        raise Refused("every document that satisfies this is endless", lowering.places.get(id(unending), ()))
    return Source(schema_text(schema, whitespace), schema, lowering.places, whitespace)


def _whitespace(root: Any) -> str:
    options = root.get("x-unspool", {}) if isinstance(root, dict) else {}
    if not isinstance(options, dict) or set(options) - {"whitespace"}:
        raise Refused("takes an object with 'whitespace'", ("x-unspool",))
    whitespace = options.get("whitespace", "compact")
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
    return json.dumps({"grammars": [{"lark_grammar": f"start: /(?:{regex})/"}]})


def _check_size(text: str, limits: Limits, noun: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise Refused(f"the {noun} holds half a surrogate pair, which is no character") from error
    if size > limits.max_bytes:
        raise Refused(f"the {noun} has {size:,} bytes; at most {limits.max_bytes:,} are accepted")


_LARK_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<special><[^<>\s]+>)
    |(?P<directive>%[a-z]+)
    |(?P<grammar>@[\w-]+)
    |(?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<name>[!?]*_?[A-Za-z][\w-]*)
    |(?P<other>.|\n)""",
    re.VERBOSE,
)
_REFUSED_DIRECTIVES = {"%llguidance": "options", "%lark": "grammars in grammars", "%declare": "%declare"}
# They change what is drawn, hide text from the answer, or forbid going back.
_REFUSED_ATTRIBUTES = ("temperature", "max_tokens", "stop", "stop_capture")


class _Lark:
    """A grammar in llguidance's Lark dialect: checked, its inline schemas rewritten like any other."""

    def __init__(self, text: str, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        if re.search(r"^\s*[A-Za-z][\w-]*\s*::=", text, re.MULTILINE):
            raise Refused("this is GBNF (name ::= …); write it in Lark (name: …)")
        if text.lstrip().startswith("{"):
            raise Refused("a grammar is Lark text, not JSON")

    def rewritten(self) -> str:
        parts = []
        for kind, token, at in self._tokens():
            self._check(kind, token, at)
            parts.append(token)
        return json.dumps({"grammars": [{"lark_grammar": "".join(parts)}]})

    def _place(self, at: int) -> str:
        line = self._text.count("\n", 0, at) + 1
        return f"line {line}, column {at - self._text.rfind(chr(10), 0, at)}"

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self._text):
            match = _LARK_TOKEN.match(self._text, at)
            assert match is not None, "the last alternative matches any character"
            kind, token = str(match.lastgroup), match.group()
            if token in ("%json", "%regex"):
                token, end = self._inline(token, match.end())
                yield kind, token, at
                at = end
            else:
                yield kind, token, at
                at = match.end()

    def _inline(self, directive: str, at: int) -> tuple[str, int]:
        """The directive with the JSON after it; a schema is rewritten."""
        start = at + len(self._text[at:]) - len(self._text[at:].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(self._text, start)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{directive} needs JSON after it: {error}", self._place(at)) from error
        if directive == "%json":
            try:
                inner = _json_schema(value, self._limits)
            except Refused as refused:
                raise Refused(str(refused), self._place(start)) from None
            assert inner.schema is not None, "a schema's source keeps its schema"
            value = {**inner.schema, "x-guidance": _guidance(inner.whitespace)}
        return f"{directive} {json.dumps(value)}", end

    def _check(self, kind: str, token: str, at: int) -> None:
        if kind == "special":
            raise Refused(f"{token}: special tokens cannot be produced by a constraint", self._place(at))
        if kind == "grammar":
            raise Refused(f"{token}: there is one grammar", self._place(at))
        if kind == "directive" and token in _REFUSED_DIRECTIVES:
            raise Refused(f"{token}: {_REFUSED_DIRECTIVES[token]} are not supported", self._place(at))
        if kind == "name" and token in _REFUSED_ATTRIBUTES and self._text[at + len(token) :].lstrip().startswith("="):
            raise Refused(f"the attribute {token!r} is not supported", self._place(at))
        if kind in ("repeat", "regex"):
            counts = [int(digits) for digits in re.findall(r"(?<=[{,~.])\s*(\d{1,12})", token)]
            if max(counts, default=0) > self._limits.max_repeat:
                raise Refused(f"{token:.40}: at most {self._limits.max_repeat:,} repetitions", self._place(at))


def where(schema_place: Place) -> str:
    return path(schema_place)

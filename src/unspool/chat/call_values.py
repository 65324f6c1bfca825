"""Grammar rules for arguments that are not written as JSON: each value by its part of the schema.

A keyword that cannot be enforced in a notation is refused with its name and place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unspool.chat.call_formats import BareCall, TaggedCall
from unspool.chat.call_tags import kinds_of, resolved
from unspool.errors import RequestError

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer

_NOTES = frozenset({"type", "title", "description", "default", "examples", "example", "deprecated", "nullable"})
_DEPTH = 20


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def marked(text: str, tokenizer: Tokenizer) -> str:
    """A text as a rule: marks that are control tokens of the vocabulary become those tokens, the rest is text."""
    parts = tokenizer.control_marks.split(text)
    return " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in parts)


class _Arguments:
    """`name` is that of the function's first rule; the others begin with it."""

    def __init__(self, name: str, schema: Mapping[str, Any], place: str) -> None:
        self._name, self._schema, self._place = name, schema, place
        self._rules: list[str] = []
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._required = frozenset(schema.get("required") or ())

    def _add(self, rule: str, *, is_lazy: bool = False) -> str:
        """Add a rule; returns its name."""
        name = f"{self._name}_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {rule}")
        return name

    def _json(self, schema: Any) -> str:
        """A value that is written as JSON. Its references point to definitions of the whole schema."""
        own = dict(schema) if isinstance(schema, Mapping) else {}
        kept = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        return f"%json {json.dumps({**kept, **own})}"

    def _texts(self, schema: Any, where: str) -> list[str] | None:
        """The texts that a schema allows; None: any."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return [value for value in values if isinstance(value, str)]
        self._refuse(schema.keys() - _NOTES, where)
        return None

    def _refuse(self, keywords: Any, where: str) -> None:
        if keywords:
            raise RequestError(
                f"{self._place}: {min(keywords)} of {where} cannot be enforced in this model's format of calls",
                self._place,
            )


class TaggedArguments(_Arguments):
    """Arguments between tags, in the order of the schema; those that are not required may be left out."""

    def __init__(self, name: str, call: TaggedCall, schema: Mapping[str, Any], place: str) -> None:
        super().__init__(name, schema, place)
        self._call = call

    def rules(self, function: str) -> list[str]:
        call = self._call
        parts = [quoted(f"{call.begins}{function}{call.name_ends}{call.line}")]
        for key, schema in self._properties.items():
            parts.append(self._argument(key, schema) + ("" if key in self._required else "?"))
        return [f"{self._name}: {' '.join(parts)} {quoted(call.ends)}", *self._rules]

    def _argument(self, key: str, schema: Any) -> str:
        call = self._call
        between = f"{call.line}{call.value_begins}" if call.value_begins else ""
        begins = quoted(f"{call.parameter}{key}{call.key_ends}{between}{call.pad}")
        ends = quoted(f"{call.pad}{call.value_ends}{call.line}")
        schema, kinds = resolved(schema, self._schema), kinds_of(schema, self._schema)
        if kinds and "string" not in kinds:
            return self._add(f"{begins} {self._json(schema)} {ends}")
        texts = self._texts(schema, key) if isinstance(schema, Mapping) and kinds == {"string"} else None
        if texts is not None:
            return self._add(f"{begins} ({' | '.join(map(quoted, texts))}) {ends}")
        return self._add(f"{begins} {self._add(f'TEXT {ends}', is_lazy=True)}")


class BareArguments(_Arguments):
    """Arguments in Gemma's notation, in the order of their names."""

    def __init__(self, name: str, call: BareCall, schema: Mapping[str, Any], place: str, tokenizer: Tokenizer) -> None:
        super().__init__(name, schema, place)
        self._call, self._quote = call, marked(call.quote, tokenizer)

    def rules(self, function: str) -> list[str]:
        text = f"{self._quote} TEXT {self._quote}"
        if not self._quote.startswith("<["):
            text = f"{self._quote} {self._add(f'TEXT {self._quote}', is_lazy=True)}"
        self._text = self._add(text)
        self._any = f"{self._name}_any"
        scalar = '%json {"type": ["number", "boolean", "null"]}'
        key = r"/[^:{}\[\],<>\"]+/"
        members = f'({key} ":" {self._any} ("," {key} ":" {self._any})*)?'
        self._rules.append(
            f'{self._any}: {self._text} | {scalar} | "[" ({self._any} ("," {self._any})*)? "]" | "{{" {members} "}}"'
        )
        head = quoted(f"{self._call.begins}{function}")
        return [f"{self._name}: {head} {self._object(self._schema, 'the arguments', 0)}", *self._rules]

    def _value(self, schema: Any, where: str, depth: int) -> str:
        schema = resolved(schema, self._schema)
        if depth > _DEPTH:
            raise RequestError(f"{self._place}: {where} nests too deep for this model's format of calls", self._place)
        kinds = kinds_of(schema, self._schema)
        if not isinstance(schema, Mapping) or not kinds:
            return self._any
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return f"({' | '.join(self._value(part, where, depth + 1) for part in schema[key])})"
        return f"({' | '.join(self._of_kind(kind, schema, where, depth) for kind in sorted(kinds))})"

    def _of_kind(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if kind == "string":
            texts = self._texts(schema, where)
            if texts is None:
                return self._text
            return f"({' | '.join(f'{self._quote} {quoted(text)} {self._quote}' for text in texts)})"
        if kind == "array":
            self._refuse(schema.keys() - _NOTES - {"items"}, where)
            item = self._value(schema.get("items"), f"{where}[]", depth + 1)
            item = self._add(item)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return self._object(schema, where, depth + 1) if schema.get("properties") else self._any
        return self._json({**schema, "type": kind} if "type" in schema else schema)

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """Members in the order of their names."""
        keys = sorted(schema.get("properties") or ())
        values = {key: self._value(schema["properties"][key], key, depth + 1) for key in keys}
        members = {key: self._add(f"{quoted(key + ':')} {value}") for key, value in values.items()}
        return f'"{{" {_members(members, frozenset(schema.get("required") or ()), ",")} "}}"'


class PythonArguments(_Arguments):
    """Arguments by name as in a Python call, with values written as JSON. Python has the same literals except true,
    false and null, which the reader also accepts."""

    def rules(self, function: str) -> list[str]:
        members = {
            key: self._add(f"{quoted(key + '=')} {self._json(resolved(schema, self._schema))}")
            for key, schema in self._properties.items()
        }
        return [f'{self._name}: {quoted(function + "(")} {_members(members, self._required, ", ")} ")"', *self._rules]


def _members(members: Mapping[str, str], required: frozenset[str], comma: str) -> str:
    """A sequence of rules with commas between them; those that are not required are optional."""
    after = first = ""  # the rules for the rest of the members: after another one, and as the first
    may_be_empty = True
    for key, member in reversed(list(members.items())):
        is_needed = key in required
        others = f" | {first}" if first and not is_needed else ""
        may_be_empty = may_be_empty and not is_needed
        first = f"({member} {after}{others}){'?' if may_be_empty else ''}"
        after = f"({quoted(comma)} {member}){'' if is_needed else '?'} {after}".strip()
    return first

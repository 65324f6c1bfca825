"""Readers of calls whose arguments are not JSON: tags around each value, or Gemma's notation. The result is JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from unspool.chat.call_formats import BareCall, TaggedCall
from unspool.chat.call_python import python_json
from unspool.chat.call_readers import SPACE, CallReader

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as in templates that do not write JSON


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


class TaggedReader(CallReader):
    """The name in a tag, and each argument between tags.

    A value is text where its schema says so, or says nothing and the value is no JSON; else it is JSON. Text goes out
    as it comes, other values when they are whole.
    """

    def __init__(
        self, names: Collection[str], call: TaggedCall, schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__(names)
        self._call = call
        self._schemas = schemas or {}
        self._step = self._read_name
        self._buffer = ""
        self._kinds: frozenset[str] = frozenset()  # of the current value
        self._value: list[str] = []  # its parts, if it must be complete
        self._is_open = False  # some of the value's text was sent
        self._num_values = 0

    def _take(self, character: str) -> None:
        self._buffer += character
        self._step()

    def _read_name(self) -> None:
        """In a format without a mark after the name, white space or a tag ends it."""
        ends = [self._call.name_ends] if self._call.name_ends else [*SPACE, self._call.parameter[0]]
        for name in self._names:
            if self._buffer in [f"{self._call.begins}{name}{end}" for end in ends]:
                self.name = name
                self._buffer = self._buffer[-1] if self._buffer[-1] == self._call.parameter[0] else ""
                self._step = self._read_tag
                return
        self.is_wrong = not any(f"{self._call.begins}{name}".startswith(self._buffer) for name in self._names) and (
            not any(f"{self._call.begins}{name}{end}".startswith(self._buffer) for name in self._names for end in ends)
        )

    def _read_tag(self) -> None:
        """Another argument, or the end."""
        self._buffer = self._buffer.lstrip(SPACE)
        if self._buffer == self._call.parameter:
            self._buffer, self._step = "", self._read_key
        elif self._buffer == self._call.ends:
            self._end()
            self.is_done = True
        elif not (self._call.parameter.startswith(self._buffer) or self._call.ends.startswith(self._buffer)):
            if self._num_values:
                self.arguments.append("}")
            self.is_wrong = True

    def _read_key(self) -> None:
        if not self._buffer.endswith(self._call.key_ends):
            return
        key = self._buffer.removesuffix(self._call.key_ends).strip()
        root = self._schemas.get(self.name or "") or {}
        properties = root.get("properties")
        self._kinds = kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, root)
        self._buffer, self._value, self._is_open = "", [], False
        self._step = self._read_second_tag if self._call.value_begins else self._read_value
        self._give(f"{', ' if self._num_values else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_values += 1

    def _read_second_tag(self) -> None:
        self._buffer = self._buffer.lstrip(SPACE)
        if self._buffer == self._call.value_begins:
            self._buffer, self._step = "", self._read_value
        elif not self._call.value_begins.startswith(self._buffer):
            self.arguments.append("null}")
            self.is_wrong = True

    def _read_value(self) -> None:
        call = self._call
        if self._buffer == call.pad and call.pad and not self._value and not self._is_open:
            self._value, self._buffer = [""], ""  # an empty part: the value has begun
            return
        if self._buffer.endswith(call.value_ends):
            rest = self._buffer.removesuffix(call.value_ends)
            self._more(rest.removesuffix(call.pad) if call.pad else rest)
            self._end_value()
            self._buffer, self._step = "", self._read_tag
            return
        held = max(overlap(self._buffer, call.value_ends), overlap(self._buffer, call.pad + call.value_ends))
        self._more(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]

    def _more(self, text: str) -> None:
        """More of the value. Text values are sent at once."""
        if not text:
            return
        if self._kinds != _TEXT:
            self._value.append(text)
            return
        quoted = json.dumps(text, ensure_ascii=False)[1:-1]
        self._give(quoted if self._is_open else f'"{quoted}')
        self._is_open = True

    def _end_value(self) -> None:
        if self._kinds == _TEXT:
            self._give('"' if self._is_open else '""')
        else:
            self._give(as_json("".join(self._value), self._kinds))

    def _end(self) -> None:
        if self._num_values:
            self._give("}")


# What a value may be --------------------------------------------------------------------------------------------------
_TEXT = frozenset({"string"})
_DEPTH = 20  # of references to references


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types in a schema; empty if it has none. `root` is the schema that it is a part of."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return frozenset()
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return frozenset([kinds] if isinstance(kinds, str) else [kind for kind in kinds if isinstance(kind, str)])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(_kind_of, values))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = [kinds_of(part, root, depth + 1) for part in schema.get(key) or ()]
        if parts and all(parts):
            return frozenset[str]().union(*parts)
    return frozenset()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema behind a reference within the same document."""
    for _ in range(_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema


def as_json(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON: unchanged if it is JSON of one of the `kinds`, else as a string."""
    stripped = _WORDS.get(text.strip(), text.strip())
    try:
        kind = _kind_of(json.loads(stripped))
    except (ValueError, RecursionError):
        is_python = "string" not in kinds and kinds & {"array", "object"}  # some templates write it so
        return (python_json(stripped) if is_python else None) or json.dumps(text, ensure_ascii=False)
    may_be_text = not kinds or "string" in kinds
    is_wanted = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    if may_be_text and (kind == "string" or not is_wanted):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, of in (("boolean", bool), ("integer", int), ("number", float), ("string", str), ("array", list)):
        if isinstance(value, of):
            return kind
    return "object"


# Gemma's notation -----------------------------------------------------------------------------------------------------
class BareReader(CallReader):
    """`call:look{at:[1,2],why:<|"|>rain<|"|>}`: keys have no quotes, text is between marks, other values are as in
    JSON."""

    def __init__(self, names: Collection[str], call: BareCall) -> None:
        super().__init__(names)
        self._call = call
        self._head = ""
        self._nesting: list[str] = []
        self._bare = ""  # a key, a number or a word that is being read, or the beginning of a mark
        self._quote: str | None = None  # the mark that ends the text that is being read

    def _take(self, character: str) -> None:
        if self.name is None:
            self._read_name(character)
        elif self._quote is not None:
            self._read_text(character)
        else:
            self._read_bare(character)

    def _read_name(self, character: str) -> None:
        self._head += character
        begins = self._call.begins
        for name in self._names:
            if self._head == f"{begins}{name}{{":
                self.name = name
                self._nesting.append("{")
                self._give("{")
                return
        self.is_wrong = not any(f"{begins}{name}{{".startswith(self._head) for name in self._names)

    def _read_text(self, character: str) -> None:
        self._bare += character
        quote = self._quote
        assert quote is not None
        if self._bare.endswith(quote) and not (quote == '"' and _is_escaped(self._bare)):
            text = self._bare.removesuffix(quote)
            self._give((text if quote == '"' else json.dumps(text, ensure_ascii=False)[1:-1]) + '"')
            self._bare, self._quote = "", None
        elif quote != '"':
            held = overlap(self._bare, quote)
            text, self._bare = self._bare[: len(self._bare) - held], self._bare[len(self._bare) - held :]
            if text:
                self._give(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read_bare(self, character: str) -> None:
        if character in "{[" and not self._bare.strip():
            self._nesting.append(character)
            self._bare = ""
            self._give(character)
        elif character == ":" and self._nesting[-1] == "{":
            self._give((_quoted(self._bare) if self._bare.strip() else "") + ": ")
            self._bare = ""
        elif character in ",}]":
            self._end_bare(character)
        else:
            self._bare += character
            if self._bare.strip() in ('"', self._call.quote):
                self._quote = self._bare.strip()
                self._bare = ""
                self._give('"')

    def _end_bare(self, character: str) -> None:
        word, self._bare = self._bare.strip(), ""
        value = as_json(word, frozenset()) if word else ""
        if character == ",":
            self._give(f"{value}, ")
            return
        opened = self._nesting.pop()
        self._give(value + ("}" if opened == "{" else "]"))
        self.is_done = not self._nesting


def _quoted(text: str) -> str:
    return json.dumps(text.strip(), ensure_ascii=False)


def _is_escaped(text: str) -> bool:
    """Whether the last character has an odd number of backslashes before it."""
    before = text[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1

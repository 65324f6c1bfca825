"""Python types as the shape of an answer: their JSON schema, and the way from an answer's text back to a value.

A dataclass, a pydantic model, or a JSON schema (whose values are what `json` reads). Fields of dataclasses may be str,
int, float, bool, None, Literal, enums, lists, tuples of one type, dicts by str, unions of these, and dataclasses.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from unspool.errors import ParseError, RequestError

Schema = dict[str, Any]
_SCALARS: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


@dataclasses.dataclass(frozen=True)
class AnswerType:
    """`parse` gives the value that a text is written as, or raises ParseError."""

    schema: Schema
    parse: Callable[[str], Any]


def answer_type(shape: Any) -> AnswerType:
    """The schema and the parser of a type; a RequestError says what cannot be written as JSON."""
    if isinstance(shape, Mapping):
        return AnswerType(dict(shape), _parser(json.loads, "JSON"))
    pydantic = sys.modules.get("pydantic")  # a class of pydantic's is there only if pydantic is
    name = getattr(shape, "__name__", str(shape))
    if pydantic is not None and isinstance(shape, type) and issubclass(shape, pydantic.BaseModel):
        model: Any = shape
        return AnswerType(model.model_json_schema(), _parser(model.model_validate_json, name))
    if dataclasses.is_dataclass(shape) and isinstance(shape, type):
        definitions: dict[type, Schema] = {}
        schema = _schema_of(shape, definitions, name)
        named = {each.__name__: found for each, found in definitions.items()}
        if len(named) < len(definitions):
            raise RequestError(f"schema: two classes in {name} have the same name", "schema")
        return AnswerType({**schema, "$defs": named}, _parser(lambda text: _value(shape, json.loads(text)), name))
    raise RequestError(
        f"schema is {shape!r:.80}; allowed: a dataclass, a pydantic model, or a JSON schema as a dictionary", "schema"
    )


def _parser(read: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, TypeError, KeyError) as error:
            raise ParseError(f"the answer is no whole {name}: {error}; the text is {text!r:.200}") from error

    return parse


# Types to schemas ---------------------------------------------------------------------------------------------------
def _schema_of(kind: Any, definitions: dict[type, Schema], place: str) -> Schema:
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _schema_of(arguments[0], definitions, place)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(each, definitions, place) for each in arguments]}
    if origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return {"type": "array", "items": _schema_of(arguments[0], definitions, f"{place}[]")}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions, f"{place}[]")}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [each.value for each in kind]}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _object_schema(kind, definitions, place)
    raise RequestError(f"schema: {place} is {kind!r:.80}, for which there is no JSON schema here", "schema")


def _object_schema(kind: type, definitions: dict[type, Schema], place: str) -> Schema:
    """A reference; the class itself is among the definitions, so that it may hold its own kind."""
    if kind not in definitions:
        definitions[kind] = {}
        hints = _hints(kind)
        fields = [each for each in dataclasses.fields(kind) if each.init]
        properties = {each.name: _schema_of(hints[each.name], definitions, f"{place}.{each.name}") for each in fields}
        definitions[kind] |= {"type": "object", "properties": properties, "additionalProperties": False}
        definitions[kind]["required"] = [each.name for each in fields]  # all: models leave out what they may
        if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
            definitions[kind]["description"] = kind.__doc__
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise RequestError(f"schema: a type of {kind.__name__} is not known: {error}", "schema") from error


# Values from JSON ---------------------------------------------------------------------------------------------------
def _value(kind: Any, value: Any) -> Any:
    """A value as its type has it; the schema has checked it, and what it could not check is checked here."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _value(arguments[0], value)
    if origin is typing.Literal:
        return _checked(value in arguments, kind, value)
    if origin in (typing.Union, types.UnionType):
        for each in arguments:
            try:
                return _value(each, value)
            except (ValueError, TypeError, KeyError):
                continue
        return _checked(False, kind, value)
    if origin in (list, tuple):
        _checked(isinstance(value, list), kind, value)
        return origin(_value(arguments[0], each) for each in value)
    if origin is dict:
        _checked(isinstance(value, dict), kind, value)
        return {key: _value(arguments[1], each) for key, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _checked(isinstance(value, dict), kind, value)
        hints = _hints(kind)
        return kind(**{name: _value(hints[name], each) for name, each in value.items()})
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _checked(type(value) is kind, kind, value)


def _checked(is_right: bool, kind: Any, value: Any) -> Any:
    if not is_right:
        raise ValueError(f"{value!r:.80} is no {getattr(kind, '__name__', kind)}")
    return value

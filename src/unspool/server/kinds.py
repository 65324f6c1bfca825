"""The types of request fields as JSON Schema: one table checks requests and is published in /openapi.json.

Only the JSON Schema keywords that the tables use are supported, and an unknown one raises when a table is made, so that
what is published is what is checked. Two keywords are unspool's own and are removed before publishing:

    x-treatment   "honoured" (the default) | "inert": cannot change an answer here | "refused": known, and why not
    x-tag         on anyOf: the property whose value chooses the alternative
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unspool.errors import RequestError
from unspool.suggest import nearest

Schema = dict[str, Any]

KNOWN = frozenset(
    [
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "items",
        "properties",
        "required",
        "additionalProperties",
        "maxProperties",
        "anyOf",
        "default",
        "description",
        "x-treatment",
        "x-tag",
    ]
)
MAX_CHECKS = 200_000  # values of one body, some counted twice: the time to check them is bounded
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


# Making tables ------------------------------------------------------------------------------------------------------
def string(**more: Any) -> Schema:
    return {"type": "string", **more}


def integer(low: int | None = None, high: int | None = None, **more: Any) -> Schema:
    return {"type": "integer", **_bounds(low, high), **more}


def number(low: float | None = None, high: float | None = None, **more: Any) -> Schema:
    return {"type": "number", **_bounds(low, high), **more}


def flag(**more: Any) -> Schema:
    return {"type": "boolean", **more}


def word(*words: str, **more: Any) -> Schema:
    return {"type": "string", "enum": list(words), **more}


def only(value: Any, **more: Any) -> Schema:
    """A field with exactly one allowed value."""
    return {"const": value, **more}


def array(items: Schema, least: int = 0, most: int | None = None, **more: Any) -> Schema:
    bounds = {"minItems": least} if least else {}
    return {"type": "array", "items": items, **bounds, **({} if most is None else {"maxItems": most}), **more}


def record(properties: Mapping[str, Schema], required: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def mapping(values: Schema | None = None, **more: Any) -> Schema:
    """An object whose keys are the caller's own."""
    return {"type": "object", "additionalProperties": values if values is not None else True, **more}


def any_of(*alternatives: Schema, tag: str | None = None, **more: Any) -> Schema:
    return {"anyOf": list(alternatives), **({"x-tag": tag} if tag else {}), **more}


def inert(schema: Schema) -> Schema:
    """Accepted, because none of its values can change an answer here."""
    return {**schema, "x-treatment": "inert"}


def refused(why: str) -> Schema:
    """A field of other APIs that is refused with a reason."""
    return {"x-treatment": "refused", "description": why}


def refused_types(*types: str, why: str) -> Schema:
    """An alternative of a tagged `anyOf` that is refused with a reason: objects of these types."""
    return {"type": "object", "properties": {"type": word(*types)}, **refused(why)}


def _bounds(low: float | None, high: float | None) -> Schema:
    return {**({} if low is None else {"minimum": low}), **({} if high is None else {"maximum": high})}


def treatment(schema: Schema) -> str:
    found: str = schema.get("x-treatment", "honoured")
    return found


# Checking -----------------------------------------------------------------------------------------------------------
class Checker:
    """Checks one body. `warnings` lists what a lenient server dropped instead of refusing."""

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self.warnings: list[str] = []
        self._num_left = MAX_CHECKS

    def check(self, schema: Schema, value: Any, path: str = "") -> None:
        """Raises a RequestError with the path of the first error."""
        self._num_left -= 1
        if self._num_left < 0:
            raise RequestError(f"{path}: the body has more values than are checked ({MAX_CHECKS:,})", path)
        if "anyOf" in schema:
            self._check_any(schema, value, path)
            return
        if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
            raise _wrong(path, value, f"only {_literal(schema['const'])} is supported", schema)
        if "type" in schema and not TYPES[schema["type"]](value):
            raise _wrong(path, value, f"expected {_article(schema['type'])}", schema)
        if "enum" in schema and value not in schema["enum"]:
            raise _wrong(path, value, f"allowed: {', '.join(map(_literal, schema['enum']))}", schema)
        if isinstance(value, dict):
            self._check_object(schema, value, path)
        elif isinstance(value, list):
            self._check_array(schema, value, path)
        elif isinstance(value, str):
            _check_size(schema, "Length", len(value), "characters", path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(schema, value, path)

    def _check_any(self, schema: Schema, value: Any, path: str) -> None:
        tag = schema.get("x-tag")
        if tag is not None:
            self._check_tagged(schema, tag, value, path)
            return
        fitting = [one for one in schema["anyOf"] if "type" not in one or TYPES[one["type"]](value)]
        if len(fitting) == 1:
            self.check(fitting[0], value, path)
            return
        problems = []
        for one in fitting:
            try:
                self.check(one, value, path)
                return
            except RequestError as error:
                problems.append(error)
        if problems:
            raise max(problems, key=lambda error: len(error.param or ""))  # the one that got furthest
        allowed = " or ".join(_article(one["type"]) for one in schema["anyOf"])
        raise _wrong(path, value, f"expected {allowed}", schema)

    def _check_tagged(self, schema: Schema, tag: str, value: Any, path: str) -> None:
        plain = [one for one in schema["anyOf"] if one.get("type") != "object"]
        for one in plain:
            if TYPES[one["type"]](value):
                self.check(one, value, path)
                return
        if not isinstance(value, dict):
            allowed = " or ".join([*(_article(one["type"]) for one in plain), "an object"])
            raise _wrong(path, value, f"expected {allowed}", schema)
        records = [one for one in schema["anyOf"] if one.get("type") == "object"]
        known: list[str] = []
        where = _join(path, tag)
        for one in records:
            tags = _tags(one["properties"][tag])
            if treatment(one) == "refused":
                if value.get(tag) in tags:
                    message = f"{where} is {_literal(value[tag])}; {one['description']}"
                    raise RequestError(message, where, "unsupported_value")
                continue
            known += tags
            if value.get(tag) in tags or (tag not in value and tag not in one["required"]):
                self.check(one, value, path)
                return
        if tag not in value:
            raise RequestError(f"{where} is missing; allowed: {', '.join(map(_literal, known))}", where)
        raise _wrong(where, value[tag], f"allowed: {', '.join(map(_literal, known))}", {})

    def _check_object(self, schema: Schema, value: dict[str, Any], path: str) -> None:
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties", True)
        _check_size(schema, "Properties", len(value), "entries", path)
        for name in schema.get("required", ()):
            if name not in value:
                raise RequestError(f"{_join(path, name)} is missing", _join(path, name), "missing_required_parameter")
        for name in list(value):
            where = _join(path, name)
            field = properties.get(name)
            if field is None and extra is False:
                hint = "" if self.lenient else nearest(name, properties)
                self._drop(value, name, RequestError(f"{where} is not a known field{hint}", where, "unknown_parameter"))
            elif field is None:
                if isinstance(extra, dict):
                    self.check(extra, value[name], where)
            elif value[name] is None and name not in schema.get("required", ()):
                del value[name]  # some clients send null for an absent field
            elif treatment(field) == "refused":
                why = f"{where} is not supported: {field['description']}"
                self._drop(value, name, RequestError(why, where, "unsupported_parameter"))
            else:
                self.check(field, value[name], where)

    def _drop(self, value: dict[str, Any], name: str, error: RequestError) -> None:
        if not self.lenient:
            raise error
        del value[name]
        self.warnings.append(f"{error}; it was ignored")

    def _check_array(self, schema: Schema, value: list[Any], path: str) -> None:
        _check_size(schema, "Items", len(value), "entries", path)
        items = schema.get("items")
        if items is None:
            return
        for one in items.get("anyOf", (items,)):
            if one.get("type") == "integer" and one.keys() <= {"type", "minimum"}:  # token ids come by the thousand
                low = one.get("minimum", float("-inf"))
                if all(type(item) is int and item >= low for item in value):
                    return
        for index, item in enumerate(value):
            self.check(items, item, f"{path}[{index}]")


def _check_size(schema: Schema, what: str, size: int, unit: str, path: str) -> None:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if size < least or (most is not None and size > most):
        allowed = f"at least {least:,}" if size < least else f"at most {most:,}"
        raise RequestError(f"{path or 'the body'} has {size:,} {unit}; {allowed} are allowed", path or None)


def _check_range(schema: Schema, value: float, path: str) -> None:
    low, high, above = schema.get("minimum"), schema.get("maximum"), schema.get("exclusiveMinimum")
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    if too_low or (high is not None and value > high):
        least = f"from {low:,}" if low is not None else f"above {above:,}" if above is not None else ""
        most = f"to {high:,}" if high is not None else "up"
        raise _wrong(path, value, f"allowed: {least} {most}".strip(), schema)


def _tags(schema: Schema) -> list[str]:
    return [schema["const"]] if "const" in schema else schema["enum"]


def _join(path: str, name: str) -> str:
    return f"{path}.{name[:100]}" if path else name[:100]


def _wrong(path: str, value: Any, what: str, schema: Schema) -> RequestError:
    hint = f" ({schema['description']})" if "const" in schema and "description" in schema else ""
    return RequestError(f"{path or 'the body'} is {_literal(value)}; {what}{hint}", path or None)


def _literal(value: Any) -> str:
    """The value as JSON, shortened."""
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = f'"{value}"' if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
    if not text:
        return "an object" if isinstance(value, dict) else "a list"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "…"


def _article(type: str) -> str:
    return "null" if type == "null" else f"an {type}" if type[0] in "aio" else f"a {type}"


# Publishing ---------------------------------------------------------------------------------------------------------
def published(schema: Schema) -> Schema:
    """The schema as /openapi.json shows it: refused fields removed, optional ones nullable, unspool's own keywords
    removed."""
    unknown = schema.keys() - KNOWN
    if unknown:
        raise ValueError(f"the checker does not know {', '.join(sorted(unknown))}")
    out = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if "anyOf" in out:
        out["anyOf"] = [published(one) for one in out["anyOf"] if treatment(one) != "refused"]
    if "items" in out:
        out["items"] = published(out["items"])
    if isinstance(out.get("additionalProperties"), dict):
        out["additionalProperties"] = published(out["additionalProperties"])
    if "properties" in out:
        required = out.get("required", ())
        fields = {name: field for name, field in out["properties"].items() if treatment(field) != "refused"}
        out["properties"] = {
            name: published(field) if name in required else _nullable(published(field))
            for name, field in fields.items()
        }
    return out


def _nullable(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "const" in schema:
        rest = {key: value for key, value in schema.items() if key not in ("const", "type")}
        return {"enum": [schema["const"], None], **rest}
    if "type" in schema:
        schema = {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        schema = {**schema, "enum": [*schema["enum"], None]}
    return schema

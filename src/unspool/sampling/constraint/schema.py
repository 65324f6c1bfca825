"""From a JSON Schema of any draft to the few keywords that llguidance enforces to the letter.

A schema is rewritten, not passed on: what is left must accept no more than what was given, so that every finished
document validates. Rewriting may narrow (a format's rare spellings, a bound's last digit) because nothing below is
ever negated; what cannot be said without a negation is refused by name. docs/constraints.md lists both.

Why not pass it on as it is: a name spelled `"\\u0061"` would escape the rule for `"a"`, a key given twice would count
twice towards minProperties, text above an exclusive bound can read as that bound, large constants lose digits.
"""

from __future__ import annotations

import math
import re
from typing import Any

from unspool.sampling.constraint import formats, numbers
from unspool.sampling.constraint.document import Document
from unspool.sampling.constraint.expression import PRINTABLE, Translation, literal, translate
from unspool.sampling.constraint.limits import Budget, Limits, Place, Refused
from unspool.sampling.constraint.unions import Unions

Lowered = dict[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# What names may be besides the keywords that say which names there are.
_ANNOTATIONS = {"$schema", "$comment", "$defs", "definitions", "title", "description", "default", "example", "examples"}
_MAX_DEPENDENT = 8  # each doubles the ways in which an object can go
# Keywords that constrain and are not enforced. All that no draft defines are annotations.
_UNSUPPORTED = {
    "if": "write anyOf",
    "not": "say what is allowed instead",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "unevaluatedProperties": "write additionalProperties",
    "unevaluatedItems": "write items",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
}
_MAX_U32 = 2**32 - 1


class Lowering:
    """Rewrites one document. `places` tells where in it each part of the result came from, by the part's identity."""

    def __init__(self, document: Document, limits: Limits, budget: Budget) -> None:
        self._document = document
        self._limits = limits
        self._unions = Unions(document, budget)
        self._names: dict[Place, str] = {}  # reference targets met so far
        self._pending: list[tuple[Any, Place]] = []
        self._num_nodes = 0
        self._multiples: set[int | float] = set()
        self.places: dict[int, Place] = {}

    def run(self) -> dict[str, Any]:
        """The rewritten schema with its definitions under `$defs`."""
        root = self._node(self._document.root, (), 0)
        definitions: dict[str, Lowered] = {}
        while self._pending:
            node, place = self._pending.pop()
            definitions[self._names[place]] = self._node(node, place, 0)
        self._check_multiples()
        if root is False:
            raise Refused("accepts nothing", "$")
        result = {} if root is True else root
        return {**result, "$defs": definitions} if definitions else result

    def _node(self, node: Any, place: Place, depth: int) -> Lowered:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise Refused(f"is {node!r:.80}; a schema is an object or a boolean", place)
        self._num_nodes += 1
        if self._num_nodes > self._limits.max_nodes:
            raise Refused(f"the schema has more than {self._limits.max_nodes:,} subschemas", place)
        if depth > self._limits.max_depth:
            raise Refused(f"the schema nests deeper than {self._limits.max_depth} subschemas", place)
        self._check_keywords(node, place)
        plain = self._assertions(node, place, depth)
        every = [*plain.pop("allOf", []), *self._dependent(node, place, depth)]
        if "propertyNames" in node:
            every.append(self._names_only(node["propertyNames"], (*place, "propertyNames")))
        joined = self._applicators(node, place, depth, every)
        # Properties come in the order in which the schema first speaks of them.
        order = [key for key in node if key in ("$ref", "allOf", "anyOf", "oneOf", "properties", "required")]
        joined_first = bool(order) and order[0] not in ("properties", "required")
        result = {**joined, **plain} if joined_first else {**plain, **joined}
        self.places[id(result)] = place
        return result

    def _check_keywords(self, node: dict[str, Any], place: Place) -> None:
        self._document.check_identity(node, place)
        for key in node:
            if key in _UNSUPPORTED:
                hint = f"; {_UNSUPPORTED[key]}" if _UNSUPPORTED[key] else ""
                raise Refused(f"the keyword {key!r} is not supported{hint}", (*place, key))

    # ---- keywords that look at the value itself

    def _assertions(self, node: dict[str, Any], place: Place, depth: int) -> dict[str, Any]:
        """`allOf` in the result holds what did not fit beside the rest."""
        result: dict[str, Any] = {}
        if "type" in node:
            result["type"] = _types(node["type"], (*place, "type"))
        limits = numbers.bounds(node, place, booleans=self._document.draft == 4)
        short = numbers.shorter(limits) if result.get("type") == "number" else []
        result |= {"allOf": [{"anyOf": [limits, {"enum": short}]}]} if short else limits
        if "multipleOf" in node:
            result["multipleOf"] = numbers.multiple_of(node["multipleOf"], (*place, "multipleOf"), self._limits)
            self._multiples.add(result["multipleOf"])
        string = self._string(node, place)
        result |= string | _unless([*result.get("allOf", []), *string.get("allOf", [])], [], "allOf")
        result |= self._array(node, place, depth)
        result |= self._object(node, place, depth)
        for key in ("const", "enum"):
            if key in node:
                self._check_values(node[key], key, (*place, key))
                result[key] = node[key]
        return result

    def _check_values(self, value: Any, key: str, place: Place) -> None:
        if key == "enum" and (not isinstance(value, list) or not value):
            raise Refused("needs a list of at least one value", place)
        if key == "enum" and len(value) > self._limits.max_values:
            raise Refused(f"has {len(value):,} values; at most {self._limits.max_values:,} are accepted", place)
        self._check_constant(value, place, 0)

    def _check_constant(self, value: Any, place: Place, depth: int) -> None:
        match value:
            case list() | dict() if depth > self._limits.max_depth:
                raise Refused(f"a constant nests deeper than {self._limits.max_depth}", place[:8])
            case str() if len(value) > self._limits.max_constant:
                raise Refused(f"has {len(value):,} characters; at most {self._limits.max_constant:,}", place)
            case str() if odd := re.search(r"[\x00-\x07\x0B\x0E-\x1F\x7F]", value):
                raise Refused(f"holds U+{ord(odd.group()):04X}, which is not written in JSON strings here", place)
            case bool() | None | str():
                return
            case int() | float() if not numbers.is_exact(value):
                raise Refused(f"is {value!r:.40}; constants have at most 15 digits, integers at most 2**53", place)
            case list():
                for number, item in enumerate(value):
                    self._check_constant(item, (*place, number), depth + 1)
            case dict():
                for name, item in value.items():
                    self._check_constant(item, (*place, name), depth + 1)

    def _string(self, node: dict[str, Any], place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        expressions = []
        if "pattern" in node:
            expressions.append(self._expression(node["pattern"], (*place, "pattern"), whole=False).regex)
        low, high = self._range(node, "Length", place)
        form = node.get("format")
        if form is not None:
            known = [*formats.STRINGS, *formats.INTEGERS, *sorted(formats.HINTS)]
            if form not in known:
                raise Refused(f"the format {form!r} is not one of {', '.join(known)}", (*place, "format"))
            if form in formats.STRINGS:
                expressions.append(self._expression(formats.STRINGS[form], (*place, "format"), whole=True).regex)
        if low:
            result["minLength"] = low
        if high is not None:
            result["maxLength"] = high
        if expressions:
            result["pattern"] = f"^(?:{expressions[0]})$"
        if len(expressions) > 1:
            result["allOf"] = [{"pattern": f"^(?:{expressions[1]})$"}]
        return result

    def _expression(self, pattern: Any, place: Place, *, whole: bool, ascii: bool = False) -> Translation:
        if not isinstance(pattern, str):
            raise Refused(f"is {pattern!r}; a string is needed", place)
        try:
            return translate(pattern, whole=whole, json=True, ascii=ascii, limits=self._limits)
        except Refused as refused:
            raise Refused(str(refused), place) from None

    def _range(self, node: dict[str, Any], noun: str, place: Place) -> tuple[int, int | None]:
        """minNoun and maxNoun."""
        found: list[int | None] = []
        for name in (f"min{noun}", f"max{noun}"):
            value = node.get(name)
            if value is not None or name in node:
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise Refused(f"is {value!r}; a whole number of at least 0 is needed", (*place, name))
            found.append(value)
        low, high = found[0] or 0, found[1]
        if low > self._limits.max_count:
            raise Refused(f"is {low:,}; at most {self._limits.max_count:,} is accepted", (*place, f"min{noun}"))
        if high is not None and low > high:
            raise Refused(f"min{noun} is {low:,} but max{noun} is {high:,}", place)
        return low, None if high is None else min(high, 2**31 - 1)

    def _array(self, node: dict[str, Any], place: Place, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if node.get("uniqueItems", False) is not False:
            raise Refused("the keyword 'uniqueItems' is not supported", (*place, "uniqueItems"))
        first, rest = ("prefixItems", "items") if self._document.draft >= 2020 else ("items", "additionalItems")
        if first == "items" and not isinstance(node.get("items"), list):
            first, rest = "", "items"
        if first in node:
            listed = node[first]
            if not isinstance(listed, list) or not listed:
                raise Refused("needs a list of at least one schema", (*place, first))
            result["prefixItems"] = [
                self._node(item, (*place, first, number), depth + 1) for number, item in enumerate(listed)
            ]
        if rest in node:
            if isinstance(node[rest], list):
                raise Refused("is a list; this draft calls that prefixItems", (*place, rest))
            result["items"] = self._node(node[rest], (*place, rest), depth + 1)
        low, high = self._range(node, "Items", place)
        return result | _unless(low, 0, "minItems") | _unless(high, None, "maxItems")

    def _object(self, node: dict[str, Any], place: Place, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        named = _mapping(node, "properties", place)
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Refused("needs a list of names", (*place, "required"))
        if max(len(named), len(required)) > self._limits.max_properties:
            count = max(len(named), len(required))
            raise Refused(f"{count:,} properties; at most {self._limits.max_properties:,} are accepted", place)
        if named:
            result["properties"] = {
                name: self._node(child, (*place, "properties", name), depth + 1) for name, child in named.items()
            }
        if "patternProperties" in node:
            result["patternProperties"] = self._patterns(node, [*named, *required], place, depth)
        if "additionalProperties" in node:
            more = (*place, "additionalProperties")
            result["additionalProperties"] = self._node(node["additionalProperties"], more, depth + 1)
        low, high = self._range(node, "Properties", place)
        if low > len(set(required)) + 1:
            # Names beyond the listed ones may repeat, and a repeated name counts once: one more is all that is sure.
            raise Refused(
                f"is {low:,}; at most one more than `required` lists ({len(set(required))}) is supported",
                (*place, "minProperties"),
            )
        result |= _unless(required, [], "required")
        return result | _unless(low, 0, "minProperties") | _unless(high, None, "maxProperties")

    def _patterns(self, node: dict[str, Any], names: list[str], place: Place, depth: int) -> dict[str, Any]:
        """A narrowed expression would let some names escape to `additionalProperties`. Where dialects disagree, names
        are therefore kept to printable ASCII, on which they do not, unless other names are refused anyway."""
        result: dict[str, Any] = {}
        patterns = _mapping(node, "patternProperties", place)
        if len(patterns) > self._limits.max_patterns:
            raise Refused(f"{len(patterns):,} patterns; at most {self._limits.max_patterns} are accepted", place)
        places = {pattern: (*place, "patternProperties", pattern) for pattern in patterns}
        exact = all(self._expression(pattern, places[pattern], whole=False).exact for pattern in patterns)
        ascii = not exact and node.get("additionalProperties") is not False
        for name in names:
            if not exact and not (name.isascii() and name.isprintable()):
                raise Refused(f"validators disagree whether the name {name!r} matches", (*place, "patternProperties"))
        for pattern, child in patterns.items():
            translation = self._expression(pattern, places[pattern], whole=False, ascii=ascii)
            key, lowered = f"^(?:{translation.regex})$", self._node(child, places[pattern], depth + 1)
            result[key] = {"allOf": [result[key], lowered]} if key in result else lowered
        if ascii:
            result[f"^{PRINTABLE}*[^\\x20-\\x7E](?s:.*)$"] = False
        return result

    # ---- keywords that hold schemas for the same value

    def _applicators(self, node: dict[str, Any], place: Place, depth: int, every: list[Lowered]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key in node:
            if key == "$ref":
                result["$ref"] = f"#/$defs/{self._target(node[key], (*place, key))}"
            elif key in ("allOf", "anyOf", "oneOf"):
                options = self._options(node[key], (*place, key), depth)
                if key == "allOf":
                    every = [*every, *options]
                elif key == "oneOf" and (pair := self._unions.overlapping(node[key], (*place, key))):
                    raise Refused(
                        f"options {pair[0]} and {pair[1]} may both accept one value; make them differ in type, in a "
                        "required constant or in closed properties, or write anyOf",
                        (*place, key),
                    )
                elif "anyOf" in result:
                    every = [*every, {"anyOf": options}]
                else:
                    result["anyOf"] = options
        return result | _unless(every, [], "allOf")

    def _dependent(self, node: dict[str, Any], place: Place, depth: int) -> list[Lowered]:
        """What holds if a property is there: it is absent, or it is there and the rest holds."""
        result: list[Lowered] = []
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, child in _mapping(node, key, place).items():
                here = (*place, key, name)
                if isinstance(child, list) and key != "dependentSchemas":
                    if not all(isinstance(other, str) for other in child):
                        raise Refused("needs a list of names", here)
                    then: dict[str, Any] = {"required": [name, *child]}
                elif key == "dependentRequired":
                    raise Refused("needs a list of names", here)
                else:
                    then = {"required": [name], "allOf": [self._node(child, here, depth + 1)]}
                result.append({"anyOf": [{"properties": {name: False}}, then]})
        if len(result) > _MAX_DEPENDENT:
            raise Refused(f"{len(result)} dependent properties; at most {_MAX_DEPENDENT} are supported", place)
        return result

    def _names_only(self, node: Any, place: Place) -> Lowered:
        """`propertyNames` as the one pattern that names may match."""
        while isinstance(node, dict) and list(node) == ["$ref"]:
            node, place = self._document.resolve(node["$ref"], place)
        if isinstance(node, bool):
            return True if node else {"patternProperties": {}, "additionalProperties": False}
        self._check_keywords(node, place)
        said = set(node) - _ANNOTATIONS
        regex = None
        if node.get("type", "string") != "string":
            raise Refused("names are strings", place)
        if said - {"type"} in ({"enum"}, {"const"}):
            values = node.get("enum", [node.get("const")])
            self._check_values(values, "enum", place)
            regex = "|".join(literal(value) for value in values if isinstance(value, str))
        elif said <= {"type", "pattern", "format", "minLength", "maxLength"}:
            lowered = self._string(node, place)
            low, high = lowered.get("minLength", 0), lowered.get("maxLength")
            if "pattern" in lowered and not lowered.get("allOf") and not low and high is None:
                regex = lowered["pattern"].removeprefix("^").removesuffix("$")
            elif "pattern" not in lowered:
                regex = f"(?s:.{{{low},{'' if high is None else high}}})"
        if not regex:
            raise Refused("supported are one of pattern, format, enum, const, or lengths", place)
        return {"patternProperties": {f"^(?:{regex})$": True}, "additionalProperties": False}

    def _options(self, value: Any, place: Place, depth: int) -> list[Lowered]:
        if not isinstance(value, list) or not value:
            raise Refused("needs a list of at least one schema", place)
        return [self._node(option, (*place, number), depth + 1) for number, option in enumerate(value)]

    def _target(self, reference: Any, place: Place) -> str:
        node, target = self._document.resolve(reference, place)
        if target not in self._names:
            self._names[target] = f"d{len(self._names)}"
            self._pending.append((node, target))
        return self._names[target]

    def _check_multiples(self) -> None:
        """Where several meet, their least common multiple is taken in 32 bits."""
        if math.prod(round(value * 10) for value in self._multiples) > _MAX_U32 and len(self._multiples) > 1:
            raise Refused("several different multipleOf in one schema are too large together", "$")


def _types(value: Any, place: Place) -> Any:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise Refused(f"is {value!r}; a type or a list of types is needed", place)
    for name in listed:
        if name not in TYPES:
            raise Refused(f"{name!r} is no type; types are {', '.join(TYPES)}", place)
    return value


def _mapping(node: dict[str, Any], key: str, place: Place) -> dict[str, Any]:
    value = node.get(key, {})
    if not isinstance(value, dict):
        raise Refused(f"is {value!r:.80}; an object is needed", (*place, key))
    return value


def _unless(value: Any, nothing: Any, key: str) -> dict[str, Any]:
    return {} if value == nothing else {key: value}

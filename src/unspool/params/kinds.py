"""The types of parameters: what each takes, its normal form, its JSON Schema and its types in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from unspool.errors import RequestError
from unspool.params import checks
from unspool.records import record

Schema = dict[str, Any]
MAX_STRINGS = 1024
# The dataclasses below have no more than __init__: every further method is compiled at every start.


class Kind(Protocol):
    """One type of values. `annotation` is what a caller may give, `resolved` what it becomes."""

    @property
    def annotation(self) -> str: ...

    @property
    def resolved(self) -> str: ...

    @property
    def range(self) -> str:
        """The allowed values in words, for tables; empty where the type says it all."""

    def check(self, name: str, value: object) -> Any:
        """The value in its normal form, or a RequestError that names the parameter, the value and the range."""

    def schema(self) -> Schema: ...


@record(eq=False, repr=False)
class Integer:
    low: int
    high: int | None = None
    also: int | None = None  # one more value, outside the range, that means off or everything
    also_means: int | None = None  # the value that `also` stands for
    annotation = resolved = "int"

    @property
    def range(self) -> str:
        also = f"{self.also}, or " if self.also is not None else ""
        return f"{also}{self.low:,} …" + (f" {self.high:,}" if self.high is not None else "")

    def check(self, name: str, value: object) -> int:
        number = checks.integer(name, value, self.low, self.high, also=self.also)
        return self.also_means if number == self.also and self.also_means is not None else number

    def schema(self) -> Schema:
        low = self.low if self.also is None else min(self.low, self.also)
        return {"type": "integer", "minimum": low, **({} if self.high is None else {"maximum": self.high})}


@record(eq=False, repr=False)
class Number:
    low: float
    high: float
    above: bool = False  # the lower bound itself is not allowed
    also: float | None = None
    annotation = resolved = "float"

    @property
    def range(self) -> str:
        also = f"{self.also:g}, or " if self.also is not None else ""
        return f"{also}{'above ' if self.above else ''}{self.low:g} … {self.high:g}"

    def check(self, name: str, value: object) -> float:
        return checks.number(name, value, self.low, self.high, above=self.above, also=self.also)

    def schema(self) -> Schema:
        low = self.low if self.also is None else min(self.low, self.also)
        return {"type": "number", "exclusiveMinimum" if self.above else "minimum": low, "maximum": self.high}


class Flag:
    annotation = resolved = "bool"
    range = ""

    def check(self, name: str, value: object) -> bool:
        return checks.flag(name, value)

    def schema(self) -> Schema:
        return {"type": "boolean"}


@record(eq=False, repr=False)
class Word:
    words: tuple[str, ...]

    @property
    def annotation(self) -> str:
        return f"Literal[{', '.join(json.dumps(word) for word in self.words)}]"

    resolved = annotation

    @property
    def range(self) -> str:
        return ", ".join(f"`{word}`" for word in self.words)

    def check(self, name: str, value: object) -> str:
        word: str = checks.word(name, value, self.words)
        return word

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.words)}


class Text:
    annotation = resolved = "str"
    range = ""

    def check(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise checks.refuse(name, value, "a string")
        return value

    def schema(self) -> Schema:
        return {"type": "string"}


class Texts:
    """A text or several."""

    annotation = "Sequence[str] | str"
    resolved = "tuple[str, ...]"
    range = ""

    def check(self, name: str, value: object) -> tuple[str, ...]:
        return checks.strings(name, value, MAX_STRINGS)

    def schema(self) -> Schema:
        text = {"type": "string", "minLength": 1}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STRINGS}]}


@record(eq=False, repr=False)
class TokenIds:
    least: int = 0  # how many a request must name
    annotation = "Sequence[int]"
    resolved = "tuple[int, ...]"
    range = ""

    def check(self, name: str, value: object) -> tuple[int, ...]:
        return checks.token_ids(name, value)

    def schema(self) -> Schema:
        bounds = {"minItems": self.least} if self.least else {}
        return {"type": "array", "items": {"type": "integer", "minimum": 0}, **bounds}


class Bias:
    """Token ids and what is added to their logits."""

    annotation = resolved = "Mapping[int, float]"
    range = f"{-checks.MAX_BIAS} … {checks.MAX_BIAS}, or -inf"

    def check(self, name: str, value: object) -> dict[int, float]:
        return checks.bias(name, value)

    def schema(self) -> Schema:
        value = {"type": "number", "minimum": -checks.MAX_BIAS, "maximum": checks.MAX_BIAS}
        return {"type": "object", "additionalProperties": value}


@record(eq=False, repr=False)
class Anything:
    """A value that is checked elsewhere."""

    about: str
    annotation = resolved = "Any"
    range = ""

    def check(self, name: str, value: object) -> Any:
        return value

    def schema(self) -> Schema:
        return {"description": self.about}


@record(eq=False, repr=False)
class Either:
    kinds: tuple[Kind, ...]
    range: str  # in words

    @property
    def annotation(self) -> str:
        return " | ".join(kind.annotation for kind in self.kinds)

    resolved = annotation

    def check(self, name: str, value: object) -> Any:
        for kind in self.kinds:
            try:
                return kind.check(name, value)
            except RequestError:
                continue
        raise checks.refuse(name, value, self.range)

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@record(eq=False, repr=False)
class Record:
    """An object of one class, whose fields have kinds of their own."""

    cls: type
    fields: Mapping[str, Kind]
    required: tuple[str, ...] = ()
    range = ""

    @property
    def annotation(self) -> str:
        return self.cls.__name__

    resolved = annotation

    def check(self, name: str, value: object) -> Any:
        if not isinstance(value, self.cls):
            raise checks.refuse(name, value, f"a {self.cls.__name__}")
        return value

    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {name: kind.schema() for name, kind in self.fields.items()},
            "required": list(self.required),
            "additionalProperties": False,
        }


class Rules:
    """A function that says where an answer ends, or several."""

    annotation = "StopRule | Sequence[StopRule]"
    resolved = "tuple[StopRule, ...]"
    range = ""

    def check(self, name: str, value: object) -> tuple[Any, ...]:
        rules = tuple(value) if isinstance(value, list | tuple) else (value,)
        for rule in rules:
            if not callable(rule) or isinstance(rule, type):
                raise checks.refuse(name, value, "a function (state) -> bool, or a list of them")
        return rules

    def schema(self) -> Schema:
        raise AssertionError("functions do not go through JSON")


class Order:
    """The name of a preset, or a list of stages."""

    annotation = "str | Sequence[Stage]"
    resolved = "tuple[Stage, ...]"
    range = ""

    def check(self, name: str, value: object) -> Any:
        from unspool.params.order import check_order  # the stages are derived from the parameters

        return check_order(value)

    def schema(self) -> Schema:
        from unspool.params.order import PRESETS, STAGES

        stages = {"type": "array", "items": Word(tuple(STAGES)).schema(), "maxItems": len(STAGES)}
        return {"anyOf": [Word(tuple(PRESETS)).schema(), stages]}

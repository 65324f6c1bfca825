"""Typed, range-checked reading of a model's metadata: GGUF keys and JSON fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from unspool.errors import ModelError
from unspool.records import record

MAX_JSON = 64 << 20


@record(frozen=True)
class Fields:
    """A mapping from an untrusted file. Every getter checks type and range; its errors name the file and the field."""

    source: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def fail(self, key: str, message: str) -> NoReturn:
        raise ModelError(f"{self.source}: {self.prefix}{key}: {message}")

    def get(self, key: str) -> Any:
        """The raw value; JSON's null counts as absent."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "it is missing")
        if isinstance(value, list) and value and all(type(each) is int and each == value[0] for each in value):
            value = value[0]  # a list with the same number for every layer
        if type(value) is not int:
            self.fail(key, f"{_short(value)} is not an integer")
        if not low <= value <= high:
            self.fail(key, f"{_short(value)} is outside {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        """A finite number, low < number ≤ high."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "it is missing")
        if type(value) not in (int, float):
            self.fail(key, f"{_short(value)} is not a number")
        if not low < value <= high:
            self.fail(key, f"{_short(value)} is outside {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, *, low: float, high: float) -> float | None:
        return None if self.get(key) is None else self.number(key, low=low, high=high)

    def numbers(self, key: str, count: int, *, low: float, high: float) -> tuple[float, ...]:
        """A list of `count` finite numbers, each low < number ≤ high."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count:
            self.fail(key, f"a list of {count} numbers was expected")
        one = Fields(self.source, {f"{self.prefix}{key}[{i}]": each for i, each in enumerate(value)}, self.prefix)
        return tuple(one.number(f"{key}[{i}]", low=low, high=high) for i in range(count))

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.fail(key, f"{_short(value)} is not true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None:
            value = default
        if not is_text(value):
            self.fail(key, "it is missing" if value is None else f"{_short(value)} is not a string")
        return str(value)

    def optional_string(self, key: str) -> str | None:
        return None if self.get(key) is None else self.string(key)

    def object(self, key: str) -> Fields | None:
        """A nested JSON object, or None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, f"{_short(value)} is not an object")
        nested = {f"{self.prefix}{key}.{name}": each for name, each in value.items()}
        return Fields(self.source, nested, f"{self.prefix}{key}.")

    def token_ids(self, key: str, vocab_size: int = 1 << 31) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for each in ids:
            if type(each) is not int or not 0 <= each < 1 << 31:
                self.fail(key, f"{_short(each)} is not a token id")
            if each >= vocab_size:
                self.fail(key, f"token {each} is outside the vocabulary of {vocab_size}")
        return tuple(ids)


def is_text(value: Any) -> bool:
    """Whether a value is a string that can be encoded: JSON's escapes can make half a surrogate pair, which cannot."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value))


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_JSON:
            raise ModelError(f"{path}: not a file of at most {MAX_JSON} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, huge numbers, deep nesting
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object was expected, not {_short(value)}")
    return value

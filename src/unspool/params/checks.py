"""Checks of single values: each returns the normal form or raises a RequestError with the field, value and range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real  # numpy's scalars are these too
from typing import Any

from unspool.errors import RequestError

MAX_BIAS = 100


def refuse(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {value!r}; allowed: {allowed}", name)


def integer(name: str, value: object, low: int, high: int | None = None, *, also: int | None = None) -> int:
    """An int within [low, high], or the one value `also` that means off or everything."""
    allowed = f"an integer from {low:,}" + (f" to {high:,}" if high is not None else " up")
    allowed += f", or {also}" if also is not None else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refuse(name, value, allowed)
    value = int(value)
    if value == also or (value >= low and (high is None or value <= high)):
        return value
    raise refuse(name, value, allowed)


def number(
    name: str, value: object, low: float, high: float, *, above: bool = False, also: float | None = None
) -> float:
    """A finite number within [low, high], or (low, high] with `above`, or the one value `also`."""
    allowed = f"above {low:g} and up to {high:g}" if above else f"from {low:g} to {high:g}"
    allowed += f", or {also:g}" if also is not None else ""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise refuse(name, value, allowed)
    given = float(value)
    if given == also or (low < given <= high if above else low <= given <= high):
        return given
    raise refuse(name, value, allowed)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def word(name: str, value: object, allowed: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise refuse(name, value, ", ".join(allowed))
    return value


def strings(name: str, value: object, most: int) -> tuple[str, ...]:
    """A string or a list of non-empty strings, as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise refuse(name, value, "a string or a list of strings")
    if len(items) > most:
        raise RequestError(f"{name} has {len(items):,} entries; at most {most:,}", name)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise RequestError(f"{name}[{index}] is {item!r}; it must be a string", name)
        if not item:
            raise RequestError(f"{name}[{index}] is an empty string; it would match everywhere", name)
    return tuple(items)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids, sorted and without doubles."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise refuse(name, value, "a list of token ids")
    ids = list(value)
    for index, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, Integral) or item < 0:
            raise RequestError(f"{name}[{index}] is {item!r}; a token id is an integer from 0 up", name)
    return tuple(sorted({int(item) for item in ids}))


def bias(name: str, value: object) -> dict[int, float]:
    """Token id -> what is added to its logit. Minus infinity bans; string keys (JSON's) are read as integers."""
    if not isinstance(value, Mapping):
        raise refuse(name, value, "a mapping from token id to a number")
    biases: dict[int, float] = {}
    for key, amount in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise RequestError(f"{name} has the key {key!r}; a token id is an integer from 0 up", name)
        good = isinstance(amount, Real) and not isinstance(amount, bool)
        if not good or not (-MAX_BIAS <= amount <= MAX_BIAS or amount == -math.inf):
            allowed = f"from {-MAX_BIAS} to {MAX_BIAS}, or -inf to ban"
            raise RequestError(f"{name}[{token}] is {amount!r}; allowed: {allowed}", name)
        biases[int(token)] = float(amount)
    return dict(sorted(biases.items()))


def within_vocab(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise RequestError(f"{name} names token {token}; the vocabulary has {vocab_size:,} tokens", name)

"""Bounds of numbers, moved inwards to where text, binary floating point and native integers agree.

A number is generated as text and validated as a double: 0.1000000000000000000001 is text above 0.1 and the double 0.1,
so `exclusiveMinimum: 0.1` must start at the next double. Inclusive bounds are safe: reading text is monotonic.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from unspool.sampling.constraint.formats import INTEGERS
from unspool.sampling.constraint.limits import Limits, Place, Refused

WIDEST = 10**17  # bounds beyond it are narrowed to it: native integers have 64 bits
EXACT = 2**53  # every integer up to it is a double
_FINEST = Decimal("1e-12")  # bounds closer to zero than this are moved away from what they exclude


def number(value: Any, place: Place) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"is {value!r}; a number is needed", place)
    return value


def bounds(schema: dict[str, Any], place: Place, *, booleans: bool) -> dict[str, Any]:
    """`minimum` and `maximum` that say at least what the schema's four keywords say. `booleans`: as in draft 4."""
    low: Decimal | None = None
    high: Decimal | None = None
    for name, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = f"exclusive{name.capitalize()}"
        values = []
        if name in schema:
            strict = booleans and schema.get(exclusive, False) is True
            values.append(_inward(number(schema[name], (*place, name)), sign, strict))
        if exclusive in schema and not booleans:
            values.append(_inward(number(schema[exclusive], (*place, exclusive)), sign, strict=True))
        elif exclusive in schema and not isinstance(schema[exclusive], bool):
            raise Refused(f"is {schema[exclusive]!r}; draft 4 has true or false here", (*place, exclusive))
        width = schema.get("format")
        if isinstance(width, str) and width in INTEGERS:
            values.append(Decimal(INTEGERS[width][0 if sign > 0 else 1]))
        if sign > 0:
            low = max(values, default=None)
        else:
            high = min(values, default=None)
    if (low is not None and low > WIDEST) or (high is not None and high < -WIDEST):
        raise Refused(f"numbers beyond ±{WIDEST:,} are not supported", place)
    result: dict[str, Any] = {}
    if low is not None:
        result["minimum"] = _plain(max(low, Decimal(-WIDEST)), ROUND_CEILING)
    if high is not None:
        result["maximum"] = _plain(min(high, Decimal(WIDEST)), ROUND_FLOOR)
    return result


def _inward(value: int | float, sign: int, strict: bool) -> Decimal:
    """The bound as a decimal; a strict one moves to the next double on the allowed side, or the next integer."""
    if isinstance(value, float) and not math.isfinite(value):
        return Decimal(-sign) * WIDEST * 10
    exact = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    if not strict:
        return exact
    if abs(exact) >= EXACT:
        return exact + sign * 1024  # more than a double's step below WIDEST
    beyond = Decimal(repr(math.nextafter(float(value), sign * math.inf)))
    return max(beyond, exact + _FINEST) if sign > 0 else min(beyond, exact - _FINEST)


def _plain(value: Decimal, rounding: str) -> int | float:
    """As JSON: at most twelve decimals where the value is small, and no double beyond the bound."""
    if abs(value) < 1 and value.as_tuple().exponent < _FINEST.as_tuple().exponent:  # type: ignore[operator]
        value = value.quantize(_FINEST, rounding=rounding)
    nearest = float(value)
    if Decimal(nearest) != value and abs(value) >= EXACT:
        outside = Decimal(nearest) > value if rounding == ROUND_FLOOR else Decimal(nearest) < value
        nearest = math.nextafter(nearest, -math.inf if rounding == ROUND_FLOOR else math.inf) if outside else nearest
    return int(nearest) if nearest == int(nearest) else nearest


def multiple_of(value: Any, place: Place, limits: Limits) -> int | float:
    """Divisors on which decimal text and binary doubles agree: whole numbers, halves, quarters and so on."""
    divisor = number(value, place)
    if divisor <= 0:
        raise Refused(f"is {value!r}; it must be above 0", place)
    if divisor > limits.max_multiple:
        raise Refused(f"is {value!r}; at most {limits.max_multiple:,} is supported", place)
    numerator, denominator = divisor.as_integer_ratio()
    if isinstance(divisor, float) and numerator & (numerator - 1) != 0:
        raise Refused(
            f"is {value!r}; whole numbers (written without a point) and powers of two are supported: "
            "validators compute others in binary and disagree about 0.29 being a multiple of 0.01",
            place,
        )
    if denominator > 1024:
        raise Refused(f"is {value!r}; at least 1/1024 is supported", place)
    return numerator if denominator == 1 else divisor

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
MAX_DIGITS = 15  # every decimal of so many digits is told apart by doubles
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
    """As JSON that llguidance reads exactly: an integer that is a double, or fifteen digits; never beyond the bound."""
    if value == value.to_integral_value():
        nearest = float(value)
        outside = Decimal(nearest) > value if rounding == ROUND_FLOOR else Decimal(nearest) < value
        return int(math.nextafter(nearest, -math.inf if rounding == ROUND_FLOOR else math.inf) if outside else nearest)
    finest = max(_FINEST, Decimal(1).scaleb(value.adjusted() - MAX_DIGITS + 1))
    inside = value.quantize(finest, rounding=rounding).normalize()
    return int(inside) if inside == inside.to_integral_value() else float(inside)


def shorter(limits: dict[str, Any]) -> list[float]:
    """Numbers within the bounds that llguidance leaves out: what the digits of a bound start with (3.7 below 3.75)."""
    low, high = limits.get("minimum", -WIDEST), limits.get("maximum", WIDEST)
    found = []
    for bound, sign in ((high, 1), (-low, -1)):
        whole, _, digits = f"{Decimal(repr(bound)):f}".partition(".")
        if bound > 0 and digits:
            found += [sign * float(f"{whole}.{digits[:length]}") for length in range(1, len(digits))]
    return [value for value in found if low <= value <= high]


def is_exact(value: int | float) -> bool:
    """Whether a constant is read by llguidance as it is by everyone: its reader rounds twice beyond fifteen digits."""
    if isinstance(value, int) or value.is_integer():
        return abs(value) <= EXACT
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= MAX_DIGITS and abs(int(exponent)) <= 22


def multiple_of(value: Any, place: Place, limits: Limits) -> int | float:
    """Divisors on which decimal text and binary doubles agree: whole numbers and a half."""
    divisor = number(value, place)
    if divisor <= 0:
        raise Refused(f"is {value!r}; it must be above 0", place)
    if divisor > limits.max_multiple:
        raise Refused(f"is {value!r}; at most {limits.max_multiple:,} is supported", place)
    if isinstance(divisor, float) and math.frexp(divisor)[0] == 0.5 and divisor >= 1:
        divisor = int(divisor)  # a power of two divides without rounding
    if not isinstance(divisor, int) and divisor != 0.5:
        raise Refused(
            f"is {value!r}; whole numbers (written without a point) and 0.5 are supported: validators compute others "
            "in binary and disagree about 0.29 being a multiple of 0.01",
            place,
        )
    return divisor

"""Numbers: their bounds moved inwards to where text, binary floating point and native integers agree, and divisors.

A number is generated as text and validated as a double: 0.1000000000000000000001 is text above 0.1 and the double 0.1,
so `exclusiveMinimum: 0.1` must start at the next double. Inclusive bounds are safe: reading text is monotonic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

from unspool.sampling.constraint.formats import INTEGERS
from unspool.sampling.constraint.limits import Limits, Place, Refused

WIDEST = 10**17  # bounds beyond it are narrowed to it: native integers have 64 bits
EXACT = 2**53  # every integer up to it is a double
MAX_DIGITS = 15  # different decimals of so many digits are different doubles
_FINEST = Decimal("1e-12")  # bounds closer to zero than this are moved away from what they exclude
_MAX_U32 = 2**32 - 1
_MAX_LISTED = 10_000

Bound = Decimal | None


def number(value: Any, place: Place) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"is {value!r}; a number is needed", place)
    return value


def bounds(schema: dict[str, Any], place: Place) -> tuple[Bound, Bound]:
    """The least and the greatest number that satisfy the schema's bounds, if it has any. A bound is exclusive by its
    name or, as in draft 4, by a flag beside it."""
    found: list[Bound] = []
    for name, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = f"exclusive{name.capitalize()}"
        flag = schema.get(exclusive)
        values = []
        if name in schema:
            values.append(_inward(number(schema[name], (*place, name)), sign, flag is True))
        if exclusive in schema and not isinstance(flag, bool):
            values.append(_inward(number(flag, (*place, exclusive)), sign, True))
        width = schema.get("format")
        if isinstance(width, str) and width in INTEGERS:
            values.append(Decimal(INTEGERS[width][0 if sign > 0 else 1]))
        found.append((max if sign > 0 else min)(values, default=None))
    return found[0], found[1]


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


def limits_of(low: Bound, high: Bound, place: Place) -> dict[str, int | float]:
    """`minimum` and `maximum` as llguidance reads them exactly."""
    if (low is not None and low > WIDEST) or (high is not None and high < -WIDEST):
        raise Refused(f"numbers beyond ±{WIDEST:,} are not supported", place)
    result: dict[str, int | float] = {}
    if low is not None:
        result["minimum"] = _rounded(max(low, Decimal(-WIDEST)), ROUND_CEILING)
    if high is not None:
        result["maximum"] = _rounded(min(high, Decimal(WIDEST)), ROUND_FLOOR)
    return result


def _rounded(value: Decimal, rounding: str) -> int | float:
    """As JSON that llguidance reads exactly: an integer that is a double, or fifteen digits; never beyond the bound."""
    if value == value.to_integral_value():
        nearest = float(value)
        outside = Decimal(nearest) > value if rounding == ROUND_FLOOR else Decimal(nearest) < value
        return int(math.nextafter(nearest, -math.inf if rounding == ROUND_FLOOR else math.inf) if outside else nearest)
    finest = max(_FINEST, Decimal(1).scaleb(value.adjusted() - MAX_DIGITS + 1))
    inside = value.quantize(finest, rounding=rounding).normalize()
    return int(inside) if inside == inside.to_integral_value() else float(inside)


def shorter(limits: dict[str, int | float]) -> list[float]:
    """Numbers within the bounds that llguidance leaves out: what the digits of a bound start with (3.7 below 3.75)."""
    low, high = limits.get("minimum", -WIDEST), limits.get("maximum", WIDEST)
    found = []
    for bound, sign in ((high, 1), (-low, -1)):
        whole, _, digits = f"{Decimal(repr(bound)):f}".partition(".")
        if bound > 0 and digits:
            found += [sign * float(f"{whole}.{digits[:length]}") for length in range(1, len(digits))]
    return [value for value in found if low <= value <= high]


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """Whether a constant is one of these, as JSON compares: 1 is 1.0 and not true."""
    return any(value == other and isinstance(value, bool) is isinstance(other, bool) for other in values)


# Divisors ------------------------------------------------------------------------------------------------------------


def divisor(value: Any, place: Place, limits: Limits) -> Fraction:
    number(value, place)
    if value <= 0:
        raise Refused(f"is {value!r}; it must be above 0", place)
    if value > limits.max_multiple:
        raise Refused(f"is {value!r}; at most {limits.max_multiple:,} is supported", place)
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def common(divisors: Iterable[Fraction], place: Place) -> Fraction | None:
    """What all of them divide, and nothing smaller."""
    result: Fraction | None = None
    for value in divisors:
        if result is None:
            result = value
        else:
            whole = math.lcm(result.numerator * value.denominator, value.numerator * result.denominator)
            result = Fraction(whole, result.denominator * value.denominator)
        if result.numerator * 10**12 // result.denominator > _MAX_U32 * 10**12:
            raise Refused("several different multipleOf are too large together", place)
    return result


def is_exact_divisor(value: Fraction) -> bool:
    """Whether decimal text and binary doubles agree on the multiples: whole numbers, halves, quarters, …"""
    return value.denominator & (value.denominator - 1) == 0 and value.denominator <= 2**10


def multiples(value: Fraction, low: Bound, high: Bound, place: Place) -> list[float]:
    """The multiples within bounds on which validators, which divide in binary, agree: they say that 0.29 is none of
    0.01."""
    if low is not None and high is not None:
        first = math.ceil(Fraction(low) / value)
        last = math.floor(Fraction(high) / value)
        if last - first <= _MAX_LISTED:
            found = [float(value * count) for count in range(first, last + 1)]
            return [one for one in found if (one / float(value)).is_integer()]
    raise Refused(
        f"is {float(value)!r}; whole numbers, halves, quarters and so on are supported, and others between a minimum "
        f"and a maximum with at most {_MAX_LISTED:,} multiples: validators divide in binary and say that 0.29 is no "
        "multiple of 0.01",
        place,
    )


def holds_multiple(value: Fraction, low: Bound, high: Bound) -> bool:
    """Whether there is a multiple within the bounds."""
    if low is None or high is None:
        return True
    return math.ceil(Fraction(low) / value) <= math.floor(Fraction(high) / value)


def apart_from(low: Bound, high: Bound, excluded: Iterable[Any]) -> list[tuple[Bound, Bound]]:
    """The intervals that are left between two bounds once these numbers are taken out."""
    left: list[tuple[Bound, Bound]] = [(low, high)]
    for value in sorted(excluded):
        start, end = left.pop()
        point = Decimal(repr(value))
        if (start is not None and point < start) or (end is not None and point > end):
            left.append((start, end))
        else:
            left += [(start, _inward(value, -1, True)), (_inward(value, 1, True), end)]
    return [(start, end) for start, end in left if start is None or end is None or start <= end]


def text(value: int | float) -> str:
    """A constant as it is written: whole numbers without a point."""
    return str(int(value)) if isinstance(value, int) or (value.is_integer() and abs(value) < WIDEST) else repr(value)

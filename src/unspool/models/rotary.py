"""Rotary positions as data, and their rotation frequencies."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from unspool.config import RopeScaling, RopeStyle
from unspool.ops import Rope
from unspool.records import record


@record(frozen=True)
class Rotary:
    """How queries and keys are rotated: `dim` channels of each head, pair i by position · theta^(-2i/dim)."""

    dim: int
    theta: float
    style: RopeStyle
    scaling: RopeScaling | None = None
    factors: str | None = None  # an optional tensor whose values divide the frequencies
    turning: int | None = None  # the number of pairs, from the first, that are rotated; None: all

    def rope(self, factors: Sequence[float] | None = None) -> Rope:
        """The rotation frequencies, after scaling."""
        speeds = [1.0 / self.theta ** (i * 2 / self.dim) for i in range(self.dim // 2)]
        if factors is not None:
            speeds = [speed / factor for speed, factor in zip(speeds, factors, strict=True)]
        scale, scaling = 1.0, self.scaling
        if scaling is not None and scaling.kind == "linear":
            speeds = [speed / scaling.factor for speed in speeds]
        elif scaling is not None and scaling.kind == "llama3":
            speeds = [_slowed_by_wavelength(speed, scaling) for speed in speeds]
        elif scaling is not None and scaling.kind == "yarn":
            speeds = _slowed_by_ramp(speeds, self.theta, scaling)
            scale = scaling.attention_factor or usual_attention_factor(scaling)
        elif scaling is not None and scaling.kind == "longrope":
            chosen = scaling.long_factors if scaling.factor > 1 else scaling.short_factors
            speeds = [speed / factor for speed, factor in zip(speeds, chosen, strict=True)]
            scale = scaling.attention_factor or usual_attention_factor(scaling)
        if self.turning is not None:
            speeds[self.turning :] = [0.0] * (len(speeds) - self.turning)
        return Rope(array("f", speeds), self.style, scale)


def usual_attention_factor(scaling: RopeScaling) -> float:
    """The default factor for cosines and sines, if a model does not have its own."""
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))
    return 0.1 * math.log(scaling.factor) + 1.0


def _slowed_by_wavelength(speed: float, scaling: RopeScaling) -> float:
    wavelength = 2 * math.pi / speed
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return speed / scaling.factor
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return speed
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * speed / scaling.factor + smooth * speed


def _slowed_by_ramp(speeds: Sequence[float], theta: float, scaling: RopeScaling) -> list[float]:
    half = len(speeds)

    def turns_at(turns: float) -> float:  # the channel pair that makes `turns` full turns over the trained context
        return half * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    low_pair, high_pair = turns_at(scaling.beta_fast), turns_at(scaling.beta_slow)
    if scaling.truncate:
        low_pair, high_pair = math.floor(low_pair), math.ceil(high_pair)
    low_pair, high_pair = max(0.0, low_pair), min(2 * half - 1.0, high_pair)
    width = max(high_pair - low_pair, 0.001)
    ramp = [min(max((i - low_pair) / width, 0), 1) for i in range(half)]
    return [speed / scaling.factor * r + speed * (1 - r) for speed, r in zip(speeds, ramp, strict=True)]

"""The weights themselves: values that are no numbers, tensors that are empty, and rounding that costs too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from unspool.doctor.finding import Finding
from unspool.doctor.subject import Subject

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

CHUNK = 1 << 20  # values decoded at once
GROUP = 16  # every quantized format shares one scale among at least this many neighbours
SAMPLED = 1 << 16  # values of a tensor from which its rounding is estimated
# Tensors whose rounding reaches every token, or passes through a sum into all later layers.
IMPORTANT = ("token_embd", "output.", "attn_v", "attn_output", "attn_qkv", "ffn_down")
NOISE_WARNING, NOISE_ERROR = 0.20, 0.45  # estimated rounding error over the weights' own size
EXACT = ("f32", "f16", "bf16")

Progress = Callable[[int, int], None]  # bytes read, bytes in all


def check_tensors(subject: Subject, progress: Progress | None = None) -> Iterator[Finding]:
    weights = subject.checkpoint.weights
    total, done = sum(weight.nbytes for weight in weights.values()), 0
    bad: list[str] = []
    empty: list[str] = []
    noisy: list[tuple[float, str]] = []
    for name, weight in weights.items():
        finite, zero = scan(weight)
        if not finite:
            bad.append(name)
        elif zero and len(weight.shape) > 1:
            empty.append(name)
        elif len(weight.shape) > 1 and weight.format not in EXACT and any(part in name for part in IMPORTANT):
            noise = rounding_noise(sample(weight))
            if noise > NOISE_WARNING:
                noisy.append((noise, f"{name} ({weight.format})"))
        done += weight.nbytes
        if progress is not None:
            progress(done, total)
    yield from _values(bad, empty)
    yield from _rounding(noisy)


def _values(bad: list[str], empty: list[str]) -> Iterator[Finding]:
    if bad:
        yield Finding(
            "weights-not-finite", "error", "certain", f"{_listed(bad)} NaN or infinite values",
            "logits become NaN and requests fail, some at once, others on certain words",
            "fetch the file again and compare its hash; if it is the same, the model was converted wrongly",
        )  # fmt: skip
    if empty:
        yield Finding(
            "weights-all-zero", "error", "likely", f"{_listed(empty)} nothing but zeros",
            "a layer does nothing: answers are poor or nonsense", "fetch or convert the file again",
        )  # fmt: skip


def _rounding(noisy: list[tuple[float, str]]) -> Iterator[Finding]:
    if not noisy:
        return
    worst, name = max(noisy)
    damaged = worst > NOISE_ERROR
    others = f" and {len(noisy) - 1} more important tensors" if len(noisy) > 1 else ""
    yield Finding(
        "quantization-coarse", "error" if damaged else "warning", "likely" if damaged else "possible",
        f"{name}{others}: rounding changed the weights by an estimated {worst:.0%} of their size",
        "answers are worse than the model's own: wrong facts, loops, broken formats",
        "use a file with more bits for these tensors, such as Q4_K_M or larger",
    )  # fmt: skip


def _listed(names: list[str]) -> str:
    return f"{names[0]} has" if len(names) == 1 else f"{len(names)} tensors, the first {names[0]}, have"


def scan(weight: Weight) -> tuple[bool, bool]:
    """Whether all values are finite, and whether all are zero."""
    rows, width = int(np.prod(weight.shape[:-1])), weight.shape[-1]
    step = max(1, CHUNK // width)
    zero = True
    for start in range(0, rows, step):
        values = weight.dequantize_rows(np.arange(start, min(start + step, rows)))
        if not np.isfinite(values).all():
            return False, False
        zero = zero and not values.any()
    return True, zero


def sample(weight: Weight) -> np.ndarray:
    """Whole rows at even distances, at most some 65,000 values."""
    rows, width = int(np.prod(weight.shape[:-1])), weight.shape[-1]
    count = max(1, min(rows, SAMPLED // width))
    return weight.dequantize_rows(np.linspace(0, rows - 1, count).astype(np.int64))


def rounding_noise(values: np.ndarray) -> float:
    """The estimated size of the rounding error over that of the weights.

    Neighbours share a scale, so the smallest difference between two of sixteen is the step they were rounded to; a step
    s rounds with an error of s / sqrt(12) on average. No original is needed. Steps that sixteen values happen not to
    show make the estimate too high, by at most half as much again for 8-bit formats, which are far below the bounds.
    """
    groups = np.sort(values.reshape(-1, GROUP), axis=1)
    gaps = np.diff(groups, axis=1)
    spread = groups[:, -1] - groups[:, 0]
    gaps[gaps <= 1e-6 * np.abs(groups).max(axis=1, keepdims=True)] = np.inf  # equal values, or float32's own rounding
    steps = gaps.min(axis=1)
    steps[~np.isfinite(steps)] = spread[~np.isfinite(steps)]
    size = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    return float(np.sqrt(np.mean(np.square(steps, dtype=np.float64)) / 12)) / size if size else 0.0

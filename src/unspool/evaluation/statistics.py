"""Intervals by resampling items, differences of pairs, and the best of several answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over items, and the interval that 95% of the resampled means lie in."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bootstrap(values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean of some items' values. Items are drawn with replacement, so they are what a user would have more of:
    several answers to one item belong into one value."""
    import numpy as np

    if not values:
        raise ValueError("there are no values")
    array = np.asarray(values, np.float64)
    if array.min() == array.max() and array[0] in (0, 1):
        room = _unseen(len(array))
        return Estimate(float(array[0]), 1 - room if array[0] else 0.0, 1.0 if array[0] else room)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    means = array[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(array.mean()), float(low), float(high))


def paired(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean difference, ours less theirs, of values of the same items."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not any(differences):
        room = _unseen(len(differences))
        return Estimate(0.0, -room, room)
    return bootstrap(differences, seed=seed)


def _unseen(count: int) -> float:
    """Where so many items all came out alike, resampling shows no spread. The share of others could still be this:
    were it larger, the chance to see none of them would be below 5%."""
    return float(1 - (1 - LEVEL) ** (1 / max(1, count)))


def best_of(scores: Sequence[float], size: int) -> float:
    """The expected best score of `size` of these answers, drawn without replacement: for scores 0 and 1, pass@k."""
    count = len(scores)
    if not 1 <= size <= count:
        raise ValueError(f"the best of {size} of {count} answers")
    ordered, total = sorted(scores), math.comb(count, size)
    # The i-th smallest is the best of a draw if the others are among the i before it.
    return sum(score * math.comb(index, size - 1) for index, score in enumerate(ordered)) / total


def most_frequent(answers: Sequence[str]) -> str:
    """The answer that most of them give; of several, the one that came first."""
    return max(answers, key=lambda answer: (answers.count(answer), -answers.index(answer)))

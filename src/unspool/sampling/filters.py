"""Filters: pure functions from a row of logits to a row in which the removed tokens are at minus infinity.

This is the specification; the native code keeps the very same survivors. That is possible because no sum here
depends on an order: a token's weight is the integer round(2^40 * exp(logit - max)), and integers add exactly. Of
tokens with equal logits the lower id counts as the better one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from unspool.sampling.draw import F32

I64 = NDArray[np.int64]
REMOVED = np.float32(-np.inf)
WEIGHT_ONE = 2**40  # the best token's weight
# Logits are float32: masses computed from them are good to about a millionth. A cut that misses its mark by less than
# this counts as having reached it, so that [.4, .3, .2, .1] cut at 0.7 keeps two tokens, as it should.
SLACK_BITS = 20

_LOG2E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_TERMS = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))
_EXP_FLOOR = np.float32(-64)  # e^-64 weighs nothing at all


def exp32(x: F32) -> F32:
    """e^x for x <= 0 in float32 within 2 ulp, by a fixed sequence of operations; below -64 it stays at e^-64."""
    x = np.maximum(x, _EXP_FLOOR)
    n = np.rint(x * _LOG2E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    result = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        result = result * r + term
    return (result.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)


def weights(row: F32) -> I64:
    """Every token's share of the distribution as an integer; the best token's is 2^40, a removed one's 0."""
    distance = row - row.max()
    return np.rint(exp32(distance).astype(np.float64) * WEIGHT_ONE).astype(np.int64)


def share(total: int, fraction: float) -> int:
    """The least weight that counts as this fraction of the total."""
    return max(1, math.ceil(float(total) * fraction) - (total >> SLACK_BITS))


def temperature(row: F32, value: float) -> F32:
    return row / np.float32(value)


def top_k(row: F32, k: int) -> F32:
    """The k best tokens, exactly."""
    return _keep(row, ranking(row)[:k])


def top_k_ties(row: F32, k: int) -> F32:
    """The k best tokens and all that equal the k-th."""
    if k >= row.size:
        return row
    return np.where(row >= row[ranking(row)[k - 1]], row, REMOVED)


def top_p(row: F32, p: float) -> F32:
    """The fewest best tokens that together hold the fraction p of the mass."""
    order = ranking(row)
    mass = np.cumsum(weights(row)[order])
    return _keep(row, order[: 1 + int(np.searchsorted(mass, share(int(mass[-1]), p)))])


def min_p_floor(p: float) -> np.float32:
    """How far below the best logit min-p still keeps a token: log p, less the slack."""
    return np.float32(math.log(p) - 2.0**-SLACK_BITS)


def min_p(row: F32, p: float) -> F32:
    """Tokens at least p times as probable as the best."""
    return np.where(row - row.max() >= min_p_floor(p), row, REMOVED)


def typical_p(row: F32, p: float) -> F32:
    """The fewest tokens that hold the fraction p, the most typical first: those whose information is nearest the mean.

    Information differs from the mean information (the entropy) as the logit differs from the mean logit.
    """
    weight = weights(row)
    total = int(weight.sum())
    distance = (row - row.max()).astype(np.float64)
    deviation = np.abs(distance - mean_distance(row))
    order = np.argsort(deviation, kind="stable")
    mass = np.cumsum(weight[order])
    keep = order[: 1 + int(np.searchsorted(mass, share(total, p)))]
    return _keep(row, keep[np.isfinite(row[keep])])


def mean_distance(row: F32) -> float:
    """The mean, under the row's own distribution, of logit - max; summed as integers like the weights."""
    distance = row - row.max()
    bounded = np.maximum(distance, _EXP_FLOOR).astype(np.float64)
    moment = np.rint(exp32(distance).astype(np.float64) * bounded * WEIGHT_ONE).astype(np.int64)
    return int(moment.sum()) / int(weights(row).sum())


def top_n_sigma(row: F32, n: float) -> F32:
    """Tokens whose logit lies within n standard deviations (of the survivors' logits) of the best."""
    distance = row - row.max()
    alive = row > REMOVED
    values = np.where(alive, distance, np.float32(0)).astype(np.float64)
    count = float(np.count_nonzero(alive))
    mean = lane_sum(values) / count
    variance = lane_sum(values * values) / count - mean * mean
    floor = np.float32(-n * math.sqrt(max(variance, 0.0)))
    return np.where(distance >= floor, row, REMOVED)


def lane_sum(values: NDArray[np.float64]) -> float:
    """A sum in a fixed order: sixteen lanes by index, each from front to back, then folded in halves."""
    padded = np.zeros((values.size + 15) // 16 * 16, np.float64)
    padded[: values.size] = values
    lanes = np.cumsum(padded.reshape(-1, 16), axis=0)[-1]
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return float(lanes[0])


def xtc(row: F32, threshold: float) -> F32:
    """Of the tokens that hold at least the threshold's fraction only the least probable stay (and all below it)."""
    weight = weights(row)
    eligible = weight >= share(int(weight.sum()), threshold)
    if np.count_nonzero(eligible) < 2:
        return row
    return np.where(row > row[eligible].min(), REMOVED, row)


def ranking(row: F32) -> NDArray[np.intp]:
    """Token ids from the best logit to the worst; equals by id."""
    return np.argsort(-row, kind="stable")


def _keep(row: F32, ids: NDArray[np.intp]) -> F32:
    kept = np.full_like(row, REMOVED)
    kept[ids] = row[ids]
    return kept

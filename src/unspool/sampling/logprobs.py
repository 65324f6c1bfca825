"""Log-probabilities, ranks and the best alternatives of a row: the numbers that an answer reports."""

from __future__ import annotations

import math

import numpy as np

from unspool.records import record
from unspool.sampling.draw import F32
from unspool.sampling.filters import WEIGHT_ONE, mean_distance, ranking, weights


@record(frozen=True)
class RowStats:
    """What a row's log-probabilities are made of: log p = logit - max - log(total / 2^40)."""

    max: float
    total: int

    def logprob(self, logit: float) -> float:
        return float(logit) - self.max - math.log(self.total / WEIGHT_ONE)


def row_stats(row: F32) -> RowStats:
    return RowStats(float(row.max()), int(weights(row).sum()))


def rank_of(row: F32, token: int) -> int:
    """1 for the best; of equal logits the lower id ranks first."""
    logit = row[token]
    return 1 + int(np.count_nonzero(row > logit)) + int(np.count_nonzero(row[:token] == logit))


def top_ids(row: F32, count: int) -> list[int]:
    """The best tokens in order, without sorting the others."""
    if count == 0:
        return []
    floor = np.partition(row, max(0, row.size - count))[max(0, row.size - count)]
    ids = np.flatnonzero(row >= floor)
    return [int(token) for token in ids[ranking(row[ids])[:count]]]


def entropy(row: F32) -> float:
    """In nats."""
    return math.log(int(weights(row).sum()) / WEIGHT_ONE) - mean_distance(row)

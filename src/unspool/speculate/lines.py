"""Drafts that grow guess by guess: a drafter that computes logits samples each guess as the model itself would.

A guess's confidence comes from its probability; drafting ends where one more guess would not pay.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from unspool.drafter import Draft
from unspool.errors import EngineError, RequestError
from unspool.lazy import np
from unspool.records import record
from unspool.sampling import native

if TYPE_CHECKING:
    from unspool.ops.step import Row
    from unspool.sampling.pipeline import Sampler

PROBABILITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)  # where the next confidence begins
PRIORS_BY_PROBABILITY = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.75, 0.85, 0.9, 0.95, 0.97, 0.99)


@record
class Line:
    """A request while its draft is made."""

    number: int
    tokens: list[int]  # the request's, then the draft's
    sampler: Sampler
    left: int
    should_continue: Callable[[Sequence[int]], bool]
    draft: Draft = field(default_factory=Draft)


def choose_guess(line: Line, logits: Row) -> None:
    """The next guess, by the request's own sampler; none where it finds no way on."""
    row = _fitted(np.asarray(logits), line.sampler.vocab_size)
    try:
        token = line.sampler.choose(row, len(line.tokens)).token
        line.sampler.accept(token)
    except (EngineError, RequestError):  # no way on from here, for the drafter; the model judges for itself
        line.left = 0
        return
    line.tokens.append(token)
    line.draft.append(token)
    line.draft.confidences.append(bisect_right(PROBABILITIES, _probability(row, token)))
    line.left -= 1
    if line.left and not line.should_continue(line.draft.confidences):
        line.left = 0


def _probability(row: np.ndarray, token: int) -> float:
    stats, _, _ = native.describe(row, token, 0, native.native_sampling())
    return math.exp(stats.logprob(row[token]))


def _fitted(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """Models of one family pad their vocabularies differently; the padding is never drawn."""
    if len(row) >= vocab_size:
        return row[:vocab_size]
    fitted = np.full(vocab_size, -np.inf, np.float32)
    fitted[: len(row)] = row
    return fitted

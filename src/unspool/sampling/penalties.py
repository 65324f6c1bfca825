"""Penalties: pure, elementwise functions of tokens' logits and of what was written so far.

They are given the logits of only the tokens that they concern, which is all a row's cost is then made of.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from unspool.sampling.draw import F32

I32 = NDArray[np.int32]
# Enough to rule a token out, small enough to survive a division by the least temperature.
MAX_DRY = 1e30


def bias(logits: F32, amounts: F32) -> F32:
    return logits + amounts


def repetition(logits: F32, counts: I32, penalty: float) -> F32:
    """A positive logit of a token seen is divided, a negative one multiplied: both lower it for a penalty above 1."""
    value = np.float32(penalty)
    penalised = np.where(logits > 0, logits / value, logits * value)
    return np.where(counts > 0, penalised, logits)


def frequency(logits: F32, counts: I32, penalty: float) -> F32:
    """Lowered by the penalty for every time the token was seen."""
    return logits - counts.astype(np.float32) * np.float32(penalty)


def presence(logits: F32, counts: I32, penalty: float) -> F32:
    """Lowered by the penalty once, if the token was seen at all."""
    return logits - (counts > 0).astype(np.float32) * np.float32(penalty)


def dry(logits: F32, lengths: I32, multiplier: float, base: float, allowed_length: int) -> F32:
    """Lowered by multiplier * base^(length - allowed_length) where a token would lengthen a repetition that long."""
    if logits.size == 0:
        return logits
    exponent = np.minimum((lengths - allowed_length).astype(np.float64), _dry_cap(multiplier, base))
    return logits - np.minimum(multiplier * np.power(base, exponent), MAX_DRY).astype(np.float32)


def _dry_cap(multiplier: float, base: float) -> float:
    """The exponent beyond which the penalty is as large as it gets."""
    return math.log(MAX_DRY / multiplier) / math.log(base) if base > 1 else 0.0


def dry_matches(
    tokens: I32, breakers: NDArray[np.bool_] | None, multiplier: float, base: float, allowed_length: int
) -> tuple[I32, I32]:
    """Tokens that would lengthen a repetition of the text's end, and for each the longest such repetition's length.

    At every earlier place where the text reads as it does at its end, the token that followed is the one that would
    repeat it further. No match runs across a sequence breaker; `breakers` is indexed by token id.
    """
    nothing = np.zeros(0, np.int32), np.zeros(0, np.int32)
    size = tokens.size
    cap = min(size, allowed_length + math.ceil(_dry_cap(multiplier, base)) if base > 1 else allowed_length)
    if size < 2 or (breakers is not None and breakers[tokens[-1]]):
        return nothing
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a match of one token ends
    longest = np.ones(ends.size, np.int32)
    alive = np.arange(ends.size)
    for length in range(1, cap):
        place = size - 1 - length
        if place < 0 or (breakers is not None and breakers[tokens[place]]):
            break
        alive = alive[ends[alive] >= length]
        alive = alive[tokens[ends[alive] - length] == tokens[place]]
        if alive.size == 0:
            break
        longest[alive] = length + 1
    long_enough = longest >= allowed_length
    followers, longest = tokens[ends[long_enough] + 1], longest[long_enough]
    if breakers is not None:
        whole = ~breakers[followers]
        followers, longest = followers[whole], longest[whole]
    ids, inverse = np.unique(followers, return_inverse=True)
    lengths = np.zeros(ids.size, np.int32)
    np.maximum.at(lengths, inverse, longest)
    return ids.astype(np.int32), lengths


def ngram_followers(tokens: I32, n: int) -> I32:
    """Tokens that would complete an n-gram which the text already holds."""
    size = tokens.size
    if size < n:
        return np.zeros(0, np.int32)
    matches = np.ones(size - n + 1, bool)
    for offset in range(n - 1):
        matches &= tokens[offset : size - n + 1 + offset] == tokens[size - n + 1 + offset]
    return np.unique(tokens[n - 1 :][matches])

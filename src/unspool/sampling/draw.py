"""Noise that needs no state: Philox4x32-10 keyed by the seed, counted by token and position; and the draw itself.

This file is the specification, in float32 operations that round once each (no fused multiply-add), so that numpy, the
native code and a GPU give the same bits. A token's word is the first of philox(key = seed, counter = (token id,
position low, position high, purpose)). Its upper 23 bits x make u = (x + 1/2) / 2^23, which is never 0 nor 1, and
-log(-log(u)) is its Gumbel noise. Adding such noise to logits and taking the best draws from their softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# The counter's last word keeps the uses of one seed apart.
PURPOSE_TOKEN, PURPOSE_XTC = 0, 1

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# The largest noise there is, gumbel(1 - 2^-24): what lies further below the best than this cannot win a draw.
MAX_GUMBEL = np.float32(16.635532)


def philox(counter: tuple[Any, int, int, int], key: int) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32. The counter's first word is an int, or a uint64 array of them; so is each result."""
    a, b, c, d = counter
    for step in range(10):
        product0, product1 = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (product1 >> 32) ^ b ^ ((key + step * _WEYL[0]) & _LOW),
            product1 & _LOW,
            (product0 >> 32) ^ d ^ (((key >> 32) + step * _WEYL[1]) & _LOW),
            product0 & _LOW,
        )
    return a, b, c, d


def uniform(word: NDArray[np.uint64]) -> F32:
    """32 random bits to a float32 in [2^-24, 1 - 2^-24]; every step is exact."""
    return ((word >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_SQRT_HALF = np.float32(0.70710677)
_LOG_TERMS = tuple(np.float32(2.0 / n) for n in (9, 7, 5, 3))


def log32(x: F32) -> F32:
    """The natural logarithm of positive, normal float32 numbers, within 2 ulp, by a fixed sequence of operations.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); with s = (m - 1) / (m + 1), log m = 2s + 2s^3/3 + 2s^5/5 + …
    """
    bits = x.view(np.int32)
    shift = (bits - _SQRT_HALF.view(np.int32)) >> 23
    mantissa = (bits - (shift << 23)).view(np.float32)
    exponent = shift.astype(np.float32)
    f = mantissa - np.float32(1)
    s = f / (np.float32(2) + f)
    z = s * s
    tail = np.full_like(z, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        tail = tail * z + term
    # 2s is written f - s*f: exact where it matters, near x = 1.
    log_m = f - s * (f - tail * z)
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + log_m)


def gumbel(seed: int, position: int, tokens: NDArray[np.integer]) -> F32:
    """The noise of these tokens at this position: a function of nothing else."""
    word = philox((tokens.astype(np.uint64), position & _LOW, position >> 32, PURPOSE_TOKEN), seed)[0]
    return -log32(-log32(uniform(word)))


def xtc_uniform(seed: int, position: int) -> float:
    """The number in (0, 1) by which XTC decides whether it acts at this position."""
    word = philox((0, position & _LOW, position >> 32, PURPOSE_XTC), seed)[0]
    return ((word >> 9) + 0.5) * 2.0**-23


def draw(row: F32, seed: int, position: int) -> int:
    """The survivor with the best logit + noise; of equals the lowest id."""
    survivors = np.flatnonzero(row > -np.inf)
    return int(survivors[np.argmax(row[survivors] + gumbel(seed, position, survivors))])


def greedy(row: F32) -> int:
    """The best logit; of equals the lowest id (argmax takes the first)."""
    return int(np.argmax(row))

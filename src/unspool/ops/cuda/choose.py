# mypy: disallow-untyped-defs=False
"""Choosing tokens on the device: the greedy choice and the keyed draw, with the very noise of sampling/draw.py.

    score[t] = logit[t] / T + gumbel(seed, position, t)        (T = 0: the logit alone)

Every operation is the specification's, in its order, rounded once; a maximum does not depend on the order in which it
is taken, and of equal scores the lowest token wins. So the device draws what the host would, bit for bit. Rows with NaN
or +infinity give the codes that sampling knows them by, and token 0 to the step that is already on its way. What shapes
a row in other ways (filters, penalties, constraints) is done by the host: the engine then steps plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from unspool.ops.cuda.launch import is_interpreted
from unspool.sampling.native import HAS_INFINITY, HAS_NAN, NONE_LEFT

if TYPE_CHECKING:
    from unspool.engine.ahead import Draw

CHUNK = 4096  # tokens that one program looks at
WORDS = 5  # of a draw: temperature's bits, seed low and high, position low and high
NONE = tl.constexpr(NONE_LEFT)
INFINITE = tl.constexpr(HAS_INFINITY)
NOT_A_NUMBER = tl.constexpr(HAS_NAN)
RING = 4  # launches whose draws the host may have under way


@triton.jit
def _philox(token, position_low, position_high, seed_low, seed_high):
    """The first word of Philox4x32-10 for (token, position, 0) under the seed."""
    a = token.to(tl.uint32)
    b = tl.zeros_like(a) + position_low
    c = tl.zeros_like(a) + position_high
    d = tl.zeros_like(a)
    key0 = tl.zeros_like(a) + seed_low
    key1 = tl.zeros_like(a) + seed_high
    first = tl.full(a.shape, 0xD2511F53, tl.uint32)
    second = tl.full(a.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(a, first), a * first
        high1, low1 = tl.umulhi(c, second), c * second
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0 += tl.full(a.shape, 0x9E3779B9, tl.uint32)
        key1 += tl.full(a.shape, 0xBB67AE85, tl.uint32)
    return a


@triton.jit
def _log(x):
    """sampling.draw.log32, operation by operation."""
    bits = x.to(tl.int32, bitcast=True)
    shift = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (shift << 23)).to(tl.float32, bitcast=True)
    exponent = shift.to(tl.float32)
    f = mantissa - 1.0
    s = tl.div_rn(f, 2.0 + f)
    z = s * s
    tail = tl.zeros_like(z) + 0.2222222238779068
    tail = tail * z + 0.2857142984867096
    tail = tail * z + 0.4000000059604645
    tail = tail * z + 0.6666666865348816
    log_m = f - s * (f - tail * z)
    return exponent * 0.693359375 + (exponent * -0.00021219444170128554 + log_m)


@triton.jit
def _gumbel(token, position_low, position_high, seed_low, seed_high):
    word = _philox(token, position_low, position_high, seed_low, seed_high)
    u = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -_log(-_log(u))


@triton.jit(do_not_specialize=["vocabulary"])
def score_kernel(logits, draws, best, winner, vocabulary, chunks, CHUNK: tl.constexpr, WORDS: tl.constexpr):
    """The best score of a chunk of a row, and whose it is."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=float("-inf"))
    words = draws + row * WORDS
    temperature = tl.load(words).to(tl.float32, bitcast=True)
    score = logit
    if temperature > 0.0:
        low, high = tl.load(words + 1).to(tl.uint32, bitcast=True), tl.load(words + 2).to(tl.uint32, bitcast=True)
        at, above = tl.load(words + 3).to(tl.uint32, bitcast=True), tl.load(words + 4).to(tl.uint32, bitcast=True)
        score = tl.div_rn(logit, tl.zeros_like(logit) + temperature) + _gumbel(token, at, above, low, high)
        score = tl.where(logit == float("-inf"), logit, score)
    is_nan = tl.max(tl.where(inside & (logit != logit), 1, 0), axis=0)
    is_infinite = tl.max(tl.where(logit == float("inf"), 1, 0), axis=0)
    top, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    found = chunk * CHUNK + place
    found = tl.where(top == float("-inf"), NONE, found)
    found = tl.where(is_infinite > 0, INFINITE, found)
    found = tl.where(is_nan > 0, NOT_A_NUMBER, found)
    tl.store(best + row * chunks + chunk, top)
    tl.store(winner + row * chunks + chunk, found)


@triton.jit
def winner_kernel(best, winner, sampled, told, chunks, CHUNKS: tl.constexpr):
    """The best of a row's chunks; one that saw NaN or infinity speaks for the row."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    score = tl.load(best + row * chunks + chunk, mask=inside, other=float("-inf"))
    found = tl.load(winner + row * chunks + chunk, mask=inside, other=NONE)
    _, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.max(tl.where(chunk == place, found, -2147483648), axis=0)
    bad = tl.max(tl.where((found == INFINITE) | (found == NOT_A_NUMBER), found, -2147483648), axis=0)
    token = tl.where(bad > -2147483648, bad, token)
    tl.store(told + row, token)
    tl.store(sampled + row, tl.maximum(token, 0))


class Chooser:
    """Draws for as many rows as `sampled` has; the tokens stay in `sampled` for the next step."""

    def __init__(self, sampled: torch.Tensor, vocabulary: int, device: torch.device) -> None:
        self.sampled, self.vocabulary = sampled, vocabulary
        self._chunks = -(-vocabulary // CHUNK)
        most, pinned = len(sampled), not is_interpreted()
        self._draws = torch.zeros((most, WORDS), dtype=torch.int32, device=device)
        self._best = torch.zeros((most, self._chunks), dtype=torch.float32, device=device)
        self._winner = torch.zeros((most, self._chunks), dtype=torch.int32, device=device)
        self._told = torch.zeros(most, dtype=torch.int32, device=device)
        self._host = [torch.zeros((most, WORDS), dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._read = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._turn = 0

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> CudaFlight:
        """Queue the draws from the first rows of `logits`."""
        count, turn = len(draws), self._turn % RING
        self._turn += 1
        self._host[turn].numpy()[:count] = words_of(draws)
        self._draws[:count].copy_(self._host[turn][:count], non_blocking=True)
        options: dict[str, Any] = {} if is_interpreted() else {"enable_fp_fusion": False}
        chunks, best, winner = self._chunks, self._best, self._winner
        score_kernel[(count, chunks)](
            logits, self._draws, best, winner, self.vocabulary, chunks, CHUNK=CHUNK, WORDS=WORDS, num_warps=8, **options
        )
        padded = int(triton.next_power_of_2(chunks))
        winner_kernel[(count,)](best, winner, self.sampled, self._told, chunks, CHUNKS=padded, num_warps=1, **options)
        self._read[turn][:count].copy_(self._told[:count], non_blocking=True)
        return CudaFlight(self._read[turn], draws)


class CudaFlight:
    """Tokens on their way to the host."""

    def __init__(self, read: torch.Tensor, draws: Sequence[Draw]) -> None:
        self._read, self._draws = read, draws
        self._done = None if is_interpreted() else torch.cuda.Event()
        if self._done is not None:
            self._done.record()

    def tokens(self) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        return self._read[: len(self._draws)].tolist()


def words_of(draws: Sequence[Draw]) -> np.ndarray:
    """Each draw as the kernel reads it."""
    words = np.empty((len(draws), WORDS), np.uint32)
    words[:, 0] = np.array([draw.sampler.params.temperature for draw in draws], np.float32).view(np.uint32)
    seeds = np.array([draw.sampler.seed for draw in draws], np.uint64)
    positions = np.array([draw.position for draw in draws], np.uint64)
    words[:, 1], words[:, 2] = seeds & 0xFFFFFFFF, seeds >> np.uint64(32)
    words[:, 3], words[:, 4] = positions & 0xFFFFFFFF, positions >> np.uint64(32)
    return words.view(np.int32)

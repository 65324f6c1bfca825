# mypy: disallow-untyped-defs=False
"""Top-k and top-p on the device: they find the last surviving token without sorting.

    coarse   counts the tokens, or sums the weights, within each of 16 distances from the best; all programs at once
    gather   collects the tokens near the cut: usually a few hundred of a row
    search   one program per row finds the last survivor among them, four bits of its key at a time

A token's weight is an integer, so sums are exact in any order. With top-k on, every token above its cut is gathered,
and top-p continues with the tokens that top-k kept. Without top-k, only the tokens between two distances are gathered,
and the sum above them is known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.sampling import (
    BEST,
    BOUND,
    GATHERED,
    LAST_K,
    LAST_P,
    SUMS,
    WANTED,
    arrive,
    as_double,
    as_float,
    ordered,
    own_row,
    survives,
    unordered,
    weight_of,
)

PART = 512  # tokens that a program of the coarse pass processes at once
BLOCK = 1024  # tokens that a program of the search processes at once


@triton.jit
def distance_of(index):
    """The 16 distances from the best logit: half steps where most cuts fall, then longer ones, then infinity."""
    far = tl.where(index == 10, 6.0, tl.where(index == 11, 7.0, tl.where(index == 12, 8.5, 10.5)))
    far = tl.where(index == 14, 14.0, tl.where(index == 15, float("inf"), far))
    return tl.where(index < 10, 0.5 * (index + 1).to(tl.float32), far)


@triton.jit
def share(total, fraction):
    """As filters.share: the least weight that reaches this fraction of the total."""
    product = total.to(tl.float64) * fraction
    whole = product.to(tl.int64)
    whole += (whole.to(tl.float64) < product).to(tl.int64)
    return tl.maximum(whole - (total >> 20), 1)


@triton.jit
def is_filtered(params):
    return (as_float(params) > 0) & ((tl.load(params + 1) > 0) | (as_double(params + 2) < 1.0))


@triton.jit
def coarse_kernel(
    x_in, step, state, vocab_size,
    PARAMS_AT: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, params, state = own_row(step, state, PARAMS_AT, STATE, PDL)
    chunk = tl.program_id(1)
    if is_filtered(params):
        k = tl.load(params + 1)
        best = unordered(tl.load(state + BEST))
        index = tl.arange(0, 16)
        limit = distance_of(index)
        sums = tl.zeros((PART, 16), tl.int64)
        for start in range(0, CHUNK, PART):
            token = chunk * CHUNK + start + tl.arange(0, PART)
            x = tl.load(x_in + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
            amount = tl.full((PART,), 1, tl.int64)
            if k == 0:
                amount = weight_of(x, best)
            amount = tl.where(x > float("-inf"), amount, 0)
            sums += tl.where((best - x)[:, None] < limit[None, :], amount[:, None], 0)
        tl.atomic_add(state + SUMS + index, tl.sum(sums, 0))
        if arrive(state, tl.num_programs(1)):
            conclude(params, state, k)


@triton.jit
def conclude(params, state, k):
    """Store the first distance within which the count or weight reaches the required one."""
    index = tl.arange(0, 16)
    sums = tl.load(state + SUMS + index, cache_modifier=".cg")
    total = tl.max(sums)
    if k > 0:
        wanted = tl.minimum(k.to(tl.int64), total)
    else:
        wanted = share(total, as_double(params + 2))
    bound = tl.min(tl.where(sums >= wanted, index, 15))
    if k == 0:
        wanted -= tl.max(tl.where(index < bound, sums, 0))
    tl.store(state + WANTED, wanted)
    tl.store(state + BOUND, bound.to(tl.int64))


@triton.jit
def gather_kernel(
    x_in, gathered, step, state, vocab_size,
    PARAMS_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, params, state = own_row(step, state, PARAMS_AT, STATE, PDL)
    chunk = tl.program_id(1)
    if is_filtered(params):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_in + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        distance = unordered(tl.load(state + BEST)) - x
        bound = tl.load(state + BOUND).to(tl.int32)
        wanted = (x > float("-inf")) & (distance < distance_of(bound))
        if (tl.load(params + 1) == 0) & (bound > 0):
            wanted = wanted & (distance >= distance_of(bound - 1))
        count = tl.sum(wanted.to(tl.int32))
        if count > 0:
            first = tl.atomic_add(state + GATHERED, count.to(tl.int64))
            place = first + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(gathered + row * vocab_size + place, token, mask=wanted)


@triton.jit
def search_kernel(
    x_in, gathered, step, state, vocab_size,
    PARAMS_AT: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, params, state = own_row(step, state, PARAMS_AT, STATE, PDL)
    if is_filtered(params):
        x_in += row * vocab_size
        gathered += row * vocab_size
        count = tl.load(state + GATHERED).to(tl.int32)
        best = unordered(tl.load(state + BEST))
        k, p = tl.load(params + 1), as_double(params + 2)
        wanted = tl.load(state + WANTED)
        if k > 0:
            find_last(x_in, gathered, count, best, state + LAST_K, state + LAST_K, wanted, False, BLOCK)
            tl.debug_barrier()  # all threads have read what one thread wrote
            if p < 1.0:
                wanted = share(weight_of_all(x_in, gathered, count, best, state + LAST_K, BLOCK), p)
        if p < 1.0:
            find_last(x_in, gathered, count, best, state + LAST_K, state + LAST_P, wanted, True, BLOCK)


@triton.jit
def load_some(x_in, gathered, start, count, best, before, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Gathered tokens, their keys, and the amount of each: its weight or 1, and 0 if an earlier filter removed it."""
    place = start + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(gathered + place, mask=inside, other=0)
    x = tl.load(x_in + token, mask=inside, other=float("-inf"))
    key = ordered(x)
    amount = inside.to(tl.int64)
    if WEIGHTS:
        amount = tl.where(inside & survives(key, token, before), weight_of(x, best), 0)
    return token, key, amount


@triton.jit
def weight_of_all(x_in, gathered, count, best, before, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        _, _, amount = load_some(x_in, gathered, start, count, best, before, True, BLOCK)
        total += amount
    return tl.sum(total)


@triton.jit
def find_last(x_in, gathered, count, best, before, last, wanted, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest key at which the amount of tokens at or above it reaches `wanted`; among tokens with that key,
    store the last one that is needed."""
    bin = tl.arange(0, 16)
    prefix, left = wanted * 0, wanted
    for digits in range(8):
        shift = 28 - 4 * digits
        sums = tl.zeros((BLOCK, 16), tl.int64)
        for start in range(0, count, BLOCK):
            _, key, amount = load_some(x_in, gathered, start, count, best, before, WEIGHTS, BLOCK)
            amount = tl.where((key >> (shift + 4)) == prefix, amount, 0)
            sums += tl.where(((key >> shift) & 15)[:, None] == bin[None, :], amount[:, None], 0)
        prefix, left = next_digit(tl.sum(sums, 0), prefix, left)
    if WEIGHTS:
        one = tl.maximum(weight_of(unordered(prefix), best), 1)
        left = (left + one - 1) // one
    tl.store(last, prefix)
    tl.store(last + 1, last_equal(x_in, gathered, count, best, before, prefix, left, WEIGHTS, BLOCK))


@triton.jit
def next_digit(found, prefix, left):
    """The highest digit at which the amount at or above it reaches the remaining amount."""
    bin = tl.arange(0, 16)
    above = tl.sum(found) - tl.cumsum(found, 0)
    reached = (above + found >= left) & (above < left)
    digit = tl.max(tl.where(reached, bin, 0))
    return (prefix << 4) | digit.to(tl.int64), left - tl.max(tl.where(bin == digit, above, 0))


@triton.jit
def last_equal(x_in, gathered, count, best, before, last, wanted, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the wanted-th of the tokens whose key is `last`. Usually there are no more than that, so any id
    serves."""
    equals = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        _, key, amount = load_some(x_in, gathered, start, count, best, before, WEIGHTS, BLOCK)
        equals += ((amount > 0) & (key == last)).to(tl.int64)
    prefix, left = wanted * 0, wanted
    if tl.sum(equals) > wanted:
        bin = tl.arange(0, 16)
        for digits in range(6):
            shift = 20 - 4 * digits
            sums = tl.zeros((BLOCK, 16), tl.int64)
            for start in range(0, count, BLOCK):
                token, key, amount = load_some(x_in, gathered, start, count, best, before, WEIGHTS, BLOCK)
                place = 16777215 - token  # the lowest id first
                matches = (amount > 0) & (key == last) & ((place >> (shift + 4)) == prefix)
                sums += (matches[:, None] & (((place >> shift) & 15)[:, None] == bin[None, :])).to(tl.int64)
            prefix, left = next_digit(tl.sum(sums, 0), prefix, left)
    return 16777215 - prefix

# mypy: disallow-untyped-defs=False
"""From logits to tokens on the device, bit for bit as sampling/ does it on the CPU, each row independently.

    prepare   bias, penalties, temperature; the row's largest value (without filters, the draw does this too)
    filters   top-k and top-p: see filtering.py
    draw      min-p, noise, the best of the survivors
    logprobs  logprobs of the chosen token and the best ones, for requests that ask for them

A row is divided among programs, one chunk of the vocabulary each. Integer atomics combine what a pass needs to know
about the whole row, and the last program to arrive evaluates it: the result does not depend on which one is last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import let_next_start, wait_for_previous
from unspool.sampling.native import HAS_INFINITY, HAS_NAN, NONE_LEFT

CHUNK = 4096  # tokens per program
# A row's parameters are 16 int32 words, see sampler.py. Its state is int64 words, zero before and after a step: keys of
# the largest logits before prepare (if logprobs are requested) and after, whether any was NaN or infinite, the number
# of programs that have arrived, the best score so far, its token, sum of weights, rank; for each filter its last
# survivor's key and id; for filtering.py: the required amount of the gathered tokens, their number, the bounds between
# which they lie, 16 sums.
STATE = 32
BEST_RAW, BEST, BAD, ARRIVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SCORE, WINNER, TOTAL, RANK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
LAST_K, LAST_P = tl.constexpr(8), tl.constexpr(10)  # two words each
WANTED, GATHERED, BOUND = tl.constexpr(12), tl.constexpr(13), tl.constexpr(14)
SUMS = tl.constexpr(16)
MOST_LOGPROBS = 20  # logprobs that can be returned in addition to the chosen token's
# int32 words of a row's result: the token or an error code, its logit; if logprobs are requested, the row's largest
# logit, sum of weights (2), rank; two are unused; then the best tokens' ids and logits.
RESULT = 8 + 2 * MOST_LOGPROBS
PLANES = 3  # per request: how often the penalties have counted each token (2), and its bias
NONE, INFINITE, NOT_A_NUMBER = tl.constexpr(NONE_LEFT), tl.constexpr(HAS_INFINITY), tl.constexpr(HAS_NAN)


@triton.jit
def ordered(x):
    """An integer for each float, such that integers compare like the floats; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def unordered(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp32(x):
    """As filters.exp32: e^x for x <= 0, with the same float32 operations in the same order."""
    x = tl.maximum(x, -64.0)
    n = (x * 1.44269504 + 12582912.0) - 12582912.0  # rounded to the nearest integer, halves to even
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    y = r * 0.00019841270113829523 + 0.0013888889225199819
    y = y * r + 0.008333333767950535
    y = y * r + 0.0416666679084301
    y = y * r + 0.1666666716337204
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    return (y.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, best):
    """As filters.weights: round(2^40 · e^(x - best)) as an integer."""
    scaled = exp32(x - best).to(tl.float64) * 1099511627776.0
    return ((scaled + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)


@triton.jit
def log32(x):
    """As draw.log32: the natural logarithm, with the same float32 operations."""
    bits = x.to(tl.int32, bitcast=True)
    shift = (bits - 1060439283) >> 23
    mantissa = (bits - (shift << 23)).to(tl.float32, bitcast=True)
    exponent = shift.to(tl.float32)
    f = mantissa - 1.0
    s = tl.div_rn(f, 2.0 + f)
    z = s * s
    tail = z * 0.2222222238779068 + 0.2857142984867096
    tail = tail * z + 0.4000000059604645
    tail = tail * z + 0.6666666865348816
    log_m = f - s * (f - tail * z)
    return exponent * 0.693359375 + (exponent * -2.12194440e-4 + log_m)


@triton.jit
def gumbel(seed_low, seed_high, position_low, position_high, token):
    """As draw.gumbel: the noise of each token at a position. It depends on seed, position and token only."""
    a, b = token.to(tl.uint32), tl.zeros_like(token).to(tl.uint32) + position_low
    c, d = tl.zeros_like(token).to(tl.uint32) + position_high, tl.zeros_like(token).to(tl.uint32)
    key0, key1 = seed_low, seed_high
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(a, 0xD2511F53), a * 0xD2511F53
        high1, low1 = tl.umulhi(c, 0xCD9E8D57), c * 0xCD9E8D57
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    uniform = ((a >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -log32(-log32(uniform))


@triton.jit
def as_float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def as_double(pointer):
    low, high = tl.load(pointer).to(tl.uint32).to(tl.uint64), tl.load(pointer + 1).to(tl.uint32).to(tl.uint64)
    return (low | (high << 32)).to(tl.float64, bitcast=True)


@triton.jit
def own_row(step, state, PARAMS_AT: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr):
    """The beginning of every kernel here: a program's row, its parameters and its state."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    params = step + tl.load(step + PARAMS_AT) + row * 16
    wait_for_previous(PDL)
    return row, params, state + row * STATE


@triton.jit
def arrive(state, chunks):
    """True for the last program of a row's pass."""
    tl.debug_barrier()
    arrived = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel") == chunks - 1
    if arrived:
        tl.store(state + ARRIVED, 0)
    return arrived


@triton.jit
def forget(state, STATE: tl.constexpr):
    """Reset the state for the next step, after every thread has read it."""
    tl.debug_barrier()
    tl.store(state + tl.arange(0, STATE), tl.zeros((STATE,), tl.int64))


@triton.jit
def prepared(logits, params, state, planes, row, token, inside, vocab_size, LOGPROBS: tl.constexpr):
    """Logits after bias, penalties and temperature. Notes NaN and infinity in the row's state, and the largest raw
    logit if logprobs are requested."""
    x = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
    if LOGPROBS:
        is_bad = (x != x) | (x == float("inf"))
        tl.atomic_max(state + BEST_RAW, tl.max(tl.where(is_bad, 0, ordered(x))))
    bad = tl.max(tl.where(x != x, 2, tl.where(x == float("inf"), 1, 0)))
    if bad > 0:
        tl.atomic_max(state + BAD, bad.to(tl.int64))
    slot = tl.load(params + 12)
    if slot >= 0:
        mine = planes + slot.to(tl.int64) * (3 * vocab_size) + token
        x = penalised(biased(x, params, mine + 2 * vocab_size, inside), params, mine, inside, vocab_size)
    temperature = as_float(params)
    if temperature > 0:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


@triton.jit
def biased(x, params, plane, inside):
    if (tl.load(params + 13) & 1) != 0:
        x = x + tl.load(plane, mask=inside, other=0).to(tl.float32, bitcast=True)
    return x


@triton.jit
def penalised(x, params, plane, inside, vocab_size):
    """As penalties.repetition, frequency and presence, from the counts of each token in their scopes."""
    repetition, frequency, presence = as_float(params + 9), as_float(params + 10), as_float(params + 11)
    factor = tl.zeros_like(x) + repetition
    if repetition != 1.0:
        seen = tl.load(plane, mask=inside, other=0)
        x = tl.where(seen > 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    if (frequency != 0.0) | (presence != 0.0):
        seen = tl.load(plane + vocab_size, mask=inside, other=0)
        if frequency != 0.0:
            x = x - seen.to(tl.float32) * frequency
        if presence != 0.0:
            x = x - (seen > 0).to(tl.float32) * presence
    return x


@triton.jit
def prepare_kernel(
    logits, x_out, step, state, planes, vocab_size,
    PARAMS_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, LOGPROBS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the filters' input and its largest value."""
    row, params, state = own_row(step, state, PARAMS_AT, STATE, PDL)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    x = prepared(logits, params, state, planes, row, token, inside, vocab_size, LOGPROBS)
    tl.store(x_out + row * vocab_size + token, x, mask=inside)
    tl.atomic_max(state + BEST, tl.max(tl.where((x != x) | (x == float("inf")), 0, ordered(x))))


@triton.jit
def survives(key, token, last):
    """Whether tokens pass a filter: better than its last survivor, or equal to it with an id that is not higher."""
    return (key > tl.load(last)) | ((key == tl.load(last)) & (token <= tl.load(last + 1)))


@triton.jit
def draw_kernel(
    logits, x_in, step, state, planes, sampled, results, vocab_size,
    PARAMS_AT: tl.constexpr, RESULT_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr,
    RESULT: tl.constexpr, FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the best survivor after adding noise (none at temperature 0); of equal ones the lowest id."""
    row, params, state = own_row(step, state, PARAMS_AT, STATE, PDL)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    if FILTERED:
        x = tl.load(x_in + row * vocab_size + token, mask=inside, other=float("-inf"))
    else:
        x = prepared(logits, params, state, planes, row, token, inside, vocab_size, LOGPROBS)
    score = x
    if as_float(params) > 0:
        alive = inside & (x > float("-inf"))
        if FILTERED:
            key = ordered(x)
            alive = alive & survives(key, token, state + LAST_K) & survives(key, token, state + LAST_P)
            alive = alive & (x - unordered(tl.load(state + BEST)) >= as_float(params + 4))
        noise = gumbel(
            tl.load(params + 5).to(tl.uint32), tl.load(params + 6).to(tl.uint32),
            tl.load(params + 7).to(tl.uint32), tl.load(params + 8).to(tl.uint32), token,
        )  # fmt: skip
        score = tl.where(alive, x + noise, float("-inf"))
    # The larger key wins, and of equal keys the lower id: one integer encodes both.
    both = ordered(score) * 2147483648 + (2147483647 - token.to(tl.int64))
    tl.atomic_max(state + SCORE, tl.max(tl.where(inside & (score == score), both, 0)))
    if arrive(state, chunks):
        winner = tl.load(state + SCORE, cache_modifier=".cg")
        chosen = (2147483647 - (winner & 2147483647)).to(tl.int32)
        chosen = tl.minimum(tl.maximum(chosen, 0), vocab_size - 1)
        bad = tl.load(state + BAD, cache_modifier=".cg")
        code = tl.where(unordered(winner >> 31) == float("-inf"), NONE, chosen)
        code = tl.where(bad == 1, INFINITE, tl.where(bad == 2, NOT_A_NUMBER, code))
        chosen = tl.where(code < 0, 0, chosen)  # the next step may already be queued, and needs a valid token
        tl.store(sampled + row, chosen)
        tl.store(state + WINNER, chosen.to(tl.int64))
        slot = tl.load(params + 12)
        if slot >= 0:
            seen = planes + slot.to(tl.int64) * (3 * vocab_size) + chosen
            tl.store(seen, tl.load(seen) + 1)
            tl.store(seen + vocab_size, tl.load(seen + vocab_size) + 1)
        out = results + tl.load(step + RESULT_AT) + row * RESULT
        tl.store(out, code)
        tl.store(out + 1, tl.load(logits + row * vocab_size + chosen).to(tl.int32, bitcast=True))
        if LOGPROBS:
            best = tl.load(state + BEST_RAW, cache_modifier=".cg")
            tl.store(out + 2, unordered(best).to(tl.int32, bitcast=True))
        if not LOGPROBS or (tl.load(params + 13) & 4) == 0:
            forget(state, STATE)


@triton.jit
def logprobs_kernel(
    logits, step, state, tops, results, vocab_size,
    PARAMS_AT: tl.constexpr, RESULT_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, RESULT: tl.constexpr,
    CHUNKS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the sum of the raw logits' weights, the chosen token's rank, and the best tokens."""
    row, params, state = own_row(step, state, PARAMS_AT, STATE, PDL)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    if (tl.load(params + 13) & 4) != 0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocab_size
        x = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
        weights = weight_of(x, unordered(tl.load(state + BEST_RAW)))
        tl.atomic_add(state + TOTAL, tl.sum(tl.where(inside & (x > float("-inf")), weights, 0)))
        chosen = tl.load(state + WINNER)
        logit = tl.load(logits + row * vocab_size + chosen)
        better = (x > logit) | ((x == logit) & (token < chosen))
        tl.atomic_add(state + RANK, tl.sum((inside & better).to(tl.int64)))
        # The best tokens of this chunk, each encoded with its id in one integer. The last program selects the best
        # overall.
        count = tl.load(params + 14)
        mine = tops + (row * chunks + chunk) * MOST
        both = tl.where(inside, ordered(x) * 2147483648 + (2147483647 - token.to(tl.int64)), 0)
        for i in range(count):
            best = tl.max(both)
            tl.store(mine + i, best, cache_modifier=".cg")
            both = tl.where(both == best, 0, both)
        if arrive(state, chunks):
            out = results + tl.load(step + RESULT_AT) + row * RESULT
            total = tl.load(state + TOTAL, cache_modifier=".cg")
            tl.store(out + 3, (total & 0xFFFFFFFF).to(tl.int32))
            tl.store(out + 4, (total >> 32).to(tl.int32))
            tl.store(out + 5, tl.load(state + RANK, cache_modifier=".cg").to(tl.int32) + 1)
            place = tl.arange(0, CHUNKS * 32)
            known = (place // 32 < chunks) & (place % 32 < count)
            all = tops + row * chunks * MOST + place // 32 * MOST + place % 32
            rivals = tl.load(all, mask=known, other=0, cache_modifier=".cg")
            for i in range(count):
                best = tl.max(rivals)
                rivals = tl.where(rivals == best, 0, rivals)
                tl.store(out + 8 + 2 * i, (2147483647 - (best & 2147483647)).to(tl.int32))
                tl.store(out + 9 + 2 * i, unordered(best >> 31).to(tl.int32, bitcast=True))
            forget(state, STATE)

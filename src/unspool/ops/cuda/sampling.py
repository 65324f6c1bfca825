# mypy: disallow-untyped-defs=False
"""From logits to tokens on the device, bit for bit as sampling/ does it on the CPU, rows independent of each other.

    prepare   penalties and temperature; the row's largest values (where nothing filters, the draw does this too)
    top-k     eight passes find the k-th best logit, four bits of it at a time, then which of its equals stay
    top-p     the same over weights: a token's weight is an integer, so their sums are exact in any order
    draw      min-p, noise, the best of the survivors
    tell      how probable the chosen token was, for those who ask

A row is divided among programs, a chunk of the vocabulary each. What a pass needs to know of the whole row is added up
with integer atomics, and the last program to arrive concludes from it: nothing depends on who was last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import let_next_start, wait_for_previous
from unspool.sampling.native import HAS_INFINITY, HAS_NAN, NONE_LEFT

CHUNK = 4096  # tokens a program looks at
# A row's parameters are 16 int32 words, see sampler.py. Its state is int64 words, all zero at the start of a step: keys
# of the largest logits before and after prepare, whether any was NaN or infinite, programs arrived, the best score so
# far, its token, sum of weights, rank; for each filter its last survivor's key, what is left to find, chunk and place
# of the last equal that stays; 16 bins of a digit; then a number for each chunk.
STATE = 48
BEST_RAW, BEST, BAD, ARRIVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SCORE, WINNER, TOTAL, RANK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
FILTER_K, FILTER_P, BINS = tl.constexpr(8), tl.constexpr(16), tl.constexpr(32)
RESULT = (
    8  # int32 words of a row's result: token or what is wrong, its logit, the row's largest, sum of weights (2), rank
)
NONE, INFINITE, NOT_A_NUMBER = tl.constexpr(NONE_LEFT), tl.constexpr(HAS_INFINITY), tl.constexpr(HAS_NAN)


@triton.jit
def ordered(x):
    """An integer for each float such that both compare alike; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def unordered(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp32(x):
    """filters.exp32: e^x for x <= 0, step by step the same float32 operations."""
    x = tl.maximum(x, -64.0)
    n = (x * 1.44269504 + 12582912.0) - 12582912.0  # to the nearest integer, halves to even
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
    """filters.weights: round(2^40 · e^(x - best)) as an integer."""
    scaled = exp32(x - best).to(tl.float64) * 1099511627776.0
    return ((scaled + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)


@triton.jit
def log32(x):
    """draw.log32: the natural logarithm by the same float32 operations."""
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
    """draw.gumbel: the noise of tokens at a position, a function of nothing else."""
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
def arrive(state, chunks):
    """True for the last program of a row's pass."""
    tl.debug_barrier()
    arrived = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel") == chunks - 1
    if arrived:
        tl.store(state + ARRIVED, 0)
    return arrived


@triton.jit
def prepared(logits, params, state, counts, row, token, inside, vocab_size):
    """Logits after penalties and temperature; the row's state learns the largest raw one, and of NaN and infinity."""
    x = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
    is_bad = (x != x) | (x == float("inf"))
    tl.atomic_max(state + BEST_RAW, tl.max(tl.where(is_bad, 0, ordered(x))))
    bad = tl.max(tl.where(x != x, 2, tl.where(x == float("inf"), 1, 0)))
    if bad > 0:
        tl.atomic_max(state + BAD, bad.to(tl.int64))
    x = penalised(x, params, counts, token, inside, vocab_size)
    temperature = as_float(params)
    if temperature > 0:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


@triton.jit
def prepare_kernel(
    logits, x_out, step, state, counts, vocab_size,
    PARAMS_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the filters look at, and its largest."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = step + tl.load(step + PARAMS_AT) + row * 16
    state += row * (STATE + tl.num_programs(1))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    x = prepared(logits, params, state, counts, row, token, inside, vocab_size)
    tl.store(x_out + row * vocab_size + token, x, mask=inside)
    tl.atomic_max(state + BEST, tl.max(tl.where((x != x) | (x == float("inf")), 0, ordered(x))))


@triton.jit
def penalised(x, params, counts, token, inside, vocab_size):
    """penalties.repetition, frequency, presence, from counts of tokens: 16 bits of the prompt's, 16 of the output's."""
    slot = tl.load(params + 12)
    if slot >= 0:
        flags = tl.load(params + 13)
        seen = tl.load(counts + slot.to(tl.int64) * vocab_size + token, mask=inside, other=0)
        output, prompt = seen & 0xFFFF, seen >> 16
        repeated = output + prompt * (flags & 1)
        frequent = output + prompt * ((flags >> 1) & 1)
        repetition, frequency, presence = as_float(params + 9), as_float(params + 10), as_float(params + 11)
        factor = tl.zeros_like(x) + repetition
        if repetition != 1.0:
            x = tl.where(repeated > 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
        if frequency != 0.0:
            x = x - frequent.to(tl.float32) * frequency
        if presence != 0.0:
            x = x - (frequent > 0).to(tl.float32) * presence
    return x


@triton.jit
def survives(x, key, chunk, filter):
    """Whether tokens passed a filter: better than its last one, or equal to it and among the first so many."""
    last, tie_chunk, tie_rank = tl.load(filter), tl.load(filter + 2), tl.load(filter + 3)
    is_tie = key == last
    stays = is_tie & (chunk < tie_chunk)
    if chunk == tie_chunk:
        stays = is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= tie_rank)
    return (key > last) | stays


@triton.jit
def digit_kernel(
    x_in, step, state, vocab_size, SHIFT: tl.constexpr, WEIGHTS: tl.constexpr,
    PARAMS_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Four bits of the last survivor's key. A filter's state: key so far, what is left, tie chunk, tie rank, is on."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    params = step + tl.load(step + PARAMS_AT) + row * 16
    state += row * (STATE + chunks)
    is_on = tl.load(params + 1) > 0
    if WEIGHTS:
        is_on = as_double(params + 2) < 1.0
    if is_on & (as_float(params) > 0):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocab_size
        x = tl.load(x_in + row * vocab_size + token, mask=inside, other=float("-inf"))
        key = ordered(x)
        amount = inside.to(tl.int64)
        filter = state + FILTER_K
        if WEIGHTS:
            filter = state + FILTER_P
            amount = weight_of(x, unordered(tl.load(state + BEST)))
            amount = tl.where(inside & (x > float("-inf")), amount, 0)
            if tl.load(params + 1) > 0:
                amount = tl.where(survives(x, key, chunk, state + FILTER_K), amount, 0)
        prefix = tl.load(filter)
        matches = amount > 0
        if SHIFT < 28:
            matches = matches & ((key >> (SHIFT + 4)) == prefix)
        if tl.max(matches.to(tl.int32)) > 0:  # soon there are few left that share the digits found so far
            digit = (key >> SHIFT) & 15
            for d in tl.static_range(16):
                found = tl.sum(tl.where(matches & (digit == d), amount, 0))
                if found > 0:
                    tl.atomic_add(state + BINS + d, found)
        if arrive(state, chunks):
            conclude_digit(params, state, filter, prefix, SHIFT, WEIGHTS)


@triton.jit
def conclude_digit(params, state, filter, prefix, SHIFT: tl.constexpr, WEIGHTS: tl.constexpr):
    """The highest digit at which what is at it or above reaches what is wanted."""
    bin = tl.arange(0, 16)
    found = tl.load(state + BINS + bin, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(state + BINS + bin, tl.zeros((16,), tl.int64))
    total = tl.sum(found)
    if SHIFT == 28:
        if WEIGHTS:
            wanted = share(total, as_double(params + 2))
        else:
            wanted = tl.minimum(tl.load(params + 1).to(tl.int64), total)
    else:
        wanted = tl.load(filter + 1)
    above = total - tl.cumsum(found, 0)  # of digits beyond this one
    reached = (above + found >= wanted) & (above < wanted)
    digit = tl.max(tl.where(reached, bin, 0))
    tl.store(filter + 1, wanted - tl.max(tl.where(bin == digit, above, 0)))
    tl.store(filter, (prefix << 4) | digit.to(tl.int64))


@triton.jit
def share(total, fraction):
    """filters.share: the least weight that counts as this fraction of the total."""
    product = total.to(tl.float64) * fraction
    whole = product.to(tl.int64)
    whole += (whole.to(tl.float64) < product).to(tl.int64)
    return tl.maximum(whole - (total >> 20), 1)


@triton.jit
def ties_kernel(
    x_in, step, state, vocab_size, WEIGHTS: tl.constexpr,
    PARAMS_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the tokens that equal the last survivor, the first so many stay: which chunk and which place in it is last."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    params = step + tl.load(step + PARAMS_AT) + row * 16
    state += row * (STATE + chunks)
    is_on = tl.load(params + 1) > 0
    filter = state + FILTER_K
    if WEIGHTS:
        is_on = as_double(params + 2) < 1.0
        filter = state + FILTER_P
    if is_on & (as_float(params) > 0):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_in + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        key = ordered(x)
        last = tl.load(filter)
        is_tie = (key == last) & (token < vocab_size)
        if WEIGHTS:  # noqa: SIM102 (the outer one is decided when this is compiled)
            if tl.load(params + 1) > 0:
                is_tie = is_tie & survives(x, key, chunk, state + FILTER_K)
        tl.store(state + STATE + chunk, tl.sum(is_tie.to(tl.int64)), cache_modifier=".cg")
        if arrive(state, chunks):
            wanted = tl.load(filter + 1)
            if WEIGHTS:
                one = tl.maximum(weight_of(unordered(last), unordered(tl.load(state + BEST))), 1)
                wanted = (wanted + one - 1) // one
            place = tl.arange(0, CHUNKS)
            ties = tl.load(state + STATE + place, mask=place < chunks, other=0, cache_modifier=".cg")
            before = tl.cumsum(ties, 0) - ties
            holds = (before < wanted) & (before + ties >= wanted)
            tie_chunk = tl.min(tl.where(holds, place, CHUNKS))
            tl.store(filter + 2, tie_chunk.to(tl.int64))
            tl.store(filter + 3, wanted - tl.max(tl.where(place == tie_chunk, before, 0)))


@triton.jit
def draw_kernel(
    logits, x_in, step, state, counts, sampled, results, vocab_size,
    PARAMS_AT: tl.constexpr, RESULT_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr,
    FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of the survivors with its noise (none at temperature 0); of equals the lowest id."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    params = step + tl.load(step + PARAMS_AT) + row * 16
    state += row * (STATE + chunks)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    if FILTERED:
        x = tl.load(x_in + row * vocab_size + token, mask=inside, other=float("-inf"))
    else:
        x = prepared(logits, params, state, counts, row, token, inside, vocab_size)
    score = x
    if as_float(params) > 0:
        alive = inside & (x > float("-inf"))
        if FILTERED:
            key = ordered(x)
            if tl.load(params + 1) > 0:
                alive = alive & survives(x, key, chunk, state + FILTER_K)
            if as_double(params + 2) < 1.0:
                alive = alive & survives(x, key, chunk, state + FILTER_P)
            alive = alive & (x - unordered(tl.load(state + BEST)) >= as_float(params + 4))
        noise = gumbel(
            tl.load(params + 5).to(tl.uint32), tl.load(params + 6).to(tl.uint32),
            tl.load(params + 7).to(tl.uint32), tl.load(params + 8).to(tl.uint32), token,
        )  # fmt: skip
        score = tl.where(alive, x + noise, float("-inf"))
    # The larger key wins; of equal keys the lower id: both in one integer.
    both = ordered(score) * 2147483648 + (2147483647 - token.to(tl.int64))
    tl.atomic_max(state + SCORE, tl.max(tl.where(inside & (score == score), both, 0)))
    if arrive(state, chunks):
        winner = tl.load(state + SCORE, cache_modifier=".cg")
        chosen = (2147483647 - (winner & 2147483647)).to(tl.int32)
        chosen = tl.minimum(tl.maximum(chosen, 0), vocab_size - 1)
        bad = tl.load(state + BAD, cache_modifier=".cg")
        code = tl.where(unordered(winner >> 31) == float("-inf"), NONE, chosen)
        code = tl.where(bad == 1, INFINITE, tl.where(bad == 2, NOT_A_NUMBER, code))
        chosen = tl.where(code < 0, 0, chosen)  # the next step, already on its way, gets a token that exists
        tl.store(sampled + row, chosen)
        tl.store(state + WINNER, chosen.to(tl.int64))
        slot = tl.load(params + 12)
        if slot >= 0:
            seen = counts + slot.to(tl.int64) * vocab_size + chosen
            tl.store(seen, tl.load(seen) + 1)
        out = results + tl.load(step + RESULT_AT) + row * 8
        tl.store(out, code)
        tl.store(out + 1, tl.load(logits + row * vocab_size + chosen).to(tl.int32, bitcast=True))
        best = tl.load(state + BEST_RAW, cache_modifier=".cg")
        tl.store(out + 2, unordered(best).to(tl.int32, bitcast=True))


@triton.jit
def tell_kernel(
    logits, step, state, results, vocab_size,
    PARAMS_AT: tl.constexpr, RESULT_AT: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of the raw logits' weights and the chosen token's rank among them."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = step + tl.load(step + PARAMS_AT) + row * 16
    state += row * (STATE + tl.num_programs(1))
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
        if arrive(state, tl.num_programs(1)):
            out = results + tl.load(step + RESULT_AT) + row * 8
            total = tl.load(state + TOTAL, cache_modifier=".cg")
            tl.store(out + 3, (total & 0xFFFFFFFF).to(tl.int32))
            tl.store(out + 4, (total >> 32).to(tl.int32))
            tl.store(out + 5, tl.load(state + RANK, cache_modifier=".cg").to(tl.int32) + 1)

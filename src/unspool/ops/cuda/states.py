# mypy: disallow-untyped-defs=False
"""Kernels of recurrent layers: causal convolutions, gated delta rules and scans (ops/recurrence.py).

A sequence's state lies in a slot, as float32. A program processes the tokens of one sequence in order, for some of its
channels or some columns of one head's matrix. A prompt and a single token are computed the same way, and a state's bits
do not depend on how the tokens were divided into steps. Sequences, channels, heads and columns run in parallel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import let_next_start, wait_for_previous
from unspool.ops.cuda.finish import activate, sigmoid

WORDS = tl.constexpr(4)  # words per sequence: steps.SEQUENCE


@triton.jit
def read_sequence(description, rows, sequence):
    """A sequence's first row, number of rows, slot, and whether its state begins with zeros (1) or not (0)."""
    own = description + 2 * rows + sequence * WORDS
    return tl.load(own), tl.load(own + 1), tl.load(own + 2).to(tl.int64), tl.load(own + 3)


@triton.jit
def conv_input(
    x, state, first, offset, is_fresh, channel, inside,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, START: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The convolution's input for the row at `offset` of a sequence; for rows before the first, from the state."""
    offset, is_fresh = offset + tl.zeros_like(channel), is_fresh + tl.zeros_like(channel)
    is_new = offset >= 0
    row = x + (first + offset).to(tl.int64) * SIZE + channel
    new = tl.load(row + START, mask=inside & is_new, other=0.0)
    if BEFORE is not None:
        new = new * tl.load(row + BEFORE, mask=inside & is_new, other=0.0)
    is_kept = inside & (offset < 0) & (is_fresh == 0)
    old = tl.load(state + (TAPS - 1 + offset) * CHANNELS + channel, mask=is_kept, other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def keep_inputs(
    target, x, state, first, offset, is_fresh, channel, inside,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, START: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Write the state after the row at `offset`. It may overwrite the state that is read, which is not read again."""
    for tap in tl.static_range(TAPS - 1):
        value = conv_input(
            x, state, first, offset - (TAPS - 2) + tap, is_fresh, channel, inside, SIZE, CHANNELS, TAPS, START, BEFORE
        )
        tl.store(target + tap * CHANNELS + channel, value, mask=inside)


@triton.jit
def conv_kernel(
    x,  # float32 [row, SIZE]
    weight,  # [channel, tap]
    bias,
    states,  # float32 [slot, TAPS - 1, channel]
    out,
    step,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    START: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATES: tl.constexpr,  # the place in `step` of the states' description
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one row. The program of a sequence's first row computes all rows that read the sequence's state,
    and then replaces the state."""
    let_next_start(PDL)
    row, rows = tl.program_id(0), tl.num_programs(0)
    description = step + tl.load(step + STATES)
    sequence = tl.load(description + rows + row)
    wait_for_previous(PDL)
    if sequence >= 0:
        first, count, slot, is_fresh = read_sequence(description, rows, sequence)
        offset = row - first
        channel = tl.program_id(1) * B + tl.arange(0, B)
        inside = channel < CHANNELS
        state = states + slot * ((TAPS - 1) * CHANNELS)
        FIRST: tl.constexpr = TAPS - 1 if TAPS > 1 else 1
        here = tl.where(offset == 0, tl.minimum(count, FIRST), 1)
        here = tl.where((offset > 0) & (offset < TAPS - 1), 0, here)
        for at in range(offset, offset + here):
            total = tl.zeros((B,), tl.float32)
            for tap in tl.static_range(TAPS):
                value = conv_input(
                    x, state, first, at - (TAPS - 1) + tap, is_fresh, channel, inside,
                    SIZE, CHANNELS, TAPS, START, BEFORE,
                )  # fmt: skip
                total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
            if bias is not None:
                total += tl.load(bias + channel, mask=inside, other=0.0)
            if ACTIVATION is not None:
                total = activate(total, ACTIVATION)
            own = (first + at).to(tl.int64)
            if AFTER is not None:
                total = total * tl.load(x + own * SIZE + AFTER + channel, mask=inside, other=0.0)
            tl.store(out + own * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)
            save = tl.load(description + first + at).to(tl.int64)
            if save >= 0:
                keep_inputs(
                    states + save * ((TAPS - 1) * CHANNELS), x, state, first, at, is_fresh, channel, inside,
                    SIZE, CHANNELS, TAPS, START, BEFORE,
                )  # fmt: skip
        if offset == 0:
            keep_inputs(
                state, x, state, first, count - 1, is_fresh, channel, inside, SIZE, CHANNELS, TAPS, START, BEFORE
            )


@triton.jit
def softplus(x):
    """log(1 + exp(x)), precise also for small results."""
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    log = tl.log(one_more) * (small / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    return tl.maximum(x, 0.0) + tl.where(one_more == 1.0, small, log)


@triton.jit
def load_token(
    x, gates, row, key, in_key, column, in_value, q_start, k_start, v_start, head,
    SIZE: tl.constexpr, GATES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A row's q, k and v of one head, and its gates: b and a (for a scan, a twice)."""
    own = x + row * SIZE
    q = tl.load(own + q_start + key, mask=in_key, other=0.0)
    k = tl.load(own + k_start + key, mask=in_key, other=0.0)
    v = tl.load(own + v_start + column, mask=in_value, other=0.0)
    gate = gates + row * GATES + head
    return q, k, v, tl.load(gate), tl.load(gate + (GATES - HEADS))


@triton.jit(do_not_specialize=["rows"])
def recurrence_kernel(
    x,  # float32 [row, SIZE]: q, k and v of all heads
    gates,  # float32 [row, GATES]
    rate,
    bias,
    skip,
    states,  # float32 [slot, head, key channel, value channel]
    out,
    step,
    eps,
    root,  # the root of the number of key channels
    rows,  # the number of rows that the step is laid out for
    SIZE: tl.constexpr,
    GATES: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    Q: tl.constexpr,  # first column of queries, of keys, of values
    K: tl.constexpr,
    V: tl.constexpr,
    DELTA: tl.constexpr,
    TILED: tl.constexpr,
    STATES: tl.constexpr,
    KEYS: tl.constexpr,  # key channels, rounded up to a power of two
    COLUMNS: tl.constexpr,  # columns per program
    PDL: tl.constexpr,
):
    """Columns of one head's matrix S [key channel, value channel], for all tokens of one sequence in order: see
    RecurrenceSpec. The next token is prefetched before the current one is computed."""
    let_next_start(PDL)
    description, count = step + tl.load(step + STATES), tl.load(step + STATES + 1)
    wait_for_previous(PDL)
    BLOCKS: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    key = tl.arange(0, KEYS)
    in_key = key < KEY
    for work in range(tl.program_id(0), count * (HEADS * BLOCKS), tl.num_programs(0)):
        head = work // BLOCKS % HEADS
        column = work % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        in_value = column < VALUE
        first, length, slot, is_fresh = read_sequence(description, rows, work // (HEADS * BLOCKS))
        own_rate, own_bias = tl.load(rate + head), tl.load(bias + head)
        key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
        q_start, k_start, v_start = Q + key_head * KEY, K + key_head * KEY, V + head * VALUE
        inside = in_key[:, None] & in_value[None, :]
        place = head * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
        is_kept = inside & (is_fresh + tl.zeros_like(place) == 0)
        s = tl.load(states + slot * (HEADS * KEY * VALUE) + place, mask=is_kept, other=0.0)
        first = first.to(tl.int64)
        q, k, v, b, a = load_token(
            x, gates, first, key, in_key, column, in_value, q_start, k_start, v_start, head, SIZE, GATES, HEADS
        )
        for index in range(length):
            row, following = first + index, first + tl.minimum(index + 1, length - 1)
            next_q, next_k, next_v, next_b, next_a = load_token(
                x, gates, following, key, in_key, column, in_value, q_start, k_start, v_start, head, SIZE, GATES, HEADS
            )
            save = tl.load(description + row).to(tl.int64)
            size = softplus(a + own_bias)
            decay = tl.exp(own_rate * size)
            if DELTA:
                k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
                q = q / tl.sqrt(tl.sum(q * q, 0) + eps) / root
                change = sigmoid(b) * (v - decay * tl.sum(s * k[:, None], 0))
            else:
                change = size * v
            s = tl.fma(k[:, None] + tl.zeros_like(s), change[None, :] + tl.zeros_like(s), decay * s)
            y = tl.sum(s * q[:, None], 0)
            if skip is not None:
                y += tl.load(skip + head) * v
            target = out + row * (HEADS * VALUE) + head * VALUE + column
            tl.store(target, y.to(out.dtype.element_ty), mask=in_value)
            if save >= 0:
                tl.store(states + save * (HEADS * KEY * VALUE) + place, s, mask=inside)
            q, k, v, b, a = next_q, next_k, next_v, next_b, next_a
        tl.store(states + slot * (HEADS * KEY * VALUE) + place, s, mask=inside)

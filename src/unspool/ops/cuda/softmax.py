# mypy: disallow-untyped-defs=False
"""Attention's arithmetic: a softmax over tiles and splits in a fixed order, see attention.py.

Keys lie along AXIS: on the matrix unit's M side if query rows are few, on its N side if they are many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.finish import tanh
from unspool.ops.cuda.handover import MORE, clear, hand_over, take


@triton.jit
def visible(scores, seen, scale, softcap):
    """Scores after softcap and mask, and the factor that converts them to base 2."""
    factor = scale * 1.4426950408889634
    if softcap is not None:
        scores = softcap * tanh(scores * scale / softcap)
        factor = 1.4426950408889634
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    return scores, factor


@triton.jit
def base_of(m):
    """The value that is subtracted from scores: the largest, or 0 if no key is visible."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def seen_by(key, position, AXIS: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys are visible to each row, with keys along AXIS."""
    key, position = tl.expand_dims(key, 1 - AXIS), tl.expand_dims(position, AXIS)
    seen = key <= position
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    return seen


@triton.jit
def weigh(scores, seen, m, scale, softcap, AXIS: tl.constexpr):
    """Process one more tile, with keys along AXIS. Returns the largest score so far (in base 2), the factor that
    rescales earlier sums, and the tile's weights."""
    scores, factor = visible(scores, seen, scale, softcap)
    new = tl.maximum(m, tl.max(scores, AXIS) * factor)
    base = base_of(new) if seen is not None else new
    weights = tl.exp2(tl.fma(scores, factor, -tl.expand_dims(base, AXIS)))
    return new, tl.exp2(m - base), weights.to(tl.float16)


@triton.jit
def weigh_pair(scores, seen, m, scale, softcap, T: tl.constexpr):
    """As weigh() for two tiles in order, but compares all scores and computes all weights at once."""
    scores, factor = visible(scores, seen, scale, softcap)
    scores = tl.reshape(scores, (2, scores.shape[0] // 2, T))
    best0, best1 = tl.split(tl.trans(tl.max(scores, 1)))
    m0 = tl.maximum(m, best0 * factor)
    m1 = tl.maximum(m0, best1 * factor)
    base0, base1 = base_of(m0), base_of(m1)
    weights = tl.exp2(tl.fma(scores, factor, -tl.trans(tl.join(base0, base1))[:, None, :])).to(tl.float16)
    weights0, weights1 = tl.split(tl.permute(weights, (1, 2, 0)))
    return m1, tl.exp2(m - base0), weights0, tl.exp2(m0 - base1), weights1


@triton.jit
def worth(m, split_m):
    """The larger maximum of two splits, and the factors that rescale the sums of each. A split without visible keys has
    m = -inf, and its factor is 0."""
    new = tl.maximum(m, split_m)
    base = base_of(new)
    return new, tl.exp2(m - base), tl.exp2(split_m - base)


@triton.jit
def merge(m, mass, acc, split_m, split_mass, split_acc, AXIS: tl.constexpr):
    """Merge one more split into the state. AXIS: the axis along which m must be repeated."""
    new, old, late = worth(m, split_m)
    old, late = tl.expand_dims(old, AXIS), tl.expand_dims(late, AXIS)
    return new, tl.fma(mass, old, split_mass * late), tl.fma(acc, old, split_acc * late)


@triton.jit
def enter_split(
    tile, first_tile, whole_m, whole_mass, whole_acc, m, mass, acc, SPLIT: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Called before each tile: at the beginning of a split, merge the previous split and start from an empty state."""
    if tile % SPLIT == 0 and tile > first_tile:
        whole_m, whole_mass, whole_acc = merge(whole_m, whole_mass, whole_acc, m, mass, acc, AXIS)
        m = tl.full(m.shape, float("-inf"), tl.float32)
        mass, acc = tl.zeros_like(mass), tl.zeros_like(acc)
    return whole_m, whole_mass, whole_acc, m, mass, acc


@triton.jit
def enter_split_evenly(
    tile, first_tile, whole_m, whole_mass, whole_acc, m, mass, acc, SPLIT: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """The same without a branch, which would make the matrix unit finish its sums first: at other tiles the merged
    state has the factor 1 and the split the factor 0. When a split begins, only m is reset; weigh() then gives its old
    sums the factor 0."""
    enters = (tile % SPLIT == 0) & (tile > first_tile)
    new, old, late = worth(whole_m, m)
    old, late = tl.where(enters, old, 1.0), tl.where(enters, late, 0.0)
    old, late = tl.expand_dims(old, AXIS), tl.expand_dims(late, AXIS)
    whole_m, m = tl.where(enters, new, whole_m), tl.where(enters, float("-inf"), m)
    return whole_m, tl.fma(whole_mass, old, mass * late), tl.fma(whole_acc, old, acc * late), m


@triton.jit
def with_sink(mass, m, sinks, head):
    """The sum of weights, plus that of each head's sink."""
    if sinks is not None:
        mass = mass + tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - base_of(m))
    return mass


@triton.jit
def answer_of(mass, acc):
    return acc / tl.where(mass == 0.0, 1.0, mass)


@triton.jit
def keep_split(partial, at, rows, m, mass, acc, T: tl.constexpr, D: tl.constexpr, ALONE: tl.constexpr):
    """Hand over a split's results, starting at `at` for the first row: channels, the largest score, the sum of
    weights."""
    r, d, copy = tl.arange(0, T)[None, :], tl.arange(0, D)[:, None], tl.arange(0, 64)[:, None]
    row = partial + (at + r).to(tl.int64) * (D + MORE)
    hand_over(row + d, acc, r < rows, ALONE)
    first = (r < rows) & (copy == 0)  # the first of 64 equal rows
    hand_over(row + D + copy, tl.broadcast_to(m[None, :], (64, T)), first, ALONE)
    hand_over(row + D + 1 + copy, mass, first, ALONE)


@triton.jit
def merge_splits(
    partial, out, sinks, at, first, rows, begin, end, first_row, head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, TIMES: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Wait for an item's splits, merge them in order, and write the result: ROWS of its rows from `first` on, TIMES
    splits at once, so that they wait for memory once. A thread has EACH consecutive channels of a row, and loads the
    row's m and mass itself; otherwise they would have to be exchanged between threads."""
    EACH: tl.constexpr = max(ROWS * D // 128, 1)
    r, d = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    m = tl.full((ROWS, D // EACH), float("-inf"), tl.float32)
    mass = tl.zeros_like(m)
    acc = ()
    for _ in tl.static_range(EACH):
        acc = acc + (tl.zeros_like(m),)  # type: ignore[assignment]  # noqa: RUF005 (Triton cannot unpack)
    stride = rows.to(tl.int64) * (D + MORE)
    for split in range(begin, end, TIMES):
        count = tl.where(r < rows, end - split, 0)
        row = partial + (at + split * rows + r).to(tl.int64) * (D + MORE)
        channels = row + tl.arange(0, D // EACH)[None, :] * EACH
        found = take(channels, row + D, stride, count, TIMES, EACH, ALONE)
        tl.debug_barrier()
        for i in tl.static_range(TIMES):
            clear(row + d + i * stride, count > i)
            clear(row + D + i * stride, count > i)
            clear(row + D + 1 + i * stride, count > i)
            m, mass, acc = merge_taken(m, mass, acc, found, i * (2 + EACH), EACH)
    mass = with_sink(mass, m, sinks, head * GROUP + r % GROUP)
    answer = ()
    for j in tl.static_range(EACH):
        answer = answer + (answer_of(mass, acc[j]).to(tl.bfloat16),)  # type: ignore[assignment]  # noqa: RUF005
    target = out + ((first_row + r // GROUP).to(tl.int64) * HEADS + head * GROUP + r % GROUP) * VALUE_DIM
    tl.store(target + d, side_by_side(answer, 0, 1, EACH, ROWS), mask=(r < rows) & (d < VALUE_DIM))


@triton.jit
def merge_taken(m, mass, acc, found, first: tl.constexpr, EACH: tl.constexpr):
    """merge() with the values that take() has loaded, starting at index `first`."""
    m, old, late = worth(m, found[first])
    newer = ()
    for j in tl.static_range(EACH):
        newer = newer + (tl.fma(acc[j], old, found[first + 2 + j] * late),)  # type: ignore[assignment]  # noqa: RUF005
    return m, tl.fma(mass, old, found[first + 1] * late), newer


@triton.jit
def side_by_side(parts, first: tl.constexpr, step: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """[row, channel] from every step-th of the parts, whose elements alternate."""
    if COUNT == 1:
        return parts[first]
    else:
        even = side_by_side(parts, first, 2 * step, COUNT // 2, ROWS)
        odd = side_by_side(parts, first + step, 2 * step, COUNT // 2, ROWS)
        return tl.reshape(tl.join(even, odd), (ROWS, 2 * even.shape[1]))


@triton.jit
def merge_rows(
    partial, out, sinks, at, first, count, rows, begin, end, first_row, head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """merge_splits for a count of rows, 1 or 4: many splits of one row at once, or few splits of four rows."""
    if count == 1:
        merge_splits(
            partial, out, sinks, at, first, rows, begin, end, first_row, head, GROUP, HEADS, VALUE_DIM, D, 1, 8, ALONE
        )
    else:
        merge_splits(
            partial, out, sinks, at, first, rows, begin, end, first_row, head, GROUP, HEADS, VALUE_DIM, D, 4, 4, ALONE
        )

# mypy: disallow-untyped-defs=False
"""Attention's arithmetic: a softmax that goes from tile to tile and from split to split in one order, see attention.py.

Keys lie along an AXIS: on the matrix unit's M side where query rows are few, on its N side where they are many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.finish import tanh


@triton.jit
def visible(scores, seen, scale, softcap):
    """Scores as they count, where they are seen, and the factor that brings them to base 2."""
    factor = scale * 1.4426950408889634
    if softcap is not None:
        scores = softcap * tanh(scores * scale / softcap)
        factor = 1.4426950408889634
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    return scores, factor


@triton.jit
def base_of(m):
    """What scores are measured from: the largest, or 0 where nothing was seen."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def seen_by(key, position, AXIS: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys a row sees, keys along AXIS."""
    key, position = tl.expand_dims(key, 1 - AXIS), tl.expand_dims(position, AXIS)
    seen = key <= position
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    return seen


@triton.jit
def weigh(scores, seen, m, scale, softcap, AXIS: tl.constexpr):
    """One more tile, its keys along AXIS: the largest score so far (in base 2), what everything before it is worth
    now, and the tile's weights."""
    scores, factor = visible(scores, seen, scale, softcap)
    new = tl.maximum(m, tl.max(scores, AXIS) * factor)
    base = base_of(new) if seen is not None else new
    weights = tl.exp2(tl.fma(scores, factor, -tl.expand_dims(base, AXIS)))
    return new, tl.exp2(m - base), weights.to(tl.float16)


@triton.jit
def weigh_pair(scores, seen, m, scale, softcap, T: tl.constexpr):
    """Two tiles, one after the other, as weigh() would: but all scores are compared at once, and all weights made."""
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
def merge(m, mass, acc, split_m, split_mass, split_acc, AXIS: tl.constexpr):
    """The state after one more split. Nothing seen has m = -inf, and counts for nothing."""
    new = tl.maximum(m, split_m)
    base = base_of(new)
    old, late = tl.expand_dims(tl.exp2(m - base), AXIS), tl.expand_dims(tl.exp2(split_m - base), AXIS)
    return new, tl.fma(mass, old, split_mass * late), tl.fma(acc, old, split_acc * late)


@triton.jit
def enter_split(
    tile, first_tile, whole_m, whole_mass, whole_acc, m, mass, acc, SPLIT: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Before a tile: at a split's beginning the last one is merged into the whole, and the next starts from nothing."""
    if tile % SPLIT == 0 and tile > first_tile:
        whole_m, whole_mass, whole_acc = merge(whole_m, whole_mass, whole_acc, m, mass, acc, AXIS)
        m = tl.full(m.shape, float("-inf"), tl.float32)
        mass, acc = tl.zeros_like(mass), tl.zeros_like(acc)
    return whole_m, whole_mass, whole_acc, m, mass, acc


@triton.jit
def answer_of(mass, acc, AXIS: tl.constexpr):
    return acc / tl.expand_dims(tl.where(mass == 0.0, 1.0, mass), AXIS)


@triton.jit
def store_partial(partial, partial_m, partial_mass, at, rows, m, mass, acc, T: tl.constexpr, D: tl.constexpr):
    """Keep a split's results, rows of queries along the last axis."""
    r, d = tl.arange(0, T), tl.arange(0, D)
    used, at = r < rows, (at + r).to(tl.int64)
    tl.store(partial + at[None, :] * D + d[:, None], acc, mask=used[None, :], cache_modifier=".cg")
    tl.store(partial_m + at, m, mask=used, cache_modifier=".cg")
    first = (tl.arange(0, 64) == 0)[:, None]  # of 64 equal rows
    tl.store(partial_mass + (at[None, :] + tl.zeros((64, T), tl.int64)), mass, mask=first & used[None, :],
             cache_modifier=".cg")  # fmt: skip


@triton.jit
def load_partial(partial, partial_m, partial_mass, kept, split, end, rows, T: tl.constexpr, D: tl.constexpr):
    """A split's kept results; past the end, results that change nothing."""
    r, d = tl.arange(0, T), tl.arange(0, D)
    used = (r < rows) & (split + tl.zeros_like(r) < end)
    at = (kept + split * rows + r).to(tl.int64)
    acc = tl.load(partial + at[:, None] * D + d[None, :], mask=used[:, None], other=0.0, cache_modifier=".cg")
    m = tl.load(partial_m + at, mask=used, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(partial_mass + at, mask=used, other=0.0, cache_modifier=".cg")
    return m, mass[:, None], acc


@triton.jit
def merge_partials(
    partial, partial_m, partial_mass, out, kept, begin, end, rows, first_row, head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """An item's splits in order, loaded four at a time so that they wait for memory once."""
    r, d = tl.arange(0, T), tl.arange(0, D)
    m = tl.full((T,), float("-inf"), tl.float32)
    mass = tl.zeros((T, 1), tl.float32)
    acc = tl.zeros((T, D), tl.float32)
    for split in range(begin, end, 4):
        m0, mass0, acc0 = load_partial(partial, partial_m, partial_mass, kept, split, end, rows, T, D)
        m1, mass1, acc1 = load_partial(partial, partial_m, partial_mass, kept, split + 1, end, rows, T, D)
        m2, mass2, acc2 = load_partial(partial, partial_m, partial_mass, kept, split + 2, end, rows, T, D)
        m3, mass3, acc3 = load_partial(partial, partial_m, partial_mass, kept, split + 3, end, rows, T, D)
        m, mass, acc = merge(m, mass, acc, m0, mass0, acc0, 1)
        m, mass, acc = merge(m, mass, acc, m1, mass1, acc1, 1)
        m, mass, acc = merge(m, mass, acc, m2, mass2, acc2, 1)
        m, mass, acc = merge(m, mass, acc, m3, mass3, acc3, 1)
    answer = answer_of(tl.max(mass, 1), acc, 1)
    at = ((first_row + r // GROUP).to(tl.int64) * HEADS + head * GROUP + r % GROUP)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + at, answer.to(tl.bfloat16), mask=(r < rows)[:, None] & (d < HEAD_DIM)[None, :])

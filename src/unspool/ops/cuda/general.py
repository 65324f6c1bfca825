# mypy: disallow-untyped-defs=False
"""Kernels for operations that are not fused with a linear layer: by rows, or by blocks of columns of a row.

Programs have the same shape for every number of rows. Rows are read as float32 or bf16, and written in the type of
`out`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import (
    ceil_exponent,
    inverse_rms,
    let_next_start,
    power_of_two,
    sum_of_squares,
    wait_for_previous,
)
from unspool.ops.cuda.finish import activate, sigmoid, tanh
from unspool.ops.cuda.plane_layout import decode_row

SIZE = tl.constexpr(64)  # values that one reduction sums


@triton.jit
def sum_of_values(x, AXIS: tl.constexpr):
    """The sum of at most 256 values along an axis, the same for every order of summation."""
    exponent = ceil_exponent(tl.max(tl.abs(x), axis=AXIS, keep_dims=True))
    total = tl.sum((x * power_of_two(22 - exponent)).to(tl.int32), axis=AXIS, keep_dims=True).to(tl.float32)
    return total * power_of_two(exponent - 22)


@triton.jit
def mean_of(x, size, D: tl.constexpr):
    """The mean of `size` values; padding after them must be 0."""
    GROUPS: tl.constexpr = D // SIZE
    parts = sum_of_values(tl.reshape(x, (GROUPS, SIZE)), 1)
    return tl.reshape(sum_of_values(tl.reshape(parts, (1, GROUPS)), 1), (1,)) / size


@triton.jit
def normed(x, inside, size, eps, CENTERED: tl.constexpr, D: tl.constexpr):
    """x divided by its root mean square; CENTERED: x minus its mean, divided by its standard deviation."""
    GROUPS: tl.constexpr = D // SIZE
    if CENTERED:
        x = tl.where(inside, x - mean_of(x, size, D), 0.0)
    parts = tl.reshape(sum_of_squares(tl.reshape(x, (GROUPS, SIZE)), 1), (1, GROUPS))
    return x * tl.reshape(inverse_rms(parts, 1.0 / size, eps), (1,))


@triton.jit
def norm_kernel(
    x, weight, bias, eps, residual, out,
    size: tl.constexpr, D: tl.constexpr, CENTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual + norm(x) · weight + bias"""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside = column < size
    y = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    y = normed(y, inside, size, eps, CENTERED, D) * tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        y = y + tl.load(bias + column, mask=inside, other=0.0)
    if residual is not None:
        y = tl.load(residual + row * size + column, mask=inside, other=0.0) + y
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def columns_of(size, B: tl.constexpr):
    """The row and the columns of a program that processes one block of columns."""
    return tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)


@triton.jit
def combine_kernel(
    x, residual, factor, softcap, out,
    size: tl.constexpr, B: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual + cap(factor · activation(x))"""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = columns_of(size, B)
    inside = column < size
    y = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        y = activate(y, ACTIVATION)
    y = y * factor
    if softcap is not None:
        y = softcap * tanh(y / softcap)
    if residual is not None:
        y = tl.load(residual + row * size + column, mask=inside, other=0.0) + y
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def join_kernel(
    x, gate, out,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, size: tl.constexpr, B: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x · activation(gate), for rows with the given strides."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = columns_of(size, B)
    inside = column < size
    value = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(gate + row * GATE_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        by, value = tl.minimum(by, 7.0), tl.minimum(tl.maximum(value, -7.0), 7.0) + 1.0
        y = by / (1.0 + tl.exp(-1.702 * by)) * value
    elif ACTIVATION is not None:
        y = value * activate(by, ACTIVATION)
    else:
        y = value * by
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_rows_kernel(x, logit, residual, out, size: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """residual + sigmoid(logit) · x, with one logit per row"""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = columns_of(size, B)
    inside = column < size
    y = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32) * sigmoid(tl.load(logit + row))
    if residual is not None:
        y = tl.load(residual + row * size + column, mask=inside, other=0.0) + y
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def arrange_kernel(
    x, table, weight, eps, out,
    X_SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a row. The table has its first column, its width, its target column, its kind (0 copied, 1 rms, 2
    centered, 3 scaled) and the first index of its weights."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), table + tl.program_id(1) * 5
    start, size, target, kind, first = (
        tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3), tl.load(part + 4),
    )  # fmt: skip
    column = tl.arange(0, D)
    inside = column < size
    y = tl.load(x + row * X_SIZE + start + column, mask=inside, other=0.0).to(tl.float32)
    # Two conditions: the first is decided at compile time, because without norms there is no pointer to load from.
    if weight is not None:  # noqa: SIM102
        if kind > 0:
            by = tl.load(weight + first + column, mask=inside, other=0.0)
            if kind == 1:
                y = normed(y, inside, size, eps, False, D) * by
            elif kind == 3:
                y = y * by
            else:
                y = normed(y, inside, size, eps, True, D) * by
    tl.store(out + row * OUT_SIZE + target + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_positions"])
def positions_kernel(
    x, positions, codes, scales, offsets, out, num_positions,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, size: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x + the table's row for each row's position"""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside = column < size
    position = tl.minimum(tl.load(positions + row), num_positions - 1).to(tl.int64)
    y = tl.load(x + row * size + column, mask=inside, other=0.0)
    y = y + decode_row(codes, scales, offsets, position, column, inside, WIDTH, FORMAT)
    tl.store(out + row * size + column, y, mask=inside)


@triton.jit
def take_rows_kernel(
    step, x, out, size: tl.constexpr, B: tl.constexpr, LOGIT_ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copy the rows whose logits are needed."""
    let_next_start(PDL)
    row, column = columns_of(size, B)
    source = tl.load(step + tl.load(step + LOGIT_ROWS) + row).to(tl.int64)
    wait_for_previous(PDL)
    value = tl.load(x + source * size + column, mask=column < size, other=0.0)
    tl.store(out + row * size + column, value, mask=column < size)


@triton.jit
def rotations_kernel(
    positions, inv_freq, rope_scale, cos, sin, num_rows,
    ROPES: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """cos and sin of each row's position, as [rope, row, pair]"""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, PAIRS_PADDED)
    position = tl.load(positions + row).to(tl.float32)
    for rope in tl.static_range(ROPES):
        angle = position * tl.load(inv_freq + rope * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        scale = tl.load(rope_scale + rope)
        place = (rope * num_rows + row) * PAIRS + pair
        tl.store(cos + place, tl.cos(angle) * scale, mask=pair < PAIRS)
        tl.store(sin + place, tl.sin(angle) * scale, mask=pair < PAIRS)

# mypy: disallow-untyped-defs=False
"""Kernels for rows with several parts, and for gates with a threshold: see `Ops.add`, `cut`, `level`, `mix`.

Programs have the same shape for any number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unspool.ops.cuda.exact import let_next_start, sum_of_parts, sum_of_squares, wait_for_previous
from unspool.ops.cuda.finish import tanh
from unspool.ops.cuda.general import SIZE, columns_of, mean_of
from unspool.ops.cuda.launch import Launch, next_power
from unspool.ops.graph import Add, Cut, Level, Mix

COLUMNS = 1024  # the most columns of a row that one program computes


@triton.jit
def add_kernel(
    x, y, x_scale, y_scale, out,
    Y_SIZE: tl.constexpr, START: tl.constexpr, size: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x_scale · x, plus y_scale · y, repeated from a column on"""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = columns_of(size, B)
    value = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32) * x_scale
    has_y = (column >= START) & (column < size)
    place = tl.where(has_y, column - START, 0) % Y_SIZE
    value = value + tl.load(y + row * Y_SIZE + place, mask=has_y, other=0.0).to(tl.float32) * y_scale
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def mean_square(x, size, D: tl.constexpr):
    """The mean square of `size` values; padding after them must be 0."""
    squares = sum_of_squares(tl.reshape(x, (D // SIZE, SIZE)), 1)
    return tl.reshape(sum_of_parts(tl.reshape(squares, (1, D // SIZE)), 1), (1,)) / size


@triton.jit
def cut_kernel(x, deviations, out, size: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr):
    """max(0, x - mean - deviations · standard deviation) of a row."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, value - mean_of(value, size, D), 0.0)
    value = centered - deviations * tl.sqrt(mean_square(centered, size, D))
    tl.store(out + row * size + column, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def level_kernel(
    x, like, least, out,
    PART: tl.constexpr, size: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a row: the first is copied from `like`, the others are scaled to its root mean square."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, part, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    inside = column < PART
    value = tl.load(like + row * PART + column, mask=inside, other=0.0).to(tl.float32)
    if part > 0:
        wanted = mean_square(value, PART, D)
        value = tl.load(x + row * size + (part - 1) * PART + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.sqrt(wanted / tl.maximum(mean_square(value, PART, D), least))
    tl.store(out + row * (size + PART) + part * PART + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def mix_kernel(
    x, logits, table, bias, residual, out,
    PART: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, LOGITS: tl.constexpr, B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of columns of one part of a row: the residual, plus a weighted sum of x's parts."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = columns_of(PART, B)
    made, inside = tl.program_id(2), column < PART
    place = (row * OUTPUTS + made) * PART + column
    total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    for part in range(INPUTS):
        factor = bias
        for each in range(LOGITS):
            gate = tanh(tl.load(logits + row * LOGITS + each).to(tl.float32))
            factor = factor + tl.load(table + (made * INPUTS + part) * LOGITS + each) * gate
        source = x + (row * INPUTS + part) * PART + column
        total = total + factor * tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def launch_of(node: Add | Cut | Level | Mix, rows: int, inputs: dict[str, Tensor], out: Tensor) -> Launch:
    """The kernel of a node; `inputs` are rows by the names of its fields."""
    args: dict[str, object] = {**inputs, "out": out}
    nbytes = 4 * rows * (node.width + sum(each.width for each in node.inputs.values()))
    match node:
        case Add():
            block = min(next_power(node.width), COLUMNS)
            args |= {"x_scale": float(node.x_scale), "y_scale": float(node.y_scale), "START": node.start}
            args |= {"Y_SIZE": node.y.width, "size": node.width, "B": block}
            return Launch(add_kernel, (rows, -(-node.width // block)), args, label="add", bytes=nbytes)
        case Cut():
            args |= {"deviations": float(node.deviations), "size": node.width, "D": _depth(node.width)}
            return Launch(cut_kernel, (rows,), args, label="cut", bytes=nbytes)
        case Level():
            part = node.like.width
            args |= {"least": float(node.least), "PART": part, "size": node.x.width, "D": _depth(part)}
            return Launch(level_kernel, (rows, node.width // part), args, label="level", bytes=nbytes)
        case Mix():
            block, outputs = min(next_power(node.part), COLUMNS), node.width // node.part
            args |= {"table": node.table, "bias": float(node.bias), "PART": node.part, "OUTPUTS": outputs}
            args |= {"INPUTS": node.x.width // node.part, "LOGITS": node.logits.width, "B": block}
            return Launch(mix_kernel, (rows, -(-node.part // block), outputs), args, label="mix", bytes=nbytes)


def _depth(size: int) -> int:
    return max(next_power(size), SIZE.value)

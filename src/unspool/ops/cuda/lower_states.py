"""Launches of recurrent layers."""

from __future__ import annotations

import math

from torch import Tensor

from unspool.ops import ConvSpec, RecurrenceSpec
from unspool.ops.cuda import steps
from unspool.ops.cuda.launch import Launch, multiprocessors, next_power
from unspool.ops.cuda.states import conv_kernel, recurrence_kernel

CHANNELS = 128  # of a program of the convolution
COLUMNS = 8  # of a head's matrix in a program: a warp of its own, in whose registers they stay
PROGRAMS = 16  # such programs that a multiprocessor runs at once


def conv_launch(spec: ConvSpec, x: Tensor, states: Tensor, out: Tensor, step: Tensor, rows: int) -> Launch:
    width = min(next_power(spec.channels), CHANNELS)
    args = {"x": x, "weight": spec.weight, "bias": spec.bias, "states": states, "out": out, "step": step}
    args |= {"SIZE": x.shape[1], "CHANNELS": spec.channels, "TAPS": spec.taps, "START": spec.start}
    args |= {"BEFORE": spec.before, "AFTER": spec.after, "ACTIVATION": spec.activation}
    factors = (spec.before is not None) + (spec.after is not None)
    return Launch(
        conv_kernel,
        (rows, -(-spec.channels // width)),
        args | {"STATES": steps.STATES, "B": width},
        warps=1,
        label="short-conv",
        bytes=4 * rows * spec.channels * (2 + factors + 2 * (spec.taps - 1)),
    )


def recurrence_launch(
    spec: RecurrenceSpec, x: Tensor, gates: Tensor, states: Tensor, out: Tensor, step: Tensor, rows: int
) -> Launch:
    q, k, v = spec.columns
    args = {"x": x, "gates": gates, "rate": spec.rate, "bias": spec.bias, "skip": spec.skip, "states": states}
    args |= {"out": out, "step": step, "eps": float(spec.eps), "root": math.sqrt(spec.key_dim), "rows": rows}
    args |= {"SIZE": spec.row_width, "GATES": spec.gates_width, "HEADS": spec.num_heads}
    args |= {"KEY_HEADS": spec.num_key_heads, "KEY": spec.key_dim, "VALUE": spec.value_dim, "Q": q, "K": k, "V": v}
    args |= {"DELTA": spec.kind == "delta", "TILED": spec.tiled, "STATES": steps.STATES}
    args |= {"KEYS": next_power(spec.key_dim), "COLUMNS": COLUMNS}
    work = rows * spec.num_heads * -(-spec.value_dim // COLUMNS)  # as much as there can be
    matrix = spec.num_heads * spec.key_dim * spec.value_dim
    return Launch(
        recurrence_kernel,
        (min(work, multiprocessors() * PROGRAMS),),
        args,
        warps=1,
        label=spec.kind,
        bytes=4 * rows * (2 * matrix + spec.row_width + spec.num_heads * spec.value_dim),
        flops=rows * matrix * (6 if spec.kind == "delta" else 5),
    )

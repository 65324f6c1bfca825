"""Launches of recurrent layers."""

from __future__ import annotations

import math

from torch import Tensor

from unspool.ops import ConvSpec, RecurrenceSpec
from unspool.ops.cuda import steps
from unspool.ops.cuda.launch import Launch, multiprocessors, next_power
from unspool.ops.cuda.states import conv_kernel, recurrence_kernel

CHANNELS = 128  # channels per program of the convolution
# Columns of a head's matrix per program. A program is one warp, which holds them in registers; the number of programs
# per multiprocessor follows from that. Columns affect the bits, so they depend only on the kind. More columns need
# fewer passes over many sequences; for a delta rule, they would slow down a long prompt.
COLUMNS = {"delta": 8, "scan": 16}
PROGRAMS = {"delta": 32, "scan": 16}
MANY = 256  # benchmarks with at least this many rows have one sequence; with fewer, each row is a sequence


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
        bytes=4 * spec.channels * (rows * (2 + factors) + 2 * (rows if rows <= MANY else 1) * (spec.taps - 1)),
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
    args |= {"KEYS": next_power(spec.key_dim), "COLUMNS": COLUMNS[spec.kind]}
    work = rows * spec.num_heads * -(-spec.value_dim // COLUMNS[spec.kind])  # the largest possible amount of work
    matrix, sequences = spec.num_heads * spec.key_dim * spec.value_dim, rows if rows <= MANY else 1
    return Launch(
        recurrence_kernel,
        (min(work, multiprocessors() * PROGRAMS[spec.kind]),),
        args,
        warps=1,
        label=spec.kind,
        bytes=4 * (2 * sequences * matrix + rows * (spec.row_width + spec.num_heads * spec.value_dim)),
        flops=rows * matrix * (6 if spec.kind == "delta" else 5),
    )

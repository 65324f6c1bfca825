# mypy: disallow-untyped-defs=False
"""Sums whose bits do not depend on the order of summation, and what else every kernel shares.

A compiler chooses which thread holds which element, and with it the order in which a reduction adds. Two tile shapes
may then disagree in the last bit, and a row's bits would depend on how many rows came along. So sums inside kernels
are taken over integers, which add exactly: the largest magnitude (a maximum is exact too) sets a power of two, each
value becomes a 24-bit integer of it, and the integers' sum is scaled back. That is as precise as float32, and free of
order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GROUP = 64  # features whose squares are summed together: a row's mean square is a sum of such groups' sums


@triton.jit
def power_of_two(exponent):
    """2^exponent for exponents of normal float32 numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_exponent(x):
    """An e with x < 2^e, for x >= 0; bounded so that neither 2^e nor 2^-e nor 24 bits more leave the normal numbers."""
    biased = x.to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(biased - 126, -90), 90)


@triton.jit
def sum_of_squares(x, AXIS: tl.constexpr):
    """sum of x^2 along an axis of at most 64 values, the same for every order of summation."""
    exponent = ceil_exponent(tl.max(tl.abs(x), axis=AXIS, keep_dims=True))
    scaled = x * power_of_two(12 - exponent)  # below 2^12, so its square is below 2^24
    total = tl.sum((scaled * scaled).to(tl.int32), axis=AXIS, keep_dims=True).to(tl.float32)
    back = power_of_two(exponent - 12)
    return total * back * back


@triton.jit
def sum_of_parts(x, AXIS: tl.constexpr):
    """The sum of at most 256 non-negative values along an axis, the same for every order of summation."""
    exponent = ceil_exponent(tl.max(x, axis=AXIS, keep_dims=True))
    total = tl.sum((x * power_of_two(23 - exponent)).to(tl.int32), axis=AXIS, keep_dims=True).to(tl.float32)
    return total * power_of_two(exponent - 23)


@triton.jit
def inverse_rms(parts, size, eps):
    """1 / sqrt(mean square + eps) of rows, from the sums of squares of their groups [row, group]."""
    total = sum_of_parts(parts, 1)
    root = tl.sqrt_rn(tl.div_rn(total, tl.zeros_like(total) + size) + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Before this, a kernel may touch weights alone: the kernel before it may still be writing everything else."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """From here on the next kernel may come and ask for its weights. Too early, and this one's would push them out."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch_run(pointers, size):
    """Ask for `size` bytes from each pointer on to be brought into the L2 cache; for a few long runs."""
    sizes = tl.full(pointers.shape, size, tl.int32)
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [pointers.to(tl.int64), sizes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_lines(pointers):
    """Ask for the 128 bytes at each pointer; for many short runs, which would keep the copy engine from its work."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_for_weights(
    w, features, width, split_width, program, programs,
    SPLITS: tl.constexpr, LINES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Bring what the next kernel's programs read first into the L2 cache, while this one has nothing more to read.

    Its program p begins with 64 rows from row p // SPLITS · 64 on; LINES lines of 64 columns are asked for of each, by
    these programs in turns.
    """
    for turn in tl.static_range(ROUNDS):
        theirs = program + turn * programs
        rows = theirs // SPLITS * 64 + tl.arange(0, 64)
        columns = theirs % SPLITS * split_width + tl.arange(0, LINES) * 64
        addresses = w + rows.to(tl.int64)[:, None] * width + columns[None, :]
        prefetch_lines(tl.where((rows < features)[:, None], addresses, w))


@triton.jit
def load_quietly(pointer):
    """A scalar that the compiler does not know for a load: it would not start a copy early that depends on one."""
    asm: tl.constexpr = "ld.global.nc.s32 $0, [$1];"
    return tl.inline_asm_elementwise(asm, "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)

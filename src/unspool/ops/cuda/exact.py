# mypy: disallow-untyped-defs=False
"""Sums whose bits do not depend on the order of summation, and other helpers that every kernel shares.

A compiler chooses which thread holds which element, and with it the order in which a reduction adds. Two tile shapes
may then differ in the last bit, and a row's bits would depend on the number of rows. So sums across threads are taken
over integers, whose addition is exact: the largest magnitude (a maximum is exact too) sets a power of two, each value
becomes a 24-bit integer multiple of it, and the sum of the integers is scaled back. That is as precise as float32, and
independent of the order. A sum that one thread adds by itself, value after value, needs none of this.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GROUP = tl.constexpr(64)  # features whose squares are summed together; a row's sum of squares adds these sums


@triton.jit
def power_of_two(exponent):
    """2^exponent for exponents of normal float32 numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_exponent(x):
    """An e with x < 2^e, for x >= 0; bounded so that 2^e, 2^-e and 24 more bits remain normal numbers."""
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
def inverse_rms(parts, inverse_size, eps):
    """1 / sqrt(mean square + eps) of rows, from the sums of squares of their groups [row, group]."""
    return inverse_root(sum_of_parts(parts, 1), inverse_size, eps)


@triton.jit
def inverse_root(total, inverse_size, eps):
    """1 / sqrt(mean square + eps) from the sum of squares and 1 / the number of values."""
    return tl.rsqrt(total * inverse_size + eps)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the kernels before this one. Before the wait, a kernel may read weights, the step's description, and
    keys and values of earlier steps; the kernels before it may still be writing everything else."""
    if PDL:
        gdc_wait()


@triton.jit
def after_previous(k, first, PDL: tl.constexpr):
    """Return k, and wait for the previous kernel if k is the first round: loads whose address depends on the result are
    issued after the wait.

    For loops whose copies the compiler issues some rounds ahead: copies whose addresses depend on the result wait, all
    others are issued before. Waiting again would cost a quarter of a microsecond per round.
    """
    if PDL:
        asm: tl.constexpr = """
        {
            .reg .pred first;
            setp.eq.s32 first, $1, $2;
            @first griddepcontrol.wait;
            mov.b32 $0, $1;
        }
        """
        k = tl.inline_asm_elementwise(asm, "=r,r,r", [k, first], dtype=tl.int32, is_pure=True, pack=1)
    return k


@tl.core.builtin
def rounds_ahead(x, rounds, _semantic=None):
    """x, loaded in a loop: prefetch it this many rounds before its use, instead of when the compiler decides."""
    x.handle.set_attr("tt.latency", _semantic.builder.get_int32_attr(tl.core._unwrap_if_constexpr(rounds)))
    return x


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start and prefetch its weights. Too early, its weights would evict those of this kernel."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def let_next_start_if(now, PDL: tl.constexpr):
    """let_next_start without a branch."""
    if PDL:
        asm: tl.constexpr = """
        {
            .reg .pred now;
            setp.ne.s32 now, $1, 0;
            @now griddepcontrol.launch_dependents;
            mov.b32 $0, 0;
        }
        """
        tl.inline_asm_elementwise(asm, "=r,r", [now.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_here(pointers, x, mask, HERE: tl.constexpr):
    """Store values of 16 or 32 bits. HERE: each thread stores its own values. tl.store would first exchange values
    between threads to coalesce them, which takes longer than it saves for few values. Several threads may hold the same
    value."""
    if HERE:
        bits = x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)
        tl.inline_asm_elementwise(
            storing(bits.dtype.primitive_bitwidth),
            "=r,l,r,h" if bits.dtype.primitive_bitwidth == 16 else "=r,l,r,r",
            [pointers.to(tl.int64), mask.to(tl.int32), bits],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, x, mask=mask)


@triton.constexpr_function
def storing(bits):
    return f"""
    {{
        .reg .pred is_wanted;
        setp.ne.s32 is_wanted, $2, 0;
        @is_wanted st.global.b{bits} [$1], $3;
        mov.b32 $0, 0;
    }}
    """


@triton.jit
def prefetch_runs(pointers, active, size):
    """Prefetch `size` bytes from each active pointer into the L2 cache.

    The tensors must have at least one element per thread of the program. If several threads held the same element, each
    of them would issue the prefetch.
    """
    sizes = tl.full(pointers.shape, size, tl.int32)
    asm: tl.constexpr = """
    {
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.u32 $0, 0;
    }
    """
    args = [pointers.to(tl.int64), active.to(tl.int32), sizes]
    tl.inline_asm_elementwise(asm, "=r,l,r,r", args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_quietly(pointer):
    """Load a scalar so that the compiler does not see a load: it would not prefetch a copy that depends on a load."""
    asm: tl.constexpr = "ld.global.nc.s32 $0, [$1];"
    return tl.inline_asm_elementwise(asm, "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)

# mypy: disallow-untyped-defs=False
"""What one program hands to another of the same kernel, by way of memory.

Where nothing is yet, memory holds ABSENT, a NaN that no sum comes to. Each value thus tells by itself that it is there:
nothing has to be ordered before a flag, and nobody counts. Whoever takes values looks until none is absent, and puts
ABSENT back. A counter would cost two ways to memory more.

Nobody waits for ever: a program takes only from work of lower numbers than its own and does its work in order, and a
device starts programs in order. So where each has one piece of work, whatever it waits for is under way. Where some
have more, all programs must have room on the device at once, which Lowering sees to on Hopper. On other chips, or with
other processes' kernels beside them, nobody could tell, and nothing is handed over then (steps.py). The interpreter
runs programs one after the other; what would wait there has to be ALONE, a single program that does all the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

ABSENT = tl.constexpr(-1)  # as int32


@triton.jit
def hand_over(pointers, x, mask, ALONE: tl.constexpr):
    """Store values for another program, each from where it is: tl.store would first bring neighbours together. No value
    may be held by two threads, as none of a product is: the second could store it after it was taken."""
    if ALONE:
        tl.store(pointers, x, mask=mask)
    else:
        asm: tl.constexpr = """
        {
            .reg .pred is_wanted, is_odd;
            setp.ne.s32 is_wanted, $3, 0;
            setp.eq.s32 is_odd, $2, -1; // by no arithmetic; but nobody shall wait for it
            selp.b32 $0, 0x7fffffff, $2, is_odd;
            @is_wanted st.relaxed.gpu.global.b32 [$1], $0;
        }
        """
        args = [pointers.to(tl.int64), x.to(tl.int32, bitcast=True), mask.to(tl.int32)]
        tl.inline_asm_elementwise(asm, "=&r,l,r,r", args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def clear(pointers, mask):
    """Make room again, after a barrier: threads may have looked at the same."""
    tl.store(pointers, tl.full(pointers.shape, ABSENT, tl.int32).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def take(
    pointers, stride, count, NEUTRAL: tl.constexpr, TIMES: tl.constexpr, PACK: tl.constexpr, ALONE: tl.constexpr
):  # fmt: skip
    """For each of three tensors of pointers what is kept there, and one, two … strides further; past the count, what is
    neutral for it, 0 or -inf. PACK: elements that a thread has, at most; it looks for so many together."""
    found = ()
    if ALONE:
        for k in tl.static_range(3):
            for i in tl.static_range(TIMES):
                value = tl.load(pointers[k] + i * stride, mask=count > i, other=NEUTRAL[k])
                found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        found = tl.inline_asm_elementwise(
            looking(NEUTRAL, TIMES, PACK),
            operands_of_looking(TIMES, PACK),
            [count, stride * 4, pointers[0], pointers[1], pointers[2]],
            dtype=(tl.float32,) * (3 * TIMES),
            is_pure=False,
            pack=PACK,
        )
    return found


@triton.constexpr_function
def looking(neutral, times, pack):
    """In assembly: all loads, again and again until nothing is absent. They are on their way together, so that it takes
    one way to memory."""
    kinds = 3
    names = iter(f"${i}" for i in range(kinds * times * pack + (2 + kinds) * pack))
    value = [[[next(names) for _ in range(pack)] for _ in range(times)] for _ in range(kinds)]
    count, stride, *pointer = ([next(names) for _ in range(pack)] for _ in range(2 + kinds))
    lines = [f"{{ .reg .pred is_there<{times * pack}>, is_absent; .reg .b64 at; .reg .b32 largest;"]
    for e in range(pack):
        lines += [f"setp.gt.s32 is_there{i * pack + e}, {count[e]}, {i};" for i in range(times)]
        for k in range(kinds):
            bits = "0xff800000" if neutral[k] < 0 else "0"
            lines += [f"mov.b32 {value[k][i][e]}, {bits};" for i in range(times)]
    lines.append("look:")
    for k in range(kinds):
        for e in range(pack):
            lines.append(f"mov.b64 at, {pointer[k][e]};")
            for i in range(times):
                lines.append(f"@is_there{i * pack + e} ld.relaxed.gpu.global.b32 {value[k][i][e]}, [at];")
                lines.append(f"add.s64 at, at, {stride[e]};")
    lines.append("mov.b32 largest, 0;")
    lines += [f"max.u32 largest, largest, {one};" for kind in value for time in kind for one in time]
    lines.append("setp.eq.u32 is_absent, largest, 0xffffffff; @is_absent bra look; }")
    return "\n".join(lines)


@triton.constexpr_function
def operands_of_looking(times, pack):
    return ",".join(["=&r"] * (3 * times * pack) + ["r"] * pack + ["l"] * (4 * pack))

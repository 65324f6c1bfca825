# mypy: disallow-untyped-defs=False
"""How programs of one kernel pass values to each other through memory.

Memory without a value holds ABSENT, a NaN that no sum produces. So each value itself shows that it has arrived: no flag
has to be ordered after it, and no counter is needed, which would cost two more round trips to memory. The program that
takes values polls until none is absent, and then stores ABSENT again.

There is no deadlock: a program only waits for work items with lower numbers than its own and processes its items in
order, and a device starts programs in order. If each program has one item, the program that it waits for has started.
If some have more, all programs must be resident at once, which Lowering ensures on Hopper. On other chips, or when
kernels of other processes run at the same time, that is not certain, and no values are passed this way (steps.py).
Triton's interpreter runs programs one after the other, so a kernel that would wait must run ALONE, as a single program
that does all the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

ABSENT = tl.constexpr(-1)  # as int32
MORE = tl.constexpr(4)  # numbers of a row in addition to its channels: two, and two for an alignment of 16 bytes


@triton.jit
def hand_over(pointers, x, mask, ALONE: tl.constexpr):
    """Store values for another program, each thread its own: tl.store would first exchange values between threads. No
    value may be held by two threads (those of a product never are), because the second could store it after it was
    taken."""
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
    """Store ABSENT again. Call it after a barrier, because several threads may poll the same values."""
    tl.store(pointers, tl.full(pointers.shape, ABSENT, tl.int32).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def take(channels, others, stride, count, TIMES: tl.constexpr, EACH: tl.constexpr, ALONE: tl.constexpr):
    """What rows hold at two tensors of pointers: the two other numbers and EACH channels. Then the same for the values
    one, two … strides further, TIMES in all. Past `count`, the neutral values of merging: -inf, 0 and 0."""
    found = ()
    if ALONE:
        for i in tl.static_range(TIMES):
            is_there = count > i
            m = tl.load(others + i * stride, mask=is_there, other=float("-inf"))
            found = found + (m, tl.load(others + 1 + i * stride, mask=is_there, other=0.0))  # type: ignore[assignment]  # noqa: RUF005
            for j in tl.static_range(EACH):
                value = tl.load(channels + j + i * stride, mask=is_there, other=0.0)
                found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        found = tl.inline_asm_elementwise(
            looking(TIMES, EACH),
            operands_of_looking(TIMES, EACH),
            [count, stride * 4, channels, others],
            dtype=(tl.float32,) * (TIMES * (2 + EACH)),
            is_pure=False,
            pack=1,
        )
    return found


@triton.constexpr_function
def looking(times, each):
    """Assembly code that repeats all loads until no value is absent. The loads are in flight together, so they take one
    round trip to memory."""
    size = 2 + each
    values = [[f"${i * size + j}" for j in range(size)] for i in range(times)]
    count, stride, channels, others = (f"${times * size + i}" for i in range(4))
    lines = [f"{{ .reg .pred is_there<{times}>, is_absent; .reg .b64 at, beside; .reg .b32 largest;"]
    for i in range(times):
        lines += [f"setp.gt.s32 is_there{i}, {count}, {i};", f"mov.b32 {values[i][0]}, 0xff800000;"]
        lines += [f"mov.b32 {one}, 0;" for one in values[i][1:]]
    lines += ["look:", f"mov.b64 at, {channels}; mov.b64 beside, {others};"]
    for i in range(times):
        lines.append(f"@is_there{i} ld.relaxed.gpu.global.v2.b32 {{{', '.join(values[i][:2])}}}, [beside];")
        for j in range(0, each, 4):
            some = values[i][2 + j : 6 + j]
            kind, target = (f".v{len(some)}", f"{{{', '.join(some)}}}") if each > 1 else ("", some[0])
            lines.append(f"@is_there{i} ld.relaxed.gpu.global{kind}.b32 {target}, [at + {4 * j}];")
        lines.append(f"add.s64 at, at, {stride}; add.s64 beside, beside, {stride};")
    lines.append("mov.b32 largest, 0;")
    lines += [f"max.u32 largest, largest, {one};" for time in values for one in time]
    lines.append("setp.eq.u32 is_absent, largest, 0xffffffff; @is_absent bra look; }")
    return "\n".join(lines)


@triton.constexpr_function
def operands_of_looking(times, each):
    return ",".join(["=&r"] * (times * (2 + each)) + ["r", "l", "l", "l"])

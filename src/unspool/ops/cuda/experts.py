# mypy: disallow-untyped-defs=False
"""Products with experts' weights, for the rows that use each expert: like linear layers (linear.py), per expert.

    gate    y[use] = activation(gate_e · x[row] + bias) · (up_e · x[row] + bias), or activation(up_e · x[row] + bias)
    down    y[use] = down_e · y[use] + bias
    gather  out[row] = residual + Σ over uses, the best first, of weight · y[use]

An expert's weights are read once per step, whatever rows use it. A use is summed over K in one order: its bits depend
only on its row and its expert, not on how many rows use the expert or on its position within a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.decode import add_product, scaled
from unspool.ops.cuda.exact import inverse_root, let_next_start, wait_for_previous
from unspool.ops.cuda.finish import activate, halves, load_row
from unspool.ops.cuda.linear import sum_squares
from unspool.ops.cuda.plane_layout import column_of, e4m3_bf16, group_columns
from unspool.ops.cuda.rows import emit


@triton.jit
def users_of(chosen, expert, num_rows, USED: tl.constexpr, T: tl.constexpr):
    """For each of T rows, its use of an expert, or -1 if the row does not use it."""
    row = tl.arange(0, T)
    found = tl.full((T,), -1, tl.int32)
    for i in tl.static_range(USED):
        use = row * USED + i
        one = tl.load(chosen + use, mask=row < num_rows, other=-1)
        found = tl.where((one == expert) & (one >= 0), use, found)
    return found


@triton.jit
def own_work(
    chosen, places, owners, num_tiles, tile, num_rows,
    EXPERTS: tl.constexpr, USED: tl.constexpr, FEW: tl.constexpr, EACH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The expert of a program, or -1 if it has no work, and the uses that it computes.

    For FEW rows, a tile stands for an expert (EACH), or for a use. In the second case, the program of an expert's first
    use computes all uses of that expert.
    """
    if FEW:
        expert = tile
        if not EACH:
            expert = tl.load(chosen + tile)
        use = users_of(chosen, expert, num_rows, USED, T)
        first = tl.min(tl.where(use >= 0, use, num_rows * USED), 0)
        is_first = first < num_rows * USED
        if not EACH:
            is_first = first == tile
        expert = tl.where(is_first, expert, -1)
    else:
        place = tl.arange(0, T)
        exists = tile + tl.zeros_like(place) < tl.load(num_tiles)
        use = tl.load(places + tile * T + place, mask=exists, other=-1)
        expert = tl.max(tl.load(owners + tl.where(exists, tile, 0), mask=exists, other=-1), 0)
    return expert, use


@triton.jit
def inputs_of(
    x, source, there, k, size, IN_BYTES: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Columns of rows from k on, in the order of a tile's bytes for weights that keep that order (plane_layout.py)."""
    column = tl.arange(0, K)
    if IN_BYTES:
        column = column_of(column)
    column = k + column
    inside = there[:, None] & (column < size)[None, :]
    return tl.load(x + source[:, None] * size + column[None, :], mask=inside, other=0.0)


@triton.jit
def add_codes(
    acc, codes, scales, offsets, x, source, there, first_row, k, width, size,
    FORMAT: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Add K more columns of quantized weights to acc: decode.py's add_round, for rows at arbitrary places."""
    COLUMNS: tl.constexpr = group_columns(FORMAT)
    HALVES: tl.constexpr = 2 if FORMAT == "u4g32o" else 1
    BYTES: tl.constexpr = K // HALVES
    tile = (first_row // 128 * (width // TILE) + k // TILE) * 128
    code = codes.load([tile + first_row % 128, k % TILE // HALVES])
    group = tile * (TILE // COLUMNS) + k % TILE // COLUMNS * 128 + first_row % 128 + tl.arange(0, F)
    values = inputs_of(x, source, there, k, size, FEW, BYTES)
    if FORMAT == "u4g32o":
        low = scaled(code & 15, scales, offsets, group, COLUMNS, F, BYTES, 0)
        acc = add_product(acc, low, values, FEW, F, T, BYTES, HOPPER)
        high = scaled(code >> 4, scales, offsets, group + BYTES // COLUMNS * 128, COLUMNS, F, BYTES, 0)
        values = inputs_of(x, source, there, k + BYTES, size, FEW, BYTES)
        acc = add_product(acc, high, values, FEW, F, T, BYTES, HOPPER)
    elif FORMAT == "f8g128":
        part = add_product(tl.zeros_like(acc), e4m3_bf16(code, HOPPER), values, FEW, F, T, K, HOPPER)
        acc = acc + part * tl.expand_dims(tl.load(scales + group), 0 if FEW else 1)
    else:
        w = scaled(code, scales, offsets, group, COLUMNS, F, K, 0)
        acc = add_product(acc, w, values, FEW, F, T, K, HOPPER)
    return acc


@triton.jit
def expert_product(
    codes, scales, offsets, x, source, there, first_row, width, size,
    FORMAT: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, K: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """w[first_row.., :] · x[source, :]^T, [F, T]"""
    if FORMAT == "bf16":
        acc = tl.zeros((F, T), tl.float32)
        for k in range(0, width, K):
            values = inputs_of(x, source, there, k, size, False, K)
            acc = tl.dot(codes.load([first_row, k]), values.T, acc)
    else:
        acc = tl.zeros((T, F) if FEW else (F, T), tl.float32)
        for k in range(0, width, K):
            acc = add_codes(
                acc, codes, scales, offsets, x, source, there, first_row, k, width, size,
                FORMAT, TILE, FEW, F, T, K, HOPPER,
            )  # fmt: skip
        if FEW:
            acc = tl.trans(acc)
    return acc


@triton.jit
def join_gate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * up
    else:
        y = activate(gate, ACTIVATION) * up
    return y


@triton.jit(do_not_specialize=["num_rows"])
def expert_kernel(
    codes,  # descriptor: bf16 weights [expert · each, width]; for other formats, tiles of codes (plane_layout.py)
    scales,
    offsets,
    x,  # bf16 [row, size]; FROM_USES: [use, size]
    parts,  # [PARTS, row] sums of squares of the normed input's groups
    inverse_size,
    eps,
    bias,  # float32 [expert, features], or None
    out,  # [use, …]: gate bf16, down float32
    chosen,
    places,
    owners,
    num_tiles,
    num_rows,
    features,
    each,  # rows per expert, including padding
    width,
    size,  # columns of a row of x; `width` includes padding
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of the gate, whose rows alternate with the up projection's; None for down
    GATED: tl.constexpr,  # there is a gate; without one, the activation is applied to the up projection
    FROM_USES: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    USED: tl.constexpr,
    FEW: tl.constexpr,
    EACH: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    tiles_f = tl.cdiv(features, F)
    tile, first_f = tl.program_id(0) // tiles_f, tl.program_id(0) % tiles_f * F
    expert, use = own_work(chosen, places, owners, num_tiles, tile, num_rows, EXPERTS, USED, FEW, EACH, T)
    let_next_start(PDL)
    if expert >= 0:
        there = use >= 0
        place = tl.maximum(use, 0).to(tl.int64)  # not tl.where, which Triton 3.6 gives operands of different layouts
        row = place // USED
        source = place if FROM_USES else row
        # Few tokens are on the matrix unit's M side, see decode.py.
        total = expert_product(
            codes, scales, offsets, x, source, there, expert * each + first_f, width, size,
            FORMAT, TILE, FEW and T == 16, F, T, K, PDL,
        )  # fmt: skip
        if PARTS > 0:
            squares = sum_squares(parts, row, num_rows, T, PARTS, 16)
            total = total * inverse_root(squares, inverse_size, eps)[None, :]
        if bias is not None:
            total = total + load_row(bias + expert * features, first_f, features, F)[:, None]
        if ACTIVATION is not None and GATED:
            gate, up = halves(total, F, T)
            y = tl.trans(join_gate(gate, up, ACTIVATION).to(tl.bfloat16))
            column, columns = first_f // 2 + tl.arange(0, F // 2), features // 2
        elif ACTIVATION is not None:
            y = tl.trans(activate(total, ACTIVATION).to(tl.bfloat16))
            column, columns = first_f + tl.arange(0, F), features
        else:
            y = tl.trans(total)
            column, columns = first_f + tl.arange(0, F), features
        inside = there[:, None] & (column < columns)[None, :]
        tl.store(out + place[:, None] * columns + column[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    y, weights, chosen, residual, out, scaled, next_weight, next_parts, num_rows,
    USED: tl.constexpr, size: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up a row's weighted experts, then compute what the next linear layer reads."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside = column < size
    total = tl.zeros((D,), tl.float32)
    if residual is not None:
        total = tl.load(residual + row * size + column, mask=inside, other=0.0)
    for i in range(USED):
        use = row * USED + i
        is_used = inside & (tl.load(chosen + use) + tl.zeros_like(column) >= 0)
        total += tl.load(weights + use) * tl.load(y + use * size + column, mask=is_used, other=0.0)
    tl.store(out + row * size + column, total, mask=inside)
    if next_weight is not None:
        emit(total, column, row, num_rows, size, scaled, next_weight, next_parts, D)

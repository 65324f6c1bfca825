# mypy: disallow-untyped-defs=False
"""Quantized weights on the device: planes of codes, scales and offsets, and how a kernel reads them.

    value = scale · code + offset

A file's blocks interleave all three and are not aligned, so they are split into planes once, when a model is loaded.
4-bit codes share a byte: of every 128 columns, the low half holds column k and the high half column k + 64. Wider codes
take a byte each. In every 32 bytes, pairs from the first and the second sixteen columns alternate (0 1 16 17 2 3 18 19
…): a thread then finds next to each other the four codes that it needs for two products of the matrix unit, which
processes 16 columns at a time.
Tiles of 128 rows and 128 columns (64, if the width is no multiple of 128) are stored one after the other, tiles of the
same rows first. So the data that a program reads in a round is contiguous, because reading a little of each of many
rows is slow. A tile of codes is [row, byte]; of scales and offsets, [group, row]. Rows are padded to whole tiles.
Scales and offsets are float16, one per group of 16 or 32 columns. FORMAT identifies the layout: "bf16", or the bits of
a code and the columns of a group, with or without offsets: "u4g32o", "i8g32", "i8g16"; "f8g128" are 8-bit floats, whose
scales are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def group_columns(format):
    """Columns that share a scale."""
    return {"f8g128": 128, "i8g16": 16, "i8g16o": 16}.get(format, 32)


@triton.constexpr_function
def tile_columns(width):
    return 128 if width % 128 == 0 else 64


@triton.jit
def byte_of(column):
    """The byte that holds a column's code."""
    return column // 32 * 32 + column % 16 // 2 * 4 + column // 16 % 2 * 2 + column % 2


@triton.jit
def column_of(byte):
    """The column whose code a byte holds."""
    return byte // 32 * 32 + byte // 2 % 2 * 16 + byte % 32 // 4 * 2 + byte % 2


@triton.jit
def e4m3(code):
    """8-bit floats from their codes, times 2^-8. A code's bits are those of float16 shifted down by a few places;
    float16's exponent bias is 15, theirs is 7. The shift of an int8 extends the sign, which must not remain in the
    exponent."""
    bits = (code.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_bf16(code, HOPPER: tl.constexpr):
    """8-bit floats as bfloat16, which represents each of them exactly. Four at a time: the bits move to bfloat16's
    places, and a product with 2^120 corrects the exponent, whose bias is 127 (also for subnormal numbers)."""
    if HOPPER:
        asm: tl.constexpr = """
        {
            .reg .b32 low, high, a, b, factor;
            mov.b32 factor, 0x7b807b80;
            prmt.b32 low, 0, $2, 0x5040;
            prmt.b32 high, 0, $2, 0x7060;
            shr.b32 a, low, 4;
            shr.b32 b, high, 4;
            and.b32 low, low, 0x80008000;
            and.b32 high, high, 0x80008000;
            lop3.b32 a, a, 0x07f007f0, low, 0xea;
            lop3.b32 b, b, 0x07f007f0, high, 0xea;
            mul.rn.bf16x2 $0, a, factor;
            mul.rn.bf16x2 $1, b, factor;
        }
        """
        value = tl.inline_asm_elementwise(asm, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        value = (e4m3(code) * 256.0).to(tl.bfloat16)
    return value


@triton.jit
def decode_row(codes, scales, offsets, row, column, inside, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """One row of a matrix as float32, for lookups. WIDTH includes padding."""
    if FORMAT == "bf16":
        value = tl.load(codes + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    else:
        TILE: tl.constexpr = tile_columns(WIDTH)
        HALVES: tl.constexpr = 2 if FORMAT == "u4g32o" else 1
        BYTES: tl.constexpr = TILE // HALVES
        COLUMNS: tl.constexpr = group_columns(FORMAT)
        tile = (row // 128 * (WIDTH // TILE) + column // TILE) * 128
        byte = tl.load(codes + (tile + row % 128) * BYTES + byte_of(column % BYTES), mask=inside, other=0)
        group = tile * (TILE // COLUMNS) + column % TILE // COLUMNS * 128 + row % 128
        scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
        if FORMAT == "f8g128":
            value = e4m3(byte) * (scale * 256.0)
        else:
            if FORMAT == "u4g32o":
                byte = tl.where(column % TILE < BYTES, byte & 15, byte >> 4)
            value = byte.to(tl.float32) * scale
            if offsets is not None:
                value = value + tl.load(offsets + group, mask=inside, other=0.0).to(tl.float32)
    return value

// Definitions that kernels, packing and programs share. Plain data only: kernels are compiled once per instruction set,
// and an inline function shared between them could be linked with instructions that the processor lacks.
#pragma once
#include <cstdint>

namespace unspool {

// All but the last two occur in files; Q4_0 and Q4_1 are packed to those two for rows of 8 bits.
// clang-format off
enum Format : int {
    F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4, W4_0, W4_1, NUM_FORMATS
};
// clang-format on

constexpr int TILE = 16;   // output features in a tile: one per lane
constexpr int BLOCK = 32;  // activations that share one scale
constexpr int SUPER = 256;

// How a format's codes lie in a tile. Codes are unsigned, `value = scale · (code - offset)`, or `scale · code + min`.
struct Scheme {
    int bits;    // 2, 3, 4, 5, 6 or 8; 0: floats
    int group;   // values that share one scale: 16 or 32
    bool min;    // has a minimum
    bool super;  // scales are 8-bit integers, times a float16 per 256 values
    int offset;
    bool whole = false;  // scales are integers, see below
    bool fp4 = false;    // codes are looked up in FP4_CODES, and scales are powers of two
};

constexpr Scheme SCHEMES[NUM_FORMATS] = {
    {0, 0, false, false, 0},  {0, 0, false, false, 0}, {0, 0, false, false, 0},   {8, 32, false, false, 128},
    {4, 32, false, false, 8}, {4, 32, true, false, 0}, {5, 32, false, false, 16}, {5, 32, true, false, 0},
    {2, 16, true, true, 0},   {3, 16, false, true, 4}, {4, 32, true, true, 0},    {5, 32, true, true, 0},
    {6, 16, false, true, 32}, {4, 32, false, false, 16, false, true}, {4, 32, false, false, 8, true},
    {4, 32, true, false, 8, true},
};

// Sixteen plus the values of MXFP4's codes in units of half its scale.
constexpr uint8_t FP4_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// Values per block of a format in files: rows consist of whole blocks.
constexpr int block_values(Format format) {
    return SCHEMES[format].bits == 0 ? 1 : SCHEMES[format].super ? SUPER : BLOCK;
}

// A tile of 16 output features by K is a sequence of units, read in order: the scales of a few blocks of 32 values of
// K, then their codes.
//   scales, plain, with minimum: d[16] m[16], float16, for one block; without: d[16] for each of two blocks
//   scales, whole: for two blocks: d[16][2] (m[16][2]), 16-bit integers; before all units worth[16], float32
//   scales, powers: for four blocks: the exponent[16] of a float32, 8 bits each; zero: the scale is zero. The last unit
//                  has the codes of its blocks alone
//   scales, super: for eight blocks: d[16] dmin[16] (float16; dmin is zero where there is no minimum), then for each
//                  block scale[groups][16] (min[groups][16]), 8 bits each
//   codes: vectors of 64 bytes; byte 4·lane + i belongs to that lane and to value 4·q + i, where q is the quad:
//     4 bits: vector j holds quad j in its low nibbles and quad j + 4 in the high ones
//     2 bits: vector j holds quads 4j to 4j + 3 from the lowest bits up;  1 bit: one vector, quad q in bit q
//     8 bits: vector q holds quad q;  3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2
constexpr int LAYOUT_VERSION = 3;  // increased with every change of the layout, because files may hold packed tiles
constexpr int blocks_per_unit(const Scheme& s) {
    return s.super ? SUPER / BLOCK : s.fp4 ? 4 : s.min && !s.whole ? 1 : 2;
}
constexpr int tile_head_bytes(const Scheme& s) { return s.whole ? TILE * 4 : 0; }
constexpr int scale_bytes_per_block(const Scheme& s) {
    return s.fp4 ? TILE : s.super ? BLOCK / s.group * TILE * (s.min ? 2 : 1) : TILE * 2 * (s.min ? 2 : 1);
}
constexpr int scale_bytes_per_unit(const Scheme& s) {
    return blocks_per_unit(s) * scale_bytes_per_block(s) + (s.super ? 64 : 0);
}
constexpr int code_bytes(const Scheme& s) { return s.bits * 64; }
constexpr int unit_bytes(const Scheme& s) { return scale_bytes_per_unit(s) + blocks_per_unit(s) * code_bytes(s); }
constexpr int64_t codes_offset(const Scheme& s, int64_t b) {
    return b / blocks_per_unit(s) * unit_bytes(s) + scale_bytes_per_unit(s) + b % blocks_per_unit(s) * code_bytes(s);
}
constexpr int64_t unit_offset(const Scheme& s, int64_t b) { return b / blocks_per_unit(s) * unit_bytes(s); }
constexpr int64_t scales_offset(const Scheme& s, int64_t b) {
    return unit_offset(s, b) + (s.super ? 64 : 0) + b % blocks_per_unit(s) * scale_bytes_per_block(s);
}

// 32 activations in 8 bits. Rows are grouped in panels of R, as many as a kernel processes at once; a panel holds block
// b of its row r at [b · R + r]. The rows' lists of outliers follow after all panels.
struct QBlock {
    int8_t q[32];
    float d;       // value = d · q
    float ds;      // d · Σq
    int32_t ns;    // -8 · Σq: what a code's offset adds to the integer dot product, times offset / 8
    int16_t s[2];  // Σq of each half
};
static_assert(sizeof(QBlock) == 48);

// 32 activations in 16 bits, for the head and the product before it: these read many weights for few rows, and their
// rounding errors would directly reach the logits. Rows are grouped in panels likewise. Of every four values, the
// second and the third are swapped: kernels multiply pairs, and get the even and the odd bytes of four codes together.
struct FineBlock {
    int16_t q[32];
    float d, ds;
    int32_t ns, s[2];  // as above
    int32_t unused[3];
};
static_assert(sizeof(FineBlock) == 2 * sizeof(QBlock));

// Integer scales. The largest scale of a tile's row, and of a row of activations, is a float; a block's scale is a
// fraction of it, in 16384ths and in 2048ths. The product of both, in 1024ths, is rounded to 16 bits, and so are a
// block's products, counted from the middle code: one instruction scales and adds up two adjacent blocks.
//   weight = worth · (d / 16 · (code - 8) + m), with d and m rounded; |d| <= 16384, |m| <= 8191
//   activation = scale · share / 2048 · q
//   sum += ((d · share + 2¹⁴) >> 15) · Σ (code - 8) · q + m · ((share · Σq + 1024) >> 11), in units of worth · scale
constexpr int WHOLE_SCALE = 16384, WHOLE_MIN = 8191, WHOLE_UNIT = 1024, MIDDLE_CODE = 8;
constexpr int WHOLE_SHARE_BITS = 11, WHOLE_SHARE = 1 << WHOLE_SHARE_BITS;
constexpr int WHOLE_BLOCKS = 32;  // the sums of this many blocks fit in 32 bits
static_assert(int64_t{WHOLE_BLOCKS} *
                  (int64_t{WHOLE_UNIT} * MIDDLE_CODE * 127 * BLOCK + int64_t{WHOLE_MIN} * 127 * BLOCK) <=
              INT32_MAX);

// 32 activations for such weights. Panels have an even number of blocks; a row's scale is stored with its outliers.
struct WholeBlock {
    int8_t q[32];
    int32_t start;  // initial value of a kernel's sum, so that codes count from the middle one: -8 · Σq
    int16_t pair[2];  // even block: its fraction and the next block's; odd block: the sums (share · Σq …) of both
};
static_assert(sizeof(WholeBlock) == 40);

// An activation that is far larger than the others would reduce the precision of its whole block. Such outliers are
// stored separately with a zero in their place, and their products are added one by one after the blocks, in order.
// With integer scales the outliers are integers too, in units of their row's own:
//   weight = worth · 2 · v, with v = (d · (code - 8) + 16 · m + 2⁴) >> 5
//   sum += v · o; the sum of a row's |o| is below 2¹⁸, so that the total fits in 32 bits
struct Outlier {
    int32_t k;
    float value;
};
struct Outliers {
    int32_t count;  // on average at most one per block: a block without room for its outlier keeps it
    float scale;    // for blocks with integer scales
    Outlier list[1];
};
constexpr int OUTLIER_SHIFT = 5, OUTLIER_MOST = 8191, OUTLIER_SUM = 1 << 18;
static_assert(int64_t{OUTLIER_SUM} * ((WHOLE_SCALE * MIDDLE_CODE + 16 * WHOLE_MIN) >> OUTLIER_SHIFT) <= INT32_MAX);
constexpr float OUTLYING = 2.2f;  // relative to the mean of the blocks' largest magnitudes

constexpr int64_t outliers_bytes(int64_t blocks) { return 8 + 8 * blocks; }

// The format of the rounded rows that a product reads instead of float32.
enum Rows : int { COARSE, FINE, WHOLE };
constexpr int64_t blocks_of(Rows rows, int64_t width) {
    return rows == WHOLE ? (width / BLOCK + 1) / 2 * 2 : width / BLOCK;
}
constexpr int64_t block_bytes(Rows rows) {
    return rows == COARSE ? sizeof(QBlock) : rows == FINE ? sizeof(FineBlock) : sizeof(WholeBlock);
}
constexpr int64_t row_of_blocks_bytes(Rows rows, int64_t width) {
    const int64_t outliers = rows == FINE ? 0 : outliers_bytes(width / BLOCK);
    return (blocks_of(rows, width) * block_bytes(rows) + outliers + 63) / 64 * 64;
}

}  // namespace unspool

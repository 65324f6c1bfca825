// Multiplies a tile of 4-bit codes by a panel of rows when the scales of both are integers (formats.h).
//
// All sums are exact integers, in any order; after every WHOLE_BLOCKS blocks they are converted to float32.
#include "kernels/codes.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

constexpr int CODE_BYTES = code_bytes(SCHEMES[W4_1]);
constexpr int codes_in_unit(bool min) { return min ? 2 * TILE * 4 : TILE * 4; }  // after the scales

// --- Two blocks ------------------------------------------------------------------------------------------------------

#if defined(KERNEL_ISA_AVX512)

INLINE void dot_words(I& c, I a, I b) { asm("vpdpwssd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); }

// For one row, the compiler's own order of instructions is faster.
template <int Q, int R> INLINE void dot_quad(const uint8_t* codes, const WholeBlock* x, I (&dot)[R]) {
    const I w = nibble<Q>(codes);
    UNROLL for (int r = 0; r < R; r++) {
        const quad_t* values = reinterpret_cast<const quad_t*>(x[r].q) + Q;
        if constexpr (R == 1) dot[r] = _mm512_dpbusd_epi32(dot[r], w, iset1(*values));
        else dot_unsigned(dot[r], w, values);
    }
}

template <int R> INLINE void dot_block(const uint8_t* codes, const WholeBlock* x, I (&dot)[R]) {
    UNROLL for (int r = 0; r < R; r++) dot[r] = iset1(x[r].start);
    if constexpr (R <= 2) {  // too few rows to hide latency: two sums instead of one
        I other[R];
        UNROLL for (int r = 0; r < R; r++) other[r] = izero();
        dot_quad<0>(codes, x, dot), dot_quad<4>(codes, x, other);
        dot_quad<1>(codes, x, dot), dot_quad<5>(codes, x, other);
        dot_quad<2>(codes, x, dot), dot_quad<6>(codes, x, other);
        dot_quad<3>(codes, x, dot), dot_quad<7>(codes, x, other);
        UNROLL for (int r = 0; r < R; r++) dot[r] = iadd(dot[r], other[r]);
    } else {
        dot_quad<0>(codes, x, dot), dot_quad<4>(codes, x, dot);
        dot_quad<1>(codes, x, dot), dot_quad<5>(codes, x, dot);
        dot_quad<2>(codes, x, dot), dot_quad<6>(codes, x, dot);
        dot_quad<3>(codes, x, dot), dot_quad<7>(codes, x, dot);
    }
}

template <bool MIN, int R> INLINE void add_pair(const uint8_t* unit, const WholeBlock* x, int stride, I (&sum)[R]) {
    const uint8_t* codes = unit + codes_in_unit(MIN);
    I d = iload(unit), m = MIN ? iload(unit + TILE * 4) : izero();
    asm volatile("" : "+v"(d), "+v"(m));  // forces both loads here, in memory order
    I first[R], second[R];
    dot_block<R>(codes, x, first);
    dot_block<R>(codes + CODE_BYTES, x + stride, second);
    UNROLL for (int r = 0; r < R; r++) {
        const I shares = iset1(*reinterpret_cast<const pair_t*>(x[r].pair));
        const I dots = _mm512_mask_blend_epi16(0x55555555, ishl<16>(second[r]), first[r]);
        dot_words(sum[r], _mm512_mulhrs_epi16(d, shares), dots);
        if constexpr (MIN) dot_pairs(sum[r], m, reinterpret_cast<const pair_t*>(x[stride + r].pair));
    }
}

#elif defined(KERNEL_ISA_AVX2)

template <int Q, int R> INLINE void dot_quad(const uint8_t* codes, const WholeBlock* x, I (&dot)[R]) {
    const VI low = nibble<Q>(codes), high = nibble<Q>(codes + 32);
    UNROLL for (int r = 0; r < R; r++) {
        const VI values = _mm256_set1_epi32(reinterpret_cast<const quad_t*>(x[r].q)[Q]);
        dot[r].a = _mm256_add_epi16(dot[r].a, _mm256_maddubs_epi16(low, values));
        dot[r].b = _mm256_add_epi16(dot[r].b, _mm256_maddubs_epi16(high, values));
    }
    // Each quad is completed before the next begins, so that the compiler does not keep sums in memory.
    UNROLL for (int r = 0; r < R; r++) asm volatile("" : "+x"(dot[r].a), "+x"(dot[r].b)::"memory");
}

// The sums of even and odd pairs of a quad's products are adjacent, and each may overflow meanwhile: after the middle
// code is subtracted from both, the result fits. Both are multiplied by the same scale.
template <bool MIN, int R> INLINE void add_pair(const uint8_t* unit, const WholeBlock* x, int stride, I (&sum)[R]) {
    const uint8_t* codes = unit + codes_in_unit(MIN);
    const I d = iload(unit);
    UNROLL for (int i = 0; i < 2; i++) {
        const WholeBlock* at = x + i * stride;
        I dot[R];
        UNROLL for (int r = 0; r < R; r++) dot[r] = iset1(at[r].start);
        const uint8_t* c = codes + i * CODE_BYTES;
        dot_quad<0>(c, at, dot), dot_quad<4>(c, at, dot), dot_quad<1>(c, at, dot), dot_quad<5>(c, at, dot);
        dot_quad<2>(c, at, dot), dot_quad<6>(c, at, dot), dot_quad<3>(c, at, dot), dot_quad<7>(c, at, dot);
        const __m256i twice = _mm256_add_epi8(
            _mm256_set1_epi8(static_cast<char>(2 * i)),
            _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12,
                             13, 12, 13));
        const __m256i low = _mm256_shuffle_epi8(d.a, twice), high = _mm256_shuffle_epi8(d.b, twice);
        UNROLL for (int r = 0; r < R; r++) {
            const __m256i share = _mm256_set1_epi16(x[r].pair[i]);
            sum[r].a = _mm256_add_epi32(sum[r].a, _mm256_madd_epi16(dot[r].a, _mm256_mulhrs_epi16(low, share)));
            sum[r].b = _mm256_add_epi32(sum[r].b, _mm256_madd_epi16(dot[r].b, _mm256_mulhrs_epi16(high, share)));
        }
    }
    if constexpr (MIN) {
        const I m = iload(unit + TILE * 4);
        UNROLL for (int r = 0; r < R; r++) dot_pairs(sum[r], m, reinterpret_cast<const pair_t*>(x[stride + r].pair));
    }
}

#else

template <bool MIN, int R> INLINE void add_pair(const uint8_t* unit, const WholeBlock* x, int stride, I (&sum)[R]) {
    const uint8_t* codes = unit + codes_in_unit(MIN);
    const I d = iload(unit);
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < R; r++) {
            const WholeBlock& block = x[i * stride + r];
            int32_t dots[TILE];
            for (int pair = 0; pair < TILE / 2; pair++) {
                Words products{};
                for (int q = 0; q < 8; q++) {
                    const int8_t* v = block.q + 4 * q;
                    products += quad<4>(codes + i * CODE_BYTES + 8 * pair, q) *
                                Words{v[0], v[1], v[2], v[3], v[0], v[1], v[2], v[3]};
                }
                for (int lane = 0; lane < 2; lane++)
                    dots[2 * pair + lane] = products[4 * lane] + products[4 * lane + 1] + products[4 * lane + 2] +
                                            products[4 * lane + 3] + block.start;
            }
            I dot;
            memcpy(&dot, dots, sizeof dot);
            const I scale = ((i ? d >> 16 : d << 16 >> 16) * x[r].pair[i] + (1 << 14)) >> 15;
            sum[r] += scale * dot;
        }
    if constexpr (MIN)
        for (int r = 0; r < R; r++)
            dot_pairs(sum[r], iload(unit + TILE * 4), reinterpret_cast<const pair_t*>(x[stride + r].pair));
}

#endif

// --- A tile ----------------------------------------------------------------------------------------------------------

template <bool MIN, int R> INLINE void tile_rows(const uint8_t* tile, int64_t blocks, const WholeBlock* x, int stride,
                                                 const float* scales, bool is_first, float* out) {
    constexpr int UNIT = codes_in_unit(MIN) + 2 * CODE_BYTES;
    const F worth = load(reinterpret_cast<const float*>(tile));
    tile += TILE * 4;
    for (int64_t done = 0; done < blocks; done += WHOLE_BLOCKS) {
        I sum[R];
        UNROLL for (int r = 0; r < R; r++) sum[r] = izero();
        const int64_t end = done + WHOLE_BLOCKS < blocks ? done + WHOLE_BLOCKS : blocks;
        for (int64_t b = done; b < end; b += 2, tile += UNIT, x += 2 * stride) {
            if (is_first) prefetch_ahead<UNIT>(tile);
            add_pair<MIN, R>(tile, x, stride, sum);
        }
        UNROLL for (int r = 0; r < R; r++) {
            const F part = to_float(sum[r]), scale = mul(worth, set1(scales[r]));
            store(out + r * TILE, fma(part, scale, done ? load(out + r * TILE) : zero()));
        }
    }
}

// --- Outliers --------------------------------------------------------------------------------------------------------

// scaled_codes: d · (code - 8) + 16 · m + 2⁴, where d and m are those of the first (0) or the second (1) of two blocks.
// together: two such columns, interleaved, without their lowest OUTLIER_SHIFT bits.
constexpr int FACTORS = 16 << 16 | (0x10000 - MIDDLE_CODE), HALF = 1 << (OUTLIER_SHIFT - 1);
static_assert(WHOLE_SCALE == 16 * WHOLE_UNIT);

#if defined(KERNEL_ISA_AVX512)

struct alignas(64) Words {
    uint16_t at[2][32];
    constexpr Words() : at() {
        for (int second = 0; second < 2; second++)
            for (int i = 0; i < 32; i++) at[second][i] = static_cast<uint16_t>((i & ~1) + second + (i & 1 ? 32 : 0));
    }
};
constexpr Words BOTH;

INLINE I scaled_codes(I d, I m, unsigned second, I code) {
    I sum = iset1(HALF);
    dot_words(sum, _mm512_permutex2var_epi16(d, iload(BOTH.at[second]), m), _mm512_add_epi16(code, iset1(FACTORS)));
    return sum;
}

INLINE I together(I first, I second) {
    const I low = _mm512_srli_epi32(first, OUTLIER_SHIFT);
    return _mm512_mask_blend_epi16(0xAAAAAAAA, low, ishl<16 - OUTLIER_SHIFT>(second));
}

#elif defined(KERNEL_ISA_AVX2)

INLINE __m256i scaled_codes(__m256i d, __m256i m, unsigned second, __m256i code) {
    const __m128i up = _mm_cvtsi32_si128(static_cast<int>(16 - 16 * second));
    const __m256i low = _mm256_srli_epi32(_mm256_sll_epi32(d, up), 16), high = _mm256_sll_epi32(m, up);
    const __m256i factors = _mm256_add_epi16(code, _mm256_set1_epi32(FACTORS));
    const __m256i products = _mm256_madd_epi16(_mm256_blend_epi16(low, high, 0xAA), factors);
    return _mm256_add_epi32(products, _mm256_set1_epi32(HALF));
}
INLINE I scaled_codes(I d, I m, unsigned second, I code) {
    return {scaled_codes(d.a, m.a, second, code.a), scaled_codes(d.b, m.b, second, code.b)};
}

INLINE __m256i together(__m256i first, __m256i second) {
    const __m256i low = _mm256_srli_epi32(first, OUTLIER_SHIFT);
    return _mm256_blend_epi16(low, _mm256_slli_epi32(second, 16 - OUTLIER_SHIFT), 0xAA);
}
INLINE I together(I first, I second) { return {together(first.a, second.a), together(first.b, second.b)}; }

#else

INLINE I scaled_codes(I d, I m, unsigned second, I code) {
    const unsigned up = 16 - 16 * second;
    return (d << up >> 16) * (code - MIDDLE_CODE) + (m << up >> 16) * 16 + HALF;
}

INLINE I together(I first, I second) { return (first >> OUTLIER_SHIFT & 0xFFFF) | (second >> OUTLIER_SHIFT << 16); }

#endif

// The 16 weights at place k of a tile.
template <bool MIN> INLINE I column(const uint8_t* tile, int k) {
    constexpr int UNIT = codes_in_unit(MIN) + 2 * CODE_BYTES;
    const auto place = static_cast<unsigned>(k), b = place / BLOCK, q = place % BLOCK / 4;
    const uint8_t* unit = tile + TILE * 4 + b / 2 * UNIT;
    const uint8_t* codes = unit + codes_in_unit(MIN) + b % 2 * CODE_BYTES + 64 * (q % 4);
    const I code = load_bits(codes, static_cast<int>(8 * (place % 4) + (q & 4)), 15);
    return scaled_codes(iload(unit), MIN ? iload(unit + TILE * 4) : izero(), b % 2, code);
}

template <bool MIN> INLINE I two_columns(const uint8_t* tile, const int32_t* places) {
    return together(column<MIN>(tile, places[0]), column<MIN>(tile, places[1]));
}

// All rows of a panel are included, and in a function of its own, as in linear.cpp.
template <bool MIN, int R>
__attribute__((noinline)) void add_outliers_of(const uint8_t* tile, const Panel& panel, float* out) {
    constexpr int PART = R < OUTLYING_ROWS ? R : OUTLYING_ROWS, PARTS = R / PART, AT_ONCE = 16;  // of pairs
    static_assert(R % PART == 0);
    const OutlierColumns& columns = panel.outliers;
    const F worth = mul(load(reinterpret_cast<const float*>(tile)), set1((1 << OUTLIER_SHIFT) / 16.0f));
    const auto* pairs = reinterpret_cast<const pair_t*>(columns.pairs);
    I sum[PARTS][PART], weights[AT_ONCE];
    UNROLL for (int p = 0; p < PARTS; p++) UNROLL for (int r = 0; r < PART; r++) sum[p][r] = izero();
    if constexpr (PARTS == 1) {
        for (int c = 0; c < columns.count / 2; c++) {
            const I both = two_columns<MIN>(tile, columns.places + 2 * c);
            UNROLL for (int r = 0; r < R; r++) dot_pairs(sum[0][r], both, pairs + c * R + r);
        }
    } else {  // each column is computed once for all parts
        for (int done = 0; done < columns.count / 2; done += AT_ONCE) {
            const int count = columns.count / 2 - done < AT_ONCE ? columns.count / 2 - done : AT_ONCE;
            for (int c = 0; c < count; c++) weights[c] = two_columns<MIN>(tile, columns.places + 2 * (done + c));
            for (int p = 0; p < PARTS; p++) {
                I part[PART];
                UNROLL for (int r = 0; r < PART; r++) part[r] = sum[p][r];
                for (int c = 0; c < count; c++)
                    UNROLL for (int r = 0; r < PART; r++)
                        dot_pairs(part[r], weights[c], pairs + (done + c) * R + p * PART + r);
                UNROLL for (int r = 0; r < PART; r++) sum[p][r] = part[r];
            }
        }
    }
    UNROLL for (int p = 0; p < PARTS; p++) UNROLL for (int r = 0; r < PART; r++) {
            const int row = p * PART + r;
            const F scale = mul(worth, set1(columns.units[row]));
            store(out + row * TILE, fma(to_float(sum[p][r]), scale, load(out + row * TILE)));
        }
}

// Processes as many rows at once as fit in the registers twice.
#if defined(KERNEL_ISA_AVX512)
constexpr int part_of(int rows) { return rows == 12 ? 6 : rows; }
#else
constexpr int part_of(int rows) { return rows > 4 ? 4 : rows; }
#endif

template <bool MIN, int R> void call(const uint8_t* tile, int64_t k, const Panel& panel, float* out) {
    constexpr int PART = part_of(R);
    static_assert(R % PART == 0);
    for (int r = 0; r < R; r += PART)
        tile_rows<MIN, PART>(tile, blocks_of(WHOLE, k), panel.whole + r, R, panel.scales + r, r == 0,
                             out + r * TILE);
    if (panel.outliers.count) add_outliers_of<MIN, R>(tile, panel, out);
}

template <bool MIN> void tile_whole(const uint8_t* tile, int64_t k, const Panel& panel, float* out) {
    with_rows(panel.rows, [&](auto rows) { call<MIN, decltype(rows)::value>(tile, k, panel, out); });
}

void fill_whole(Kernels& kernels) {
    kernels.tiles[W4_0] = tile_whole<false>;
    kernels.tiles[W4_1] = tile_whole<true>;
}

}  // namespace unspool::KERNEL_ISA

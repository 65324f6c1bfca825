// Multiplies a tile of 16 output features by a panel of rows, for every weight format.
//
// An output element's sum has the same order for any number of rows: block after block of K; for each block (or half
// block, if 16 values share a scale) one fused multiply-add of the exact integer dot product, then one of the minimum.
#include <type_traits>

#include "kernels/codes.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

// --- Integer dot products of a group of codes with R rows ------------------------------------------------------------

#if defined(KERNEL_ISA_AVX512)

template <int BITS, int Q, int R> INLINE void dot_quad(const uint8_t* c, const QBlock* x, VI (&dot)[R]) {
    VI w = quad<BITS, Q>(c);
    UNROLL for (int r = 0; r < R; r++) dot[r] =
        _mm512_dpbusd_epi32(dot[r], w, _mm512_set1_epi32(reinterpret_cast<const quad_t*>(x[r].q)[Q]));
}

template <int BITS, int GROUP, int G, int R> INLINE void dots(const uint8_t* c, const QBlock* x, VI (&dot)[R]) {
    constexpr int q = G * 4;
    if constexpr (GROUP == 16) {
        dot_quad<BITS, q, R>(c, x, dot), dot_quad<BITS, q + 1, R>(c, x, dot);
        dot_quad<BITS, q + 2, R>(c, x, dot), dot_quad<BITS, q + 3, R>(c, x, dot);
    } else if constexpr (R <= 2) {
        // With few rows the processor would wait for each product before it adds the next: two sums instead of one.
        VI other[R];
        UNROLL for (int r = 0; r < R; r++) other[r] = vset1i(0);
        dot_quad<BITS, 0, R>(c, x, dot), dot_quad<BITS, 4, R>(c, x, other);
        dot_quad<BITS, 1, R>(c, x, dot), dot_quad<BITS, 5, R>(c, x, other);
        dot_quad<BITS, 2, R>(c, x, dot), dot_quad<BITS, 6, R>(c, x, other);
        dot_quad<BITS, 3, R>(c, x, dot), dot_quad<BITS, 7, R>(c, x, other);
        UNROLL for (int r = 0; r < R; r++) dot[r] = iadd(dot[r], other[r]);
    } else {
        dot_quad<BITS, 0, R>(c, x, dot), dot_quad<BITS, 4, R>(c, x, dot);
        dot_quad<BITS, 1, R>(c, x, dot), dot_quad<BITS, 5, R>(c, x, dot);
        dot_quad<BITS, 2, R>(c, x, dot), dot_quad<BITS, 6, R>(c, x, dot);
        dot_quad<BITS, 3, R>(c, x, dot), dot_quad<BITS, 7, R>(c, x, dot);
    }
}

#elif defined(KERNEL_ISA_AVX2)

// maddubs adds two products of at most (2^bits - 1) · 128 in 16 bits, those of FP4 of at most 28 · 128. As many such
// sums as fit are added before they are widened. 8-bit codes do not fit even once, so their nibbles are multiplied
// separately.
template <int BITS> constexpr int SUMS = BITS == 5 || BITS == FP4 ? 4 : BITS <= 4 ? 8 : 2;

INLINE VI broadcast(const QBlock& x, int q) { return _mm256_set1_epi32(reinterpret_cast<const quad_t*>(x.q)[q]); }

// The compiler would keep every broadcast for the other half of the tile instead of keeping sums in registers, so each
// quad is completed before the next begins.
template <int R> INLINE void settle(VI (&sum)[R]) {
    UNROLL for (int r = 0; r < R; r++) asm volatile("" : "+x"(sum[r])::"memory");
}

template <int BITS, int Q, int R> INLINE void dot_quad(const uint8_t* c, const QBlock* x, VI (&sum)[R]) {
    VI w = quad<BITS, Q>(c);
    UNROLL for (int r = 0; r < R; r++) sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(w, broadcast(x[r], Q)));
    settle<R>(sum);
}

template <int Q, int HIGH, int R> INLINE void dot_quad_of_8(const uint8_t* c, const QBlock* x, VI (&sum)[R]) {
    VI w = vand(vshift<HIGH ? -4 : 0>(vbytes(c + 64 * Q)), 15);
    UNROLL for (int r = 0; r < R; r++) sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(w, broadcast(x[r], Q)));
    settle<R>(sum);
}

template <int R> INLINE void widen(VI (&dot)[R], VI (&sum)[R], int times) {
    UNROLL for (int r = 0; r < R; r++) {
        dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(sum[r], _mm256_set1_epi16(static_cast<short>(times))));
        sum[r] = _mm256_setzero_si256();
    }
}

template <int BITS, int GROUP, int G, int R> INLINE void dots(const uint8_t* c, const QBlock* x, VI (&dot)[R]) {
    constexpr int q = G * 4;
    VI sum[R];
    UNROLL for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
    if constexpr (BITS == 8) {
        static_assert(GROUP == 32);
        dot_quad_of_8<0, 0, R>(c, x, sum), dot_quad_of_8<1, 0, R>(c, x, sum), dot_quad_of_8<2, 0, R>(c, x, sum);
        dot_quad_of_8<3, 0, R>(c, x, sum), dot_quad_of_8<4, 0, R>(c, x, sum), dot_quad_of_8<5, 0, R>(c, x, sum);
        dot_quad_of_8<6, 0, R>(c, x, sum), dot_quad_of_8<7, 0, R>(c, x, sum);
        widen<R>(dot, sum, 1);
        dot_quad_of_8<0, 1, R>(c, x, sum), dot_quad_of_8<1, 1, R>(c, x, sum), dot_quad_of_8<2, 1, R>(c, x, sum);
        dot_quad_of_8<3, 1, R>(c, x, sum), dot_quad_of_8<4, 1, R>(c, x, sum), dot_quad_of_8<5, 1, R>(c, x, sum);
        dot_quad_of_8<6, 1, R>(c, x, sum), dot_quad_of_8<7, 1, R>(c, x, sum);
        widen<R>(dot, sum, 16);
        return;
    }
    if constexpr (BITS < 8 && GROUP == 32) {
        dot_quad<BITS, 0, R>(c, x, sum), dot_quad<BITS, 4, R>(c, x, sum);
        if constexpr (SUMS<BITS> <= 2) widen<R>(dot, sum, 1);
        dot_quad<BITS, 1, R>(c, x, sum), dot_quad<BITS, 5, R>(c, x, sum);
        if constexpr (SUMS<BITS> <= 4) widen<R>(dot, sum, 1);
        dot_quad<BITS, 2, R>(c, x, sum), dot_quad<BITS, 6, R>(c, x, sum);
        if constexpr (SUMS<BITS> <= 2) widen<R>(dot, sum, 1);
        dot_quad<BITS, 3, R>(c, x, sum), dot_quad<BITS, 7, R>(c, x, sum);
        widen<R>(dot, sum, 1);
    }
    if constexpr (BITS < 8 && GROUP == 16) {
        dot_quad<BITS, q, R>(c, x, sum), dot_quad<BITS, q + 1, R>(c, x, sum);
        if constexpr (SUMS<BITS> <= 2) widen<R>(dot, sum, 1);
        dot_quad<BITS, q + 2, R>(c, x, sum), dot_quad<BITS, q + 3, R>(c, x, sum);
        widen<R>(dot, sum, 1);
    }
}

#else

// Products are added up in 16 bits if those of a whole group fit: 127 · (15 · 8, 31 · 8 or 63 · 4). Those of 8-bit
// codes do not fit, so their nibbles are multiplied separately.
template <int BITS, int GROUP, int G, int R> INLINE void dots(const uint8_t* c, const QBlock* x, VI (&dot)[R]) {
    constexpr int COUNT = GROUP / 4;
    Words v[R][COUNT];
    for (int r = 0; r < R; r++)
        for (int q = 0; q < COUNT; q++) {
            const int8_t* at = x[r].q + 4 * (G * 4 + q);
            v[r][q] = Words{at[0], at[1], at[2], at[3], at[0], at[1], at[2], at[3]};
        }
    int32_t sums[R][TILE];
    for (int pair = 0; pair < 8; pair++) {
        Words low[R] = {}, high[R] = {};
        for (int q = 0; q < COUNT; q++) {
            const Words w = quad<BITS>(c + 8 * pair, G * 4 + q);
            for (int r = 0; r < R; r++) {
                low[r] += (BITS == 8 ? w & 15 : w) * v[r][q];
                if constexpr (BITS == 8) high[r] += (w >> 4) * v[r][q];
            }
        }
        for (int r = 0; r < R; r++)
            for (int lane = 0; lane < 2; lane++) {
                int32_t sum = 0;
                for (int i = 0; i < 4; i++) sum += low[r][4 * lane + i] + 16 * high[r][4 * lane + i];
                sums[r][2 * pair + lane] = sum;
            }
    }
    for (int r = 0; r < R; r++) {
        VI add;
        memcpy(&add, sums[r], sizeof add);
        dot[r] += add;
    }
}

#endif

// --- The same with rows of 16 bits -----------------------------------------------------------------------------------

#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)

#if defined(KERNEL_ISA_AVX512)
INLINE VI even_bytes(VI w) { return _mm512_and_si512(w, _mm512_set1_epi16(255)); }
INLINE void dot_words(VI& sum, VI w, const pair_t* x) { dot_pairs(sum, w, x); }
#else
INLINE VI even_bytes(VI w) { return _mm256_and_si256(w, _mm256_set1_epi16(255)); }
INLINE void dot_words(VI& sum, VI w, const pair_t* x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, _mm256_set1_epi32(*x)));
    asm volatile("" : "+x"(sum)::"memory");  // as above
}
#endif

template <int BITS, int FROM, int TO, int R>
INLINE void dot_fine_quads(const uint8_t* c, const FineBlock* x, VI (&even)[R], VI (&odd)[R]) {
    const VI w = quad<BITS, FROM>(c), first = even_bytes(w), second = vshift<-8>(w);
    UNROLL for (int r = 0; r < R; r++) {
        const auto* values = reinterpret_cast<const pair_t*>(x[r].q) + 2 * FROM;
        dot_words(even[r], first, values), dot_words(odd[r], second, values + 1);
    }
    if constexpr (FROM + 1 < TO) dot_fine_quads<BITS, FROM + 1, TO, R>(c, x, even, odd);
}

// With few rows the processor would wait for each product before it adds the next: two sums instead of one.
template <int BITS, int GROUP, int G, int R> INLINE void dots(const uint8_t* c, const FineBlock* x, VI (&dot)[R]) {
    constexpr int FROM = G * 4, TO = FROM + GROUP / 4;
    if constexpr (R > 4) return dot_fine_quads<BITS, FROM, TO, R>(c, x, dot, dot);
    VI odd[R];
    UNROLL for (int r = 0; r < R; r++) odd[r] = vset1i(0);
    dot_fine_quads<BITS, FROM, TO, R>(c, x, dot, odd);
    UNROLL for (int r = 0; r < R; r++) dot[r] = vaddi(dot[r], odd[r]);
}

#else

template <int BITS, int GROUP, int G, int R> INLINE void dots(const uint8_t* c, const FineBlock* x, VI (&dot)[R]) {
    for (int r = 0; r < R; r++) {
        int32_t sums[TILE] = {};
        for (int q = G * 4; q < G * 4 + GROUP / 4; q++) {
            const int16_t* v = x[r].q + 4 * q;
            for (int pair = 0; pair < 8; pair++) {
                const Words w = quad<BITS>(c + 8 * pair, q);
                for (int lane = 0; lane < 2; lane++)
                    sums[2 * pair + lane] += w[4 * lane] * v[0] + w[4 * lane + 1] * v[2] + w[4 * lane + 2] * v[1] +
                                             w[4 * lane + 3] * v[3];
            }
        }
        VI add;
        memcpy(&add, sums, sizeof add);
        dot[r] += add;
    }
}

#endif

// --- Scaling and adding up -------------------------------------------------------------------------------------------

template <Format FMT, int G, int R, class Row>
INLINE void add_group(const uint8_t* codes, const Row* x, V scale, V min, V (&acc)[R]) {
    constexpr Scheme S = SCHEMES[FMT];
    VI dot[R];
    UNROLL for (int r = 0; r < R; r++) {
        if constexpr (S.offset == 0) dot[r] = vset1i(0);
        else if constexpr (S.group == 32) dot[r] = vshl<(S.offset == 8 ? 0 : S.offset == 16 ? 1 : 4)>(vset1i(x[r].ns));
        else dot[r] = vset1i(wrapping_mul(-S.offset, x[r].s[G]));
    }
    dots<CODES<FMT>, S.group, G, R>(codes, x, dot);
    UNROLL for (int r = 0; r < R; r++) {
        acc[r] = vfma(vfloat(dot[r]), vmul(scale, vset1(x[r].d)), acc[r]);
        if constexpr (S.min) {
            float sum = S.group == 32 ? x[r].ds : x[r].d * static_cast<float>(x[r].s[G]);
            acc[r] = vfma(min, vset1(sum), acc[r]);
        }
    }
}

template <Format FMT, int R, int H, class Row>
INLINE void add_block(const uint8_t* scales, V d, V dmin, const uint8_t* codes, const Row* x, V (&acc)[R]) {
    constexpr Scheme S = SCHEMES[FMT];
    constexpr int groups = BLOCK / S.group;
    if constexpr (S.super) {
        const uint8_t* s = scales + H * LANES;
        const uint8_t* m = s + groups * TILE;
        V min0 = S.min ? vmul(dmin, vload_i8(m)) : vzero();
        add_group<FMT, 0>(codes + H * 32, x, vmul(d, vload_i8(s)), min0, acc);
        if constexpr (groups == 2) {
            V min1 = S.min ? vmul(dmin, vload_i8(m + TILE)) : vzero();
            add_group<FMT, 1>(codes + H * 32, x, vmul(d, vload_i8(s + TILE)), min1, acc);
        }
    } else if constexpr (S.fp4) {
        add_group<FMT, 0>(codes + H * 32, x, vload_power(scales + H * LANES), vzero(), acc);
    } else {
        const uint16_t* s = reinterpret_cast<const uint16_t*>(scales) + H * LANES;
        V min = S.min ? vload_f16(s + TILE) : vzero();
        add_group<FMT, 0>(codes + H * 32, x, vload_f16(s), min, acc);
    }
}

#if defined(KERNEL_ISA_AVX2)

// Both halves of a tile at once: four values of a row are then broadcast once for 16 output features, not twice. This
// needs twice as many sums, so it is for codes whose sums need no intermediate widening.
template <Format FMT, int R> constexpr bool TOGETHER =
    SCHEMES[FMT].group == 32 && CODES<FMT> == 4 && R >= 3 && R <= 4;

template <int BITS, int Q, int R>
INLINE void dot_quad_twice(const uint8_t* c, const QBlock* x, VI (&low)[R], VI (&high)[R]) {
    const VI w0 = quad<BITS, Q>(c), w1 = quad<BITS, Q>(c + 32);
    UNROLL for (int r = 0; r < R; r++) {
        const VI values = broadcast(x[r], Q);
        low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(w0, values));
        high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(w1, values));
    }
    settle<R>(low), settle<R>(high);
}

template <Format FMT, int R>
INLINE void scale_half(VI (&sum)[R], const QBlock* x, V scale, V min, V (&acc)[R]) {
    constexpr Scheme S = SCHEMES[FMT];
    UNROLL for (int r = 0; r < R; r++) {
        VI dot = _mm256_madd_epi16(sum[r], _mm256_set1_epi16(1));
        if constexpr (S.offset != 0) dot = _mm256_add_epi32(dot, vset1i(x[r].ns));
        acc[r] = vfma(vfloat(dot), vmul(scale, vset1(x[r].d)), acc[r]);
        if constexpr (S.min) acc[r] = vfma(min, vset1(x[r].ds), acc[r]);
    }
}

template <Format FMT, int R> INLINE void add_block_together(const uint8_t* scales, V d0, V d1, V m0, V m1,
                                                            const uint8_t* c, const QBlock* x, V (&acc0)[R],
                                                            V (&acc1)[R]) {
    constexpr Scheme S = SCHEMES[FMT];
    static_assert(S.offset == 0 || S.offset == 8);
    VI low[R], high[R];
    UNROLL for (int r = 0; r < R; r++) low[r] = high[r] = _mm256_setzero_si256();
    dot_quad_twice<CODES<FMT>, 0, R>(c, x, low, high), dot_quad_twice<CODES<FMT>, 4, R>(c, x, low, high);
    dot_quad_twice<CODES<FMT>, 1, R>(c, x, low, high), dot_quad_twice<CODES<FMT>, 5, R>(c, x, low, high);
    dot_quad_twice<CODES<FMT>, 2, R>(c, x, low, high), dot_quad_twice<CODES<FMT>, 6, R>(c, x, low, high);
    dot_quad_twice<CODES<FMT>, 3, R>(c, x, low, high), dot_quad_twice<CODES<FMT>, 7, R>(c, x, low, high);
    if constexpr (S.super) {
        const uint8_t* m = scales + TILE;
        scale_half<FMT, R>(low, x, vmul(d0, vload_i8(scales)), S.min ? vmul(m0, vload_i8(m)) : vzero(), acc0);
        scale_half<FMT, R>(high, x, vmul(d1, vload_i8(scales + LANES)), S.min ? vmul(m1, vload_i8(m + LANES)) : vzero(),
                           acc1);
    } else {
        const uint16_t* s = reinterpret_cast<const uint16_t*>(scales);
        scale_half<FMT, R>(low, x, vload_f16(s), S.min ? vload_f16(s + TILE) : vzero(), acc0);
        scale_half<FMT, R>(high, x, vload_f16(s + LANES), S.min ? vload_f16(s + TILE + LANES) : vzero(), acc1);
    }
}

// For many rows, and codes that are expensive to unpack: they are unpacked once for all rows, into memory that stays in
// the L1 cache. The sums of four rows at a time fit in registers; partial sums are kept in `out`.
constexpr int AT_ONCE = 4;
template <int R> constexpr bool FINE_IN_PARTS = R > AT_ONCE;
template <Format FMT, int R>
constexpr bool IN_PARTS = R > AT_ONCE && TOGETHER<FMT, AT_ONCE> && !SCHEMES[FMT].super;
template <Format FMT, int R> constexpr bool MANY = R > AT_ONCE && SCHEMES[FMT].bits < 8 && !IN_PARTS<FMT, R>;

template <int BITS, int Q> INLINE void take_quads(const uint8_t* c, VI (*codes)[2]) {
    codes[Q][0] = quad<BITS, Q>(c), codes[Q][1] = quad<BITS, Q>(c + 32);
}

template <int FROM, int TO, int R>
INLINE void dot_quads_many(const VI (*codes)[2], const QBlock* x, VI (&low)[R], VI (&high)[R]) {
    UNROLL for (int q = FROM; q < TO; q++) {
        const VI w0 = codes[q][0], w1 = codes[q][1];
        UNROLL for (int r = 0; r < R; r++) {
            const VI values = broadcast(x[r], q);
            const VI p0 = _mm256_maddubs_epi16(w0, values), p1 = _mm256_maddubs_epi16(w1, values);
            low[r] = q == FROM ? p0 : _mm256_add_epi16(low[r], p0);
            high[r] = q == FROM ? p1 : _mm256_add_epi16(high[r], p1);
        }
        settle<R>(low), settle<R>(high);
    }
}

// Products of quads [FROM, TO), widened to 32 bits; as many as fit are added up in 16 bits before.
template <int BITS, int FROM, int TO, int R>
INLINE void dots_many(const VI (*codes)[2], const QBlock* x, VI (&low)[R], VI (&high)[R]) {
    constexpr int FIT = SUMS<BITS>;
    const VI ones = _mm256_set1_epi16(1);
    if constexpr (TO - FROM <= FIT) {
        dot_quads_many<FROM, TO, R>(codes, x, low, high);
        UNROLL for (int r = 0; r < R; r++) {
            low[r] = _mm256_madd_epi16(low[r], ones), high[r] = _mm256_madd_epi16(high[r], ones);
        }
    } else {
        VI rest_low[R], rest_high[R];
        dots_many<BITS, FROM, FROM + FIT, R>(codes, x, low, high);
        dots_many<BITS, FROM + FIT, TO, R>(codes, x, rest_low, rest_high);
        UNROLL for (int r = 0; r < R; r++) {
            low[r] = _mm256_add_epi32(low[r], rest_low[r]), high[r] = _mm256_add_epi32(high[r], rest_high[r]);
        }
    }
}

template <Format FMT, int G, int H> INLINE void scale_many(VI dot, const QBlock& x, V scale, V min, float* out) {
    constexpr Scheme S = SCHEMES[FMT];
    if constexpr (S.offset != 0 && S.group == 32)
        dot = _mm256_add_epi32(dot, vshl<(S.offset == 8 ? 0 : S.offset == 16 ? 1 : 4)>(vset1i(x.ns)));
    if constexpr (S.offset != 0 && S.group == 16) dot = _mm256_add_epi32(dot, vset1i(wrapping_mul(-S.offset, x.s[G])));
    V acc = _mm256_load_ps(out + H * LANES);
    acc = vfma(vfloat(dot), vmul(scale, vset1(x.d)), acc);
    if constexpr (S.min) acc = vfma(min, vset1(S.group == 32 ? x.ds : x.d * static_cast<float>(x.s[G])), acc);
    _mm256_store_ps(out + H * LANES, acc);
}

template <Format FMT, int G, int R>
INLINE void add_group_many(const VI (*codes)[2], const QBlock* x, const V (&scale)[2], const V (&min)[2], float* out) {
    constexpr Scheme S = SCHEMES[FMT];
    constexpr int QUADS = S.group / 4;
    for (int r = 0; r < R; r += AT_ONCE) {
        VI low[AT_ONCE], high[AT_ONCE];
        dots_many<CODES<FMT>, G * QUADS, (G + 1) * QUADS, AT_ONCE>(codes, x + r, low, high);
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            scale_many<FMT, G, 0>(low[i], x[r + i], scale[0], min[0], out + (r + i) * TILE);
            scale_many<FMT, G, 1>(high[i], x[r + i], scale[1], min[1], out + (r + i) * TILE);
        }
    }
}

template <Format FMT, int G> INLINE V scale_of(const uint8_t* scales, V d, int half) {
    constexpr Scheme S = SCHEMES[FMT];
    if constexpr (S.fp4) return vload_power(scales + half * LANES);
    else if constexpr (S.super) return vmul(d, vload_i8(scales + G * TILE + half * LANES));
    else return vload_f16(reinterpret_cast<const uint16_t*>(scales) + half * LANES);
}
template <Format FMT, int G> INLINE V min_of(const uint8_t* scales, V dmin, int half) {
    constexpr Scheme S = SCHEMES[FMT];
    if constexpr (!S.min) return vzero();
    else if constexpr (S.super) return vmul(dmin, vload_i8(scales + (BLOCK / S.group + G) * TILE + half * LANES));
    else return vload_f16(reinterpret_cast<const uint16_t*>(scales) + TILE + half * LANES);
}

template <Format FMT, int R> INLINE void add_block_many(const uint8_t* scales, V d0, V d1, V m0, V m1, const uint8_t* c,
                                                        const QBlock* x, float* out) {
    constexpr Scheme S = SCHEMES[FMT];
    VI codes[8][2];
    take_quads<CODES<FMT>, 0>(c, codes), take_quads<CODES<FMT>, 1>(c, codes), take_quads<CODES<FMT>, 2>(c, codes);
    take_quads<CODES<FMT>, 3>(c, codes), take_quads<CODES<FMT>, 4>(c, codes), take_quads<CODES<FMT>, 5>(c, codes);
    take_quads<CODES<FMT>, 6>(c, codes), take_quads<CODES<FMT>, 7>(c, codes);
    const V scale[2] = {scale_of<FMT, 0>(scales, d0, 0), scale_of<FMT, 0>(scales, d1, 1)};
    const V min[2] = {min_of<FMT, 0>(scales, m0, 0), min_of<FMT, 0>(scales, m1, 1)};
    add_group_many<FMT, 0, R>(codes, x, scale, min, out);
    if constexpr (S.group == 16) {
        const V second[2] = {scale_of<FMT, 1>(scales, d0, 0), scale_of<FMT, 1>(scales, d1, 1)};
        const V second_min[2] = {min_of<FMT, 1>(scales, m0, 0), min_of<FMT, 1>(scales, m1, 1)};
        add_group_many<FMT, 1, R>(codes, x, second, second_min, out);
    }
}

#else
constexpr int AT_ONCE = 1;
template <int R> constexpr bool FINE_IN_PARTS = false;
template <Format FMT, int R> constexpr bool IN_PARTS = false;
template <Format FMT, int R> constexpr bool TOGETHER = false;
template <Format FMT, int R>
void add_block_together(const uint8_t*, V, V, V, V, const uint8_t*, const QBlock*, V (&)[R], V (&)[R]);
template <Format FMT, int R> constexpr bool MANY = false;
template <Format FMT, int R>
void add_block_many(const uint8_t*, V, V, V, V, const uint8_t*, const QBlock*, float*);
#endif

// --- Outliers --------------------------------------------------------------------------------------------------------

// One code in each lane.
#if defined(KERNEL_ISA_AVX512)
INLINE I fp4_column(I a) { return _mm512_and_si512(fp4_codes(a), iset1(255)); }
#elif defined(KERNEL_ISA_AVX2)
INLINE I fp4_column(I a) {
    const __m256i low = _mm256_set1_epi32(255);
    return {_mm256_and_si256(fp4_codes(a.a), low), _mm256_and_si256(fp4_codes(a.b), low)};
}
#else
INLINE I fp4_column(I a) {
    for (int i = 0; i < TILE; i++) a[i] = FP4_CODES[a[i]];
    return a;
}
#endif

// The 16 weights at place k of a tile.
template <Format FMT> INLINE F column(const uint8_t* tile, int k) {
    constexpr Scheme S = SCHEMES[FMT];
    const int64_t b = k / BLOCK;
    const int q = k % BLOCK / 4, byte = 8 * (k % 4), g = k % BLOCK / S.group;
    const uint8_t* c = tile + codes_offset(S, b);
    const uint8_t* rest = c + (S.bits >= 4 ? 256 : 0);
    I code;
    if constexpr (S.bits == 8) code = load_bits(c + 64 * q, byte, 255);
    else if constexpr (S.bits >= 4) code = load_bits(c + 64 * (q % 4), byte + (q < 4 ? 0 : 4), 15);
    else code = load_bits(c + 64 * (q / 4), byte + 2 * (q % 4), 3);
    if constexpr (S.bits == 6) code = ior(code, ishl<4>(load_bits(rest + 64 * (q / 4), byte + 2 * (q % 4), 3)));
    if constexpr (S.bits == 5) code = ior(code, ishl<4>(load_bits(rest, byte + q, 1)));
    if constexpr (S.bits == 3) code = ior(code, ishl<2>(load_bits(c + 128, byte + q, 1)));
    if constexpr (S.fp4) code = fp4_column(code);
    const F value = to_float(iadd(code, -S.offset));
    constexpr int groups = BLOCK / S.group;
    const uint8_t* scales = tile + scales_offset(S, b);
    if constexpr (S.fp4) {
        return mul(load_power(scales), value);
    } else if constexpr (S.super) {
        const uint8_t* head = tile + unit_offset(S, b);
        F d = mul(load_f16(reinterpret_cast<const uint16_t*>(head)),
                  load_i8(reinterpret_cast<const int8_t*>(scales) + g * TILE));
        if constexpr (!S.min) return mul(d, value);
        F m = mul(load_f16(reinterpret_cast<const uint16_t*>(head) + TILE), load_u8(scales + (groups + g) * TILE));
        return sub(mul(d, value), m);
    } else {
        F d = load_f16(reinterpret_cast<const uint16_t*>(scales));
        if constexpr (!S.min) return mul(d, value);
        return fma(d, value, load_f16(reinterpret_cast<const uint16_t*>(scales) + TILE));
    }
}

// out[r] += Σ values[c][r] · weights[c]
template <int R> INLINE void add_products(const float* weights, const float* values, int count, float* out) {
    constexpr int PART = R < OUTLYING_ROWS ? R : OUTLYING_ROWS;
    static_assert(R % PART == 0);
    for (int from = 0; from < R; from += PART) {
        F sum[PART];
        UNROLL for (int r = 0; r < PART; r++) sum[r] = load(out + (from + r) * TILE);
        for (int c = 0; c < count; c++) {
            const F weight = load(weights + c * TILE);
            UNROLL for (int r = 0; r < PART; r++) sum[r] = fma(set1(values[c * R + from + r]), weight, sum[r]);
        }
        UNROLL for (int r = 0; r < PART; r++) store(out + (from + r) * TILE, sum[r]);
    }
}

// Outliers times the 16 weights at their place, which column(k) returns. All rows of a panel are included, with zeros
// where they have no outlier: selecting rows would need branches that cannot be predicted. Sums are never -0, so adding
// a zero changes nothing.
template <class Column> INLINE void add_outliers(const Panel& panel, float* out, Column column) {
    constexpr int AT_ONCE = 32;
    alignas(64) float weights[AT_ONCE * TILE];
    const OutlierColumns& columns = panel.outliers;
    for (int done = 0; done < columns.count; done += AT_ONCE) {
        const int count = done + AT_ONCE < columns.count ? AT_ONCE : columns.count - done;
        for (int c = 0; c < count; c++) store(weights + c * TILE, column(columns.places[done + c]));
        with_rows(panel.rows, [&](auto rows) {
            add_products<decltype(rows)::value>(weights, columns.values + done * panel.rows, count, out);
        });
    }
}

// In a function of its own: inlined into the products, it may make the compiler keep their sums in memory.
template <Format FMT>
__attribute__((noinline)) void add_outliers_of(const uint8_t* tile, const Panel& panel, float* out) {
    add_outliers(panel, out, [&](int k) { return column<FMT>(tile, k); });
}

template <Format FMT, int R, int STRIDE = R, class Row>
INLINE void tile_rows(const uint8_t* tile, int64_t k, const Row* x, float* out) {
    constexpr bool FINE = std::is_same_v<Row, FineBlock>;
    constexpr Scheme S = SCHEMES[FMT];
    constexpr int per_unit = blocks_per_unit(S);
    V acc0[R], acc1[R];
    UNROLL for (int r = 0; r < R; r++) acc0[r] = acc1[r] = vzero();
    if constexpr (!FINE && MANY<FMT, R>)
        for (int i = 0; i < R * TILE; i += TILE) store(out + i, zero());
    V d0 = vzero(), d1 = vzero(), m0 = vzero(), m1 = vzero();
    for (int64_t left = k / BLOCK; left > 0; left -= per_unit, tile += unit_bytes(S)) {
        const uint8_t* scales = tile;
        const uint8_t* codes = tile + scale_bytes_per_unit(S);
        if constexpr (S.super) {
            const uint16_t* head = reinterpret_cast<const uint16_t*>(tile);
            d0 = vload_f16(head), m0 = vneg(vload_f16(head + TILE));
            if constexpr (HALVES == 2) d1 = vload_f16(head + LANES), m1 = vneg(vload_f16(head + TILE + LANES));
            scales += 64;
        }
        for (int i = 0; i < per_unit && (S.super || i < left); i++, x += STRIDE) {
            prefetch_ahead<unit_bytes(S) / per_unit>(tile + i * (unit_bytes(S) / per_unit));
            if constexpr (!FINE && MANY<FMT, R>) {
                add_block_many<FMT, R>(scales, d0, d1, m0, m1, codes, x, out);
            } else if constexpr (!FINE && TOGETHER<FMT, R>) {
                add_block_together<FMT, R>(scales, d0, d1, m0, m1, codes, x, acc0, acc1);
            } else {
                add_block<FMT, R, 0>(scales, d0, m0, codes, x, acc0);
                if constexpr (HALVES == 2) add_block<FMT, R, 1>(scales, d1, m1, codes, x, acc1);
            }
            scales += scale_bytes_per_block(S), codes += code_bytes(S);
        }
    }
    if constexpr (FINE || !MANY<FMT, R>) UNROLL for (int r = 0; r < R; r++) {
        vstore(out + r * TILE, acc0[r]);
        if constexpr (HALVES == 2) vstore(out + r * TILE + LANES, acc1[r]);
    }
}

// --- Floats: one fused multiply-add per value of K, in order ---------------------------------------------------------

template <Format FMT, int R> INLINE void tile_rows_float(const uint8_t* tile, int64_t k, const float* x, float* out) {
    F acc[R];
    UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    constexpr int SIZE = FMT == F32 ? 4 : 2;
    for (int64_t i = 0; i < k; i++) {
        prefetch_ahead<TILE * SIZE>(tile + i * TILE * SIZE);
        F w;
        if constexpr (FMT == F32) w = load(reinterpret_cast<const float*>(tile) + i * TILE);
        if constexpr (FMT == F16) w = load_f16(reinterpret_cast<const uint16_t*>(tile) + i * TILE);
        if constexpr (FMT == BF16) w = load_bf16(reinterpret_cast<const uint16_t*>(tile) + i * TILE);
        UNROLL for (int r = 0; r < R; r++) acc[r] = fma(w, set1(x[i * R + r]), acc[r]);
    }
    UNROLL for (int r = 0; r < R; r++) store(out + r * TILE, acc[r]);
}

template <Format FMT, int R> void call(const uint8_t* tile, int64_t k, const Panel& panel, float* out) {
    if constexpr (SCHEMES[FMT].bits == 0) {
        tile_rows_float<FMT, R>(tile, k, panel.f32, out);
    } else if (panel.fine) {
        constexpr int PART = FINE_IN_PARTS<R> ? AT_ONCE : R;
        for (int r = 0; r < R; r += PART) tile_rows<FMT, PART, R>(tile, k, panel.fine + r, out + r * TILE);
    } else {
        constexpr int PART = IN_PARTS<FMT, R> ? AT_ONCE : R;
        for (int r = 0; r < R; r += PART) tile_rows<FMT, PART, R>(tile, k, panel.q8 + r, out + r * TILE);
        add_outliers_of<FMT>(tile, panel, out);
    }
}

template <Format FMT> void tile(const uint8_t* tile, int64_t k, const Panel& panel, float* out) {
    with_rows(panel.rows, [&](auto rows) { call<FMT, decltype(rows)::value>(tile, k, panel, out); });
}

void fill_linear(Kernels& kernels) {
    kernels.row_counts = ROW_COUNTS;
    kernels.tiles[F32] = tile<F32>;
    kernels.tiles[F16] = tile<F16>;
    kernels.tiles[BF16] = tile<BF16>;
    kernels.tiles[Q8_0] = tile<Q8_0>;
    kernels.tiles[Q4_0] = tile<Q4_0>;
    kernels.tiles[Q4_1] = tile<Q4_1>;
    kernels.tiles[Q5_0] = tile<Q5_0>;
    kernels.tiles[MXFP4] = tile<MXFP4>;
    kernels.tiles[Q5_1] = tile<Q5_1>;
    kernels.tiles[Q2_K] = tile<Q2_K>;
    kernels.tiles[Q3_K] = tile<Q3_K>;
    kernels.tiles[Q4_K] = tile<Q4_K>;
    kernels.tiles[Q5_K] = tile<Q5_K>;
    kernels.tiles[Q6_K] = tile<Q6_K>;
}

}  // namespace unspool::KERNEL_ISA

// Reads the codes of weights from a tile, and other helpers that all products share.
#pragma once
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

// --- Integers of the native width ------------------------------------------------------------------------------------

#if defined(KERNEL_ISA_AVX2)
constexpr int LANES = 8;
using V = __m256;
using VI = __m256i;
INLINE V vzero() { return _mm256_setzero_ps(); }
INLINE V vset1(float a) { return _mm256_set1_ps(a); }
INLINE V vmul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V vneg(V a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
INLINE void vstore(float* p, V a) { _mm256_storeu_ps(p, a); }
INLINE V vload_f16(const uint16_t* p) { return load8_f16(p); }
INLINE V vload_i8(const uint8_t* p) { return load8_i8(reinterpret_cast<const int8_t*>(p)); }
INLINE V vload_power(const uint8_t* p) {  // 2 to the power of exponents
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
}
INLINE F load_power(const uint8_t* p) { return {vload_power(p), vload_power(p + 8)}; }
INLINE V vfloat(VI a) { return _mm256_cvtepi32_ps(a); }
INLINE VI vset1i(int a) { return _mm256_set1_epi32(a); }
template <int N> INLINE VI vshl(VI a) { return _mm256_slli_epi32(a, N); }
INLINE VI vaddi(VI a, VI b) { return _mm256_add_epi32(a, b); }
#else
constexpr int LANES = 16;
using V = F;
using VI = I;
INLINE V vzero() { return zero(); }
INLINE V vset1(float a) { return set1(a); }
INLINE V vmul(V a, V b) { return mul(a, b); }
INLINE V vfma(V a, V b, V c) { return fma(a, b, c); }
INLINE V vneg(V a) { return sub(zero(), a); }
INLINE void vstore(float* p, V a) { store(p, a); }
INLINE V vload_f16(const uint16_t* p) { return load_f16(p); }
INLINE V vload_i8(const uint8_t* p) { return load_i8(reinterpret_cast<const int8_t*>(p)); }
INLINE V vfloat(VI a) { return to_float(a); }
#if defined(KERNEL_ISA_AVX512)
INLINE VI vset1i(int a) { return _mm512_set1_epi32(a); }
INLINE F load_power(const uint8_t* p) {  // 2 to the power of exponents
    return as_float(ishl<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
#else
INLINE VI vset1i(int a) { return VI{} + a; }
INLINE F load_power(const uint8_t* p) {
    I exponents;
    for (int i = 0; i < TILE; i++) exponents[i] = p[i];
    return as_float(exponents << 23);
}
#endif
INLINE V vload_power(const uint8_t* p) { return load_power(p); }
template <int N> INLINE VI vshl(VI a) { return ishl<N>(a); }
INLINE VI vaddi(VI a, VI b) { return iadd(a, b); }
#endif
constexpr int HALVES = TILE / LANES;

// --- The codes of one quad (four values of K for each lane) ----------------------------------------------------------

// Codes are of BITS bits, or FP4: 4-bit floats, which are looked up.
constexpr int FP4 = 0;
template <Format FMT> constexpr int CODES = SCHEMES[FMT].fp4 ? FP4 : SCHEMES[FMT].bits;

#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)

#if defined(KERNEL_ISA_AVX512)
INLINE VI vbytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE VI vand(VI a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(mask))); }
INLINE VI vor(VI a, VI b) { return _mm512_or_si512(a, b); }
INLINE VI fp4_codes(VI a) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(FP4_CODES));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), a);
}
template <int N> INLINE VI vshift(VI a) {
    if constexpr (N > 0) return _mm512_slli_epi16(a, N);
    if constexpr (N < 0) return _mm512_srli_epi16(a, -N);
    return a;
}
#else
INLINE VI vbytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE VI vand(VI a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(mask))); }
INLINE VI vor(VI a, VI b) { return _mm256_or_si256(a, b); }
INLINE VI fp4_codes(VI a) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(FP4_CODES));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), a);
}
template <int N> INLINE VI vshift(VI a) {
    if constexpr (N > 0) return _mm256_slli_epi16(a, N);
    if constexpr (N < 0) return _mm256_srli_epi16(a, -N);
    return a;
}
#endif

// Shifts operate on 16-bit words: the mask removes the bits that come from the neighbouring byte.
template <int Q> INLINE VI nibble(const uint8_t* c) {
    return vand(vshift<(Q < 4 ? 0 : -4)>(vbytes(c + 64 * (Q % 4))), 15);
}
template <int Q, int TO> INLINE VI pair(const uint8_t* c) {
    return vand(vshift<TO - 2 * (Q % 4)>(vbytes(c + 64 * (Q / 4))), 3 << TO);
}
template <int Q, int TO> INLINE VI bit(const uint8_t* c) { return vand(vshift<TO - Q>(vbytes(c)), 1 << TO); }

template <int BITS, int Q> INLINE VI quad(const uint8_t* c) {
    if constexpr (BITS == FP4) return fp4_codes(nibble<Q>(c));
    if constexpr (BITS == 8) return vbytes(c + 64 * Q);
    if constexpr (BITS == 6) return vor(nibble<Q>(c), pair<Q, 4>(c + 256));
    if constexpr (BITS == 5) return vor(nibble<Q>(c), bit<Q, 4>(c + 256));
    if constexpr (BITS == 4) return nibble<Q>(c);
    if constexpr (BITS == 3) return vor(pair<Q, 0>(c), bit<Q, 2>(c + 128));
    if constexpr (BITS == 2) return pair<Q, 0>(c);
}

#else

// Eight bytes of a vector (two lanes), widened.
typedef uint8_t Bytes __attribute__((vector_size(8)));
typedef int16_t Words __attribute__((vector_size(16)));

INLINE Words words(const uint8_t* p) {
    Bytes bytes;
    memcpy(&bytes, p, 8);
    return __builtin_convertvector(bytes, Words);
}

// Lookups one by one would take twice the time.
INLINE Words fp4_codes(Words a) {
    const Words size = a & 7, negative = a > 7;
    const Words value = size + ((size > 4) & (size - 4)) + ((size == 7) & 2);  // 0 1 2 3 4 6 8 12
    return 16 + (value ^ negative) - negative;
}

template <int BITS> INLINE Words quad(const uint8_t* c, int q) {
    if constexpr (BITS == 8) return words(c + 64 * q);
    Words low;
    if constexpr (BITS >= 4 || BITS == FP4) low = words(c + 64 * (q % 4)) >> (q < 4 ? 0 : 4) & 15;
    else low = words(c + 64 * (q / 4)) >> (2 * (q % 4)) & 3;
    if constexpr (BITS == 6) low |= (words(c + 256 + 64 * (q / 4)) >> (2 * (q % 4)) & 3) << 4;
    if constexpr (BITS == 5) low |= (words(c + 256) >> q & 1) << 4;
    if constexpr (BITS == 3) low |= (words(c + 128) >> q & 1) << 2;
    return BITS == FP4 ? fp4_codes(low) : low;
}

#endif

// --- Reading ahead ---------------------------------------------------------------------------------------------------

// Tiles lie one after another and are read in order, so the bytes that are this far ahead are prefetched. The
// processor's own prefetcher fails where a block has several sequences of bytes or takes long to multiply:
// one row of Q5_K then comes at 18 GB/s instead of 45, eight rows of Q4_K at 10 instead of 25.
constexpr int AHEAD = 8 << 10;

// Addresses that do not exist are ignored by the processor.
template <int BYTES> INLINE void prefetch_ahead(const uint8_t* p) {
    const uintptr_t from = reinterpret_cast<uintptr_t>(p) + AHEAD;
    UNROLL for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(reinterpret_cast<const void*>(from + at), 0, 3);
}

// --- How many rows at once -------------------------------------------------------------------------------------------

template <int R> struct RowCount {
    static constexpr int value = R;
};

// Calls each(the number of rows as a constant) with one of these numbers.
#if defined(KERNEL_ISA_AVX512)
constexpr int ROW_COUNTS[] = {12, 8, 6, 4, 3, 2, 1};
#elif defined(KERNEL_ISA_AVX2)
constexpr int ROW_COUNTS[] = {12, 4, 3, 2, 1};
#else
constexpr int ROW_COUNTS[] = {4, 2, 1};
#endif

template <class Each> INLINE void with_rows(int rows, Each each) {
    switch (rows) {
#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
        case 12: return each(RowCount<12>());
#endif
#if defined(KERNEL_ISA_AVX512)
        case 8: return each(RowCount<8>());
        case 6: return each(RowCount<6>());
#endif
        case 4: return each(RowCount<4>());
#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
        case 3: return each(RowCount<3>());
#endif
        case 2: return each(RowCount<2>());
        default: return each(RowCount<1>());
    }
}

// Rows whose outliers are multiplied at once: as many as the registers can hold sums for.
#if defined(KERNEL_ISA_AVX512)
constexpr int OUTLYING_ROWS = 12;
#else
constexpr int OUTLYING_ROWS = 4;
#endif

}  // namespace unspool::KERNEL_ISA

// Sixteen floats or integers as one value, for each instruction set. All code here is in the set's own namespace.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
#include <immintrin.h>
#endif

#define INLINE [[maybe_unused]] static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace unspool::KERNEL_ISA {

typedef int32_t __attribute__((may_alias)) pair_t;  // two 16-bit integers
typedef int32_t __attribute__((may_alias)) quad_t;  // four 8-bit integers, or half of them as a pair

// Rows that are not finite, or have extreme values, may have arbitrary integers: their sums wrap around and are not
// used, because the row's scale marks the row.
INLINE int wrapping_add(int a, int b) { return static_cast<int>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
INLINE int wrapping_mul(int a, int b) { return static_cast<int>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)); }

#if defined(KERNEL_ISA_AVX512)

using F = __m512;
using I = __m512i;

INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
INLINE F set1(float a) { return _mm512_set1_ps(a); }
INLINE F zero() { return _mm512_setzero_ps(); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// If b is NaN, the result is NaN.
INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F abs(F a) { return _mm512_abs_ps(a); }
INLINE I as_int(F a) { return _mm512_castps_si512(a); }
INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
INLINE I iadd(I a, int b) { return _mm512_add_epi32(a, _mm512_set1_epi32(b)); }
template <int N> INLINE I ishl(I a) { return _mm512_slli_epi32(a, N); }
INLINE I ishl(I a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I round_int(F a) { return _mm512_cvtps_epi32(a); }
INLINE int isum(I a) {
    const __m256i s = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1)));
}
INLINE I load_bits(const uint8_t* p, int shift, int mask) {
    return _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(mask));
}
INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I izero() { return _mm512_setzero_si512(); }
INLINE I iset1(int a) { return _mm512_set1_epi32(a); }
INLINE I iload(const void* p) { return _mm512_loadu_si512(p); }
INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
// c += the products of the pairs of 16-bit integers in each lane of a with the pair at b. In assembly, because with the
// intrinsic the compiler moves every sum to another register and back.
INLINE void dot_pairs(I& c, I a, const pair_t* b) {
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
}
// Sixteen quads of bytes are multiplied by one quad in QUAD_PARTS steps: part P of them by the bytes at b[P], as
// store_quads stores them. Either the sixteen are unsigned (keys) and the one is signed, or the other way around
// (values).
constexpr int QUAD_PARTS = 1;
template <int P> INLINE I key_part(I a) { return a; }
template <int P> INLINE I value_part(I a) { return a; }
INLINE void dot_unsigned(I& c, I a, const quad_t* b) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
}
INLINE void dot_signed(I& c, I a, const quad_t* b) {
    asm("vpdpbusd %1, %2, %0" : "+v"(c) : "v"(a), "v"(_mm512_set1_epi32(*b)));
}
INLINE void store_quads(quad_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
INLINE void istore(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
// The lowest bytes of the lanes, contiguous; or as one byte of each of sixteen quads, leaving the other bytes
// unchanged.
INLINE void store_bytes(uint8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
INLINE void store_of_quads(uint8_t* p, int which, I a) {
    _mm512_mask_storeu_epi8(p, 0x1111111111111111u << which, _mm512_sll_epi32(a, _mm_cvtsi32_si128(8 * which)));
}
// Swap lanes with those at distance LEN (1, 2, 4 or 8).
template <int LEN> INLINE F swap(F a) {
    if constexpr (LEN <= 2) return _mm512_permute_ps(a, LEN == 1 ? 0xB1 : 0x4E);
    else return _mm512_shuffle_f32x4(a, a, LEN == 4 ? 0xB1 : 0x4E);
}
// b in lanes whose number has the bit LEN, else a.
template <int LEN> INLINE F mixed(F a, F b) {
    constexpr int bits = LEN == 1 ? 0xAAAA : LEN == 2 ? 0xCCCC : LEN == 4 ? 0xF0F0 : 0xFF00;
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), a, b);
}
INLINE float first(F a) { return _mm512_cvtss_f32(a); }
// The larger of two non-negative numbers; NaN if either is NaN.
INLINE F larger(F a, F b) { return as_float(_mm512_max_epu32(as_int(a), as_int(b))); }
// Rounds towards zero; numbers that are too low, and NaN, become the lowest integer.
INLINE I truncated(F a) { return _mm512_cvttps_epi32(a); }
INLINE I imax(I a, int b) { return _mm512_max_epi32(a, _mm512_set1_epi32(b)); }
// Bits of a where the mask is set, else bits of b.
INLINE I masked_or(I a, int mask, int b) {
    return _mm512_ternarylogic_epi32(a, _mm512_set1_epi32(mask), _mm512_set1_epi32(b), 0xEA);
}
INLINE void store_i16(int16_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(a));
}
INLINE void store_i8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a)); }
// The sum of sixteen 8-bit integers, given both in memory and widened.
INLINE int sum16(const int8_t* p, I) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
    const __m128i sums = _mm_sad_epu8(bytes, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}
INLINE F load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE void store_f16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE F load_bf16(const uint16_t* p) {
    I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return as_float(_mm512_slli_epi32(wide, 16));
}
// Lanes [low, high) of a, the others from `other`.
INLINE F keep(F a, int low, int high, float other) {
    auto bits = [](int n) { return n <= 0 ? 0u : n >= 16 ? 0xFFFFu : (1u << n) - 1; };
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits(high) & ~bits(low)), set1(other), a);
}
INLINE F where_below(F a, float limit, F below, F otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, set1(limit), _CMP_LT_OQ), otherwise, below);
}
// One bit per lane, set if the lane is above the limit.
INLINE uint32_t above(F a, float limit) { return _mm512_cmp_ps_mask(a, set1(limit), _CMP_GT_OQ); }
// Zero if the magnitude is above the limit, or if there is none.
INLINE F at_most(F a, F limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(abs(a), limit, _CMP_LE_OQ), a); }
// The numbers at sixteen places of an array.
template <int N> INLINE F pick(const F (&x)[N], I at) {
    F found = _mm512_permutex2var_ps(x[0], at, x[1]);
    UNROLL for (int i = 2; i < N; i += 2)
        found = _mm512_mask_mov_ps(found, _mm512_cmpge_epi32_mask(at, iset1(i * 16)),
                                   _mm512_permutex2var_ps(x[i], at, x[i + 1]));
    return found;
}
INLINE float hsum(F a) { return _mm512_reduce_add_ps(a); }
INLINE float hmax(F a) { return _mm512_reduce_max_ps(a); }

#elif defined(KERNEL_ISA_AVX2)

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE I iadd(I x, int y) {
    return {_mm256_add_epi32(x.a, _mm256_set1_epi32(y)), _mm256_add_epi32(x.b, _mm256_set1_epi32(y))};
}
template <int N> INLINE I ishl(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
INLINE I ishl(I x, int n) {
    const __m128i by = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.a, by), _mm256_sll_epi32(x.b, by)};
}
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I round_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE int isum(I x) {
    __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1)));
}
INLINE __m256i load8_bits(const uint8_t* p, int shift, int mask) {
    __m256i bits = _mm256_srl_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm_cvtsi32_si128(shift));
    return _mm256_and_si256(bits, _mm256_set1_epi32(mask));
}
INLINE I load_bits(const uint8_t* p, int shift, int mask) {
    return {load8_bits(p, shift, mask), load8_bits(p + 32, shift, mask)};
}
INLINE I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I iset1(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I iload(const void* p) {
    const auto* at = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
// In assembly, so that each product is added up at once; the compiler would store many products in memory first.
INLINE void dot_pairs(I& z, I x, const pair_t* y) {
    const __m256i pair = _mm256_set1_epi32(*y);
    z.a = _mm256_add_epi32(z.a, _mm256_madd_epi16(x.a, pair));
    z.b = _mm256_add_epi32(z.b, _mm256_madd_epi16(x.b, pair));
    asm volatile("" : "+x"(z.a), "+x"(z.b));
}
// Bytes are widened to pairs of 16 bits first, even ones and odd ones, because products of bytes would not fit.
constexpr int QUAD_PARTS = 2;
template <int P> INLINE __m256i key_part(__m256i x) {
    return P ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(255));
}
template <int P> INLINE I key_part(I x) { return {key_part<P>(x.a), key_part<P>(x.b)}; }
template <int P> INLINE __m256i value_part(__m256i x) { return _mm256_srai_epi16(P ? x : _mm256_slli_epi16(x, 8), 8); }
template <int P> INLINE I value_part(I x) { return {value_part<P>(x.a), value_part<P>(x.b)}; }
INLINE void dot_unsigned(I& z, I x, const quad_t* y) { dot_pairs(z, x, y); }
INLINE void dot_signed(I& z, I x, const quad_t* y) { dot_pairs(z, x, y); }
INLINE void store_quads(quad_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    const __m256i apart = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), apart);
}
INLINE void istore(int32_t* p, I x) {
    auto* at = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(at, x.a), _mm256_storeu_si256(at + 1, x.b);
}
INLINE void store_bytes(uint8_t* p, I x) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
INLINE void store_of_quads(uint8_t* p, int which, I x) {
    uint8_t bytes[16];
    store_bytes(bytes, x);
    for (int i = 0; i < 16; i++) p[i * 4 + which] = bytes[i];
}
template <int LEN> INLINE F swap(F x) {
    if constexpr (LEN == 8) return {x.b, x.a};
    else if constexpr (LEN == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    else return {_mm256_permute_ps(x.a, LEN == 1 ? 0xB1 : 0x4E), _mm256_permute_ps(x.b, LEN == 1 ? 0xB1 : 0x4E)};
}
template <int LEN> INLINE F mixed(F x, F y) {
    constexpr int bits = LEN == 1 ? 0xAA : LEN == 2 ? 0xCC : 0xF0;
    if constexpr (LEN == 8) return {x.a, y.b};
    else return {_mm256_blend_ps(x.a, y.a, bits), _mm256_blend_ps(x.b, y.b, bits)};
}
INLINE float first(F x) { return _mm256_cvtss_f32(x.a); }
INLINE F larger(F x, F y) {
    const I i = as_int(x), j = as_int(y);
    return as_float({_mm256_max_epu32(i.a, j.a), _mm256_max_epu32(i.b, j.b)});
}
INLINE I truncated(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
INLINE I imax(I x, int y) {
    return {_mm256_max_epi32(x.a, _mm256_set1_epi32(y)), _mm256_max_epi32(x.b, _mm256_set1_epi32(y))};
}
INLINE __m256i masked_or(__m256i x, int mask, int y) {
    return _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(mask)), _mm256_set1_epi32(y));
}
INLINE I masked_or(I x, int mask, int y) { return {masked_or(x.a, mask, y), masked_or(x.b, mask, y)}; }
INLINE void store_i16(int16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8));
}
INLINE void store_i8(int8_t* p, I x) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
// The sum of sixteen 8-bit integers, given both in memory and widened.
INLINE int sum16(const int8_t* p, I) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
    const __m128i sums = _mm_sad_epu8(bytes, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}
INLINE __m256 load8_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE __m256 load8_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE __m256 load8_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE __m256 load8_bf16(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE F load_i8(const int8_t* p) { return {load8_i8(p), load8_i8(p + 8)}; }
INLINE F load_u8(const uint8_t* p) { return {load8_u8(p), load8_u8(p + 8)}; }
INLINE F load_f16(const uint16_t* p) { return {load8_f16(p), load8_f16(p + 8)}; }
INLINE F load_bf16(const uint16_t* p) { return {load8_bf16(p), load8_bf16(p + 8)}; }
INLINE void store_f16(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256 keep8(__m256 a, __m256i lanes, int low, int high, __m256 other) {
    __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(high), lanes),
                                  _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(low - 1)));
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(in));
}
INLINE F keep(F x, int low, int high, float other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 o = _mm256_set1_ps(other);
    return {keep8(x.a, lanes, low, high, o), keep8(x.b, lanes, low - 8, high - 8, o)};
}
INLINE F where_below(F x, float limit, F below, F otherwise) {
    const __m256 l = _mm256_set1_ps(limit);
    return {_mm256_blendv_ps(otherwise.a, below.a, _mm256_cmp_ps(x.a, l, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.b, below.b, _mm256_cmp_ps(x.b, l, _CMP_LT_OQ))};
}
INLINE uint32_t above(F x, float limit) {
    const __m256 l = _mm256_set1_ps(limit);
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, l, _CMP_GT_OQ));
    return static_cast<uint32_t>(low | _mm256_movemask_ps(_mm256_cmp_ps(x.b, l, _CMP_GT_OQ)) << 8);
}
INLINE F at_most(F x, F limit) {
    const F size = abs(x);
    return {_mm256_and_ps(x.a, _mm256_cmp_ps(size.a, limit.a, _CMP_LE_OQ)),
            _mm256_and_ps(x.b, _mm256_cmp_ps(size.b, limit.b, _CMP_LE_OQ))};
}
INLINE float hsum(F x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
INLINE float hmax(F x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}

#else  // portable: the compiler's own vectors

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));  // for sums that may wrap around, as in the other instruction sets
INLINE U as_unsigned(I a) { return reinterpret_cast<U>(a); }
INLINE I as_signed(U a) { return reinterpret_cast<I>(a); }

INLINE F load(const float* p) {
    F a;
    memcpy(&a, p, 64);
    return a;
}
INLINE void store(float* p, F a) { memcpy(p, &a, 64); }
INLINE F set1(float a) { return F{} + a; }
INLINE F zero() { return F{}; }
INLINE F add(F a, F b) { return a + b; }
INLINE F sub(F a, F b) { return a - b; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F div(F a, F b) { return a / b; }
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE F max(F a, F b) { return a > b ? a : b; }
INLINE F min(F a, F b) { return a < b ? a : b; }
INLINE I as_int(F a) { return reinterpret_cast<I>(a); }
INLINE F as_float(I a) { return reinterpret_cast<F>(a); }
INLINE F abs(F a) { return as_float(as_int(a) & 0x7FFFFFFF); }
INLINE I iadd(I a, int b) { return as_signed(as_unsigned(a) + static_cast<uint32_t>(b)); }
template <int N> INLINE I ishl(I a) { return a << N; }
INLINE I ishl(I a, int n) { return a << n; }
INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
// Rounds to nearest, ties to even, for |a| < 2²²: adding 1.5 · 2²³ leaves the integer in the low bits. Other numbers
// give an arbitrary integer.
INLINE I round_int(F a) { return iadd(as_int(a + 12582912.0f), -0x4B400000); }
INLINE int isum(I a) {
    uint32_t s = 0;
    for (int i = 0; i < 16; i++) s += as_unsigned(a)[i];
    return static_cast<int>(s);
}
INLINE I load_bits(const uint8_t* p, int shift, int mask) {
    I a;
    memcpy(&a, p, 64);
    return a >> shift & mask;
}
INLINE I ior(I a, I b) { return a | b; }
INLINE I izero() { return I{}; }
INLINE I iset1(int a) { return I{} + a; }
INLINE I iload(const void* p) {
    I a;
    memcpy(&a, p, 64);
    return a;
}
INLINE I iadd(I a, I b) { return as_signed(as_unsigned(a) + as_unsigned(b)); }
INLINE void dot_pairs(I& c, I a, const pair_t* b) {
    c = iadd(c, iadd((a << 16 >> 16) * static_cast<int16_t>(*b), (a >> 16) * (*b >> 16)));
}
constexpr int QUAD_PARTS = 1;
template <int P> INLINE I key_part(I a) { return a; }
template <int P> INLINE I value_part(I a) { return a; }
INLINE void dot_unsigned(I& c, I a, const quad_t* b) {
    const int32_t q = *b;
    c += (a & 255) * static_cast<int8_t>(q) + (a >> 8 & 255) * static_cast<int8_t>(q >> 8) +
         (a >> 16 & 255) * static_cast<int8_t>(q >> 16) + (a >> 24 & 255) * (q >> 24);
}
INLINE void dot_signed(I& c, I a, const quad_t* b) {
    const int32_t w = *b;
    c += (a << 24 >> 24) * (w & 255) + (a << 16 >> 24) * (w >> 8 & 255) + (a << 8 >> 24) * (w >> 16 & 255) +
         (a >> 24) * (w >> 24 & 255);
}
INLINE void istore(int32_t* p, I a) { memcpy(p, &a, 64); }
INLINE void store_bytes(uint8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<uint8_t>(a[i]);
}
INLINE void store_of_quads(uint8_t* p, int which, I a) {
    for (int i = 0; i < 16; i++) p[i * 4 + which] = static_cast<uint8_t>(a[i]);
}
INLINE void store_quads(quad_t* p, I a) {
    uint8_t bytes[16];
    store_bytes(bytes, a);
    memcpy(p, bytes, 16);
}
constexpr I NUMBERS{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <int LEN> INLINE F swap(F a) { return __builtin_shuffle(a, NUMBERS ^ LEN); }
template <int LEN> INLINE F mixed(F a, F b) { return __builtin_shuffle(a, b, NUMBERS + (NUMBERS & LEN) * (16 / LEN)); }
INLINE float first(F a) { return a[0]; }
INLINE F larger(F a, F b) {
    return reinterpret_cast<U>(a) > reinterpret_cast<U>(b) ? a : b;
}
INLINE I truncated(F a) { return __builtin_convertvector(a > -0x1p31f ? a : set1(-0x1p31f), I); }
INLINE I imax(I a, int b) { return a > b ? a : iset1(b); }
INLINE I masked_or(I a, int mask, int b) { return (a & mask) | b; }
INLINE void store_i16(int16_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(a[i]);
}
INLINE void store_i8(int8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a[i]);
}
INLINE int sum16(const int8_t*, I a) { return isum(a); }
INLINE F load_i8(const int8_t* p) {
    F a;
    for (int i = 0; i < 16; i++) a[i] = p[i];
    return a;
}
INLINE F load_u8(const uint8_t* p) {
    F a;
    for (int i = 0; i < 16; i++) a[i] = p[i];
    return a;
}
INLINE uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000u) return sign | 0x7E00;
    if (bits >= 0x477FF000u) return sign | 0x7C00;
    if (bits < 0x38800000u) {  // subnormal: let the adder round to units of 2⁻²⁴
        float a;
        memcpy(&a, &bits, 4);
        a += 0.5f;
        memcpy(&bits, &a, 4);
        return sign | static_cast<uint16_t>(bits - 0x3F000000u);
    }
    bits += 0xC8000FFFu + (bits >> 13 & 1);
    return sign | static_cast<uint16_t>(bits >> 13);
}
INLINE F load_f16(const uint16_t* p) {
    typedef uint16_t H __attribute__((vector_size(32)));
    H half;
    memcpy(&half, p, 32);
    I wide = __builtin_convertvector(half, I);
    I rest = (wide & 0x7FFF) << 13;
    I bits = as_int(as_float(rest) * 0x1p112f);  // moves the exponent, and makes subnormals normal
    return as_float(bits | ((rest >= 0x0F800000) & 0x7F800000) | (wide & 0x8000) << 16);
}
INLINE void store_f16(uint16_t* p, F a) {
    for (int i = 0; i < 16; i++) p[i] = float_to_half(a[i]);
}
INLINE F load_bf16(const uint16_t* p) {
    I a;
    for (int i = 0; i < 16; i++) a[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return as_float(a);
}
INLINE F keep(F a, int low, int high, float other) {
    for (int i = 0; i < 16; i++)
        if (i < low || i >= high) a[i] = other;
    return a;
}
INLINE F where_below(F a, float limit, F below, F otherwise) { return a < set1(limit) ? below : otherwise; }
INLINE uint32_t above(F a, float limit) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= static_cast<uint32_t>(a[i] > limit) << i;
    return bits;
}
INLINE F at_most(F a, F limit) { return abs(a) <= limit ? a : zero(); }
INLINE float hsum(F a) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}
INLINE float hmax(F a) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
}

#endif

// The first n (1 to 16) floats; the rest are zero.
INLINE F load_n(const float* p, int n) {
    if (n >= 16) return load(p);
    float part[16] = {};
    for (int i = 0; i < n; i++) part[i] = p[i];
    return load(part);
}
INLINE void store_n(float* p, F a, int n) {
    if (n >= 16) return store(p, a);
    float part[16];
    store(part, a);
    for (int i = 0; i < n; i++) p[i] = part[i];
}

// eˣ to about one unit in the last place; 0 below -87, about 2¹²⁷ above 88. NaN stays NaN.
INLINE F exp(F x) {
    F y = min(set1(88.0f), max(set1(-87.0f), x));
    F shifted = fma(y, set1(1.44269504088896341f), set1(12582912.0f));
    F n = sub(shifted, set1(12582912.0f));
    F r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    F power = as_float(ishl<23>(iadd(as_int(shifted), 127 - 0x4B400000)));
    return where_below(x, -87.0f, zero(), mul(p, power));
}

// 2ˣ for x below 127, to a unit or two in the last place; 2⁻¹²⁶ below -126. NaN stays NaN.
INLINE F exp2(F x) {
    x = max(set1(-126.0f), x);
    const F shifted = add(x, set1(12582912.0f));  // the nearest whole number is in its lowest bits
    x = sub(x, sub(shifted, set1(12582912.0f)));
    F p = set1(1.3276471519e-3f);
    p = fma(p, x, set1(9.6755413307e-3f));
    p = fma(p, x, set1(5.5507132750e-2f));
    p = fma(p, x, set1(2.4022119724e-1f));
    p = fma(p, x, set1(6.9314696706e-1f));
    p = fma(p, x, set1(1.0f));
    return as_float(iadd(as_int(p), ishl<23>(as_int(shifted))));
}

// 2 to the power of x / 2²³, for x of about 0 or below, to one part in ten thousand; 2⁻¹⁰⁰ if that is less, and for
// NaN. In these units the integer part of x is a float's exponent, and a polynomial of the rest is its mantissa.
INLINE F exp2_of_units(F x) {
    const I units = imax(truncated(x), -100 * (1 << 23));
    const F m = as_float(masked_or(units, 0x007FFFFF, 0x3F800000));
    F p = set1(7.8024522640e-02f);
    p = fma(p, m, set1(-8.0064124939e-03f));
    p = fma(p, m, set1(4.7777279756e-01f));
    p = fma(p, m, set1(4.5213431085e-01f));
    return as_float(iadd(as_int(p), masked_or(units, -(1 << 23), 0)));
}

// Products of 0 to 255, rounded. After adding 1.5 · 2²³ they are in the lowest bits.
INLINE void store_products(quad_t* p, F x, F y) {
    const I sum = as_int(fma(x, y, set1(12582912.0f)));
    store_quads(p, QUAD_PARTS == 1 ? sum : masked_or(sum, 255, 0));
}

// Lane i is the largest of the sixteen non-negative numbers of row i.
template <int LEN = 1> INLINE F largest_of_rows(const float (*rows)[16]) {
    if constexpr (LEN == 16) return load(rows[0]);
    else {
        const F a = largest_of_rows<2 * LEN>(rows), b = largest_of_rows<2 * LEN>(rows + LEN);
        return larger(mixed<LEN>(a, b), swap<LEN>(mixed<LEN>(b, a)));
    }
}
INLINE float hlargest(F x) {
    x = larger(x, swap<8>(x)), x = larger(x, swap<4>(x)), x = larger(x, swap<2>(x));
    return first(larger(x, swap<1>(x)));
}

INLINE F tanh(F x) {
    F e = exp(mul(set1(2.0f), x));
    return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

}  // namespace unspool::KERNEL_ISA

// The passes of sampling.h in GCC's vector types, which are as wide as the registers of the instruction set.
#include "sampling.h"

#include <bit>
#include <cstddef>
#include <limits>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace unspool::KERNEL_ISA {
namespace {

#if defined(KERNEL_ISA_AVX512)
constexpr int WIDTH = 16;
#elif defined(KERNEL_ISA_AVX2)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float F __attribute__((vector_size(WIDTH * 4)));
typedef int32_t I __attribute__((vector_size(WIDTH * 4)));
typedef double D __attribute__((vector_size(WIDTH * 4)));  // half as many elements fill a register
typedef int64_t L __attribute__((vector_size(WIDTH * 4)));
typedef uint64_t U __attribute__((vector_size(WIDTH * 4)));
typedef float HalfF __attribute__((vector_size(WIDTH * 2)));
typedef uint32_t HalfU __attribute__((vector_size(WIDTH * 2)));

#define INLINE static inline __attribute__((always_inline))

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// A vector at any address, aligned or not.
template <typename V>
struct Unaligned {
    typedef V type __attribute__((aligned(4), may_alias));
};
template <typename V, typename T>
INLINE V load(const T* p) {
    return *reinterpret_cast<const typename Unaligned<V>::type*>(p);
}
template <typename V, typename T>
INLINE void store(T* p, V x) {
    *reinterpret_cast<typename Unaligned<V>::type*>(p) = x;
}
INLINE F load(const float* p) { return load<F>(p); }
INLINE F splat(float x) { return F{} + x; }
INLINE F larger(F a, F b) { return a > b ? a : b; }

INLINE float horizontal_max(F x) {
    float best = x[0];
    for (int i = 1; i < WIDTH; i++) best = x[i] > best ? x[i] : best;
    return best;
}

INLINE bool any(I x) {
#if defined(KERNEL_ISA_AVX512)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < WIDTH; i++) all |= x[i];
    return all != 0;
#endif
}

// One bit per lane that is not below; the arguments are never NaN.
INLINE uint32_t lanes_at_least(F x, float floor) {
#if defined(KERNEL_ISA_AVX512)
    return _mm512_cmp_ps_mask((__m512)(x), _mm512_set1_ps(floor), _CMP_GE_OQ);
#elif defined(KERNEL_ISA_AVX2)
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)(x), _mm256_set1_ps(floor), _CMP_GE_OQ)));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < WIDTH; i++) lanes |= static_cast<uint32_t>(x[i] >= floor) << i;
    return lanes;
#endif
}

// filters.exp32: the same operations in the same order.
INLINE F exp32(F x) {
    x = larger(x, splat(-64.0f));
    F n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer, ties to even
    F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F y = splat(static_cast<float>(1.0 / 5040));
    y = y * r + static_cast<float>(1.0 / 720);
    y = y * r + static_cast<float>(1.0 / 120);
    y = y * r + static_cast<float>(1.0 / 24);
    y = y * r + static_cast<float>(1.0 / 6);
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return (F)((I)(y) + (__builtin_convertvector(n, I) << 23));
}

// draw.log32: the same operations in the same order.
INLINE F log32(F x) {
    I raw = (I)(x);
    constexpr int32_t sqrt_half = std::bit_cast<int32_t>(0.70710677f);
    I shift = (raw - sqrt_half) >> 23;
    F mantissa = (F)(raw - (shift << 23));
    F exponent = __builtin_convertvector(shift, F);
    F f = mantissa - 1.0f;
    F s = f / (2.0f + f);
    F z = s * s;
    F tail = splat(static_cast<float>(2.0 / 9));
    tail = tail * z + static_cast<float>(2.0 / 7);
    tail = tail * z + static_cast<float>(2.0 / 5);
    tail = tail * z + static_cast<float>(2.0 / 3);
    F log_m = f - s * (f - tail * z);
    return exponent * 0.693359375f + (exponent * -2.12194440e-4f + log_m);
}

template <int FIRST, size_t... LANES>
INLINE HalfF part(F x, std::index_sequence<LANES...>) {
    return __builtin_shufflevector(x, x, (FIRST + static_cast<int>(LANES))...);
}
INLINE D low(F x) { return __builtin_convertvector(part<0>(x, std::make_index_sequence<WIDTH / 2>()), D); }
INLINE D high(F x) { return __builtin_convertvector(part<WIDTH / 2>(x, std::make_index_sequence<WIDTH / 2>()), D); }

// A double in [-1, 1] plus this has its multiple of 2^-40 in the lowest bits, so one addition rounds it.
constexpr double MAGIC = 6144.0;  // 1.5 * 2^12
INLINE L fixed_point(D x) { return (L)(x + MAGIC) - (L)(D{} + MAGIC); }

INLINE int64_t horizontal_sum(L x) {
    int64_t sum = 0;
    for (int i = 0; i < WIDTH / 2; i++) sum += x[i];
    return sum;
}

int64_t argmax(const float* row, int64_t n) {
    constexpr int64_t CHUNK = 1024;
    float best = MINUS_INFINITY;
    int64_t chunk = 0;
    I nan = I{};
    int64_t whole = n / CHUNK * CHUNK;
    for (int64_t start = 0; start < whole; start += CHUNK) {
        F a = splat(MINUS_INFINITY), b = a, c = a, d = a;
        for (int64_t i = start; i < start + CHUNK; i += 4 * WIDTH) {
            F w = load(row + i), x = load(row + i + WIDTH), y = load(row + i + 2 * WIDTH),
              z = load(row + i + 3 * WIDTH);
            nan |= (w != w) | (x != x) | (y != y) | (z != z);
            a = larger(w, a), b = larger(x, b), c = larger(y, c), d = larger(z, d);
        }
        float high = horizontal_max(larger(larger(a, b), larger(c, d)));
        if (high > best) best = high, chunk = start;
    }
    if (any(nan)) return -1;
    for (int64_t i = whole; i < n; i++) {
        if (row[i] != row[i]) return -1;
        if (row[i] > best) best = row[i], chunk = i;
    }
    for (int64_t i = chunk; i < n; i++)
        if (row[i] == best) return i;
    return 0;
}

INLINE F scale_block(const float* row, float divisor, float* out, I& nan) {
    F high = splat(MINUS_INFINITY);
    for (int64_t i = 0; i < SAMPLING_BLOCK; i += WIDTH) {
        F x = load(row + i);
        if (divisor != 1.0f) x = x / divisor;
        nan |= x != x;
        high = larger(x, high);
        store(out + i, x);
    }
    return high;
}

bool scale(const float* row, int64_t n, float divisor, float* out, float* maxima) {
    I nan = I{};
    int64_t blocks = n / SAMPLING_BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t at = b * SAMPLING_BLOCK;
        maxima[b] = horizontal_max(scale_block(row + at, divisor, out + at, nan));
    }
    if (int64_t rest = n - blocks * SAMPLING_BLOCK) {
        float last[SAMPLING_BLOCK];
        for (int64_t i = 0; i < SAMPLING_BLOCK; i++)
            last[i] = i < rest ? row[blocks * SAMPLING_BLOCK + i] : MINUS_INFINITY;
        maxima[blocks] = horizontal_max(scale_block(last, divisor, out + blocks * SAMPLING_BLOCK, nan));
    }
    return !any(nan);
}

int64_t total(const float* row, int64_t n, const float* maxima, float max) {
    L sum = L{};
    for (int64_t b = 0; b < n / SAMPLING_BLOCK; b++) {
        if (maxima[b] - max < -29.0f) continue;  // 2^40 e^-29 rounds to 0
        for (int64_t i = b * SAMPLING_BLOCK; i < (b + 1) * SAMPLING_BLOCK; i += WIDTH) {
            F e = exp32(load(row + i) - max);
            sum += fixed_point(low(e)) + fixed_point(high(e));
        }
    }
    return horizontal_sum(sum);
}

int64_t moment(const float* row, int64_t n, float max) {
    L sum = L{};
    for (int64_t i = 0; i < n; i += WIDTH) {
        F x = load(row + i) - max;
        F e = exp32(x);
        x = larger(x, splat(-64.0f));
        sum += fixed_point(low(e) * low(x)) + fixed_point(high(e) * high(x));
    }
    return horizontal_sum(sum);
}

void weigh(const float* row, int64_t n, float max, int64_t* weights) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        F e = exp32(load(row + i) - max);
        store(weights + i, fixed_point(low(e)));
        store(weights + i + WIDTH / 2, fixed_point(high(e)));
    }
}

int64_t collect(const float* row, int64_t n, int32_t first, float base, float floor, int32_t* ids, float* values) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WIDTH) {
        uint32_t lanes = lanes_at_least(load(row + i) - base, floor);
        for (; lanes; lanes &= lanes - 1, count++) {
            int64_t at = i + __builtin_ctz(lanes);
            ids[count] = first + static_cast<int32_t>(at);
            values[count] = row[at];
        }
    }
    return count;
}

int64_t count_better(const float* row, int64_t n, int64_t token) {
    float limit = row[token];
    I count = I{};
    int64_t i = 0;
    for (; i + WIDTH <= token; i += WIDTH) count -= load(row + i) >= limit;
    int64_t sum = 0;
    for (int64_t end = i + WIDTH; i < end; i++) sum += i < token ? row[i] >= limit : row[i] > limit;
    for (; i < n; i += WIDTH) count -= load(row + i) > limit;
    for (int j = 0; j < WIDTH; j++) sum += count[j];
    return sum;
}

// 32 low bits of each lane times 32 bits, as a full 64-bit product.
INLINE U multiply(U a, uint32_t b) {
#if defined(KERNEL_ISA_AVX512)
    return (U)(_mm512_maskz_mul_epu32(0xFF, (__m512i)(a), _mm512_set1_epi64(b)));
#elif defined(KERNEL_ISA_AVX2)
    return (U)(_mm256_mul_epu32((__m256i)(a), _mm256_set1_epi64x(b)));
#elif defined(__SSE2__)
    return (U)(_mm_mul_epu32((__m128i)(a), _mm_set1_epi64x(b)));
#else
    return (a & 0xFFFFFFFFull) * static_cast<uint64_t>(b);
#endif
}

// draw.philox for one word of output. The upper halves of the lanes are arbitrary; multiply() ignores them.
INLINE U philox(U a, uint64_t position, uint64_t seed) {
    U b = U{} + (position & 0xFFFFFFFF), c = U{} + (position >> 32), d = U{};
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int step = 0; step < 10; step++) {
        U product0 = multiply(a, 0xD2511F53), product1 = multiply(c, 0xCD9E8D57);
        a = (product1 >> 32) ^ b ^ static_cast<uint64_t>(key0);
        c = (product0 >> 32) ^ d ^ static_cast<uint64_t>(key1);
        b = product1;
        d = product0;
        key0 += 0x9E3779B9, key1 += 0xBB67AE85;
    }
    return a;
}

// The upper 23 bits of each lane's word, as floats.
INLINE HalfF upper_bits(U word) {
    return __builtin_convertvector(__builtin_convertvector((word & 0xFFFFFFFFull) >> 9, HalfU), HalfF);
}

INLINE F noise(U first, U second, uint64_t seed, uint64_t position) {
    HalfF a = upper_bits(philox(first, position, seed)), b = upper_bits(philox(second, position, seed));
    F x;
    store(reinterpret_cast<float*>(&x), a), store(reinterpret_cast<float*>(&x) + WIDTH / 2, b);
    return -log32(-log32((x + 0.5f) * 0x1p-23f));
}

void gumbel(const int32_t* ids, int32_t first, int64_t n, uint64_t seed, uint64_t position, float* out) {
    if (ids) {
        for (int64_t i = 0; i < n; i += WIDTH) {
            U a = __builtin_convertvector(load<HalfU>(ids + i), U);
            U b = __builtin_convertvector(load<HalfU>(ids + i + WIDTH / 2), U);
            store(out + i, noise(a, b, seed, position));
        }
        return;
    }
    U tokens;
    for (int j = 0; j < WIDTH / 2; j++) tokens[j] = static_cast<uint32_t>(first + j);
    for (int64_t i = 0; i < n; i += WIDTH, tokens += static_cast<uint64_t>(WIDTH))
        store(out + i, noise(tokens, tokens + static_cast<uint64_t>(WIDTH / 2), seed, position));
}

void mask(float* row, int64_t n, const uint32_t* allowed) {
    for (int64_t start = 0; start < n; start += 32) {
        uint32_t word = allowed[start / 32];
        if (word == 0xFFFFFFFFu) continue;
        int64_t end = n - start < 32 ? n - start : 32;
        for (int64_t i = 0; i < end; i++) row[start + i] = (word >> i & 1) ? row[start + i] : MINUS_INFINITY;
    }
}

void log(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += WIDTH) store(out + i, log32(load(x + i)));
}

void exp(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += WIDTH) store(out + i, exp32(load(x + i)));
}

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

}  // namespace

const SamplingKernels* sampling() {
    static const SamplingKernels kernels = {TEXT(KERNEL_ISA), argmax, scale,  total, moment, weigh, collect,
                                            count_better,     gumbel, mask,   log,   exp};
    return &kernels;
}

}  // namespace unspool::KERNEL_ISA

#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)

namespace unspool {
const SamplingKernels* JOIN(sampling_, KERNEL_ISA)() { return KERNEL_ISA::sampling(); }
}  // namespace unspool

// What happens to whole rows: norms, 8-bit activations, gates, rotations.
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

// residual + x / rms(x) · weight. The squares are added in four strands, a function of n alone.
void norm(const float* x, const float* weight, const float* residual, int n, float eps, float* out) {
    F sums[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 64 <= n; i += 64) UNROLL for (int j = 0; j < 4; j++) {
            F v = load(x + i + 16 * j);
            sums[j] = fma(v, v, sums[j]);
        }
    for (; i < n; i += 16) {
        F v = load_n(x + i, n - i);
        sums[0] = fma(v, v, sums[0]);
    }
    float mean = hsum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(n);
    F scale = set1(1.0f / sqrtf(mean + eps));
    for (i = 0; i < n; i += 16) {
        F v = mul(mul(load_n(x + i, n - i), scale), load_n(weight + i, n - i));
        if (residual) v = add(load_n(residual + i, n - i), v);
        store_n(out + i, v, n - i);
    }
}

INLINE float largest(const float* x) { return hmax(max(abs(load(x)), abs(load(x + 16)))); }

// Zero, or not a number if one of a row's is not finite: added to a scale, it tells whoever reads the row.
INLINE float spoilt(const float* x, int blocks) {
    F low = zero(), high = zero();
    for (int i = 0; i < blocks * BLOCK; i += BLOCK)
        low = fma(load(x + i), zero(), low), high = fma(load(x + i + 16), zero(), high);
    return hsum(add(low, high));
}

INLINE void quantize_block(const float* x, float most, QBlock* out) {
    const bool empty = most < 1e-30f;  // a scale this small has no reciprocal
    F inverse = set1(empty ? 0.0f : 127.0f / most);
    I low = round_int(mul(load(x), inverse)), high = round_int(mul(load(x + 16), inverse));
    store_i8(out->q, low);
    store_i8(out->q + 16, high);
    const int sum_low = sum16(out->q, low), sum_high = sum16(out->q + 16, high);
    out->d = empty ? 0.0f : most / 127.0f;
    out->ds = out->d * static_cast<float>(sum_low + sum_high);
    out->ns = -8 * (sum_low + sum_high);
    out->s[0] = static_cast<int16_t>(sum_low);
    out->s[1] = static_cast<int16_t>(sum_high);
}

// The block without what lies above the limit, which is put on the list while there is room.
INLINE void set_apart(const float* x, float limit, int block, int blocks, Outliers* outliers, float* rest) {
    const F low = load(x), high = load(x + 16);
    store(rest, low), store(rest + 16, high);
    for (uint32_t bits = above(abs(low), limit) | above(abs(high), limit) << 16; bits; bits &= bits - 1) {
        const int i = __builtin_ctz(bits);
        if (outliers->count == blocks) return;
        outliers->list[outliers->count++] = {block * BLOCK + i, x[i]};
        rest[i] = 0.0f;
    }
}

void quantize(const float* x, int blocks, QBlock* out, int stride, Outliers* outliers) {
    if (!outliers) {
        for (int b = 0; b < blocks; b++) quantize_block(x + b * BLOCK, largest(x + b * BLOCK), out + b * stride);
        return;
    }
    float sum = 0.0f;
    for (int b = 0; b < blocks; b++) sum += out[b * stride].d = largest(x + b * BLOCK);
    const float limit = OUTLYING * sum / static_cast<float>(blocks), spoils = spoilt(x, blocks);
    outliers->count = 0;
    for (int b = 0; b < blocks; b++) {
        QBlock* to = out + b * stride;
        if (to->d > limit) {
            float rest[BLOCK];
            set_apart(x + b * BLOCK, limit, b, blocks, outliers, rest);
            quantize_block(rest, largest(rest) + spoils, to);
        } else {
            quantize_block(x + b * BLOCK, to->d + spoils, to);
        }
    }
}

// --- Rows whose scales are whole numbers -----------------------------------------------------------------------------

// Puts 32 integers in their place with what a kernel's sum begins with, and gives their sum.
#if defined(KERNEL_ISA_AVX512)
INLINE int put_bytes(I low, I high, WholeBlock& out) {
    const __m256i bytes = _mm256_set_m128i(_mm512_cvtsepi32_epi8(high), _mm512_cvtsepi32_epi8(low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.q), bytes);
    const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    const int result = _mm_cvtsi128_si32(sum) - BLOCK * 128;
    out.start = -MIDDLE_CODE * result;
    return result;
}
#elif defined(KERNEL_ISA_AVX2)
INLINE int put_bytes(I low, I high, WholeBlock& out) {
    store_i8(out.q, low), store_i8(out.q + 16, high);
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(out.q));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(out.q + 16)), one = _mm_set1_epi8(1);
    __m128i sums = _mm_add_epi16(_mm_maddubs_epi16(one, first), _mm_maddubs_epi16(one, second));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4E));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xB1));
    out.start = _mm_cvtsi128_si32(_mm_mullo_epi16(sums, _mm_set1_epi16(-MIDDLE_CODE)));  // for even and odd pairs
    return static_cast<int16_t>(_mm_extract_epi16(sums, 0)) + static_cast<int16_t>(_mm_extract_epi16(sums, 1));
}
#else
INLINE int put_bytes(I low, I high, WholeBlock& out) {
    store_i8(out.q, low), store_i8(out.q + 16, high);
    const int result = isum(low + high);
    out.start = -MIDDLE_CODE * result;
    return result;
}
#endif

void quantize_whole(const float* x, int blocks, WholeBlock* out, int stride, Outliers* outliers) {
    // A block's largest magnitude waits in its place until all are known.
    typedef float __attribute__((may_alias)) waiting_t;
    auto largest_at = [&](int b) -> waiting_t& { return *reinterpret_cast<waiting_t*>(&out[b * stride].start); };
    float sum = spoilt(x, blocks), most = 0.0f;
    for (int b = 0; b < blocks; b++) sum += largest_at(b) = largest(x + b * BLOCK);
    const float limit = OUTLYING * sum / static_cast<float>(blocks);
    outliers->count = 0;
    for (int b = 0; b < blocks; b++) {
        if (largest_at(b) > limit) {
            float rest[BLOCK];
            set_apart(x + b * BLOCK, limit, b, blocks, outliers, rest);
            largest_at(b) = largest(rest);
        }
        most = largest_at(b) > most ? largest_at(b) : most;
    }
    // A scale this small has no reciprocal; what is not a number makes the row none.
    const bool empty = !(most >= 1e-30f && sum < __builtin_inff());
    const float shares = empty ? 0.0f : WHOLE_SHARE / most, inverse = empty ? 0.0f : 127.0f * WHOLE_SHARE / most;
    outliers->scale = (empty ? 0.0f : most / 127.0f) + 0.0f * sum;
    const Outlier *apart = outliers->list, *end = apart + outliers->count;
    int32_t sums[2] = {};
    for (int b = 0; b < blocks; b++) {
        WholeBlock& block = out[b * stride];
        int share = empty ? 1 : static_cast<int>(largest_at(b) * shares) + 1;  // rounded up: 127 is not exceeded
        share = share > WHOLE_SHARE ? WHOLE_SHARE : share;
        const F scale = set1(inverse / static_cast<float>(share));
        float rest[BLOCK];
        const float* from = x + b * BLOCK;
        if (apart != end && apart->k / BLOCK == b) {
            memcpy(rest, from, sizeof rest);
            for (; apart != end && apart->k / BLOCK == b; apart++) rest[apart->k % BLOCK] = 0.0f;
            from = rest;
        }
        const I low = round_int(mul(load(from), scale)), high = round_int(mul(load(from + 16), scale));
        sums[b % 2] = (share * put_bytes(low, high, block) + WHOLE_SHARE / 2) >> WHOLE_SHARE_BITS;
        out[(b - b % 2) * stride].pair[b % 2] = static_cast<int16_t>(share);
        if (b % 2) block.pair[0] = static_cast<int16_t>(sums[0]), block.pair[1] = static_cast<int16_t>(sums[1]);
    }
    if (blocks % 2) {
        WholeBlock& none = out[blocks * stride];
        none = {};
        none.pair[0] = static_cast<int16_t>(sums[0]);
        out[(blocks - 1) * stride].pair[1] = 0;
    }
}

void quantize_fine(const float* x, int blocks, FineBlock* out, int stride) {
    const float spoils = spoilt(x, blocks);
    for (int b = 0; b < blocks; b++, x += BLOCK, out += stride) {
        const float most = largest(x) + spoils;
        const bool empty = most < 1e-30f;
        const F inverse = set1(empty ? 0.0f : 32767.0f / most);
        const I low = round_int(mul(load(x), inverse)), high = round_int(mul(load(x + 16), inverse));
        int16_t values[BLOCK];
        store_i16(values, low), store_i16(values + 16, high);
        for (int i = 0; i < BLOCK; i += 4)
            for (int j = 0; j < 4; j++) out->q[i + j] = values[i + j / 2 + j % 2 * 2];
        out->s[0] = isum(low), out->s[1] = isum(high);
        out->d = empty ? 0.0f : most / 32767.0f;
        out->ds = out->d * static_cast<float>(out->s[0] + out->s[1]);
        out->ns = -8 * (out->s[0] + out->s[1]);
    }
}

INLINE F silu(F x) {
    const F power = min(set1(126.0f), mul(x, set1(-1.44269504088896341f)));
    return div(x, add(set1(1.0f), exp2(power)));
}

INLINE F gelu_tanh(F x) {
    F inner = mul(set1(0.7978845608f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

template <class Activate>
INLINE void gate_rows(const float* gate, const float* up, int rows, int n, float* out, int64_t stride, Activate f) {
    for (int r = 0; r < rows; r++) {
        const F value = mul(f(load(gate + r * TILE)), load(up + r * TILE));
        store_n(out + r * stride, value, n);
    }
}

void gate(const float* gate, const float* up, int rows, int n, Activation activation, float* out, int64_t stride) {
    if (activation == SILU) gate_rows(gate, up, rows, n, out, stride, [](F x) { return silu(x); });
    else gate_rows(gate, up, rows, n, out, stride, [](F x) { return gelu_tanh(x); });
}

void put(const float* part, int rows, int n, const float* bias, const float* add_to, float* out, int64_t stride) {
    const F b = bias ? load_n(bias, n) : zero();
    for (int r = 0; r < rows; r++, out += stride) {
        F value = load(part + r * TILE);
        if (bias) value = add(value, b);
        if (add_to) value = add(load_n(add_to + r * stride, n), value);
        store_n(out, value, n);
    }
}

void softcap(float* x, int n, float cap) {
    for (int i = 0; i < n; i += 16) {
        F v = div(load_n(x + i, n - i), set1(cap));
        store_n(x + i, mul(set1(cap), tanh(v)), n - i);
    }
}

void rotate(const float* x, const float* cos, const float* sin, int half, bool interleaved, int n, float* out) {
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * cos[i] - b * sin[i];
            out[2 * i + 1] = a * sin[i] + b * cos[i];
        }
    } else {
        for (int i = 0; i < half; i += TILE) {
            const F a = load_n(x + i, half - i), b = load_n(x + half + i, half - i);
            const F c = load_n(cos + i, half - i), s = load_n(sin + i, half - i);
            store_n(out + i, sub(mul(a, c), mul(b, s)), half - i);
            store_n(out + half + i, add(mul(a, s), mul(b, c)), half - i);
        }
    }
    for (int i = 2 * half; i < n; i++) out[i] = x[i];
}

void fill_rows(Kernels& kernels) {
    kernels.norm = norm;
    kernels.quantize = quantize;
    kernels.quantize_fine = quantize_fine;
    kernels.quantize_whole = quantize_whole;
    kernels.gate = gate;
    kernels.put = put;
    kernels.softcap = softcap;
    kernels.rotate = rotate;
}

#define NAME_OF(isa) NAME_OF_(isa)
#define NAME_OF_(isa) #isa
#define TABLE_OF(isa) TABLE_OF_(isa)
#define TABLE_OF_(isa) kernels_##isa

Kernels make_table() {
    Kernels kernels{};
    kernels.name = NAME_OF(KERNEL_ISA);
    fill_linear(kernels);
    fill_whole(kernels);
    fill_rows(kernels);
    fill_attention(kernels);
    return kernels;
}

}  // namespace unspool::KERNEL_ISA

namespace unspool {

const Kernels* TABLE_OF(KERNEL_ISA)() {
    static const Kernels kernels = KERNEL_ISA::make_table();
    return &kernels;
}

}  // namespace unspool

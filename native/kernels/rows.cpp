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

// What is not finite is larger than all numbers: it becomes its block's scale, and so tells whoever reads the row.
INLINE float largest(F low, F high) { return hlargest(larger(abs(low), abs(high))); }
INLINE float largest(const float* x) { return largest(load(x), load(x + 16)); }

// Without what is larger than `most`, which was set apart.
INLINE void quantize_block(const float* x, float most, QBlock* out) {
    const bool empty = most < 1e-30f;  // a scale this small has no reciprocal
    const F inverse = set1(empty ? 0.0f : 127.0f / most), limit = set1(most);
    const I low = round_int(mul(at_most(load(x), limit), inverse));
    const I high = round_int(mul(at_most(load(x + 16), limit), inverse));
    store_i8(out->q, low);
    store_i8(out->q + 16, high);
    const int sum_low = sum16(out->q, low), sum_high = sum16(out->q + 16, high);
    out->d = empty ? 0.0f : most / 127.0f;
    out->ds = out->d * static_cast<float>(sum_low + sum_high);
    out->ns = -8 * (sum_low + sum_high);
    out->s[0] = static_cast<int16_t>(sum_low);
    out->s[1] = static_cast<int16_t>(sum_high);
}

// Puts what lies above the limit on the list, if there is room for all of it, and gives the largest magnitude left.
INLINE float set_apart(const float* x, float limit, int block, int blocks, Outliers* outliers) {
    const F low = load(x), high = load(x + 16);
    uint32_t bits = above(abs(low), limit) | above(abs(high), limit) << 16;
    if (outliers->count + __builtin_popcount(bits) > blocks) return largest(low, high);
    for (; bits; bits &= bits - 1) {
        const int i = __builtin_ctz(bits);
        outliers->list[outliers->count++] = {block * BLOCK + i, x[i]};
    }
    return largest(at_most(low, set1(limit)), at_most(high, set1(limit)));
}

void quantize(const float* x, int blocks, QBlock* out, int stride, Outliers* outliers) {
    if (!outliers) {
        for (int b = 0; b < blocks; b++) quantize_block(x + b * BLOCK, largest(x + b * BLOCK), out + b * stride);
        return;
    }
    float sum = 0.0f;
    for (int b = 0; b < blocks; b++) sum += out[b * stride].d = largest(x + b * BLOCK);
    const float limit = OUTLYING * sum / static_cast<float>(blocks);
    outliers->count = 0;
    for (int b = 0; b < blocks; b++) {
        QBlock* to = out + b * stride;
        const float most = to->d > limit ? set_apart(x + b * BLOCK, limit, b, blocks, outliers) : to->d;
        quantize_block(x + b * BLOCK, most, to);
    }
}

// --- Rows whose scales are whole numbers -----------------------------------------------------------------------------

// What makes shares of magnitudes, and integers where a share is one.
struct Inverses {
    float most, unit;
};

// Two blocks lie `stride` apart in a panel. Their largest magnitudes wait in the first one's place until all are known.
// A share is rounded up, so that no integer exceeds 127.
#if defined(KERNEL_ISA_AVX512)

INLINE void largest_two(const float* first, const float* second, float* out) {
    const F a = larger(abs(load(first)), abs(load(first + 16))), b = larger(abs(load(second)), abs(load(second + 16)));
    F both = larger(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    both = larger(both, swap<4>(both)), both = larger(both, swap<2>(both)), both = larger(both, swap<1>(both));
    out[0] = _mm512_cvtss_f32(both), out[1] = _mm256_cvtss_f32(_mm512_extractf32x8_ps(both, 1));
}

// Integers of both halves of a block, still in the order in which packing leaves them.
INLINE I packed_block(const float* x, F most, F scale) {
    return _mm512_packs_epi32(round_int(mul(at_most(load(x), most), scale)),
                              round_int(mul(at_most(load(x + 16), most), scale)));
}

INLINE void round_two(const float* first, const float* second, Inverses by, WholeBlock* out, int stride) {
    const __m128 most = _mm_castsi128_ps(_mm_loadu_si64(out->q));
    const __m128i up = _mm_add_epi32(_mm_cvttps_epi32(_mm_mul_ps(most, _mm_set1_ps(by.most))), _mm_set1_epi32(1));
    const __m128i share = _mm_min_epi32(up, _mm_set1_epi32(WHOLE_SHARE));
    const __m128 scale = _mm_div_ps(_mm_set1_ps(by.unit), _mm_cvtepi32_ps(share));
    const I low = packed_block(first, _mm512_broadcastss_ps(most), _mm512_broadcastss_ps(scale));
    const I high = packed_block(second, _mm512_broadcastss_ps(_mm_movehdup_ps(most)),
                                _mm512_broadcastss_ps(_mm_movehdup_ps(scale)));
    const I quads = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I bytes = _mm512_permutexvar_epi32(quads, _mm512_packs_epi16(low, high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q), _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[stride].q), _mm512_extracti64x4_epi64(bytes, 1));
    I wide = _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), izero());
    wide = iadd(wide, _mm512_shuffle_i64x2(wide, wide, 0xB1));
    wide = iadd(wide, _mm512_shuffle_epi32(wide, _MM_PERM_BADC));
    const __m128i both = _mm_unpacklo_epi32(_mm512_castsi512_si128(wide), _mm512_extracti32x4_epi32(wide, 2));
    const __m128i sum = _mm_sub_epi32(both, _mm_set1_epi32(BLOCK * 128));
    const __m128i start = _mm_mullo_epi32(sum, _mm_set1_epi32(-MIDDLE_CODE));
    const __m128i rounded = _mm_add_epi32(_mm_mullo_epi32(sum, share), _mm_set1_epi32(WHOLE_SHARE / 2));
    const __m128i scaled = _mm_srai_epi32(rounded, WHOLE_SHARE_BITS);
    const __m128i shares = _mm_packs_epi32(share, share), sums = _mm_packs_epi32(scaled, scaled);
    _mm_storeu_si64(&out->start, _mm_unpacklo_epi32(start, shares));
    _mm_storeu_si64(&out[stride].start, _mm_unpacklo_epi32(_mm_shuffle_epi32(start, 1), sums));
}

#else

INLINE void largest_two(const float* first, const float* second, float* out) {
    out[0] = largest(first), out[1] = largest(second);
}

// Gives the sum of the integers.
INLINE int round_one(const float* x, float most, float scale, WholeBlock& out) {
    const F limit = set1(most), by = set1(scale);
    const I low = round_int(mul(at_most(load(x), limit), by)), high = round_int(mul(at_most(load(x + 16), limit), by));
    store_i8(out.q, low), store_i8(out.q + 16, high);
#if defined(KERNEL_ISA_AVX2)
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(out.q));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(out.q + 16)), one = _mm_set1_epi8(1);
    __m128i sums = _mm_add_epi16(_mm_maddubs_epi16(one, first), _mm_maddubs_epi16(one, second));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4E));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xB1));
    out.start = _mm_cvtsi128_si32(_mm_mullo_epi16(sums, _mm_set1_epi16(-MIDDLE_CODE)));  // for even and odd pairs
    return static_cast<int16_t>(_mm_extract_epi16(sums, 0)) + static_cast<int16_t>(_mm_extract_epi16(sums, 1));
#else
    const int sum = isum(low + high);
    out.start = -MIDDLE_CODE * sum;
    return sum;
#endif
}

INLINE void round_two(const float* first, const float* second, Inverses by, WholeBlock* out, int stride) {
    float most[2];
    memcpy(most, out->q, sizeof most);
    for (int i = 0; i < 2; i++) {
        const int up = by.most == 0.0f ? 1 : static_cast<int>(most[i] * by.most) + 1;
        const int share = up < WHOLE_SHARE ? up : WHOLE_SHARE;
        const int sum = round_one(i ? second : first, most[i], by.unit / static_cast<float>(share), out[i * stride]);
        out->pair[i] = static_cast<int16_t>(share);
        out[stride].pair[i] = static_cast<int16_t>((share * sum + WHOLE_SHARE / 2) >> WHOLE_SHARE_BITS);
    }
}

#endif

alignas(64) constexpr float NO_BLOCK[BLOCK] = {};  // the second of the last two where there is an odd number

void quantize_whole(const float* x, int blocks, WholeBlock* out, int stride, Outliers* outliers) {
    typedef float __attribute__((may_alias)) waiting_t;
    const auto waiting = [&](int b) { return reinterpret_cast<waiting_t*>(out[b * stride].q); };
    const auto second = [&](int b) { return b + 1 < blocks ? x + (b + 1) * BLOCK : NO_BLOCK; };
    float sum = 0.0f, most = 0.0f;
    for (int b = 0; b < blocks; b += 2) {
        float two[2];
        largest_two(x + b * BLOCK, second(b), two);
        waiting(b)[0] = two[0], waiting(b)[1] = two[1];
        sum += two[0], sum += two[1];
    }
    const float limit = OUTLYING * sum / static_cast<float>(blocks);
    outliers->count = 0;
    for (int b = 0; b < blocks; b++) {
        waiting_t& here = waiting(b & ~1)[b & 1];
        if (here > limit) here = set_apart(x + b * BLOCK, limit, b, blocks, outliers);
        most = here > most ? here : most;
    }
    // A scale this small has no reciprocal; what is not a number makes the row none.
    const bool empty = !(most >= 1e-30f && sum < __builtin_inff());
    const Inverses by = {empty ? 0.0f : WHOLE_SHARE / most, empty ? 0.0f : 127.0f * WHOLE_SHARE / most};
    outliers->scale = (empty ? 0.0f : most / 127.0f) + 0.0f * sum;
    for (int b = 0; b < blocks; b += 2) round_two(x + b * BLOCK, second(b), by, out + b * stride, stride);
}

void quantize_fine(const float* x, int blocks, FineBlock* out, int stride) {
    for (int b = 0; b < blocks; b++, x += BLOCK, out += stride) {
        const float most = largest(x);
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

INLINE void rotate(const float* x, const Rotation& by, int n, float* out) {
    const int half = by.half;
    if (by.interleaved) {
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * by.cos[i] - b * by.sin[i];
            out[2 * i + 1] = a * by.sin[i] + b * by.cos[i];
        }
    } else {
        for (int i = 0; i < half; i += TILE) {
            const F a = load_n(x + i, half - i), b = load_n(x + half + i, half - i);
            const F c = load_n(by.cos + i, half - i), s = load_n(by.sin + i, half - i);
            store_n(out + i, sub(mul(a, c), mul(b, s)), half - i);
            store_n(out + half + i, add(mul(a, s), mul(b, c)), half - i);
        }
    }
    for (int i = 2 * half; i < n; i++) out[i] = x[i];
}

#if defined(KERNEL_ISA_AVX512)

// Heads of this many channels, all of them rotated, never leave the registers: first all firsts of pairs, then all
// seconds, whether they were interleaved or not.
template <int N> INLINE void turn_at_once(const float* x, const Rotation& by, const Arrangement& as, float* out) {
    constexpr int REGISTERS = N / TILE, HALF = REGISTERS / 2;
    const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), odd = iadd(even, 1);
    F turned[REGISTERS];
    UNROLL for (int i = 0; i < HALF; i++) {
        const float* second = by.interleaved ? x + (2 * i + 1) * TILE : x + (HALF + i) * TILE;
        F a = load(by.interleaved ? x + 2 * i * TILE : x + i * TILE), b = load(second);
        if (by.interleaved) {
            const F firsts = _mm512_permutex2var_ps(a, even, b);
            b = _mm512_permutex2var_ps(a, odd, b), a = firsts;
        }
        const F c = load(by.cos + i * TILE), s = load(by.sin + i * TILE);
        turned[i] = sub(mul(a, c), mul(b, s)), turned[HALF + i] = add(mul(a, s), mul(b, c));
    }
    UNROLL for (int i = 0; i < REGISTERS; i++) {
        I at = iload(as.order + i * TILE);
        if (by.interleaved) {
            const I second = _mm512_and_si512(at, iset1(1));
            at = iadd(_mm512_srli_epi32(at, 1), _mm512_mullo_epi32(second, iset1(N / 2)));
        }
        store(out + i * TILE, mul(pick(turned, at), load(as.times + i * TILE)));
    }
}

#endif

void turn(const float* x, const Rotation& by, const Arrangement& as, int n, float* out) {
    if (!as.order) return rotate(x, by, n, out);
#if defined(KERNEL_ISA_AVX512)
    if (2 * by.half == n) {
        if (n == 64) return turn_at_once<64>(x, by, as, out);
        if (n == 128) return turn_at_once<128>(x, by, as, out);
        if (n == 256) return turn_at_once<256>(x, by, as, out);
    }
#endif
    float* turned = out + n;
    rotate(x, by, n, turned);
    for (int i = 0; i < n; i++) out[i] = turned[as.order[i]] * as.times[i];
}

void fill_rows(Kernels& kernels) {
    kernels.norm = norm;
    kernels.quantize = quantize;
    kernels.quantize_fine = quantize_fine;
    kernels.quantize_whole = quantize_whole;
    kernels.gate = gate;
    kernels.put = put;
    kernels.softcap = softcap;
    kernels.turn = turn;
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

// Operations on whole rows: norms, rounding to 8 bits, gates, rotations.
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

// residual + x / rms(x) · weight. The squares are added in four partial sums, in an order that only n determines.
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

// The sum of f(x) over n values, in four partial sums like the norm's squares.
template <class Map> INLINE float sum_of(const float* x, int n, Map f) {
    F sums[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 64 <= n; i += 64) UNROLL for (int j = 0; j < 4; j++)
            sums[j] = add(sums[j], f(load(x + i + 16 * j), TILE));
    for (; i < n; i += 16) sums[0] = add(sums[0], f(load_n(x + i, n - i), n - i));
    return hsum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

void layer_norm(const float* x, const float* weight, const float* bias, const float* residual, int n, float eps,
                float* out) {
    const float mean = sum_of(x, n, [](F v, int) { return v; }) / static_cast<float>(n);
    const F center = set1(mean);
    const float variance = sum_of(x, n, [&](F v, int count) {
        float kept[TILE];
        const F off = sub(v, center);
        if (count >= TILE) return mul(off, off);
        store(kept, off);
        const F inside = load_n(kept, count);  // values past the end must not contribute
        return mul(inside, inside);
    }) / static_cast<float>(n);
    const F scale = set1(1.0f / sqrtf(variance + eps));
    for (int i = 0; i < n; i += 16) {
        F v = mul(mul(sub(load_n(x + i, n - i), center), scale), load_n(weight + i, n - i));
        if (bias) v = add(v, load_n(bias + i, n - i));
        if (residual) v = add(load_n(residual + i, n - i), v);
        store_n(out + i, v, n - i);
    }
}

// A value that is not finite counts as larger than all numbers: it becomes its block's scale, and so marks the row.
INLINE float largest(F low, F high) { return hlargest(larger(abs(low), abs(high))); }
INLINE float largest(const float* x) { return largest(load(x), load(x + 16)); }

// Without values larger than `most`, which are stored separately.
INLINE void quantize_block(const float* x, float most, QBlock* out) {
    const bool empty = most < 1e-30f;  // such a small scale has no reciprocal
    const F inverse = set1(empty ? 0.0f : 127.0f / most), limit = set1(most);
    const I low = round_int(mul(at_most(load(x), limit), inverse));
    const I high = round_int(mul(at_most(load(x + 16), limit), inverse));
    store_i8(out->q, low);
    store_i8(out->q + 16, high);
    const int sum_low = sum16(out->q, low), sum_high = sum16(out->q + 16, high);
    out->d = empty ? 0.0f : most / 127.0f;
    const int sum = wrapping_add(sum_low, sum_high);
    out->ds = out->d * static_cast<float>(sum);
    out->ns = wrapping_mul(-8, sum);
    out->s[0] = static_cast<int16_t>(sum_low);
    out->s[1] = static_cast<int16_t>(sum_high);
}

// Adds the values above the limit to the list if there is room for all of them. Returns the largest remaining
// magnitude.
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

// --- Rows with integer scales ----------------------------------------------------------------------------------------

// The factors from magnitudes to a block's scale, and from values to integers where that scale is one.
struct Inverses {
    float most, unit;
};

// Blocks are processed in pairs, `stride` apart in a panel. A scale is rounded up, so that no integer exceeds 127.
alignas(64) constexpr float NO_BLOCK[BLOCK] = {};  // the second block of the last pair if their number is odd
INLINE const float* second_of(const float* x, int count) { return count > 1 ? x + BLOCK : NO_BLOCK; }

#if defined(KERNEL_ISA_AVX512)

constexpr int AT_ONCE = 16;  // blocks, one per lane

template <int FIRST, int SECOND> INLINE F larger_quarters(F a, F b) {
    return larger(_mm512_shuffle_f32x4(a, b, FIRST), _mm512_shuffle_f32x4(a, b, SECOND));
}
template <int FIRST, int SECOND> INLINE F larger_lanes(F a, F b) {
    return larger(_mm512_shuffle_ps(a, b, FIRST), _mm512_shuffle_ps(a, b, SECOND));
}

// Lane i is the largest magnitude of the i-th of sixteen blocks.
INLINE F largest_of_blocks(const float* x) {
    F m[16];
    UNROLL for (int i = 0; i < 16; i++) m[i] = larger(abs(load(x + i * BLOCK)), abs(load(x + i * BLOCK + 16)));
    UNROLL for (int i = 0; i < 8; i++) m[i] = larger_quarters<0x44, 0xEE>(m[2 * i], m[2 * i + 1]);
    UNROLL for (int i = 0; i < 4; i++) m[i] = larger_quarters<0x88, 0xDD>(m[2 * i], m[2 * i + 1]);
    UNROLL for (int i = 0; i < 2; i++) m[i] = larger_lanes<0x44, 0xEE>(m[2 * i], m[2 * i + 1]);
    const I lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(lanes, larger_lanes<0x88, 0xDD>(m[0], m[1]));
}

// Integers of both halves of a block, in the order in which the pack instruction leaves them.
INLINE I packed_block(const float* x, F most, F scale) {
    const F low = load(x), high = load(x + 16);
    const auto kept = [&](F value) { return _mm512_cmp_ps_mask(abs(value), most, _CMP_LE_OQ); };
    return _mm512_packs_epi32(round_int(_mm512_maskz_mul_ps(kept(low), low, scale)),
                              round_int(_mm512_maskz_mul_ps(kept(high), high, scale)));
}

// The integers of two blocks, one after the other.
INLINE I packed_blocks(const float* first, const float* second, const float* most, const float* scale) {
    const I quads = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(quads, _mm512_packs_epi16(packed_block(first, set1(most[0]), set1(scale[0])),
                                                              packed_block(second, set1(most[1]), set1(scale[1]))));
}

// Lane i is the sum of the i-th of sixteen blocks. Blocks come in pairs: four 64-bit lanes form the sum of each, with
// 128 added to every integer.
INLINE I sums_of(const I (&twos)[8]) {
    I four[4], eight[2];
    UNROLL for (int i = 0; i < 4; i++) four[i] = _mm512_or_si512(twos[2 * i], _mm512_slli_epi64(twos[2 * i + 1], 32));
    UNROLL for (int i = 0; i < 2; i++)
        eight[i] = iadd(_mm512_unpacklo_epi64(four[2 * i], four[2 * i + 1]),
                        _mm512_unpackhi_epi64(four[2 * i], four[2 * i + 1]));
    const I sums = iadd(_mm512_shuffle_i64x2(eight[0], eight[1], 0x88), _mm512_shuffle_i64x2(eight[0], eight[1], 0xDD));
    const I order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return iadd(_mm512_permutexvar_epi32(order, sums), -BLOCK * 128);
}

// The compiler would extract single numbers from registers instead of reading them from where they were stored.
INLINE void settle() { asm volatile("" ::: "memory"); }

template <bool ALL> INLINE void round_some(const float* x, const float* most, int count, Inverses by, WholeBlock* out,
                                           int stride) {
    const I up = iadd(truncated(mul(load(most), set1(by.most))), 1), share = _mm512_min_epi32(up, iset1(WHOLE_SHARE));
    alignas(64) float scale[AT_ONCE];
    store(scale, div(set1(by.unit), to_float(share)));
    settle();
    I twos[AT_ONCE / 2];
    UNROLL for (int i = 0; i < AT_ONCE / 2; i++) {
        twos[i] = izero();
        if (!ALL && 2 * i >= count) continue;
        const float* first = x + 2 * i * BLOCK;
        const I bytes = packed_blocks(first, second_of(first, ALL ? 2 : count - 2 * i), most + 2 * i, scale + 2 * i);
        WholeBlock* to = out + 2 * i * stride;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to->q), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[stride].q), _mm512_extracti64x4_epi64(bytes, 1));
        twos[i] = _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), izero());
    }
    const I sum = sums_of(twos), start = _mm512_mullo_epi32(sum, iset1(-MIDDLE_CODE));
    const I scaled = _mm512_srai_epi32(iadd(_mm512_mullo_epi32(sum, share), WHOLE_SHARE / 2), WHOLE_SHARE_BITS);
    // Even blocks hold both scales, odd ones both sums.
    const I shares = _mm512_mask_blend_epi16(0xAAAAAAAA, share, ishl<16>(_mm512_shuffle_epi32(share, _MM_PERM_CDAB)));
    const I sums = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_shuffle_epi32(scaled, _MM_PERM_CDAB), ishl<16>(scaled));
    const I pair = _mm512_mask_blend_epi32(0xAAAA, shares, sums);
    alignas(64) int64_t ends[2][AT_ONCE / 2];  // of blocks 0, 1, 4, 5, …; of the others
    _mm512_store_si512(ends[0], _mm512_unpacklo_epi32(start, pair));
    _mm512_store_si512(ends[1], _mm512_unpackhi_epi32(start, pair));
    settle();
    UNROLL for (int i = 0; i < AT_ONCE; i++)
        if (ALL || i < count + count % 2) memcpy(&out[i * stride].start, &ends[i / 2 % 2][i / 4 * 2 + i % 2], 8);
}

INLINE void find_largest(const float* x, int blocks, float* most) {
    int b = 0;
    for (; b + AT_ONCE <= blocks; b += AT_ONCE) store(most + b, largest_of_blocks(x + b * BLOCK));
    for (; b < blocks; b++) most[b] = largest(x + b * BLOCK);
}

INLINE void round_row(const float* x, const float* most, int blocks, Inverses by, WholeBlock* out, int stride) {
    int b = 0;
    for (; b + AT_ONCE <= blocks; b += AT_ONCE)
        round_some<true>(x + b * BLOCK, most + b, AT_ONCE, by, out + b * stride, stride);
    if (b < blocks) round_some<false>(x + b * BLOCK, most + b, blocks - b, by, out + b * stride, stride);
}

#else

// Returns the sum of the integers.
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
    const int sum = isum(iadd(low, high));
    out.start = wrapping_mul(-MIDDLE_CODE, sum);
    return sum;
#endif
}

INLINE void find_largest(const float* x, int blocks, float* most) {
    for (int b = 0; b < blocks; b++) most[b] = largest(x + b * BLOCK);
}

INLINE void round_row(const float* x, const float* most, int blocks, Inverses by, WholeBlock* out, int stride) {
    for (int b = 0; b < blocks; b += 2, x += 2 * BLOCK, out += 2 * stride)
        for (int i = 0; i < 2; i++) {
            const int up = by.most == 0.0f ? 1 : static_cast<int>(most[b + i] * by.most) + 1;
            const int share = up < WHOLE_SHARE ? up : WHOLE_SHARE;
            const float* block = i ? second_of(x, blocks - b) : x;
            const int sum = round_one(block, most[b + i], by.unit / static_cast<float>(share), out[i * stride]);
            out->pair[i] = static_cast<int16_t>(share);
            const int scaled = wrapping_add(wrapping_mul(share, sum), WHOLE_SHARE / 2);
            out[stride].pair[i] = static_cast<int16_t>(scaled >> WHOLE_SHARE_BITS);
        }
}

#endif

// Stores the values above the limit separately. Returns the row's largest remaining magnitude.
INLINE float set_apart_of_row(const float* x, float* most, float limit, int blocks, Outliers* outliers) {
    outliers->count = 0;
    F below = zero();
    float left = 0.0f;
    for (int b = 0; b < blocks; b += TILE) {
        const F here = load(most + b);
        below = larger(below, at_most(here, set1(limit)));
        for (uint32_t bits = above(here, limit); bits; bits &= bits - 1) {
            const int at = b + __builtin_ctz(bits);
            most[at] = set_apart(x + at * BLOCK, limit, at, blocks, outliers);
            left = most[at] > left ? most[at] : left;
        }
    }
    const float largest_below = hlargest(below);
    return largest_below > left ? largest_below : left;
}

// Each stage is done for all rows before the next one, because a stage ends with a few numbers that the next waits for.
void quantize_whole(const float* x, int rows, int blocks, WholeBlock* out, int stride, Outliers* outliers,
                    float* room) {
    const int width = blocks * BLOCK, padded = magnitudes_room(blocks);
    float sum[ROWS_TOGETHER], most[ROWS_TOGETHER];
    const auto list = [&](int r) {
        return reinterpret_cast<Outliers*>(reinterpret_cast<uint8_t*>(outliers) + r * outliers_bytes(blocks));
    };
    for (int r = 0; r < rows; r++) {
        find_largest(x + r * width, blocks, room + r * padded);
        for (int b = blocks; b < padded; b++) room[r * padded + b] = 0.0f;
    }
    for (int r = 0; r < rows; r++) {
        sum[r] = 0.0f;
        for (int b = 0; b < blocks; b++) sum[r] += room[r * padded + b];
    }
    for (int r = 0; r < rows; r++) {
        const float limit = OUTLYING * sum[r] / static_cast<float>(blocks);
        most[r] = set_apart_of_row(x + r * width, room + r * padded, limit, blocks, list(r));
    }
    for (int r = 0; r < rows; r++) {
        // Such a small scale has no reciprocal; a NaN makes the whole row NaN.
        const bool empty = !(most[r] >= 1e-30f && sum[r] < __builtin_inff());
        const Inverses by = {empty ? 0.0f : WHOLE_SHARE / most[r], empty ? 0.0f : 127.0f * WHOLE_SHARE / most[r]};
        list(r)->scale = (empty ? 0.0f : most[r] / 127.0f) + 0.0f * sum[r];
        round_row(x + r * width, room + r * padded, blocks, by, out + r, stride);
    }
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
        const int sum = wrapping_add(out->s[0], out->s[1]);
        out->ds = out->d * static_cast<float>(sum);
        out->ns = wrapping_mul(-8, sum);
    }
}

INLINE F silu(F x) {
    const F power = min(set1(126.0f), mul(x, set1(-1.44269504088896341f)));
    return div(x, add(set1(1.0f), exp2(power)));
}

INLINE F sigmoid(F x) {
    const F power = min(set1(126.0f), mul(x, set1(-1.44269504088896341f)));
    return div(set1(1.0f), add(set1(1.0f), exp2(power)));
}

INLINE F gelu_tanh(F x) {
    F inner = mul(set1(0.7978845608f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

// The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
INLINE F erf(F x) {
    const F size = abs(x), t = div(set1(1.0f), fma(set1(0.3275911f), size, set1(1.0f)));
    F sum = fma(set1(1.061405429f), t, set1(-1.453152027f));
    sum = fma(sum, t, set1(1.421413741f));
    sum = fma(sum, t, set1(-0.284496736f));
    sum = mul(fma(sum, t, set1(0.254829592f)), t);
    const F tail = mul(sum, exp(sub(zero(), mul(x, x))));
    const F found = sub(set1(1.0f), tail);
    return where_below(x, 0.0f, sub(zero(), found), found);
}

INLINE F gelu(F x) { return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.70710678f))))); }

INLINE F relu(F x) { return max(zero(), x); }

// Calls done(f), where f is the activation of sixteen values.
template <class Done> INLINE void with_activation(Activation activation, Done done) {
    switch (activation) {
        case SILU: return done([](F x) { return silu(x); });
        case GELU: return done([](F x) { return gelu(x); });
        case GELU_TANH: return done([](F x) { return gelu_tanh(x); });
        case RELU: return done([](F x) { return relu(x); });
        case SIGMOID: return done([](F x) { return sigmoid(x); });
        case RELU2: return done([](F x) { return mul(relu(x), relu(x)); });
        default: return done([](F x) { return x; });
    }
}

void activate(float* x, int n, Activation activation) {
    with_activation(activation, [&](auto f) {
        for (int i = 0; i < n; i += 16) store_n(x + i, f(load_n(x + i, n - i)), n - i);
    });
}

void multiply(const float* x, const float* gate, int n, Activation activation, float* out) {
    with_activation(activation, [&](auto f) {
        for (int i = 0; i < n; i += 16)
            store_n(out + i, mul(load_n(x + i, n - i), f(load_n(gate + i, n - i))), n - i);
    });
}

// Some groups of sixteen columns, whose sums stay in registers; the last group may be incomplete.
template <int N> INLINE void recur_columns(const Recurrence& r, int from) {
    const auto size = [&](int i) { return r.columns - from - 16 * i; };
    F change[N], sum[N];
    const F decay = set1(r.decay), beta = set1(r.beta), skip = set1(r.skip);
    float* const state = r.state + from;
    UNROLL for (int i = 0; i < N; i++) {
        const F v = load_n(r.v + from + 16 * i, size(i));
        change[i] = mul(beta, v), sum[i] = mul(skip, v);
    }
    if (r.is_delta) {
        F held[N];
        UNROLL for (int i = 0; i < N; i++) held[i] = zero();
        for (int row = 0; row < r.rows; row++) {
            const F key = set1(r.k[row]);
            UNROLL for (int i = 0; i < N; i++)
                held[i] = fma(load_n(state + row * r.stride + 16 * i, size(i)), key, held[i]);
        }
        UNROLL for (int i = 0; i < N; i++) {
            const F v = load_n(r.v + from + 16 * i, size(i));
            change[i] = mul(beta, sub(v, mul(decay, held[i])));
        }
    }
    for (int row = 0; row < r.rows; row++) {
        const F key = set1(r.k[row]), query = set1(r.q[row]);
        UNROLL for (int i = 0; i < N; i++) {
            float* const at = state + row * r.stride + 16 * i;
            const F value = fma(key, change[i], mul(decay, load_n(at, size(i))));
            sum[i] = fma(value, query, sum[i]);
            store_n(at, value, size(i));
        }
    }
    UNROLL for (int i = 0; i < N; i++) store_n(r.out + from + 16 * i, sum[i], size(i));
}

void recur(const Recurrence& r) {
    int from = 0;
    for (; from + 64 <= r.columns; from += 64) recur_columns<4>(r, from);
    for (; from < r.columns; from += 16) recur_columns<1>(r, from);
}

// The gate is limited to at most 7, the other factor to -7 … 7: gate · sigmoid(1.702 · gate) · (up + 1).
INLINE F clamped_swiglu(F gate, F up) {
    gate = min(set1(7.0f), gate), up = max(set1(-7.0f), min(set1(7.0f), up));
    const F power = min(set1(126.0f), mul(gate, set1(-1.702f * 1.44269504088896341f)));
    return mul(div(gate, add(set1(1.0f), exp2(power))), add(up, set1(1.0f)));
}

template <class Activate>
INLINE void gate_rows(const float* gate, const float* up, int rows, int n, float* out, int64_t stride, Activate f) {
    for (int r = 0; r < rows; r++) {
        const F value = mul(f(load(gate + r * TILE)), load(up + r * TILE));
        store_n(out + r * stride, value, n);
    }
}

void gate(const float* gate, const float* up, int rows, int n, Activation activation, float* out, int64_t stride) {
    if (activation == CLAMPED_SWIGLU) {
        for (int r = 0; r < rows; r++)
            store_n(out + r * stride, clamped_swiglu(load(gate + r * TILE), load(up + r * TILE)), n);
        return;
    }
    with_activation(activation, [&](auto f) { gate_rows(gate, up, rows, n, out, stride, f); });
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

// Heads of this size whose channels are all rotated stay in registers: first the first halves of all pairs, then the
// second halves, whether the pairs were interleaved or not.
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
            const I is_second = _mm512_slli_epi32(_mm512_and_si512(at, iset1(1)), __builtin_ctz(N / 2));
            at = iadd(_mm512_srli_epi32(at, 1), is_second);
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
    kernels.layer_norm = layer_norm;
    kernels.activate = activate;
    kernels.multiply = multiply;
    kernels.recur = recur;
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
    fill_peak(kernels);
    return kernels;
}

}  // namespace unspool::KERNEL_ISA

namespace unspool {

const Kernels* TABLE_OF(KERNEL_ISA)() {
    static const Kernels kernels = KERNEL_ISA::make_table();
    return &kernels;
}

}  // namespace unspool

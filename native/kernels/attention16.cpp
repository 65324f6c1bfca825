// Attention over keys and values of 16-bit integers, each token's with a scale of its own.
//
// Products of queries with keys, and of weights with values, are exact integers: their order does not matter, and a
// weight of zero adds nothing, whatever lies there. So all queries of a pass go over all of its keys together.
// Magnitudes are such that 32 products fit 32 bits; weights have the largest, for most are small beside the first.
#include "kernels/attention.h"

namespace unspool::KERNEL_ISA {

constexpr int QUERY = 8191, KEY = 8191, WEIGHT = 1 << 14, VALUE = 4095;
constexpr int CHUNK = 16;  // pairs whose products are added up in integers
static_assert(2LL * CHUNK * QUERY * KEY <= INT32_MAX && 2LL * CHUNK * WEIGHT * VALUE <= INT32_MAX);
constexpr int SIXTEENS = SPLIT / TILE;      // of keys in a split
constexpr int IN_CHUNK = 2 * CHUNK / TILE;  // of keys whose values are added up in integers
constexpr int IN_CACHE = 4;                 // of keys that stay in the nearest cache while all queries pass by
constexpr float LOG2E = 1.44269504088896341f;

INLINE int pairs_of(const KvView& kv) { return kv.head_dim / 2; }
INLINE bool is_loose(const KvView& kv) { return kv.block_size % TILE != 0; }
INLINE int64_t key_scales(const KvView& kv) { return static_cast<int64_t>(kv.block_size) * pairs_of(kv) * 4; }
INLINE int64_t value_scales(const KvView& kv) {
    return kv.values + static_cast<int64_t>(kv.block_size) * kv.padded_dim * 2;
}

INLINE float largest_of(const float* x, int n) {
    F most = zero();
    for (int i = 0; i < n; i += TILE) most = max(most, abs(load_n(x + i, n - i)));
    return hmax(most);
}

// Calls put(place, sixteen integers) for x in units of the scale that this returns; past the end they are zero.
template <class Put> INLINE float round_row(const float* x, int n, int largest, Put put) {
    const float limit = static_cast<float>(largest);
    const float most = largest_of(x, n);
    const bool empty = most < 1e-30f;  // a scale this small has no reciprocal
    const F inverse = set1(empty ? 0.0f : limit / most);
    for (int i = 0; i < n; i += TILE) {
        int16_t part[TILE];
        store_i16(part, round_int(mul(load_n(x + i, n - i), inverse)));
        put(i, part);
    }
    return empty ? 0.0f : most / limit;
}

void prepare16(const KvView& kv, const Queries& queries, int32_t* pairs, float* factors) {
    for (int n = 0; n < queries.count; n++, pairs += kv.head_dim / 2) {
        const float scale = round_row(queries.q + n * kv.head_dim, kv.head_dim, QUERY, [&](int i, const int16_t* part) {
            memcpy(pairs + i / 2, part, static_cast<size_t>(lower(TILE, kv.head_dim - i)) * 2);
        });
        factors[n] = scale * queries.scale;
    }
}

// --- Where the keys of a split lie, by sixteens ----------------------------------------------------------------------

struct Span {
    int first, last;  // sixteens of the split that somebody sees: [first, last)
    int64_t key_stride;
    const uint8_t* keys[SIXTEENS];
    const uint8_t* values[SIXTEENS];
    const float* key_scales[SIXTEENS];
    const float* value_scales[SIXTEENS];
};

// Loose tokens are put side by side first.
void gather16(const KvView& kv, const Queries& queries, Range all, float* room, Span& span) {
    const int pairs = pairs_of(kv), padded = kv.padded_dim;
    auto* keys = reinterpret_cast<int32_t*>(room);
    auto* values = reinterpret_cast<int16_t*>(keys + pairs * SPLIT);
    float* key_scale = reinterpret_cast<float*>(values + padded * SPLIT);
    float* value_scale = key_scale + SPLIT;
    for (int64_t key = all.low; key < all.high; key++) {
        const int at = static_cast<int>(key % SPLIT);
        const uint8_t* block = block_of(kv, queries, key);
        const int64_t token = key % kv.block_size;
        const auto* k = reinterpret_cast<const int32_t*>(block) + token * pairs;
        const auto* v = reinterpret_cast<const int16_t*>(block + kv.values) + token * padded;
        for (int p = 0; p < pairs; p++) keys[p * SPLIT + at] = k[p];
        for (int c = 0; c < padded; c++) values[(at / 2 * padded + c) * 2 + at % 2] = v[c];
        memcpy(key_scale + at, block + key_scales(kv) + token * 4, 4);
        memcpy(value_scale + at, block + value_scales(kv) + token * 4, 4);
    }
    span.key_stride = SPLIT * 4;
    for (int g = span.first; g < span.last; g++) {
        span.keys[g] = reinterpret_cast<const uint8_t*>(keys + g * TILE);
        span.values[g] = reinterpret_cast<const uint8_t*>(values + g * TILE * padded);
        span.key_scales[g] = key_scale + g * TILE;
        span.value_scales[g] = value_scale + g * TILE;
    }
}

INLINE void find_span(const KvView& kv, const Queries& queries, int split, Range all, float* room, Span& span) {
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    span.first = static_cast<int>((all.low - start) / TILE);
    span.last = static_cast<int>((all.high - start + TILE - 1) / TILE);
    if (is_loose(kv)) return gather16(kv, queries, all, room, span);
    span.key_stride = kv.block_size * 4;
    const auto first = static_cast<uint32_t>(start + span.first * TILE), size = static_cast<uint32_t>(kv.block_size);
    const int32_t* entry = queries.table + first / size;
    const uint8_t* block = kv.base + *entry * kv.block_stride;
    int64_t token = first % size;
    for (int g = span.first; g < span.last; g++, token += TILE) {
        if (token == kv.block_size) block = kv.base + *++entry * kv.block_stride, token = 0;
        span.keys[g] = block + token * 4;
        span.values[g] = block + kv.values + token * kv.padded_dim * 2;
        span.key_scales[g] = reinterpret_cast<const float*>(block + key_scales(kv)) + token;
        span.value_scales[g] = reinterpret_cast<const float*>(block + value_scales(kv)) + token;
    }
}

// --- Scores ----------------------------------------------------------------------------------------------------------

// N queries times G sixteens of keys. What comes after them is asked for meanwhile where queries are few: blocks lie
// far apart, and nothing else would ask in time.
template <int N, int G> void score16(const Span& span, int g0, const int32_t* q, int pairs, float* out) {
    const uint8_t *at[G], *ahead[G];
    const float* scales[G];
    float* to[G];
    const int left = span.last - g0 - 1;
    UNROLL for (int g = 0; g < G; g++) {
        const int mine = g0 + (g < left ? g : left), next = mine + G;  // the last one again where there are too few
        at[g] = span.keys[mine], scales[g] = span.key_scales[mine], to[g] = out + mine * TILE;
        ahead[g] = next < span.last ? span.keys[next] : span.values[span.first + (g < left ? g : left)];
    }
    for (int chunk = 0; chunk < pairs; chunk += CHUNK) {
        const int end = chunk + CHUNK < pairs ? chunk + CHUNK : pairs;
        I acc[G][N];
        UNROLL for (int g = 0; g < G; g++) UNROLL for (int n = 0; n < N; n++) acc[g][n] = izero();
        for (int p = chunk; p < end; p++) {
            I k[G];
            UNROLL for (int g = 0; g < G; g++) k[g] = iload(at[g] + p * span.key_stride);
            if constexpr (N <= 4)
                UNROLL for (int g = 0; g < G; g++) __builtin_prefetch(ahead[g] + p * span.key_stride);
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int g = 0; g < G; g++) dot_pairs(acc[g][n], k[g], q + n * pairs + p);
        }
        UNROLL for (int g = 0; g < G; g++) {
            if (g > left) break;
            const F scale = load(scales[g]);
            UNROLL for (int n = 0; n < N; n++) {
                const F sum = to_float(acc[g][n]);
                float* row = to[g] + n * SPLIT;
                store(row, chunk ? fma(sum, scale, load(row)) : mul(sum, scale));
            }
        }
    }
}

// --- Weights ---------------------------------------------------------------------------------------------------------

INLINE bool is_whole(Range range, int64_t key) { return key >= range.low && key + TILE <= range.high; }
INLINE F masked(F x, Range range, int64_t key, float other) {
    return keep(x, static_cast<int>(range.low - key), static_cast<int>(range.high - key), other);
}

// The power of two that brings values up to `most` to at most WEIGHT.
INLINE int weight_power(float most) {
    uint32_t bits;
    memcpy(&bits, &most, 4);
    return most == 0.0f ? 0 : 13 - (static_cast<int>(bits >> 23 & 255) - 127);
}
INLINE float power_of_two(int n) {
    const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// What makes weights of one query's scores: 2^(slope · score + offset), and what a weight's unit is worth.
struct Softmax {
    float slope, offset, worth, maximum;
};

// Scores lack the query's factor, which is never below zero.
INLINE Softmax study16(const Queries& queries, const Span& span, int n, int split, float* row) {
    const Range range = seen(queries, n, split);
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    float slope = queries.factors[n] * LOG2E;
    if (queries.softcap != 0.0f) {
        const F inner = set1(queries.factors[n] / queries.softcap);
        for (int g = span.first; g < span.last; g++) store(row + g * TILE, tanh(mul(load(row + g * TILE), inner)));
        slope = queries.softcap * LOG2E;
    }
    F most = set1(LOWEST), largest = zero();
    for (int g = span.first; g < span.last; g++) {
        F s = load(row + g * TILE), value_scale = load(span.value_scales[g]);
        if (!is_whole(range, start + g * TILE)) {
            s = masked(s, range, start + g * TILE, LOWEST);
            value_scale = masked(value_scale, range, start + g * TILE, 0.0f);
        }
        most = max(most, s), largest = max(largest, value_scale);
    }
    const float maximum = slope * hmax(most), top = hmax(largest);
    const int power = weight_power(top);
    // Worth is not a number where values are not.
    return {slope, static_cast<float>(power) - maximum, power_of_two(-power) + 0.0f * top, maximum};
}

// Scores of one query become weights times the values' scales, in 16 bits.
INLINE void softmax16(const Queries& queries, const Span& span, int n, int split, const Softmax& how, const float* row,
                      int16_t* weights, float* part_end) {
    const Range range = seen(queries, n, split);
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    const F slope = set1(how.slope), offset = set1(how.offset);
    F sum = zero();
    for (int g = span.first; g < span.last; g++) {
        F w = exp2_nearly(fma(load(row + g * TILE), slope, offset));
        F scaled = mul(w, load(span.value_scales[g]));
        if (!is_whole(range, start + g * TILE)) {
            w = masked(w, range, start + g * TILE, 0.0f);
            scaled = masked(scaled, range, start + g * TILE, 0.0f);
        }
        sum = add(sum, w);
        store_i16(weights + g * TILE, round_int(scaled));
    }
    part_end[0] = how.maximum;
    part_end[1] = hsum(sum) * how.worth;
}

// --- Values ----------------------------------------------------------------------------------------------------------

// parts[n] += Σ weight · value for C times sixteen channels over some sixteens of keys.
template <int N, int C> void weigh16(const Span& span, int first, int last, int padded, const pair_t* weights,
                                     const float* worth, int c, float* parts) {
    constexpr int PAIRS = TILE / 2;
    const int stride = padded + TILE;
    I acc[C][N];
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) acc[i][n] = izero();
    for (int g = first; g < last; g++) {
        const uint8_t* v = span.values[g] + c * 4;
        const uint8_t* ahead = span.values[g + 4 < span.last ? g + 4 : g] + c * 4;
        const pair_t* w = weights + g * PAIRS;
#pragma GCC unroll 1
        for (int j = 0; j < PAIRS; j++, v += padded * 4, ahead += padded * 4, w++) {
            I value[C];
            UNROLL for (int i = 0; i < C; i++) value[i] = iload(v + i * 64);
            if constexpr (N <= 4) UNROLL for (int i = 0; i < C; i++) __builtin_prefetch(ahead + i * 64);
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int i = 0; i < C; i++) dot_pairs(acc[i][n], value[i], w + n * SPLIT / 2);
        }
    }
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) {
        float* to = parts + n * stride + c + i * TILE;
        store(to, fma(to_float(acc[i][n]), set1(worth[n]), load(to)));
    }
}

// How many sixteens fit in the registers beside n queries.
#if defined(KERNEL_ISA_AVX512)
constexpr int FITTING = 24;
#elif defined(KERNEL_ISA_AVX2)
constexpr int FITTING = 6;
#else
constexpr int FITTING = 4;
#endif
constexpr int fitting(int n) { return 4 * n <= FITTING ? 4 : 2 * n <= FITTING ? 2 : 1; }

void attend16(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts) {
    const int count = queries.count, pairs = pairs_of(kv), padded = kv.padded_dim, stride = padded + TILE;
    Range all = seen(queries, 0, split);
    for (int n = 1; n < count; n++) {
        const Range range = seen(queries, n, split);
        if (range.low < range.high) all = {lower(all.low, range.low), higher(all.high, range.high)};
    }
    for (int n = 0; n < count; n++)
        for (int c = 0; c < stride; c += TILE) store(parts + n * stride + c, zero());
    if (all.low >= all.high) return;
    float* scores = scratch;
    auto* weights = reinterpret_cast<pair_t*>(scratch + count * SPLIT);  // of weights, for pairs of keys
    Span span;
    find_span(kv, queries, split, all, scratch + count * SPLIT * 3 / 2, span);
    for (int near = span.first; near < span.last; near += IN_CACHE)
        in_pieces(count, [&](auto number, int done) {
            constexpr int N = decltype(number)::value, G = fitting(N);
            for (int g = near; g < near + IN_CACHE && g < span.last; g += G)
                score16<N, G>(span, g, queries.pairs + done * pairs, pairs, scores + done * SPLIT);
        });
    // All are studied first: a maximum comes late, and meanwhile the processor goes on with the next.
    Softmax how[MOST];
    float worth[MOST];
    for (int n = 0; n < count; n++) how[n] = study16(queries, span, n, split, scores + n * SPLIT), worth[n] = how[n].worth;
    for (int n = 0; n < count; n++)
        softmax16(queries, span, n, split, how[n], scores + n * SPLIT,
                  reinterpret_cast<int16_t*>(weights + n * SPLIT / 2), parts + n * stride + padded);
    for (int chunk = span.first / IN_CHUNK * IN_CHUNK; chunk < span.last; chunk += IN_CHUNK) {
        const int first = chunk > span.first ? chunk : span.first;
        const int last = chunk + IN_CHUNK < span.last ? chunk + IN_CHUNK : span.last;
        in_pieces(count, [&](auto number, int done) {
            constexpr int N = decltype(number)::value, C = fitting(N);
            const pair_t* w = weights + done * SPLIT / 2;
            int c = 0;
            for (; c + C * TILE <= padded; c += C * TILE)
                weigh16<N, C>(span, first, last, padded, w, worth + done, c, parts + done * stride);
            if constexpr (C > 1)
                for (; c < padded; c += TILE)
                    weigh16<N, 1>(span, first, last, padded, w, worth + done, c, parts + done * stride);
        });
    }
}

// --- Storing ---------------------------------------------------------------------------------------------------------

void store16(const KvView& kv, int64_t block, int offset, const float* key, const float* value) {
    uint8_t* keys = const_cast<uint8_t*>(kv.base) + block * kv.block_stride;
    uint8_t* values = keys + kv.values;
    const int n = kv.head_dim, padded = kv.padded_dim;
    const bool loose = is_loose(kv);
    auto* k = reinterpret_cast<int32_t*>(keys) + (loose ? static_cast<int64_t>(offset) * n / 2 : offset);
    const int64_t next = loose ? 1 : kv.block_size;
    const float key_scale = round_row(key, n, KEY, [&](int i, const int16_t* part) {
        for (int j = 0; j < TILE && i + j < n; j += 2) memcpy(k + (i + j) / 2 * next, part + j, 4);
    });
    auto* v = reinterpret_cast<int16_t*>(values) +
              (loose ? static_cast<int64_t>(offset) * padded : static_cast<int64_t>(offset / 2) * padded * 2 + offset % 2);
    const int apart = loose ? 1 : 2;
    const float value_scale = round_row(value, n, VALUE, [&](int i, const int16_t* part) {
        for (int j = 0; j < TILE; j++) v[(i + j) * apart] = part[j];
    });
    memcpy(keys + key_scales(kv) + offset * 4, &key_scale, 4);
    memcpy(keys + value_scales(kv) + offset * 4, &value_scale, 4);
}

}  // namespace unspool::KERNEL_ISA

// Attention over keys and values of 8-bit integers, each token's with a scale of its own.
//
// Products of queries with keys, and of weights with values, are exact integers: their order does not matter, and a
// weight of zero adds nothing, whatever lies there. So all queries of a pass go over all of its keys together.
//
// A few channels of keys are far larger than the rest, which would be left with few of the 8 bits. Queries and keys are
// both turned by a Hadamard matrix first: their products stay what they were, and large channels are spread over all.
// Weights of 32 keys have a scale for each query, for one key often has most of the weight.
#include "kernels/attention.h"

namespace unspool::KERNEL_ISA {

constexpr int QUERY = 127, KEY = 127, KEY_ZERO = 128, WEIGHT = 255, VALUE = 127;
constexpr int SIXTEENS = SPLIT / TILE;  // of keys in a split
constexpr int IN_CHUNK = 2;             // of keys whose weights have one scale
constexpr int CHUNKS = SIXTEENS / IN_CHUNK;
constexpr int IN_CACHE = 4;  // of keys that stay in the nearest cache while all queries pass by
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LEAST = 1e-35f;  // what makes a scale: smaller ones have no reciprocal

INLINE int quads_of(const KvView& kv) { return (kv.head_dim + 3) / 4; }
INLINE int query_stride(const KvView& kv) { return kv.padded_dim / 4 * QUAD_PARTS; }
INLINE bool is_loose(const KvView& kv) { return kv.block_size % TILE != 0; }
INLINE int64_t key_scales(const KvView& kv) { return static_cast<int64_t>(kv.block_size) * quads_of(kv) * 4; }
INLINE int64_t value_scales(const KvView& kv) { return kv.values + static_cast<int64_t>(kv.block_size) * kv.padded_dim; }

// --- Rows of 8 bits --------------------------------------------------------------------------------------------------

// Sums and differences of V sixteens, within blocks of `size` channels as far as these reach.
template <int V> INLINE void turn_sixteens(float* x, int n, int size) {
    F v[V];
    UNROLL for (int i = 0; i < V; i++) {
        v[i] = load_n(x + i * TILE, n - i * TILE);
        if (size > 1) v[i] = butterflies<1>(v[i]);
        if (size > 2) v[i] = butterflies<2>(v[i]);
        if (size > 4) v[i] = butterflies<4>(v[i]);
        if (size > 8) v[i] = butterflies<8>(v[i]);
    }
    UNROLL for (int apart = 1; apart < V; apart *= 2)
        UNROLL for (int i = 0; i < V; i++) {
            if (i & apart) continue;
            const F a = v[i], b = v[i + apart];
            v[i] = add(a, b), v[i + apart] = sub(a, b);
        }
    UNROLL for (int i = 0; i < V; i++) store_n(x + i * TILE, v[i], n - i * TILE);
}

// The largest power of two that divides a head: the channels that are turned together.
INLINE int turned_together(int head_dim) { return head_dim & -head_dim; }

// x times a Hadamard matrix of plus and minus one, block by block.
INLINE void turn(float* x, int n) {
    const int size = turned_together(n);
    if (size < 2 * TILE)
        for (int i = 0; i < n; i += TILE) turn_sixteens<1>(x + i, n - i, size);
    else if (size < 4 * TILE)
        for (int i = 0; i < n; i += 2 * TILE) turn_sixteens<2>(x + i, n - i, size);
    else
        for (int i = 0; i < n; i += 4 * TILE) turn_sixteens<4>(x + i, n - i, size);
    for (int apart = 4 * TILE; apart < size; apart *= 2)
        for (int i = 0; i < n; i += TILE) {
            if (i & apart) continue;
            const F a = load(x + i), b = load(x + i + apart);
            store(x + i, add(a, b)), store(x + i + apart, sub(a, b));
        }
}

// Calls put(place, sixteen integers) for x in units of the scale that this returns; past the end they are zero. The
// scale of what is not finite is not a number.
template <class Put> INLINE float round_row(const float* x, int n, float limit, Put put) {
    F largest = zero();
    for (int i = 0; i < n; i += TILE) largest = larger(largest, abs(load_n(x + i, n - i)));
    const float most = hlargest(largest);
    const bool empty = most < LEAST;
    const F inverse = set1(empty ? 0.0f : limit / most);
    for (int i = 0; i < n; i += TILE) put(i, round_int(mul(load_n(x + i, n - i), inverse)));
    return empty ? 0.0f : most / limit + 0.0f * most;
}

void prepare8(const KvView& kv, Queries& queries, int32_t* room) {
    const int count = queries.count, n = kv.head_dim, stride = query_stride(kv);
    int32_t* starts = room + count * stride;
    auto* factors = reinterpret_cast<float*>(starts + count);
    const float factor = queries.scale / static_cast<float>(turned_together(n));
    for (int i = 0; i < count; i++) {
        float* q = queries.q + i * n;
        turn(q, n);
        I sum = izero();
        const float scale = round_row(q, n, QUERY, [&](int c, I part) {
            store_quads(room + i * stride + c / 4 * QUAD_PARTS, part);
            sum = iadd(sum, part);
        });
        starts[i] = -KEY_ZERO * isum(sum);
        factors[i] = scale * factor;
    }
    queries.quads = room, queries.starts = starts, queries.factors = factors;
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
void gather8(const KvView& kv, const Queries& queries, Range all, float* room, Span& span) {
    const int quads = quads_of(kv), padded = kv.padded_dim;
    auto* keys = reinterpret_cast<uint8_t*>(room);
    uint8_t* values = keys + quads * 4 * SPLIT;
    float* key_scale = reinterpret_cast<float*>(values + padded * SPLIT);
    float* value_scale = key_scale + SPLIT;
    for (int64_t key = all.low; key < all.high; key++) {
        const int at = static_cast<int>(key % SPLIT);
        const uint8_t* block = block_of(kv, queries, key);
        const int64_t token = key % kv.block_size;
        const uint8_t* k = block + token * quads * 4;
        const uint8_t* v = block + kv.values + token * padded;
        for (int p = 0; p < quads; p++) memcpy(keys + (p * SPLIT + at) * 4, k + p * 4, 4);
        for (int c = 0; c < padded; c++) values[(at / 4 * padded + c) * 4 + at % 4] = v[c];
        memcpy(key_scale + at, block + key_scales(kv) + token * 4, 4);
        memcpy(value_scale + at, block + value_scales(kv) + token * 4, 4);
    }
    span.key_stride = SPLIT * 4;
    for (int g = span.first; g < span.last; g++) {
        span.keys[g] = keys + g * TILE * 4;
        span.values[g] = values + g * TILE * padded;
        span.key_scales[g] = key_scale + g * TILE;
        span.value_scales[g] = value_scale + g * TILE;
    }
}

INLINE void find_span(const KvView& kv, const Queries& queries, int split, Range all, float* room, Span& span) {
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    span.first = static_cast<int>((all.low - start) / TILE);
    span.last = static_cast<int>((all.high - start + TILE - 1) / TILE);
    if (is_loose(kv)) return gather8(kv, queries, all, room, span);
    span.key_stride = kv.block_size * 4;
    const auto first = static_cast<uint32_t>(start + span.first * TILE), size = static_cast<uint32_t>(kv.block_size);
    const int32_t* entry = queries.table + first / size;
    const uint8_t* block = kv.base + *entry * kv.block_stride;
    int64_t token = first % size;
    for (int g = span.first; g < span.last; g++, token += TILE) {
        if (token == kv.block_size) block = kv.base + *++entry * kv.block_stride, token = 0;
        span.keys[g] = block + token * 4;
        span.values[g] = block + kv.values + token * kv.padded_dim;
        span.key_scales[g] = reinterpret_cast<const float*>(block + key_scales(kv)) + token;
        span.value_scales[g] = reinterpret_cast<const float*>(block + value_scales(kv)) + token;
    }
}

// --- Scores ----------------------------------------------------------------------------------------------------------

// N queries times G sixteens of keys. What comes after them is asked for meanwhile where queries are few: blocks lie
// far apart, and nothing else would ask in time.
template <int N, int G> void score8(const Span& span, int g0, const quad_t* q, int stride, const int32_t* starts,
                                    int quads, float* out) {
    const uint8_t *at[G], *ahead[G];
    const int left = span.last - g0 - 1;
    I acc[G][N];
    UNROLL for (int g = 0; g < G; g++) {
        const int mine = g0 + (g < left ? g : left), next = mine + G;  // the last one again where there are too few
        at[g] = span.keys[mine];
        ahead[g] = next < span.last ? span.keys[next] : span.values[span.first + (g < left ? g : left)];
        UNROLL for (int n = 0; n < N; n++) acc[g][n] = iset1(starts[n]);
    }
    const int64_t ahead_stride = g0 + G < span.last ? span.key_stride : 64;
    for (int p = 0; p < quads; p++, q += QUAD_PARTS) {
        UNROLL for (int part = 0; part < QUAD_PARTS; part++) {
            I k[G];
            UNROLL for (int g = 0; g < G; g++) {
                const I bytes = iload(at[g] + p * span.key_stride);
                k[g] = part ? key_part<1>(bytes) : key_part<0>(bytes);
            }
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int g = 0; g < G; g++) dot_keys(acc[g][n], k[g], q + n * stride + part);
        }
        if constexpr (N <= 4) UNROLL for (int g = 0; g < G; g++) __builtin_prefetch(ahead[g] + p * ahead_stride);
    }
    UNROLL for (int g = 0; g < G; g++) {
        if (g > left) break;
        const F scale = load(span.key_scales[g0 + g]);
        UNROLL for (int n = 0; n < N; n++) store(out + n * SPLIT + (g0 + g) * TILE, mul(to_float(acc[g][n]), scale));
    }
}

// --- Weights ---------------------------------------------------------------------------------------------------------

INLINE bool is_whole(Range range, int64_t key) { return key >= range.low && key + TILE <= range.high; }
INLINE F masked(F x, Range range, int64_t key, float other) {
    return keep(x, static_cast<int>(range.low - key), static_cast<int>(range.high - key), other);
}

// What makes weights of one query's scores: 2^(slope · score - maximum).
struct Softmax {
    float slope, maximum;
};

// Scores lack the query's factor, which is never below zero.
INLINE Softmax study8(const Queries& queries, const Span& span, int n, int split, float* row) {
    const Range range = seen(queries, n, split);
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    float slope = queries.factors[n] * LOG2E;
    if (queries.softcap != 0.0f) {
        const F inner = set1(queries.factors[n] / queries.softcap);
        for (int g = span.first; g < span.last; g++) store(row + g * TILE, tanh(mul(load(row + g * TILE), inner)));
        slope = queries.softcap * LOG2E;
    }
    F most = set1(LOWEST);
    for (int g = span.first; g < span.last; g++) {
        F s = load(row + g * TILE);
        if (!is_whole(range, start + g * TILE)) s = masked(s, range, start + g * TILE, LOWEST);
        most = max(most, s);
    }
    return {slope, slope * hmax(most)};
}

// Scores of one query become weights times the values' scales, still floats. The largest of each chunk are left among
// sixteen.
INLINE void softmax8(const Queries& queries, const Span& span, int n, int split, const Softmax& how, float* row,
                     float (*largest)[TILE], float* part_end) {
    const Range range = seen(queries, n, split);
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    const F slope = set1(how.slope), offset = set1(-how.maximum);
    F sum = zero();
    for (int g = span.first; g < span.last; g++) {
        F w = exp2_roughly(fma(load(row + g * TILE), slope, offset));
        F scaled = mul(w, load(span.value_scales[g]));
        if (!is_whole(range, start + g * TILE)) {
            w = masked(w, range, start + g * TILE, 0.0f);
            scaled = masked(scaled, range, start + g * TILE, 0.0f);
        }
        sum = add(sum, w);
        store(row + g * TILE, scaled);
        float* most = largest[g / IN_CHUNK];
        store(most, larger(load(most), scaled));
    }
    part_end[0] = how.maximum;
    part_end[1] = hsum(sum);
}

// Weights in 8 bits, each chunk's in a unit of its own; the units of each chunk for all queries lie side by side.
template <int N> INLINE void weights8(const Queries& queries, const Span& span, int n0, int split, const Softmax* how,
                                      float* scores, quad_t* weights, float* units, float* parts, int stride) {
    static_assert(N * CHUNKS == TILE);
    float largest[TILE][TILE], inverse[TILE], unit[TILE];
    for (int i = 0; i < TILE; i++) store(largest[i], zero());
    const int count = queries.count - n0 < N ? queries.count - n0 : N;
    for (int i = 0; i < count; i++)
        softmax8(queries, span, n0 + i, split, how[n0 + i], scores + (n0 + i) * SPLIT, largest + i * CHUNKS,
                 parts + (n0 + i) * stride);
    const F most = max(set1(LEAST), largest_of_rows(largest));
    store(inverse, div(set1(WEIGHT), most));
    store(unit, mul(most, set1(1.0f / WEIGHT)));
    for (int i = 0; i < count; i++) {
        const float* row = scores + (n0 + i) * SPLIT;
        quad_t* to = weights + (n0 + i) * SPLIT / 4 * QUAD_PARTS;
        for (int g = span.first; g < span.last; g++) {
            const F times = set1(inverse[i * CHUNKS + g / IN_CHUNK]);
            store_quads(to + g * (TILE / 4) * QUAD_PARTS, round_int(mul(load(row + g * TILE), times)));
        }
        for (int c = 0; c < CHUNKS; c++) units[c * MOST + n0 + i] = unit[i * CHUNKS + c];
    }
}

// --- Values ----------------------------------------------------------------------------------------------------------

// parts[n] += Σ weight · value for C times sixteen channels over some sixteens of keys.
template <int N, int C> void weigh8(const Span& span, int first, int last, int padded, const quad_t* weights,
                                    const float* units, int c, float* parts) {
    constexpr int QUADS = TILE / 4;
    const int stride = padded + TILE;
    I acc[C][N];
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) acc[i][n] = izero();
    for (int g = first; g < last; g++) {
        const uint8_t* v = span.values[g] + c * 4;
        const uint8_t* ahead = span.values[g + 4 < span.last ? g + 4 : g] + c * 4;
        const quad_t* w = weights + g * QUADS * QUAD_PARTS;
#pragma GCC unroll 1
        for (int j = 0; j < QUADS; j++, v += padded * 4, ahead += padded * 4, w += QUAD_PARTS) {
            UNROLL for (int part = 0; part < QUAD_PARTS; part++) {
                I value[C];
                UNROLL for (int i = 0; i < C; i++) {
                    const I bytes = iload(v + i * 64);
                    value[i] = part ? value_part<1>(bytes) : value_part<0>(bytes);
                }
                UNROLL for (int n = 0; n < N; n++)
                    UNROLL for (int i = 0; i < C; i++)
                        dot_values(acc[i][n], value[i], w + n * (SPLIT / 4) * QUAD_PARTS + part);
            }
            if constexpr (N <= 4) UNROLL for (int i = 0; i < C; i++) __builtin_prefetch(ahead + i * 64);
        }
    }
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) {
        float* to = parts + n * stride + c + i * TILE;
        store(to, fma(to_float(acc[i][n]), set1(units[n]), load(to)));
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

void attend8(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts) {
    const int count = queries.count, quads = quads_of(kv), padded = kv.padded_dim, stride = padded + TILE;
    Range all = seen(queries, 0, split);
    for (int n = 1; n < count; n++) {
        const Range range = seen(queries, n, split);
        if (range.low < range.high) all = {lower(all.low, range.low), higher(all.high, range.high)};
    }
    for (int n = 0; n < count; n++)
        for (int c = 0; c < stride; c += TILE) store(parts + n * stride + c, zero());
    if (all.low >= all.high) return;
    float* scores = scratch;
    auto* weights = reinterpret_cast<quad_t*>(scratch + count * SPLIT);
    Span span;
    find_span(kv, queries, split, all, scratch + count * SPLIT * 3 / 2, span);
    for (int near = span.first; near < span.last; near += IN_CACHE)
        in_pieces(count, [&](auto number, int done) {
            constexpr int N = decltype(number)::value, G = fitting(N);
            for (int g = near; g < near + IN_CACHE && g < span.last; g += G)
                score8<N, G>(span, g, queries.quads + done * query_stride(kv), query_stride(kv), queries.starts + done,
                             quads, scores + done * SPLIT);
        });
    // All are studied first: a maximum comes late, and meanwhile the processor goes on with the next.
    Softmax how[MOST];
    float units[CHUNKS * MOST];
    for (int n = 0; n < count; n++) how[n] = study8(queries, span, n, split, scores + n * SPLIT);
    constexpr int TOGETHER = TILE / CHUNKS;
    for (int n = 0; n < count; n += TOGETHER)
        weights8<TOGETHER>(queries, span, n, split, how, scores, weights, units, parts + padded, stride);
    for (int chunk = span.first / IN_CHUNK; chunk * IN_CHUNK < span.last; chunk++) {
        const int first = chunk * IN_CHUNK > span.first ? chunk * IN_CHUNK : span.first;
        const int last = (chunk + 1) * IN_CHUNK < span.last ? (chunk + 1) * IN_CHUNK : span.last;
        in_pieces(count, [&](auto number, int done) {
            constexpr int N = decltype(number)::value, C = fitting(N);
            const quad_t* w = weights + done * (SPLIT / 4) * QUAD_PARTS;
            const float* unit = units + chunk * MOST + done;
            int c = 0;
            for (; c + C * TILE <= padded; c += C * TILE)
                weigh8<N, C>(span, first, last, padded, w, unit, c, parts + done * stride);
            if constexpr (C > 1)
                for (; c < padded; c += TILE)
                    weigh8<N, 1>(span, first, last, padded, w, unit, c, parts + done * stride);
        });
    }
}

// --- Storing ---------------------------------------------------------------------------------------------------------

void store8(const KvView& kv, int64_t block, int offset, float* key, const float* value) {
    uint8_t* keys = const_cast<uint8_t*>(kv.base) + block * kv.block_stride;
    uint8_t* values = keys + kv.values;
    const int n = kv.head_dim, quads = quads_of(kv), padded = kv.padded_dim;
    const bool loose = is_loose(kv);
    turn(key, n);
    uint8_t* k = keys + static_cast<int64_t>(offset) * (loose ? quads : 1) * 4;
    const int64_t next = (loose ? 1 : kv.block_size) * 4;
    const float key_scale = round_row(key, n, KEY, [&](int i, I part) {
        uint8_t bytes[TILE];
        store_i8(reinterpret_cast<int8_t*>(bytes), part);
        for (int j = 0; j < TILE; j++) bytes[j] ^= KEY_ZERO;
        for (int j = 0; j < TILE && i + j < n; j += 4) memcpy(k + (i + j) / 4 * next, bytes + j, 4);
    });
    uint8_t* v = values + (loose ? static_cast<int64_t>(offset) * padded
                                 : static_cast<int64_t>(offset / 4) * padded * 4 + offset % 4);
    const int apart = loose ? 1 : 4;
    const float value_scale = round_row(value, n, VALUE, [&](int i, I part) {
        int8_t bytes[TILE];
        store_i8(bytes, part);
        for (int j = 0; j < TILE; j++) v[(i + j) * apart] = static_cast<uint8_t>(bytes[j]);
    });
    memcpy(keys + key_scales(kv) + offset * 4, &key_scale, 4);
    memcpy(keys + value_scales(kv) + offset * 4, &value_scale, 4);
}

}  // namespace unspool::KERNEL_ISA

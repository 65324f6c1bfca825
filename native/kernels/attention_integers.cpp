// Attention over integer keys and values, with one scale per token: values have 8 bits; keys have 8 bits, except a
// quarter of their channels, which have 16.
//
// Products of queries with keys, and of weights with values, are exact integers: their order does not matter, and a
// weight of zero adds nothing, whatever the value is. So all queries of a pass process all of its keys together.
//
// A few channels of keys are far larger than the rest, which would keep few of 8 bits if all shared one scale. Which
// channels these are, and their factors for queries and keys, is measured before (KeyChannels in kv.h): narrow channels
// come first, then wide ones. Sums of narrow products are shifted left to the unit of wide products and added to them,
// so there is one sum with one scale. Weights have a scale per query and 32 keys, because one key often has most of the
// weight.
#include "kernels/attention.h"

namespace unspool::KERNEL_ISA {

constexpr int BYTE = 127, KEY_ZERO = 128, WEIGHT = 255;
constexpr int SIXTEENS = SPLIT / TILE;  // groups of sixteen keys per split
constexpr int IN_CHUNK = 2;             // groups of sixteen keys whose weights share one scale
constexpr int CHUNKS = SIXTEENS / IN_CHUNK;
constexpr int IN_CACHE = 4;  // groups of sixteen keys that stay in the L1 cache while all queries process them
constexpr float LEAST = 1e-35f;  // the least maximum that makes a scale: smaller ones have no reciprocal

// How many sums of integers fit in the registers, and whether one sum of floats per value fits too.
#if defined(KERNEL_ISA_AVX512)
constexpr int SCORES = 24, VALUES = 12, VALUE_QUERIES = 6;
constexpr bool SUMS_FIT = true;
#elif defined(KERNEL_ISA_AVX2)
constexpr int SCORES = 6, VALUES = 4, VALUE_QUERIES = 6;
constexpr bool SUMS_FIT = false;
#else
constexpr int SCORES = 4, VALUES = 4, VALUE_QUERIES = 4;
constexpr bool SUMS_FIT = false;
#endif
constexpr int fitting(int n, int sums) { return 4 * n <= sums ? 4 : 2 * n <= sums ? 2 : 1; }

INLINE int words_of(const KvView& kv) { return key_words(kv.head_dim); }
INLINE int quads_of(const KvView& kv) { return narrow_channels(kv.head_dim) / 4; }  // index of the first of them
INLINE bool is_loose(const KvView& kv) { return kv.block_size % TILE != 0; }
INLINE int64_t key_scales(const KvView& kv) { return static_cast<int64_t>(kv.block_size) * words_of(kv) * 4; }
INLINE int64_t value_scales(const KvView& kv) {
    return kv.values + static_cast<int64_t>(kv.block_size) * kv.padded_dim;
}

// --- Rows of integers ------------------------------------------------------------------------------------------------

// Magnitudes, and the largest of them.
INLINE F largest_of(const float* x, int n) {
    F largest = zero();
    for (int i = 0; i < n; i += TILE) largest = larger(largest, abs(load_n(x + i, n - i)));
    return largest;
}

// The factor that converts numbers to integers in this unit, and the value of one such integer; NaN if the unit is not
// finite.
INLINE F into_integers(F unit) { return where_below(unit, LEAST, zero(), div(set1(1.0f), unit)); }
INLINE F worth_of_integers(F unit) { return where_below(unit, LEAST, zero(), add(unit, mul(unit, zero()))); }

// The unit of narrow channels for which these and the wide, finer ones stay within their limits; per lane.
INLINE F unit_of(const KvView& kv, const float* x) {
    const int narrow = narrow_channels(kv.head_dim);
    return larger(
        mul(largest_of(x, narrow), set1(1.0f / BYTE)),
        mul(largest_of(x + narrow, kv.head_dim - narrow), set1(static_cast<float>(1 << kv.finer) / kv.limit)));
}

// Calls put(sixteen integers, the first one's channel, whether they are wide), narrow ones first.
template <class Put> INLINE void each_sixteen(const KvView& kv, const float* x, F inverse, Put put) {
    const int narrow = narrow_channels(kv.head_dim), n = kv.head_dim;
    for (int c = 0; c < narrow; c += TILE) put(round_int(mul(load_n(x + c, narrow - c), inverse)), c, false);
    const F finer = mul(inverse, set1(static_cast<float>(1 << kv.finer)));
    for (int c = narrow; c < n; c += TILE) put(round_int(mul(load_n(x + c, n - c), finer)), c, true);
}

// Sixteen values of a query, in words that are interleaved with those of all queries.
template <bool WIDE> INLINE void put_words(I values, int32_t* to) {
    constexpr int WORDS = WIDE ? TILE / 2 : TILE / 4 * QUAD_PARTS;
    pair_t words[WORDS];
    if constexpr (WIDE) store_i16(reinterpret_cast<int16_t*>(words), values);
    else store_quads(words, values);
    UNROLL for (int j = 0; j < WORDS; j++) to[j * MOST] = words[j];
}

// The initial sums of all queries: they correct for keys being stored as unsigned bytes.
INLINE void find_starts(const int32_t* words, int count, int32_t* starts) {
    I sum = izero();
    int32_t sums[TILE];
    const quad_t ones = QUAD_PARTS == 1 ? 0x01010101 : 0x00010001;
    for (int j = 0; j < count; j++) dot_signed(sum, iload(words + j * MOST), &ones);
    istore(sums, sum);
    for (int i = 0; i < MOST; i++) starts[i] = -KEY_ZERO * sums[i];
}

void prepare_integers(const KvView& kv, Queries& queries, int32_t* room) {
    const int count = queries.count, n = kv.head_dim, quads = quads_of(kv) * QUAD_PARTS;
    int32_t* starts = room + (quads + words_of(kv) - quads_of(kv)) * MOST;
    auto* factors = reinterpret_cast<float*>(starts + MOST);
    float units[TILE][TILE], inverse[TILE], worth[TILE];
    for (int i = count; i < TILE; i++) store(units[i], zero());
    for (int i = 0; i < count; i++) store(units[i], unit_of(kv, queries.q + i * n));
    const F unit = largest_of_rows(units);
    store(inverse, into_integers(unit)), store(worth, worth_of_integers(unit));
    for (int i = 0; i < count; i++)
        each_sixteen(kv, queries.q + i * n, set1(inverse[i]), [&](I integers, int c, bool wide) {
            if (wide) put_words<true>(integers, room + (quads + (c - quads_of(kv) * 4) / 2) * MOST + i);
            else put_words<false>(integers, room + c / 4 * QUAD_PARTS * MOST + i);
        });
    find_starts(room, quads, starts);
    // In units of the wide channels of queries and keys.
    const float scale = queries.scale / static_cast<float>(1 << 2 * kv.finer);
    for (int i = 0; i < count; i++) factors[i] = worth[i] * scale;
    queries.words = room, queries.starts = starts, queries.factors = factors;
}

// --- The addresses of a split's keys, in groups of sixteen -----------------------------------------------------------

struct Span {
    int first, last;  // groups of the split that some query sees: [first, last)
    int64_t key_stride;
    const uint8_t* keys[SIXTEENS];
    const uint8_t* values[SIXTEENS];
    const float* key_scales[SIXTEENS];
    const float* value_scales[SIXTEENS];

    int first_chunk() const { return first / IN_CHUNK; }
    int last_chunk() const { return (last + IN_CHUNK - 1) / IN_CHUNK; }
    int chunks() const { return last_chunk() - first_chunk(); }
};

// Tokens that are not contiguous are copied first.
void gather(const KvView& kv, const Queries& queries, Range all, float* room, Span& span) {
    const int words = words_of(kv), padded = kv.padded_dim;
    auto* keys = reinterpret_cast<uint8_t*>(room);
    uint8_t* values = keys + words * 4 * SPLIT;
    float* key_scale = reinterpret_cast<float*>(values + padded * SPLIT);
    float* value_scale = key_scale + SPLIT;
    for (int64_t key = all.low; key < all.high; key++) {
        const int at = static_cast<int>(key % SPLIT);
        const uint8_t* block = block_of(kv, queries, key);
        const int64_t token = key % kv.block_size;
        const uint8_t* k = block + token * words * 4;
        const uint8_t* v = block + kv.values + token * padded;
        for (int p = 0; p < words; p++) memcpy(keys + (p * SPLIT + at) * 4, k + p * 4, 4);
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
    if (is_loose(kv)) return gather(kv, queries, all, room, span);
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

// The layout of keys for a pass: the number of words of narrow and of wide channels, and the shift from narrow products
// to wide ones.
struct Words {
    int quads, pairs, shift;
};

// N queries times G groups of sixteen keys. The following groups are prefetched meanwhile: blocks are not contiguous,
// so the hardware prefetcher does not fetch them.
template <int N, int G>
void score(const Span& span, int g0, const int32_t* q, const int32_t* starts, Words words, float* out) {
    const uint8_t *at[G], *ahead[G];
    const int left = span.last - g0 - 1;
    const int64_t next_key = span.key_stride, next_ahead = g0 + G < span.last ? next_key : 64;
    I acc[G][N];
    UNROLL for (int g = 0; g < G; g++) {
        const int mine = g0 + (g < left ? g : left), next = mine + G;  // the last group again if there are too few
        at[g] = span.keys[mine];
        ahead[g] = next < span.last ? span.keys[next] : span.values[span.first + (g < left ? g : left)];
        UNROLL for (int n = 0; n < N; n++) acc[g][n] = iset1(starts[n]);
    }
    UNROLL for (int part = 0; part < QUAD_PARTS; part++) {
        const quad_t* with = q + part * MOST;
#pragma GCC unroll 1
        for (int p = 0; p < words.quads; p++, with += QUAD_PARTS * MOST) {
            I k[G];
            UNROLL for (int g = 0; g < G; g++) {
                const I word = iload(at[g] + p * next_key);
                k[g] = part ? key_part<1>(word) : key_part<0>(word);
            }
            if (part == 0) UNROLL for (int g = 0; g < G; g++) __builtin_prefetch(ahead[g] + p * next_ahead);
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int g = 0; g < G; g++) dot_unsigned(acc[g][n], k[g], with + n);
        }
    }
    UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int g = 0; g < G; g++) acc[g][n] = ishl(acc[g][n], words.shift);
    const pair_t* with = q + words.quads * QUAD_PARTS * MOST;
#pragma GCC unroll 1
    for (int p = words.quads; p < words.quads + words.pairs; p++, with += MOST) {
        I k[G];
        UNROLL for (int g = 0; g < G; g++) k[g] = iload(at[g] + p * next_key);
        UNROLL for (int g = 0; g < G; g++) __builtin_prefetch(ahead[g] + p * next_ahead);
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int g = 0; g < G; g++) dot_pairs(acc[g][n], k[g], with + n);
    }
    UNROLL for (int g = 0; g < G; g++) {
        if (g > left) break;
        const F scale = load(span.key_scales[g0 + g]);
        UNROLL for (int n = 0; n < N; n++) store(out + n * SPLIT + (g0 + g) * TILE, mul(to_float(acc[g][n]), scale));
    }
}

// --- Weights ---------------------------------------------------------------------------------------------------------

// The parameters of one query's softmax: weight = 2^(slope · score - maximum), for the keys [low, high) of the split.
struct Softmax {
    float slope, maximum;
    int low, high;
};
INLINE F masked(F x, const Softmax& how, int key, float other) { return keep(x, how.low - key, how.high - key, other); }

// NaN if the score of a visible key is NaN.
INLINE float spoilt(const Span& span, const Softmax& how) {
    F sum = zero();
    for (int g = span.first; g < span.last; g++)
        sum = add(sum, mul(zero(), masked(load(span.key_scales[g]), how, g * TILE, 0.0f)));
    return hsum(sum);
}

// Scores do not include the query's factor, which is never negative.
INLINE Softmax study(const Queries& queries, const Span& span, int n, int split, float* row) {
    const Range range = seen(queries, n, split);
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    Softmax how = {queries.factors[n] * LOG2E, 0.0f, static_cast<int>(range.low - start),
                   static_cast<int>(range.high - start)};
    if (queries.softcap != 0.0f) {
        const F inner = set1(queries.factors[n] / queries.softcap);
        for (int g = span.first; g < span.last; g++) store(row + g * TILE, tanh(mul(load(row + g * TILE), inner)));
        how.slope = queries.softcap * LOG2E;
    }
    F most = set1(LOWEST), other = most;
    const int from = (how.low + TILE - 1) / TILE, to = how.high / TILE;
    int g = span.first;
    for (; g < from && g < span.last; g++) most = max(most, masked(load(row + g * TILE), how, g * TILE, LOWEST));
    for (; g + 1 < to; g += 2) most = max(most, load(row + g * TILE)), other = max(other, load(row + (g + 1) * TILE));
    for (; g < span.last; g++) most = max(most, masked(load(row + g * TILE), how, g * TILE, LOWEST));
    how.maximum = how.slope * hmax(max(most, other));
    return how;
}

// Scores of a query become weights times the values' scales, as floats. Returns the sum of the weights without the
// scales, or NaN if scores overflow; `largest` gets the largest scaled weights of each chunk, per lane.
INLINE float softmax(const Span& span, const Softmax& how, float* row, float (*largest)[TILE]) {
    constexpr float UNITS = 1 << 23;
    const float slope = how.slope * UNITS, offset = how.maximum * -UNITS;
    const F slopes = set1(slope), offsets = set1(offset);
    F sum = zero();
    const auto weigh = [&](int g, F& most, bool whole) {
        F w = exp2_of_units(fma(load(row + g * TILE), slopes, offsets)), scaled = mul(w, load(span.value_scales[g]));
        if (!whole) w = masked(w, how, g * TILE, 0.0f), scaled = masked(scaled, how, g * TILE, 0.0f);
        store(row + g * TILE, scaled);
        sum = add(sum, w), most = larger(most, scaled);
    };
    const auto some = [&](int c) {
        F most = zero();
        for (int g = c * IN_CHUNK; g < (c + 1) * IN_CHUNK; g++)
            if (g >= span.first && g < span.last) weigh(g, most, false);
        store(*largest++, most);
    };
    constexpr int KEYS = IN_CHUNK * TILE;
    const int from = (how.low + KEYS - 1) / KEYS, to = how.high / KEYS, last = span.last_chunk();
    int c = span.first_chunk();
    for (; c < from && c < last; c++) some(c);
    for (; c < to; c++) {
        F most = zero();
        UNROLL for (int g = 0; g < IN_CHUNK; g++) weigh(c * IN_CHUNK + g, most, true);
        store(*largest++, most);
    }
    for (; c < last; c++) some(c);
    return hsum(sum) + 0.0f * (slope + offset);
}

// Rounds weights to 8 bits, in a unit per chunk. Weights outside the span are arbitrary.
INLINE void round_weights(const Span& span, const float* row, const float* inverse, quad_t* to) {
    for (int c = span.first_chunk(); c < span.last_chunk(); c++) {
        const F times = set1(*inverse++);
        UNROLL for (int g = c * IN_CHUNK; g < (c + 1) * IN_CHUNK; g++)
            store_products(to + g * (TILE / 4) * QUAD_PARTS, load(row + g * TILE), times);
    }
}

// Each stage is done for all queries before the next one, so that the processor can overlap their latencies. parts[n]
// gets the numbers that follow the sums of values; units are [query][chunk of the span].
INLINE void find_weights(const Queries& queries, const Span& span, Range all, int split, float* scores, quad_t* weights,
                         float* units, float* parts, int stride) {
    const int count = queries.count, chunks = span.chunks();
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    const Softmax everyone = {0.0f, 0.0f, static_cast<int>(all.low - start), static_cast<int>(all.high - start)};
    const bool sound = spoilt(span, everyone) == 0.0f;
    Softmax how[MOST];
    float largest[MOST * CHUNKS][TILE], inverse[MOST * CHUNKS];
    for (int n = 0; n < count; n++) how[n] = study(queries, span, n, split, scores + n * SPLIT);
    for (int n = 0; n < count; n++) {
        const float sum = softmax(span, how[n], scores + n * SPLIT, largest + n * chunks);
        parts[n * stride] = how[n].maximum;
        parts[n * stride + 1] = sound ? sum : sum + spoilt(span, how[n]);
    }
    for (int row = count * chunks; row % TILE; row++) store(largest[row], zero());
    for (int row = 0; row < count * chunks; row += TILE) {
        const F most = max(set1(LEAST), largest_of_rows(largest + row));
        store(inverse + row, div(set1(WEIGHT), most));
        store(units + row, mul(most, set1(1.0f / WEIGHT)));
    }
    for (int n = 0; n < count; n++)
        round_weights(span, scores + n * SPLIT, inverse + n * chunks, weights + n * (SPLIT / 4) * QUAD_PARTS);
}

// --- Values ----------------------------------------------------------------------------------------------------------

// parts[n] += Σ weight · value for C times sixteen channels.
template <int N, int C>
void weigh_values(const Span& span, int padded, const quad_t* weights, const float* units, int c, float* parts) {
    constexpr int QUADS = TILE / 4;
    const auto part = [&](int n, int i) { return parts + n * (padded + TILE) + c + i * TILE; };
    F sum[C][N];
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) sum[i][n] = zero();
    for (int g = span.first; g < span.last; units++) {
        I acc[C][N];
        UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) acc[i][n] = izero();
        const int first = g, chunk = g / IN_CHUNK;
        const int last = (chunk + 1) * IN_CHUNK < span.last ? (chunk + 1) * IN_CHUNK : span.last;
        UNROLL for (int p = 0; p < QUAD_PARTS; p++)
            for (g = first; g < last; g++) {
                const uint8_t* v = span.values[g] + c * 4;
                const uint8_t* ahead = span.values[g + 4 < span.last ? g + 4 : g] + c * 4;
                const quad_t* w = weights + g * QUADS * QUAD_PARTS + p;
#pragma GCC unroll 1
                for (int j = 0; j < QUADS; j++, v += padded * 4, ahead += padded * 4, w += QUAD_PARTS) {
                    I value[C];
                    UNROLL for (int i = 0; i < C; i++) {
                        const I bytes = iload(v + i * 64);
                        value[i] = p ? value_part<1>(bytes) : value_part<0>(bytes);
                    }
                    if (p == 0) UNROLL for (int i = 0; i < C; i++) __builtin_prefetch(ahead + i * 64);
                    UNROLL for (int n = 0; n < N; n++)
                        UNROLL for (int i = 0; i < C; i++)
                            dot_signed(acc[i][n], value[i], w + n * (SPLIT / 4) * QUAD_PARTS);
                }
            }
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int i = 0; i < C; i++) {
                const F before = SUMS_FIT ? sum[i][n] : load(part(n, i));
                sum[i][n] = fma(to_float(acc[i][n]), set1(units[n * span.chunks()]), before);
                if (!SUMS_FIT) store(part(n, i), sum[i][n]);
            }
    }
    if (!SUMS_FIT) return;
    UNROLL for (int n = 0; n < N; n++) UNROLL for (int i = 0; i < C; i++) store(part(n, i), sum[i][n]);
}

void score_all(const KvView& kv, const Queries& queries, const Span& span, float* scores) {
    const Words words = {quads_of(kv), words_of(kv) - quads_of(kv), 2 * kv.finer};
    for (int near = span.first; near < span.last; near += IN_CACHE)
        in_pieces(queries.count, [&](auto number, int done) {
            constexpr int N = decltype(number)::value, G = fitting(N, SCORES);
            for (int g = near; g < near + IN_CACHE && g < span.last; g += G)
                score<N, G>(span, g, queries.words + done, queries.starts + done, words, scores + done * SPLIT);
        });
}

void attend_integers(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts) {
    const int count = queries.count, padded = kv.padded_dim, stride = padded + TILE;
    Range all = seen(queries, 0, split);
    for (int n = 1; n < count; n++) {
        const Range range = seen(queries, n, split);
        if (range.low < range.high) all = {lower(all.low, range.low), higher(all.high, range.high)};
    }
    if (all.low >= all.high) return;  // no query reads these parts
    if (!SUMS_FIT)
        for (int n = 0; n < count; n++)
            for (int c = 0; c < padded; c += TILE) store(parts + n * stride + c, zero());
    float* scores = scratch;
    auto* weights = reinterpret_cast<quad_t*>(scratch + count * SPLIT);
    Span span;
    find_span(kv, queries, split, all, scratch + count * SPLIT * 3 / 2, span);
    score_all(kv, queries, span, scores);
    float units[MOST * CHUNKS];
    find_weights(queries, span, all, split, scores, weights, units, parts + padded, stride);
    in_pieces<VALUE_QUERIES>(count, [&](auto number, int done) {
        constexpr int N = decltype(number)::value, C = fitting(N, VALUES);
        const quad_t* w = weights + done * (SPLIT / 4) * QUAD_PARTS;
        const float* of_weights = units + done * span.chunks();
        float* to = parts + done * stride;
        int c = 0;
        for (; c + C * TILE <= padded; c += C * TILE) weigh_values<N, C>(span, padded, w, of_weights, c, to);
        if constexpr (C > 1)
            for (; c < padded; c += TILE) weigh_values<N, 1>(span, padded, w, of_weights, c, to);
    });
}

// --- Storing ---------------------------------------------------------------------------------------------------------

// Sixteen values of a key are stored in words that are `next` bytes apart.
INLINE void put_key(I values, bool wide, int count, uint8_t* to, int64_t next) {
    uint8_t bytes[2 * TILE];
    if (wide) store_i16(reinterpret_cast<int16_t*>(bytes), values);
    else store_bytes(bytes, iadd(values, KEY_ZERO));
    for (int j = 0; j * (wide ? 2 : 4) < count; j++) memcpy(to + j * next, bytes + 4 * j, 4);
}

void store_integers(const KvView& kv, int64_t block, int offset, const float* key, const float* value) {
    uint8_t* keys = const_cast<uint8_t*>(kv.base) + block * kv.block_stride;
    uint8_t* values = keys + kv.values;
    const int n = kv.head_dim, m = kv.value_dim, narrow = quads_of(kv) * 4, padded = kv.padded_dim;
    const bool loose = is_loose(kv);
    const F key_unit = set1(hlargest(unit_of(kv, key)));
    const F value_unit = set1(hlargest(largest_of(value, m)) * (1.0f / BYTE)), inverse = into_integers(value_unit);
    const float key_scale = first(worth_of_integers(key_unit)), value_scale = first(worth_of_integers(value_unit));
    uint8_t* k = keys + static_cast<int64_t>(offset) * (loose ? words_of(kv) : 1) * 4;
    const int64_t next = (loose ? 1 : kv.block_size) * 4;
    uint8_t* v = values + static_cast<int64_t>(loose ? offset : offset / 4 * 4) * padded;
    each_sixteen(kv, key, into_integers(key_unit), [&](I integers, int c, bool wide) {
        const int end = wide ? n : narrow, word = wide ? quads_of(kv) + (c - narrow) / 2 : c / 4;
        put_key(integers, wide, end - c < TILE ? end - c : TILE, k + word * next, next);
    });
    for (int i = 0; i < m; i += TILE) {
        const I integers = round_int(mul(load_n(value + i, m - i), inverse));
        if (loose) store_bytes(v + i, integers);
        else store_of_quads(v + i * 4, offset % 4, integers);
    }
    memcpy(keys + key_scales(kv) + offset * 4, &key_scale, 4);
    memcpy(keys + value_scales(kv) + offset * 4, &value_scale, 4);
}

}  // namespace unspool::KERNEL_ISA

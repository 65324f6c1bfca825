// Attention over blocks of keys and values.
//
// A split of 256 keys, counted from position 0, has its own softmax: scores, their maximum, weights, their sum, and
// weighted values in the order of the keys. Splits are merged in order. So a query's bits depend only on its own keys,
// whatever other queries share its pass, and splits may be computed separately.
#include "kernels/attention.h"

namespace unspool::KERNEL_ISA {

struct F16Element {
    using type = uint16_t;
    INLINE F read(const uint16_t* p) { return load_f16(p); }
};
struct F32Element {
    using type = float;
    INLINE F read(const float* p) { return load(p); }
};

// Sixteen keys, channel after channel; gathered if the block size is not a multiple of sixteen.
template <class E> void gather_keys(const KvView& kv, const Queries& queries, int64_t key, int64_t last, float* out) {
    using T = typename E::type;
    for (int lane = 0; lane < TILE; lane++) {
        if (key + lane > last) {
            for (int d = 0; d < kv.head_dim; d++) out[d * TILE + lane] = 0.0f;
            continue;
        }
        const T* source = reinterpret_cast<const T*>(block_of(kv, queries, key + lane)) + (key + lane) % kv.block_size;
        for (int d = 0; d < kv.head_dim; d++) {
            T one[TILE] = {source[d * kv.block_size]};
            float wide[TILE];
            store(wide, E::read(one));
            out[d * TILE + lane] = wide[0];
        }
    }
}

// Prefetches what is read two blocks later: the keys of a split, then its values, then the next split's. Blocks are not
// contiguous, so the hardware prefetcher does not fetch the next one.
INLINE const uint8_t* soon(const KvView& kv, const Queries& queries, Range all, int64_t key, bool is_value) {
    const int64_t first = all.low / kv.block_size, count = (all.high - 1) / kv.block_size - first + 1;
    int64_t block = key / kv.block_size - first + 2;
    bool values = is_value;
    if (block >= count) {
        block -= count;
        values = !is_value;
        if (is_value) block += count;
    }
    if (block >= count + (is_value ? 2 : 0) || (first + block) * kv.block_size > queries.last[0]) block = 0;
    return kv.base + queries.table[first + block] * kv.block_stride + (values ? kv.values : 0);
}

// Scores of G times sixteen keys for N queries.
template <class E, int N, int G> void score(const typename E::type* keys, int64_t stride, const float* q, int head_dim,
                                            const uint8_t* ahead, float* out) {
    F acc[G][N];
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int n = 0; n < N; n++) acc[g][n] = zero();
    for (int d = 0; d < head_dim; d++) {
        __builtin_prefetch(ahead + d * 64);
        F k[G];
        UNROLL for (int g = 0; g < G; g++) k[g] = E::read(keys + d * stride + g * TILE);
        UNROLL for (int n = 0; n < N; n++) {
            F factor = set1(q[n * head_dim + d]);
            UNROLL for (int g = 0; g < G; g++) acc[g][n] = fma(factor, k[g], acc[g][n]);
        }
    }
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int n = 0; n < N; n++) store(out + n * SPLIT + g * TILE, acc[g][n]);
}

constexpr int at_once(int n, int most) {  // how many accumulators of a kind fit in registers with n queries: 4, 2 or 1
    return 4 * n <= MOST && most >= 4 ? 4 : 2 * n <= MOST ? 2 : 1;
}

// parts[n] += Σ weight · value over keys [from, to), in order; for C times sixteen channels at once.
template <class E, int N, int C> INLINE void weigh_channels(const KvView& kv, const Queries& queries, Range all,
                                                            int64_t from, int64_t to, const float* weights, int c,
                                                            float* parts) {
    using T = typename E::type;
    const int stride = kv.padded_dim + TILE;
    F acc[C][N];
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++) acc[i][n] =
        load(parts + n * stride + c + i * TILE);
    for (int64_t key = from; key < to;) {
        const int offset = static_cast<int>(key % kv.block_size);
        const int64_t left = kv.block_size - offset, run = left < to - key ? left : to - key;
        const T* v = reinterpret_cast<const T*>(block_of(kv, queries, key) + kv.values) + offset * kv.padded_dim + c;
        const float* w = weights + key % SPLIT;
        const uint8_t* ahead = soon(kv, queries, all, key, true) + offset * 128;
        for (int64_t k = 0; k < run; k++) {
            if constexpr (C > 1) __builtin_prefetch(ahead + k * 128), __builtin_prefetch(ahead + k * 128 + 64);
            F value[C];
            UNROLL for (int i = 0; i < C; i++) value[i] = E::read(v + k * kv.padded_dim + i * TILE);
            UNROLL for (int n = 0; n < N; n++) {
                F factor = set1(w[n * SPLIT + k]);
                UNROLL for (int i = 0; i < C; i++) acc[i][n] = fma(factor, value[i], acc[i][n]);
            }
        }
        key += run;
    }
    UNROLL for (int i = 0; i < C; i++) UNROLL for (int n = 0; n < N; n++)
        store(parts + n * stride + c + i * TILE, acc[i][n]);
}

template <class E, int N> void weigh(const KvView& kv, const Queries& queries, Range all, int64_t from, int64_t to,
                                     const float* weights, float* parts) {
    constexpr int C = at_once(N, 4);
    int c = 0;
    for (; c + C * TILE <= kv.padded_dim; c += C * TILE)
        weigh_channels<E, N, C>(kv, queries, all, from, to, weights, c, parts);
    if constexpr (C > 1)
        for (; c < kv.padded_dim; c += TILE) weigh_channels<E, N, 1>(kv, queries, all, from, to, weights, c, parts);
}

template <class E> INLINE void weigh_some(const KvView& kv, const Queries& queries, Range all, int from_query,
                                          int to_query, int64_t from, int64_t to, const float* weights, float* parts) {
    if (from >= to) return;
    in_pieces(to_query - from_query, [&](auto n, int done) {
        const int q = from_query + done;
        weigh<E, decltype(n)::value>(kv, queries, all, from, to, weights + q * SPLIT,
                                     parts + q * (kv.padded_dim + TILE));
    });
}

INLINE void scale_scores(const Queries& queries, float* out) {
    for (int n = 0; n < queries.count; n++) {
        F s = mul(load(out + n * SPLIT), set1(queries.scale));
        if (queries.softcap != 0.0f) s = mul(set1(queries.softcap), tanh(div(s, set1(queries.softcap))));
        store(out + n * SPLIT, s);
    }
}

template <class E>
void scores_of_split(const KvView& kv, const Queries& queries, Range all, float* weights, float* keys) {
    using T = typename E::type;
    const bool whole = kv.block_size % TILE == 0, pairs = kv.block_size % (2 * TILE) == 0;
    for (int64_t key = all.low / TILE * TILE; key < all.high;) {
        float* out = weights + key % SPLIT;
        // Two groups of sixteen at once if they are in one block and registers allow it.
        const int groups = pairs && key % (2 * TILE) == 0 && key + TILE < all.high && queries.count <= MOST / 2 ? 2 : 1;
        if (whole) {
            const uint8_t* block = block_of(kv, queries, key);
            const uint8_t* ahead = soon(kv, queries, all, key, false);
            const T* at = reinterpret_cast<const T*>(block) + key % kv.block_size;
            in_pieces(queries.count, [&](auto n, int done) {
                constexpr int N = decltype(n)::value;
                const float* q = queries.q + done * kv.head_dim;
                if constexpr (2 * N <= MOST) {
                    if (groups == 2)
                        return score<E, N, 2>(at, kv.block_size, q, kv.head_dim, ahead, out + done * SPLIT);
                }
                score<E, N, 1>(at, kv.block_size, q, kv.head_dim, ahead, out + done * SPLIT);
            });
        } else {
            gather_keys<E>(kv, queries, key, all.high - 1, keys);
            in_pieces(queries.count, [&](auto n, int done) {
                const float* q = queries.q + done * kv.head_dim;
                score<F32Element, decltype(n)::value, 1>(keys, TILE, q, kv.head_dim,
                                                         reinterpret_cast<const uint8_t*>(keys), out + done * SPLIT);
            });
        }
        for (int g = 0; g < groups; g++, key += TILE, out += TILE) scale_scores(queries, out);
    }
}

// Scores become weights e^(score - maximum), zero for keys that the query does not see.
void softmax_of_split(const KvView& kv, const Queries& queries, Range all, int n, int split, float* weights,
                      float* part) {
    const Range range = seen(queries, n, split);
    const int64_t begin = all.low / TILE * TILE;
    float* row = weights + n * SPLIT;
    F most = set1(NEVER);
    for (int64_t key = begin; key < all.high; key += TILE) {
        F s =
            keep(load(row + key % SPLIT), static_cast<int>(range.low - key), static_cast<int>(range.high - key), NEVER);
        store(row + key % SPLIT, s);
        most = max(most, s);
    }
    const float maximum = hmax(most);
    F sum = zero();
    for (int64_t key = begin; key < all.high; key += TILE) {
        F w = exp(sub(load(row + key % SPLIT), set1(maximum)));
        w = keep(w, static_cast<int>(range.low - key), static_cast<int>(range.high - key), 0.0f);
        sum = add(sum, w);
        store(row + key % SPLIT, w);
    }
    part[kv.padded_dim] = maximum;
    part[kv.padded_dim + 1] = hsum(sum);
}

template <class E> void attend_as(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts) {
    const int count = queries.count, stride = kv.padded_dim + TILE;
    float* weights = scratch;
    Range all = seen(queries, 0, split), common = all;
    for (int n = 1; n < count; n++) {
        Range range = seen(queries, n, split);
        all = {lower(all.low, range.low), higher(all.high, range.high)};
        common = {higher(common.low, range.low), lower(common.high, range.high)};
    }
    for (int n = 0; n < count; n++)
        for (int c = 0; c < stride; c += TILE) store(parts + n * stride + c, zero());
    if (all.low >= all.high) return;
    scores_of_split<E>(kv, queries, all, weights, scratch + count * SPLIT);
    for (int n = 0; n < count; n++) softmax_of_split(kv, queries, all, n, split, weights, parts + n * stride);

    // Keys that all queries see are processed together. Those before and after are processed query by query: even with
    // weight 0, an invisible value that is infinite would make the result NaN.
    if (common.low >= common.high) common = {all.high, all.high};
    for (int n = 0; n < count; n++) {
        Range range = seen(queries, n, split);
        weigh_some<E>(kv, queries, all, n, n + 1, range.low, lower(common.low, range.high), weights, parts);
    }
    weigh_some<E>(kv, queries, all, 0, count, common.low, common.high, weights, parts);
    for (int n = 0; n < count; n++) {
        Range range = seen(queries, n, split);
        weigh_some<E>(kv, queries, all, n, n + 1, higher(common.high, range.low), range.high, weights, parts);
    }
}

void attend(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts) {
    if (kv.type == KV_Q8) attend_integers(kv, queries, split, scratch, parts);
    else if (kv.type == KV_F16) attend_as<F16Element>(kv, queries, split, scratch, parts);
    else attend_as<F32Element>(kv, queries, split, scratch, parts);
}

void merge(const Queries& queries, int split, int padded_dim, const float* parts, float* state) {
    const int stride = padded_dim + TILE;
    bool is_fresh[TILE] = {}, is_seen[TILE] = {};
    float ours[TILE] = {}, theirs[TILE] = {}, most[TILE], keep_ours[TILE], keep_theirs[TILE];
    for (int n = 0; n < queries.count; n++) {
        const Range range = seen(queries, n, split);
        is_seen[n] = range.low < range.high;
        is_fresh[n] = static_cast<int64_t>(split) * SPLIT <= queries.first[n];
        if (is_seen[n]) theirs[n] = parts[n * stride + padded_dim];
        if (is_seen[n] && !is_fresh[n]) ours[n] = state[n * stride + padded_dim];
    }
    const F maximum = max(load(theirs), load(ours));
    const auto power = [&](F x) { return queries.base2 ? exp2(x) : exp(x); };
    store(most, maximum);
    store(keep_ours, power(sub(load(ours), maximum)));
    store(keep_theirs, power(sub(load(theirs), maximum)));
    for (int n = 0; n < queries.count; n++, parts += stride, state += stride) {
        if (!is_seen[n]) continue;
        if (is_fresh[n]) {
            for (int c = 0; c < stride; c += TILE) store(state + c, load(parts + c));
            continue;
        }
        for (int c = 0; c < padded_dim; c += TILE)
            store(state + c, fma(load(state + c), set1(keep_ours[n]), mul(load(parts + c), set1(keep_theirs[n]))));
        state[padded_dim] = most[n];
        state[padded_dim + 1] = state[padded_dim + 1] * keep_ours[n] + parts[padded_dim + 1] * keep_theirs[n];
    }
}

void finish(const float* state, int head_dim, int padded_dim, const float* sink, bool base2, float* out) {
    float total = state[padded_dim + 1];
    if (sink) {
        const F most = set1(state[padded_dim]);
        if (base2) total += first(exp2(min(set1(126.0f), sub(set1(*sink * LOG2E), most))));
        else total += first(exp(sub(set1(*sink), most)));
    }
    F inverse = set1(1.0f / total);
    for (int c = 0; c < head_dim; c += TILE) store_n(out + c, mul(load(state + c), inverse), head_dim - c);
}

// --- Storing ---------------------------------------------------------------------------------------------------------

void store_kv(const KvView& kv, int64_t block, int offset, const float* key, const float* value) {
    if (kv.type == KV_Q8) return store_integers(kv, block, offset, key, value);
    uint8_t* keys = const_cast<uint8_t*>(kv.base) + block * kv.block_stride;
    uint8_t* values = keys + kv.values;
    const int n = kv.head_dim, m = kv.value_dim, size = kv.block_size, padded = kv.padded_dim;
    if (kv.type == KV_F32) {
        for (int d = 0; d < n; d++) reinterpret_cast<float*>(keys)[d * size + offset] = key[d];
        for (int d = 0; d < m; d++) reinterpret_cast<float*>(values)[offset * padded + d] = value[d];
        for (int d = m; d < padded; d++) reinterpret_cast<float*>(values)[offset * padded + d] = 0.0f;
    } else {
        for (int c = 0; c < n; c += TILE) {
            uint16_t half[TILE];
            store_f16(half, load_n(key + c, n - c));
            for (int i = 0; i < TILE && c + i < n; i++)
                reinterpret_cast<uint16_t*>(keys)[(c + i) * size + offset] = half[i];
        }
        for (int c = 0; c < m; c += TILE)
            store_f16(reinterpret_cast<uint16_t*>(values) + offset * padded + c, load_n(value + c, m - c));
    }
}

void prepare(const KvView& kv, Queries& queries, int32_t* room) {
    if (kv.type == KV_Q8) prepare_integers(kv, queries, room);
}

void fill_attention(Kernels& kernels) {
    kernels.prepare = prepare;
    kernels.max_queries = MOST;
    kernels.store_kv = store_kv;
    kernels.attend = attend;
    kernels.merge = merge;
    kernels.finish = finish;
}

}  // namespace unspool::KERNEL_ISA

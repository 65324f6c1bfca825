// Attention over blocks of keys and values.
//
// A split of 128 keys, counted from position 0, has a softmax of its own: scores, their maximum, weights, their sum,
// weighted values in the order of the keys. Splits merge in order. So a query's bits depend on its own keys alone,
// whoever else looks at them in the same pass, and splits may be computed apart.
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

#if defined(KERNEL_ISA_AVX512)
constexpr int MOST = 12;
#elif defined(KERNEL_ISA_AVX2)
constexpr int MOST = 6;
#else
constexpr int MOST = 4;
#endif
constexpr float NEVER = -__builtin_inff();

struct F16Element {
    using type = uint16_t;
    INLINE F read(const uint16_t* p) { return load_f16(p); }
};
struct F32Element {
    using type = float;
    INLINE F read(const float* p) { return load(p); }
};
struct Q8Element {
    using type = int8_t;
    INLINE F read(const int8_t* p) { return load_i8(p); }
};

INLINE const uint8_t* block_of(const KvView& kv, const Queries& queries, int64_t key) {
    return kv.base + queries.table[key / kv.block_size] * kv.block_stride;
}

template <class E> INLINE int64_t key_bytes(const KvView& kv) {
    return static_cast<int64_t>(kv.block_size) * kv.head_dim * static_cast<int64_t>(sizeof(typename E::type));
}

template <class E> INLINE int64_t value_bytes(const KvView& kv) {
    return static_cast<int64_t>(kv.block_size) * kv.padded_dim * static_cast<int64_t>(sizeof(typename E::type));
}

// Sixteen keys side by side, channel after channel, gathered where a block holds no whole sixteen.
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

// The scales of sixteen 8-bit keys or values, which lie at `offset` of each block.
INLINE F gather_scales(const KvView& kv, const Queries& queries, int64_t key, int64_t last, int64_t offset) {
    float scales[TILE] = {};
    for (int lane = 0; lane < TILE && key + lane <= last; lane++) {
        const uint8_t* at = block_of(kv, queries, key + lane) + offset + (key + lane) % kv.block_size * 4;
        memcpy(scales + lane, at, 4);
    }
    return load(scales);
}

template <class E, int N>
void score(const typename E::type* keys, int64_t stride, const float* q, int head_dim, float* out) {
    F acc[N];
    UNROLL for (int n = 0; n < N; n++) acc[n] = zero();
    for (int d = 0; d < head_dim; d++) {
        F k = E::read(keys + d * stride);
        UNROLL for (int n = 0; n < N; n++) acc[n] = fma(set1(q[n * head_dim + d]), k, acc[n]);
    }
    UNROLL for (int n = 0; n < N; n++) store(out + n * SPLIT, acc[n]);
}

template <class E>
INLINE void score_some(int count, const typename E::type* keys, int64_t stride, const float* q, int head_dim, float* out) {
    while (count > 0) {
        int n = count;
#if defined(KERNEL_ISA_AVX512)
        if (n >= 12) score<E, 12>(keys, stride, q, head_dim, out), n = 12;
        else if (n >= 9) score<E, 9>(keys, stride, q, head_dim, out), n = 9;
        else if (n >= 8) score<E, 8>(keys, stride, q, head_dim, out), n = 8;
        else
#endif
#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
        if (n >= 6) score<E, 6>(keys, stride, q, head_dim, out), n = 6;
        else
#endif
        if (n >= 4) score<E, 4>(keys, stride, q, head_dim, out), n = 4;
        else if (n == 3) score<E, 3>(keys, stride, q, head_dim, out);
        else if (n == 2) score<E, 2>(keys, stride, q, head_dim, out);
        else score<E, 1>(keys, stride, q, head_dim, out);
        count -= n, q += n * head_dim, out += n * SPLIT;
    }
}

// parts[n] += Σ weight · value over keys [from, to), in order.
template <class E, int N>
void weigh(const KvView& kv, const Queries& queries, int64_t from, int64_t to, const float* weights, float* parts) {
    using T = typename E::type;
    const int stride = kv.padded_dim + TILE;
    for (int c = 0; c < kv.padded_dim; c += TILE) {
        F acc[N];
        UNROLL for (int n = 0; n < N; n++) acc[n] = load(parts + n * stride + c);
        for (int64_t key = from; key < to;) {
            const int offset = static_cast<int>(key % kv.block_size);
            const int64_t left = kv.block_size - offset, run = left < to - key ? left : to - key;
            const T* v = reinterpret_cast<const T*>(block_of(kv, queries, key) + kv.values) + offset * kv.padded_dim + c;
            const float* w = weights + key % SPLIT;
            for (int64_t i = 0; i < run; i++) {
                F value = E::read(v + i * kv.padded_dim);
                UNROLL for (int n = 0; n < N; n++) acc[n] = fma(set1(w[n * SPLIT + i]), value, acc[n]);
            }
            key += run;
        }
        UNROLL for (int n = 0; n < N; n++) store(parts + n * stride + c, acc[n]);
    }
}

template <class E>
INLINE void weigh_some(const KvView& kv, const Queries& queries, int from_query, int to_query, int64_t from, int64_t to,
                       const float* weights, float* parts) {
    if (from >= to) return;
    const int stride = kv.padded_dim + TILE;
    for (int q = from_query; q < to_query;) {
        int n = to_query - q;
        const float* w = weights + q * SPLIT;
        float* p = parts + q * stride;
#if defined(KERNEL_ISA_AVX512)
        if (n >= 12) weigh<E, 12>(kv, queries, from, to, w, p), n = 12;
        else if (n >= 9) weigh<E, 9>(kv, queries, from, to, w, p), n = 9;
        else if (n >= 8) weigh<E, 8>(kv, queries, from, to, w, p), n = 8;
        else
#endif
#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
        if (n >= 6) weigh<E, 6>(kv, queries, from, to, w, p), n = 6;
        else
#endif
        if (n >= 4) weigh<E, 4>(kv, queries, from, to, w, p), n = 4;
        else if (n == 3) weigh<E, 3>(kv, queries, from, to, w, p);
        else if (n == 2) weigh<E, 2>(kv, queries, from, to, w, p);
        else weigh<E, 1>(kv, queries, from, to, w, p);
        q += n;
    }
}

INLINE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys [low, high) of a split that a query sees.
struct Range {
    int64_t low, high;
};
INLINE Range seen(const Queries& queries, int n, int split) {
    const int64_t start = static_cast<int64_t>(split) * SPLIT;
    return {higher(start, queries.first[n]), lower(start + SPLIT, static_cast<int64_t>(queries.last[n]) + 1)};
}

template <class E>
void scores_of_split(const KvView& kv, const Queries& queries, Range all, float* weights, float* keys) {
    using T = typename E::type;
    const bool whole = kv.block_size % TILE == 0;
    for (int64_t key = all.low / TILE * TILE; key < all.high; key += TILE) {
        float* out = weights + key % SPLIT;
        if (whole) {
            const T* at = reinterpret_cast<const T*>(block_of(kv, queries, key)) + key % kv.block_size;
            score_some<E>(queries.count, at, kv.block_size, queries.q, kv.head_dim, out);
        } else {
            gather_keys<E>(kv, queries, key, all.high - 1, keys);
            score_some<F32Element>(queries.count, keys, TILE, queries.q, kv.head_dim, out);
        }
        F scale = set1(queries.scale);
        if constexpr (sizeof(T) == 1) scale = mul(scale, gather_scales(kv, queries, key, all.high - 1, key_bytes<E>(kv)));
        for (int n = 0; n < queries.count; n++) {
            F s = mul(load(out + n * SPLIT), scale);
            if (queries.softcap != 0.0f) s = mul(set1(queries.softcap), tanh(div(s, set1(queries.softcap))));
            store(out + n * SPLIT, s);
        }
    }
}

// Scores become weights e^(score - maximum), zero for keys that the query does not see.
template <class E>
void softmax_of_split(const KvView& kv, const Queries& queries, Range all, int n, int split, float* weights, float* part) {
    const Range range = seen(queries, n, split);
    const int64_t begin = all.low / TILE * TILE;
    float* row = weights + n * SPLIT;
    F most = set1(NEVER);
    for (int64_t key = begin; key < all.high; key += TILE) {
        F s = keep(load(row + key % SPLIT), static_cast<int>(range.low - key), static_cast<int>(range.high - key), NEVER);
        store(row + key % SPLIT, s);
        most = max(most, s);
    }
    const float maximum = hmax(most);
    F sum = zero();
    for (int64_t key = begin; key < all.high; key += TILE) {
        F w = exp(sub(load(row + key % SPLIT), set1(maximum)));
        w = keep(w, static_cast<int>(range.low - key), static_cast<int>(range.high - key), 0.0f);
        sum = add(sum, w);
        if constexpr (sizeof(typename E::type) == 1)
            w = mul(w, gather_scales(kv, queries, key, range.high - 1, kv.values + value_bytes<E>(kv)));
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
    for (int n = 0; n < count; n++) softmax_of_split<E>(kv, queries, all, n, split, weights, parts + n * stride);

    // Keys that all see go together; those before and after go query by query, so that none touches a value it must
    // not see: even a weight of zero would let another row's infinity in.
    if (common.low >= common.high) common = {all.high, all.high};
    for (int n = 0; n < count; n++) {
        Range range = seen(queries, n, split);
        weigh_some<E>(kv, queries, n, n + 1, range.low, lower(common.low, range.high), weights, parts);
    }
    weigh_some<E>(kv, queries, 0, count, common.low, common.high, weights, parts);
    for (int n = 0; n < count; n++) {
        Range range = seen(queries, n, split);
        weigh_some<E>(kv, queries, n, n + 1, higher(common.high, range.low), range.high, weights, parts);
    }
}

void attend(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts) {
    if (kv.type == KV_F16) attend_as<F16Element>(kv, queries, split, scratch, parts);
    else if (kv.type == KV_F32) attend_as<F32Element>(kv, queries, split, scratch, parts);
    else attend_as<Q8Element>(kv, queries, split, scratch, parts);
}

INLINE float exp_of(float x) {
    float out[16];
    store(out, exp(set1(x)));
    return out[0];
}

void merge(const Queries& queries, int split, int padded_dim, const float* parts, float* state) {
    const int stride = padded_dim + TILE;
    for (int n = 0; n < queries.count; n++, parts += stride, state += stride) {
        Range range = seen(queries, n, split);
        if (range.low >= range.high) continue;
        const bool fresh = static_cast<int64_t>(split) * SPLIT <= queries.first[n];
        const float ours = state[padded_dim], theirs = parts[padded_dim];
        const float most = fresh || theirs > ours ? theirs : ours;
        const float keep_ours = fresh ? 0.0f : exp_of(ours - most), keep_theirs = exp_of(theirs - most);
        if (fresh) {
            for (int c = 0; c < stride; c += TILE) store(state + c, load(parts + c));
            continue;
        }
        for (int c = 0; c < padded_dim; c += TILE)
            store(state + c, fma(load(state + c), set1(keep_ours), mul(load(parts + c), set1(keep_theirs))));
        state[padded_dim] = most;
        state[padded_dim + 1] = state[padded_dim + 1] * keep_ours + parts[padded_dim + 1] * keep_theirs;
    }
}

void finish(const float* state, int head_dim, int padded_dim, float* out) {
    F inverse = set1(1.0f / state[padded_dim + 1]);
    for (int c = 0; c < head_dim; c += TILE) store_n(out + c, mul(load(state + c), inverse), head_dim - c);
}

// --- Storing ---------------------------------------------------------------------------------------------------------

INLINE float scale_of(const float* x, int n) {
    float most = 0.0f;
    for (int i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most / 127.0f;
}

INLINE int8_t to_i8(float x, float inverse) {
    int8_t out[16];
    store_i8(out, round_int(set1(x * inverse)));
    return out[0];
}

INLINE uint16_t to_f16(float x) {
    uint16_t out[16];
    store_f16(out, set1(x));
    return out[0];
}

void store_kv(const KvView& kv, int64_t block, int offset, const float* key, const float* value) {
    uint8_t* keys = const_cast<uint8_t*>(kv.base) + block * kv.block_stride;
    uint8_t* values = keys + kv.values;
    const int n = kv.head_dim, size = kv.block_size, padded = kv.padded_dim;
    if (kv.type == KV_F32) {
        for (int d = 0; d < n; d++) reinterpret_cast<float*>(keys)[d * size + offset] = key[d];
        for (int d = 0; d < n; d++) reinterpret_cast<float*>(values)[offset * padded + d] = value[d];
        for (int d = n; d < padded; d++) reinterpret_cast<float*>(values)[offset * padded + d] = 0.0f;
    } else if (kv.type == KV_F16) {
        for (int c = 0; c < n; c += TILE) {
            uint16_t half[TILE];
            store_f16(half, load_n(key + c, n - c));
            for (int i = 0; i < TILE && c + i < n; i++) reinterpret_cast<uint16_t*>(keys)[(c + i) * size + offset] = half[i];
            store_f16(reinterpret_cast<uint16_t*>(values) + offset * padded + c, load_n(value + c, n - c));
        }
    } else {
        const float key_scale = scale_of(key, n), value_scale = scale_of(value, n);
        const float key_inverse = key_scale > 1e-30f ? 1.0f / key_scale : 0.0f;
        const float value_inverse = value_scale > 1e-30f ? 1.0f / value_scale : 0.0f;
        for (int d = 0; d < n; d++) reinterpret_cast<int8_t*>(keys)[d * size + offset] = to_i8(key[d], key_inverse);
        for (int d = 0; d < padded; d++)
            reinterpret_cast<int8_t*>(values)[offset * padded + d] = d < n ? to_i8(value[d], value_inverse) : int8_t{0};
        memcpy(keys + static_cast<int64_t>(size) * n + offset * 4, &key_scale, 4);
        memcpy(values + static_cast<int64_t>(size) * padded + offset * 4, &value_scale, 4);
    }
}

void fill_attention(Kernels& kernels) {
    kernels.max_queries = MOST;
    kernels.store_kv = store_kv;
    kernels.attend = attend;
    kernels.merge = merge;
    kernels.finish = finish;
}

}  // namespace unspool::KERNEL_ISA

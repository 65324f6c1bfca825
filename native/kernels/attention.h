// Shared by the attention kernels: which keys a query sees, and how queries are divided into pieces.
#pragma once
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
constexpr int MOST = 12;
#else
constexpr int MOST = 4;
#endif
constexpr float LOG2E = 1.44269504088896341f;
constexpr float NEVER = -__builtin_inff(), LOWEST = -3e38f;

INLINE const uint8_t* block_of(const KvView& kv, const Queries& queries, int64_t key) {
    return kv.base + queries.table[key / kv.block_size] * kv.block_stride;
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

// Calls f(std::integral constant n, done) for pieces of `count`; n is at most LARGEST and one that kernels exist for.
template <int N> struct Count {
    static constexpr int value = N;
};

template <int N, int LARGEST, class Each> INLINE bool take_piece(int count, int& done, Each& each) {
    if constexpr (N > LARGEST) return false;
    else {
        if (count - done < N) return false;
        each(Count<N>(), done);
        done += N;
        return true;
    }
}

template <int LARGEST = MOST, class Each> INLINE void in_pieces(int count, Each each) {
    for (int done = 0; done < count;)
#if defined(KERNEL_ISA_AVX512)
        take_piece<12, LARGEST>(count, done, each) || take_piece<9, LARGEST>(count, done, each) ||
            take_piece<8, LARGEST>(count, done, each) ||
#endif
#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
            take_piece<6, LARGEST>(count, done, each) ||
#endif
            take_piece<4, LARGEST>(count, done, each) || take_piece<3, LARGEST>(count, done, each) ||
            take_piece<2, LARGEST>(count, done, each) || take_piece<1, LARGEST>(count, done, each);
}

// For integer keys and values (attention_integers.cpp).
void prepare_integers(const KvView& kv, Queries& queries, int32_t* room);
void attend_integers(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts);
void store_integers(const KvView& kv, int64_t block, int offset, const float* key, const float* value);

}  // namespace unspool::KERNEL_ISA

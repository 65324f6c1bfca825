// What the kernels of attention share: which keys a query sees, and in how many pieces queries are taken.
#pragma once
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
constexpr int MOST = 12;
#else
constexpr int MOST = 4;
#endif
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

// Calls f(std::integral constant n, done) for pieces of count that kernels are made for.
template <int N> struct Count {
    static constexpr int value = N;
};

template <class Each> INLINE void in_pieces(int count, Each each) {
    for (int done = 0; done < count;) {
        const int left = count - done;
#if defined(KERNEL_ISA_AVX512)
        if (left >= 12) each(Count<12>(), done), done += 12;
        else if (left >= 9) each(Count<9>(), done), done += 9;
        else if (left >= 8) each(Count<8>(), done), done += 8;
        else
#endif
#if defined(KERNEL_ISA_AVX512) || defined(KERNEL_ISA_AVX2)
            if (left >= 6)
            each(Count<6>(), done), done += 6;
        else
#endif
            if (left >= 4)
            each(Count<4>(), done), done += 4;
        else if (left == 3) each(Count<3>(), done), done += 3;
        else if (left == 2) each(Count<2>(), done), done += 2;
        else each(Count<1>(), done), done += 1;
    }
}

// With keys and values of 8 bits (attention8.cpp).
void prepare8(const KvView& kv, Queries& queries, int32_t* room);
void attend8(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts);
void store8(const KvView& kv, int64_t block, int offset, float* key, const float* value);

}  // namespace unspool::KERNEL_ISA

// Choosing a token: passes over a row of logits, compiled for each instruction set behind one table of pointers.
//
// The numpy functions in unspool/sampling are the specification. Only integers are summed, so results do not depend on
// the width of a vector or on the order of a loop, and every backend chooses the same tokens.
#pragma once
#include <cstdint>

namespace unspool {

constexpr int64_t SAMPLING_BLOCK = 64;  // tokens that share one maximum; a padded row is a whole number of blocks

struct SamplingKernels {
    const char* name;
    // The first index of the largest value, or -1 if there is a NaN; for any n.
    int64_t (*argmax)(const float* row, int64_t n);
    // out = row / divisor, padded with -inf, and the maximum of each block. Returns false if there is a NaN.
    bool (*scale)(const float* row, int64_t n, float divisor, float* out, float* maxima);
    // The functions below work on padded rows: n is a multiple of a block.
    // Σ round(2^40 exp(x - max)), and the same with x - max as a factor inside the rounding.
    int64_t (*total)(const float* row, int64_t n, const float* maxima, float max);
    int64_t (*moment)(const float* row, int64_t n, float max);
    void (*weigh)(const float* row, int64_t n, float max, int64_t* weights);
    // Appends the indices (starting at first) and values with x - base >= floor, in order; returns their number.
    int64_t (*collect)(const float* row, int64_t n, int32_t first, float base, float floor, int32_t* ids,
                       float* values);
    // The number of tokens that rank before a token: larger ones, and equal ones with a lower index.
    int64_t (*count_better)(const float* row, int64_t n, int64_t token);
    // The noise of tokens ids[0 .. n), or of first + 0 … n - 1 if ids is null; n is a multiple of 16.
    void (*gumbel)(const int32_t* ids, int32_t first, int64_t n, uint64_t seed, uint64_t position, float* out);
    void (*mask)(float* row, int64_t n, const uint32_t* bits);  // any n
    void (*log)(const float* x, int64_t n, float* out);         // a multiple of 16
    void (*exp)(const float* x, int64_t n, float* out);
};

const SamplingKernels* sampling_plain();
#ifdef UNSPOOL_X86
const SamplingKernels* sampling_avx2();
const SamplingKernels* sampling_avx512();
#endif

}  // namespace unspool

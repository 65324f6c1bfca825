// Products without memory access: the speed of this instruction set when nothing else limits it.
#include "kernels/simd.h"
#include "kernels/table.h"

namespace unspool::KERNEL_ISA {

namespace {

#if defined(KERNEL_ISA_AVX512)
constexpr int SUMS = 16;  // independent sums; all of them stay in registers
#else
constexpr int SUMS = 6;
#endif
constexpr int LANES = 16, TURNS = 64;

// Prevents the compiler from removing the computation.
template <class T> INLINE void keep(T& value) { asm volatile("" : "+m"(value)); }
// Every loop over sums is unrolled, and no sum's address is taken; otherwise sums lie in memory and each product stores
// one.
template <class T> INLINE void use(T value) { keep(value); }

double spin_floats(int64_t rounds) {
    F sums[SUMS], a = set1(0.5f), b = set1(0.25f);
    keep(a), keep(b);
    UNROLL for (int s = 0; s < SUMS; s++) sums[s] = set1(0.0f);
    for (int64_t round = 0; round < rounds; round++)
        for (int turn = 0; turn < TURNS; turn++)
            UNROLL for (int s = 0; s < SUMS; s++) sums[s] = fma(a, b, sums[s]);
    UNROLL for (int s = 0; s < SUMS; s++) use(sums[s]);
    return 2.0 * LANES * SUMS * TURNS * static_cast<double>(rounds);
}

double spin_integers(int64_t rounds) {
    I sums[SUMS], a = iset1(0x01010101);
    quad_t b{};
    keep(a), keep(b);
    UNROLL for (int s = 0; s < SUMS; s++) sums[s] = izero();
    for (int64_t round = 0; round < rounds; round++)
        for (int turn = 0; turn < TURNS; turn++)
            UNROLL for (int s = 0; s < SUMS; s++) dot_unsigned(sums[s], a, &b);
    UNROLL for (int s = 0; s < SUMS; s++) use(sums[s]);
    return 2.0 * LANES * 4 / QUAD_PARTS * SUMS * TURNS * static_cast<double>(rounds);
}

}  // namespace

void fill_peak(Kernels& kernels) {
    kernels.spin_floats = spin_floats;
    kernels.spin_integers = spin_integers;
}

}  // namespace unspool::KERNEL_ISA

// The parts of a kernel table; each is filled in by the file that defines the kernels.
#pragma once
#include "kernels.h"

namespace unspool::KERNEL_ISA {

void fill_linear(Kernels& kernels);
void fill_whole(Kernels& kernels);
void fill_rows(Kernels& kernels);
void fill_attention(Kernels& kernels);
void fill_peak(Kernels& kernels);

}  // namespace unspool::KERNEL_ISA

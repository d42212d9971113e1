// The kernels for x86-64 with AVX2 and FMA; only this unit is compiled with those flags.
#define VECTOR_BYTES 32
#include "kernels.inc"

namespace tokamak::cpu {
Kernels avx2_kernels() { return all_kernels(); }
}  // namespace tokamak::cpu

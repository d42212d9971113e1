// The kernels for x86-64 with AVX2 and FMA; this unit alone is compiled with those flags.
#define VECTOR_BYTES 32
#define VARIANT "avx2"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &avx2_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

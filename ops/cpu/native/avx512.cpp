// The kernels for x86-64 with AVX-512 and VNNI (servers from 2019 on).
#define VECTOR_BYTES 64
#define VARIANT "avx512"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &avx512_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

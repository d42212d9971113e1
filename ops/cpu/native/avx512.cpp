// The kernels for x86-64 with AVX-512 and VNNI (servers from 2019 on).
#define VECTOR_BYTES 64
#include "kernels.inc"

namespace tokamak::cpu {
Kernels avx512_kernels() { return all_kernels(); }
}  // namespace tokamak::cpu

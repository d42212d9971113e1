// The kernels for x86-64 with AVX2, FMA and the dot products of AVX-VNNI (client processors from 2021 on): all others are those
// of `avx2`.
#define VECTOR_BYTES 32
#include "kernels.inc"

namespace tokamak::cpu {
Kernels avxvnni_kernels() { return with_bytes(avx2_kernels()); }
}  // namespace tokamak::cpu

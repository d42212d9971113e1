// The kernels for x86-64 with AVX2, FMA and the dot products of AVX-VNNI (client processors from 2021 on).
#define VECTOR_BYTES 32
#define VARIANT "avxvnni"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &avxvnni_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

// The kernels for x86-64 with AVX-512, VNNI and the dot products of bfloat16 (Zen 4, Sapphire Rapids).
#define VECTOR_BYTES 64
#define VARIANT "avx512bf16"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &avx512bf16_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

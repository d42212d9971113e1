// The kernels for x86-64 with AVX-512, VNNI and the dot products of bfloat16 (Zen 4, Sapphire Rapids): all others are those of
// `avx512`.
#define VECTOR_BYTES 64
#include "kernels.inc"

namespace tokamak::cpu {
Kernels avx512bf16_kernels() { return with_bfloat16(avx512_kernels()); }
}  // namespace tokamak::cpu

// The kernels for x86-64 with AVX-512, BF16 and AMX (Sapphire Rapids): linears over narrow weights and attention in tiles,
// everything else as in `avx512bf16`.
#define VECTOR_BYTES 64
#include "kernels.inc"

namespace tokamak::cpu {
Kernels amx_kernels() { return with_tiles(avx512bf16_kernels()); }
}  // namespace tokamak::cpu

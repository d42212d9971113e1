// The kernels for x86-64 with AVX-512, BF16 and AMX (Sapphire Rapids): linears over narrow weights in tiles.
#define VECTOR_BYTES 64
#define VARIANT "amx"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &amx_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

// The code of `amx` on x86-64 with AVX2 alone: what tiles do is done by a model of them (tiles.inc), to the bit, so that all of it
// is tested on machines without. Never the best.
#define VECTOR_BYTES 64
#define VARIANT "amxemulated"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &amxemulated_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

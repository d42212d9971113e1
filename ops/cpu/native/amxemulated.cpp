// The code of `amx` on x86-64 with AVX2 alone: what tiles do is done by a model of them (tiles.inc), to the bit, so that all of it
// is tested on machines without. Never the best.
#define VECTOR_BYTES 64
#include "kernels.inc"

namespace tokamak::cpu {
#if defined(__AVX512F__)  // which is built instead of `wide`
Kernels amxemulated_kernels() { return with_tiles(with_bfloat16(avx512_kernels())); }
#else
Kernels amxemulated_kernels() { return with_tiles(wide_kernels()); }
#endif
}  // namespace tokamak::cpu

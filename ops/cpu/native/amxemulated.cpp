// The code of `amx` on x86-64 with AVX2: a bit-exact model replaces the tiles (tiles.inc), so that the code is tested on
// machines without AMX. Never the best.
#define VECTOR_BYTES 64
#include "kernels.inc"

namespace tokamak::cpu {
#if defined(__AVX512F__)  // built instead of `wide`
Kernels amxemulated_kernels() { return with_tiles(with_bfloat16(avx512_kernels())); }
#else
Kernels amxemulated_kernels() { return with_tiles(wide_kernels()); }
#endif
}  // namespace tokamak::cpu

// The kernels for any processor: vectors of 16 bytes, which every compiler maps to what the target has (SSE2, NEON).
#define VECTOR_BYTES 16
#define VARIANT "portable"
#include "kernels.inc"

namespace tokamak::cpu {
const Kernels &portable_kernels() { return KERNELS; }
}  // namespace tokamak::cpu

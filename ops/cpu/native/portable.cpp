// The kernels for any processor: vectors of 16 bytes, which every compiler maps to what the target has (SSE2, NEON).
#define VECTOR_BYTES 16
#include "kernels.inc"

namespace tokamak::cpu {
Kernels portable_kernels() { return all_kernels(); }
}  // namespace tokamak::cpu

// The code for vectors of 64 bytes on x86-64 with AVX2, so that its logic is tested without AVX-512. Never the best.
#define VECTOR_BYTES 64
#include "kernels.inc"

namespace tokamak::cpu {
Kernels wide_kernels() { return all_kernels(); }
}  // namespace tokamak::cpu

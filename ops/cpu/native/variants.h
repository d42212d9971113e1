// Kernel variants of this build and processor.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokamak::cpu {

std::vector<const char *> built_variants();     // in the order of `VARIANTS` (processor.h)
const std::vector<Kernels> &variants();         // those that this processor supports, the best last
const Kernels *find_variant(const char *name);  // of these; null: not found

}  // namespace tokamak::cpu

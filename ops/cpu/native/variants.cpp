// The only file that depends on which variants are built, so that others need no rebuild when these change (CMakeLists.txt).
#include "variants.h"

#include <cstring>

#include "processor.h"

namespace tokamak::cpu {
namespace {

struct Built {
    const char *name;
    Kernels (*kernels)();
};

#define VARIANT(name) {#name, name##_kernels},
const Built BUILT[] = {TOKAMAK_BUILT_VARIANTS};
#undef VARIANT

// Never calls code of a unit that the processor does not support.
std::vector<Kernels> make_variants() {
    std::vector<Kernels> found;
    for (const Built &built : BUILT) {
        for (const Variant &variant : VARIANTS) {
            if (std::strcmp(variant.name, built.name) != 0 || !variant.is_runnable()) continue;
            found.push_back(built.kernels());
            found.back().name = built.name;
        }
    }
    return found;
}

}  // namespace

std::vector<const char *> built_variants() {
    std::vector<const char *> names;
    for (const Built &built : BUILT) names.push_back(built.name);
    return names;
}

const std::vector<Kernels> &variants() {
    static const std::vector<Kernels> found = make_variants();
    return found;
}

const Kernels *find_variant(const char *name) {
    for (const Kernels &kernels : variants()) {
        if (std::strcmp(kernels.name, name) == 0) return &kernels;
    }
    return nullptr;
}

}  // namespace tokamak::cpu

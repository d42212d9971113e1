// A program of the build: prints the variants that this machine supports, separated by semicolons.
#include "processor.h"

#include <cstdio>

int main() {
    const char *separator = "";
    for (const tokamak::cpu::Variant &variant : tokamak::cpu::VARIANTS) {
        if (!variant.is_runnable()) continue;
        std::printf("%s%s", separator, variant.name);
        separator = ";";
    }
}

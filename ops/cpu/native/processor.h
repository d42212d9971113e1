// The variants of the kernels, from the one that runs everywhere to the fastest, and which of them this processor runs. Asked by
// the module when it is loaded, and by the build when it leaves out what the machine cannot run (processor.cpp).
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tokamak::cpu {

// Leaf 7.1 of CPUID, register A: not every compiler's __builtin_cpu_supports knows AVX-VNNI (4) and AVX512-BF16 (5).
inline bool has_extension([[maybe_unused]] int bit) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> bit & 1) != 0;
#else
    return false;
#endif
}

inline bool has_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

inline bool has_avx512() {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

struct Variant {
    const char *name;
    bool (*is_runnable)();
    bool is_for_tests = false;  // never chosen for an engine
};

inline const Variant VARIANTS[] = {
    {"portable", [] { return true; }},
    {"wide", has_avx2, true},  // the 64-byte code on AVX2, for tests where there is no AVX-512
    {"avx2", has_avx2},
    {"avxvnni", [] { return has_avx2() && has_extension(4); }},
    {"avx512", has_avx512},
    {"avx512bf16", [] { return has_avx512() && has_extension(5); }},
};

}  // namespace tokamak::cpu

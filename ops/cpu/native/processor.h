// The kernel variants, from the portable one to the fastest, and which of them this processor supports. Used by the module
// when it is loaded, and by the build to skip variants that the machine does not support (processor.cpp).
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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

// Conversion of halves (F16C): all processors with AVX2 have it, but not every compiler's __builtin_cpu_supports knows it.
inline bool has_halves() {
#if defined(__x86_64__)
    constexpr unsigned F16C = 1u << 29;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & F16C) != 0;
#else
    return false;
#endif
}

inline bool has_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_halves();
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

// Tiles with products of bfloat16 and of bytes: the processor has them, the operating system saves them (bits of XCR0) and
// grants them to this process, which must request them once, before a thread uses them. The request fails if a thread's signal
// stack is too small.
inline bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, OSXSAVE = 1u << 27, TILE_STATE = 3u << 17;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    static const bool is_granted = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (~d & (BF16 | TILE | INT8)) != 0) return false;
        if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & OSXSAVE) == 0) return false;
        asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        return (~a & TILE_STATE) == 0 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    }();
    return is_granted;
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
    {"wide", has_avx2, true},         // the 64-byte code on AVX2, for tests without AVX-512
    {"amxemulated", has_avx2, true},  // tiles as plain code, for tests without AMX
    {"avx2", has_avx2},
    {"avxvnni", [] { return has_avx2() && has_extension(4); }},
    {"avx512", has_avx512},
    {"avx512bf16", [] { return has_avx512() && has_extension(5); }},
    {"amx", [] { return has_avx512() && has_extension(5) && has_amx(); }},
};

}  // namespace tokamak::cpu

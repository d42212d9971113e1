// Short busy wait for another thread or process, before sleeping.
#pragma once

#include <cstdint>

#include "clock.h"

namespace tokamak::cpu {

constexpr std::int64_t SPIN_NS = 40'000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(const Condition &is_true, std::int64_t limit_ns = SPIN_NS) {
    const std::int64_t deadline = monotonic_ns() + limit_ns;
    do {
        for (int turn = 0; turn < 32; ++turn) {
            if (is_true()) return true;
            relax();
        }
    } while (monotonic_ns() < deadline);
    return false;
}

}  // namespace tokamak::cpu

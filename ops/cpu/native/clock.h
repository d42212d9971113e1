#pragma once

#include <time.h>

#include <cstdint>

namespace tokamak::cpu {

inline std::int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace tokamak::cpu

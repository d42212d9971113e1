// Progress of a step: the time is written to a shared word (the heartbeat of the worker's row in the counters file) after each
// op and each task of the step's own thread, to distinguish a slow step from a stuck one.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.h"

namespace tokamak::cpu {

inline std::atomic<std::uint64_t *> heartbeat_word{nullptr};  // null: no reader; the mapping is kept while it is set

inline void beat() {
    std::uint64_t *word = heartbeat_word.load(std::memory_order_relaxed);
    if (word != nullptr) __atomic_store_n(word, static_cast<std::uint64_t>(monotonic_ns()), __ATOMIC_RELEASE);
}

}  // namespace tokamak::cpu

// Progress of a step: the time is written to a word that others read (the heartbeat of the worker's row in the counters
// file), after each op and each task of the step's own thread. So a slow step can be told from a stuck one.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.h"

namespace tokamak::cpu {

inline std::atomic<std::uint64_t *> heartbeat_word{nullptr};  // null where nobody looks; the mapping outlives its being here

inline void beat() {
    std::uint64_t *word = heartbeat_word.load(std::memory_order_relaxed);
    if (word != nullptr) __atomic_store_n(word, static_cast<std::uint64_t>(monotonic_ns()), __ATOMIC_RELEASE);
}

}  // namespace tokamak::cpu

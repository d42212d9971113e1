// Says that the step gets on: the time goes into a word that others read (the heartbeat of the worker's row in the counters
// file), after each op and each task that the step's own thread did. So a step that takes long is told from one that is stuck.
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

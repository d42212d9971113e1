// The wait of a reader and the wake of its writers.
#pragma once

#include <algorithm>
#include <atomic>

#include "sync.h"

namespace tokamak {

constexpr i64 MAX_SLEEP_NS = 100'000'000;  // a writer that died between `parked = 0` and the wake costs a reader this much
constexpr i64 RECENT_NS = 1'000'000;       // spin only this soon after a record came

class Doorbell {
public:
    explicit Doorbell(DoorbellLine *line) : parked_(&line->parked) {}

    // By a writer, after it published. One writer of many wakes; nobody calls the kernel while the reader is awake.
    // SYNC: the fence pairs with the fence in wait().
    void ring() {
        fence();
        if (load_relaxed(parked_) != 0 && __atomic_exchange_n(parked_, 0, __ATOMIC_RELAXED) != 0) futex_wake(parked_, 1);
    }

    void note_activity() { last_active_ns_.store(monotonic_ns(), std::memory_order_relaxed); }

    // By the reader, without the GIL: until `is_ready()`, at most one sleep of min(timeout_ns, MAX_SLEEP_NS), or a signal.
    template <class Ready>
    bool wait(i64 timeout_ns, i64 spin_ns, Ready is_ready) {
        if (is_ready()) return true;
        if (timeout_ns <= 0) return false;
        if (spin_ns > 0 && spin(std::min(spin_ns, timeout_ns), is_ready)) return true;
        store_relaxed<u32>(parked_, 1);
        fence();  // SYNC: pairs with the fence in ring().
        const bool is_late = !is_ready() && futex_wait(parked_, 1, std::min(timeout_ns, MAX_SLEEP_NS)) == ETIMEDOUT;
        store_relaxed<u32>(parked_, 0);
        if (!is_ready()) return false;
        num_late_wakes_ += is_late;
        return true;
    }

    // Sleeps that ran out with a record there already: its writer died, or was held up, between publishing and waking.
    u64 num_late_wakes() const { return num_late_wakes_; }

private:
    template <class Ready>
    bool spin(i64 spin_ns, Ready is_ready) {
        const i64 start = monotonic_ns();
        if (start - last_active_ns_.load(std::memory_order_relaxed) > RECENT_NS) return false;
        do {
            for (int turn = 0; turn < 16; ++turn) {
                if (is_ready()) return true;
                cpu_relax();
            }
        } while (monotonic_ns() - start < spin_ns);
        return false;
    }

    u32 *parked_;
    std::atomic<i64> last_active_ns_{0};
    u64 num_late_wakes_ = 0;
};

}  // namespace tokamak

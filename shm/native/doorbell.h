// How a reader waits and its writers wake it.
#pragma once

#include <sched.h>

#include <algorithm>

#include "sync.h"

namespace tokamak {

constexpr i64 MAX_SLEEP_NS = 100'000'000;  // delay of a reader if a writer died between `parked = 0` and the wake
constexpr i64 SHORT_WAIT_NS = 100'000;     // after a wait of at most this length, the next record may come as soon

class Doorbell {
public:
    explicit Doorbell(DoorbellLine *line, i64 max_sleep_ns = MAX_SLEEP_NS)
        : parked_(&line->parked), max_sleep_ns_(max_sleep_ns) {}

    // Called by a writer after publishing. Of many writers one wakes; no kernel call while the reader is awake.
    // SYNC: the fence pairs with the fence in sleep().
    void ring() {
        fence();
        if (load_relaxed(parked_) != 0 && __atomic_exchange_n(parked_, 0, __ATOMIC_RELAXED) != 0) futex_wake(parked_, 1);
    }

    // Called by the reader without the GIL: waits until `is_ready()`, a sleep of min(timeout_ns, max_sleep_ns), or a signal. If
    // the last wait was short, spins for up to `spin_ns` before it sleeps; an idle reader never spins.
    template <class Ready>
    bool wait(i64 timeout_ns, i64 spin_ns, Ready is_ready) {
        if (is_ready()) {
            last_wait_ns_ = 0;
            return true;
        }
        if (timeout_ns <= 0) return false;
        const i64 start = monotonic_ns();
        const bool spins = last_wait_ns_ <= SHORT_WAIT_NS;
        const bool found = (spins && spin(start + std::min(spin_ns, timeout_ns), is_ready)) || sleep(timeout_ns, is_ready);
        last_wait_ns_ = monotonic_ns() - start;
        return found;
    }

    // Sleeps that timed out although a record was there: its writer died or was delayed between publishing and waking.
    u64 num_late_wakes() const { return num_late_wakes_; }

private:
    // Yields the core in each round: the writer may need this one, and then a spin that keeps it only delays.
    template <class Ready>
    static bool spin(i64 end, Ready is_ready) {
        while (monotonic_ns() < end) {
            for (int turn = 0; turn < 16; ++turn) {
                if (is_ready()) return true;
                cpu_relax();
            }
            sched_yield();
        }
        return is_ready();
    }

    template <class Ready>
    bool sleep(i64 timeout_ns, Ready is_ready) {
        store_relaxed<u32>(parked_, 1);
        fence();  // SYNC: pairs with the fence in ring().
        const bool is_late = !is_ready() && futex_wait(parked_, 1, std::min(timeout_ns, max_sleep_ns_)) == ETIMEDOUT;
        store_relaxed<u32>(parked_, 0);
        if (!is_ready()) return false;
        num_late_wakes_ += is_late;
        return true;
    }

    u32 *parked_;
    i64 max_sleep_ns_;
    i64 last_wait_ns_ = MAX_SLEEP_NS;
    u64 num_late_wakes_ = 0;
};

}  // namespace tokamak

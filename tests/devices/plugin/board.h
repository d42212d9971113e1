// What a test and the devices of all its processes have in common: a file that each maps (TOKASIM_BOARD), or memory of the
// process where there is none. Lists of names are read by `tests/devices/board.py` too.
//
//     0                 controls, int64 each: written by the test
//     8 * MOST          counters of device 0, int64 each: added to by the devices, across restarts of their processes
//     8 * MOST * 2      counters of device 1
//     ...
#pragma once

#include <atomic>
#include <cstdint>

namespace tokasim {

constexpr int MOST = 64, NUM_DEVICES = 4;

// clang-format off
#define CONTROLS(X) \
    X(is_stopped)      /* streams do nothing */ \
    X(kernel_ns)       /* a kernel takes so long at least */ \
    X(delay_seed)      /* not 0: streams pause now and then */ \
    X(memory_bytes)    /* not 0: a device has no more */ \
    X(capture_bytes)   /* not 0: nor has a capture, beyond what there was before */ \
    X(capture_devices) /* not 0: that is so of the devices alone whose bits are set */
#define COUNTERS(X) \
    X(copies_to_device) X(copies_to_host) X(bytes_to_device) X(bytes_to_host) \
    X(blocking_copies) /* of these: the host waited for them, and for all before */ \
    X(copies_within) X(stream_waits) X(event_waits) X(device_waits) \
    X(waits_ahead)     /* of waits for events: there was more for the device to do behind what was waited for */ \
    X(launches)        /* kernels, copies and graphs that the host gave */ \
    X(allocations) X(allocated_bytes) X(freed_bytes) X(kernels) X(captures) X(replays) X(collectives) \
    X(busy_ns) X(first_ns) X(last_ns) /* work of kernels and copies: all of it, when the first began, when the last ended */
// clang-format on

#define NAME(name) name,
enum class Control { CONTROLS(NAME) };
enum class Counter { COUNTERS(NAME) };
#undef NAME

std::atomic<int64_t> &cell(Control control);
std::atomic<int64_t> &cell(int device, Counter counter);

inline int64_t get(Control control) { return cell(control).load(std::memory_order_relaxed); }
inline void count(int device, Counter counter, int64_t value = 1) {
    cell(device, counter).fetch_add(value, std::memory_order_relaxed);
}

}  // namespace tokasim

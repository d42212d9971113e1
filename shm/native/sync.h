// Atomic words in mapped memory, the futex, the clock.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "layout.h"

namespace tokamak {

template <class T>
T load_relaxed(const T *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
template <class T>
T load_acquire(const T *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
template <class T>
void store_relaxed(T *word, T value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
template <class T>
void store_release(T *word, T value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Adds to a word with one writer, which needs no locked instruction.
template <class T>
void add_relaxed(T *word, T count) {
    store_relaxed(word, static_cast<T>(load_relaxed(word) + count));
}

template <class T>
bool compare_exchange(T *word, T expected, T desired) {
    return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

inline i64 monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// Hints to the core that this is a spin loop, to spare its sibling thread and the memory bus.
inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

// Sleeps while *word == expected, at most timeout_ns. 0: woken; EAGAIN: the word differed; ETIMEDOUT; EINTR: a signal came. The
// futex is a shared one: waiter and waker are different processes.
inline int futex_wait(const u32 *word, u32 expected, i64 timeout_ns) {
    timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    return syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0) == 0 ? 0 : errno;
}

inline int futex_wake(const u32 *word, int num_waiters) {
    return static_cast<int>(syscall(SYS_futex, word, FUTEX_WAKE, num_waiters, nullptr, nullptr, 0));
}

}  // namespace tokamak

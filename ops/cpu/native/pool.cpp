#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "clock.h"
#include "progress.h"
#include "spin.h"

namespace tokamak::cpu {
namespace {

constexpr int COUNT_BITS = 20;
constexpr std::uint64_t COUNT_MASK = (1u << COUNT_BITS) - 1;
constexpr std::int64_t MAX_TASKS = 1 << 19;  // the rest of the range is room for late claims

void futex_wait(std::atomic<std::uint32_t> &word, std::uint32_t expected) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t> &word, int num_waiters) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(&word), FUTEX_WAKE_PRIVATE, num_waiters, nullptr, nullptr, 0);
}

bool has_tasks(std::uint64_t claims) { return (claims & COUNT_MASK) < (claims >> COUNT_BITS & COUNT_MASK); }

// If a core was taken from the process, the thread runs on any other.
void stay_on(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

Pool::Pool(int num_threads, const std::vector<int> &cores) {
    if (!cores.empty()) stay_on(cores[0]);
    for (int thread = 1; thread < num_threads; ++thread) {
        const int core = cores.empty() ? -1 : cores[thread];
        threads_.emplace_back([this, thread, core] {
            if (core >= 0) stay_on(core);
            serve(thread);
        });
    }
}

Pool::~Pool() {
    is_stopping_.store(true);
    num_jobs_.fetch_add(1);
    futex_wake(num_jobs_, static_cast<int>(threads_.size()));
    for (std::thread &thread : threads_) thread.join();
}

Jobs Pool::end_alone() {
    num_pretended_ = 0;
    return std::exchange(jobs_, {});
}

void Pool::run_tasks(std::int64_t num_tasks, Task task, void *context) {
    if (num_pretended_ != 0) {
        std::vector<std::int64_t> &times = jobs_.emplace_back(num_tasks);
        for (std::int64_t index = 0; index < num_tasks; ++index) {
            const std::int64_t begin = monotonic_ns();
            task(context, index, 0);
            times[index] = monotonic_ns() - begin;
            beat();
        }
        return;
    }
    if (num_tasks <= 1 || threads_.empty()) {
        for (std::int64_t index = 0; index < num_tasks; ++index) {
            task(context, index, 0);
            beat();
        }
        return;
    }
    for (std::int64_t begin = 0; begin < num_tasks; begin += MAX_TASKS) {
        const std::int64_t count = std::min(num_tasks - begin, MAX_TASKS);
        struct Part {
            Task task;
            void *context;
            std::int64_t begin;
        } part{task, context, begin};
        task_ = [](void *part_context, std::int64_t index, int thread) {
            const Part &own = *static_cast<Part *>(part_context);
            own.task(own.context, own.begin + index, thread);
        };
        context_ = &part;
        num_finished_.store(0, std::memory_order_relaxed);
        generation_ = (generation_ + 1) & ((1u << 24) - 1);
        // SYNC: publishes task_ and context_; pairs with the claim in work(). Sequentially consistent, like num_asleep_ and the
        // threads' check of the claims before they sleep: either they see the job, or they are seen asleep.
        claims_.store(generation_ << (2 * COUNT_BITS) | static_cast<std::uint64_t>(count) << COUNT_BITS);
        num_jobs_.fetch_add(1);
        if (num_asleep_.load() != 0) futex_wake(num_jobs_, static_cast<int>(std::min<std::int64_t>(count - 1, 1 << 20)));
        while (work(0)) {
        }
        wait_until_finished(static_cast<std::uint32_t>(count));
    }
}

bool Pool::work(int thread) {
    if (!has_tasks(claims_.load(std::memory_order_relaxed))) return false;
    const std::uint64_t claim = claims_.fetch_add(1, std::memory_order_acquire);  // SYNC: pairs with the store in run_tasks()
    if (!has_tasks(claim)) return false;
    task_(context_, static_cast<std::int64_t>(claim & COUNT_MASK), thread);
    if (thread == 0) beat();
    const auto count = static_cast<std::uint32_t>(claim >> COUNT_BITS & COUNT_MASK);
    // SYNC: publishes the task's results; pairs with the loads in wait_until_finished().
    if (num_finished_.fetch_add(1) + 1 == count && thread != 0 && is_caller_asleep_.load() != 0) futex_wake(num_finished_, 1);
    return true;
}

void Pool::wait_until_finished(std::uint32_t num_tasks) {
    const auto is_finished = [&] { return num_finished_.load(std::memory_order_acquire) == num_tasks; };
    if (spin_until(is_finished)) return;
    is_caller_asleep_.store(1);
    for (std::uint32_t seen = num_finished_.load(); seen != num_tasks; seen = num_finished_.load()) {
        futex_wait(num_finished_, seen);
    }
    is_caller_asleep_.store(0);
}

void Pool::serve(int thread) {
    while (!is_stopping_.load(std::memory_order_relaxed)) {
        if (work(thread)) continue;
        const std::uint32_t seen = num_jobs_.load();
        const auto has_work = [&] { return has_tasks(claims_.load(std::memory_order_relaxed)) || num_jobs_.load() != seen; };
        if (spin_until(has_work)) continue;
        num_asleep_.fetch_add(1);
        if (!has_tasks(claims_.load()) && !is_stopping_.load()) futex_wait(num_jobs_, seen);
        num_asleep_.fetch_sub(1);
    }
}

}  // namespace tokamak::cpu

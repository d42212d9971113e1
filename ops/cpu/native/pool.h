// The rank's threads: `run(num_tasks, task)` calls task(index, thread) for each index, on the caller and on the pool's threads.
// Tasks are assigned to threads at random; kernels compute the same bits on any thread.
//
// A thread without work spins for SPIN_NS and then sleeps in a futex: other actors need the cores. The caller never
// waits for a thread that took no task, so a thread that is late, or preempted by another process, only delays the tasks
// that it has started.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tokamak::cpu {

using Jobs = std::vector<std::vector<std::int64_t>>;  // nanoseconds of the tasks of each call of `run`

class Pool {
public:
    static constexpr std::int64_t WAKING = 16;
    using Task = void (*)(void *context, std::int64_t index, int thread);

    // With `cores` (one per thread) each thread is pinned to one, the caller to the first.
    explicit Pool(int num_threads, const std::vector<int> &cores = {});
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int num_threads() const { return num_pretended_ != 0 ? num_pretended_ : static_cast<int>(threads_.size()) + 1; }

    // `size`: work that the caller does alone rather than share it with spinning threads; it wakes sleeping threads only for
    // more than WAKING times as much. So a small model leaves the other cores to other processes.
    std::int64_t small(std::int64_t size) const {
        const auto num_asleep = num_pretended_ != 0 ? 0 : num_asleep_.load(std::memory_order_relaxed);
        return num_asleep != 0 && num_asleep == threads_.size() ? WAKING * size : size;
    }

    // While it exists, the pool reports `num_threads`, but the caller runs all tasks alone, one after another.
    void begin_alone(int num_threads) { num_pretended_ = num_threads; }
    Jobs end_alone();

    // Not called from a task, and by one thread at a time.
    template <class Function>
    void run(std::int64_t num_tasks, const Function &function) {
        const Task task = [](void *context, std::int64_t index, int thread) {
            (*static_cast<const Function *>(context))(index, thread);
        };
        run_tasks(num_tasks, task, const_cast<Function *>(&function));
    }

private:
    void run_tasks(std::int64_t num_tasks, Task task, void *context);
    bool work(int thread);  // one claim; false: nothing left
    void serve(int thread);
    void wait_until_finished(std::uint32_t num_tasks);

    // generation (24 bits) | number of tasks (20) | next task (20): a claim is one fetch_add with a consistent result, even for
    // a thread that was delayed across generations. Task and context are kept until every claimed task is finished.
    alignas(64) std::atomic<std::uint64_t> claims_{0};
    alignas(64) std::atomic<std::uint32_t> num_finished_{0};  // futex word of the caller
    std::atomic<std::uint32_t> is_caller_asleep_{0};
    alignas(64) std::atomic<std::uint32_t> num_jobs_{0};  // futex word of the threads
    std::atomic<std::uint32_t> num_asleep_{0};
    std::atomic<bool> is_stopping_{false};
    Task task_ = nullptr;
    void *context_ = nullptr;
    std::uint64_t generation_ = 0;
    int num_pretended_ = 0;
    Jobs jobs_;  // when run alone
    std::vector<std::thread> threads_;
};

}  // namespace tokamak::cpu

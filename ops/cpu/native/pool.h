// The rank's threads: `run(num_tasks, task)` calls task(index, thread) for each index, on the caller and on threads that live
// as long as the pool. Tasks are assigned to threads at random; kernels compute the same bits on any thread.
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

    // With `cores` (as many as threads) each thread stays on its own, the caller on the first.
    explicit Pool(int num_threads, const std::vector<int> &cores = {});
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int num_threads() const { return num_pretended_ != 0 ? num_pretended_ : static_cast<int>(threads_.size()) + 1; }

    // What the caller does sooner than it shares it with threads that look for work is `size`; it wakes them for more than
    // WAKING times as much. So a model whose steps have nothing larger leaves the other cores to the other processes.
    std::int64_t small(std::int64_t size) const {
        const auto num_asleep = num_pretended_ != 0 ? 0 : num_asleep_.load(std::memory_order_relaxed);
        return num_asleep != 0 && num_asleep == threads_.size() ? WAKING * size : size;
    }

    // From here to the end it says that it has `num_threads`, and the caller does everything alone, one task after another.
    void begin_alone(int num_threads) { num_pretended_ = num_threads; }
    Jobs end_alone();

    // Not from within a task, and from one thread at a time.
    template <class Function>
    void run(std::int64_t num_tasks, const Function &function) {
        const Task task = [](void *context, std::int64_t index, int thread) {
            (*static_cast<const Function *>(context))(index, thread);
        };
        run_tasks(num_tasks, task, const_cast<Function *>(&function));
    }

private:
    void run_tasks(std::int64_t num_tasks, Task task, void *context);
    bool work(int thread);  // one claim; false: nothing to claim
    void serve(int thread);
    void wait_until_finished(std::uint32_t num_tasks);

    // generation (24 bits) | number of tasks (20) | next task (20): a claim is one fetch_add, and what it returns is whole,
    // even to a thread that was held up across generations. Task and context stay until every claimed task of them is finished.
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
    Jobs jobs_;  // done alone
    std::vector<std::thread> threads_;
};

}  // namespace tokamak::cpu

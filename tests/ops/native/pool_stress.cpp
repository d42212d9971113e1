// The pool of a rank at full speed: jobs of all sizes one after another, with pauses in which its threads fall asleep, and pools
// that come and go. Every task runs exactly once, and what it wrote is there when `run` returns; what the jobs share is plain
// memory, so that ThreadSanitizer sees every order that the pool does not make. Built and run by tools/test --sanitize, and
// without a sanitizer by test_pool.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../../ops/cpu/native/clock.h"
#include "../../../ops/cpu/native/pool.h"

using tokamak::cpu::Pool;

constexpr std::int64_t LONGEST = 300;
constexpr std::int64_t PAUSE_NS = 100'000;  // longer than a thread looks for work before it sleeps

int main(int, char **arguments) {
    const long num_jobs = std::strtol(arguments[1], nullptr, 10);
    long num_wrong = 0;
    unsigned random = 1;
    std::vector<long> results(LONGEST);
    for (int num_threads = 2; num_threads <= 5; ++num_threads) {
        Pool pool(num_threads);
        for (long job = 1; job <= num_jobs / 4; ++job) {
            random = random * 1664525 + 1013904223;
            const std::int64_t num_tasks = random >> 16 & 1 ? random >> 20 & 7 : (random >> 20) % LONGEST;
            pool.run(num_tasks, [&](std::int64_t index, int thread) {
                results[index] += job;
                if (thread < 0 || thread >= num_threads) results[index] = -1;
            });
            for (std::int64_t index = 0; index < num_tasks; ++index) {
                num_wrong += results[index] != job;
                results[index] = 0;
            }
            if ((random >> 8) % 64 == 0) {
                const std::int64_t end = tokamak::cpu::monotonic_ns() + PAUSE_NS;
                while (tokamak::cpu::monotonic_ns() < end) {
                }
            }
        }
    }
    std::printf("%ld wrong of %ld\n", num_wrong, num_jobs);
    return num_wrong != 0;
}

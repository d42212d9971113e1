// Two processes on one doorbell, in C++ so that thousands of rounds meet in the few nanoseconds between "publish, look at parked"
// and "park, look at tail". Prints the number of wakes that were lost: sleeps that ran out with something there already. They are
// so long that a machine that stalls a process between the store and the wake is not taken for a lost wake. Built and run by
// test_programs.py.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>

#include "../../../shm/native/doorbell.h"

using namespace tokamak;

constexpr i64 PATIENCE_NS = 20'000'000'000;

struct Shared {
    alignas(LINE) u64 tail;  // rounds begun, by the parent
    alignas(LINE) u64 head;  // rounds seen, by the child
    DoorbellLine doorbell;
};

// A delay that differs each time, so that the two sides drift across each other.
void dawdle(u32 &state) {
    state = state * 1664525 + 1013904223;
    for (u32 turn = state >> 26; turn > 0; --turn) cpu_relax();
}

int main(int, char **arguments) {
    const u64 num_rounds = std::strtoull(arguments[1], nullptr, 10);
    auto *shared =
        static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    Doorbell doorbell(&shared->doorbell, PATIENCE_NS);
    u32 random = 1;
    if (const pid_t child = fork(); child > 0) {
        for (u64 round = 1; round <= num_rounds; ++round) {
            dawdle(random);
            store_release(&shared->tail, round);
            doorbell.ring();
            for (u32 turn = 0; load_acquire(&shared->head) != round; ++turn) turn % 4096 ? cpu_relax() : (void)sched_yield();
        }
        int status;
        waitpid(child, &status, 0);
        return WEXITSTATUS(status);
    }
    random = 7;
    for (u64 round = 1; round <= num_rounds; ++round) {
        dawdle(random);
        while (!doorbell.wait(PATIENCE_NS, 0, [&] { return load_acquire(&shared->tail) == round; })) {
        }
        store_release(&shared->head, round);
    }
    std::printf("%llu\n", static_cast<unsigned long long>(doorbell.num_late_wakes()));
}

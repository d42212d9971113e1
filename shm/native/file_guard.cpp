// Guards of mapped files that another process may truncate, or that a disk cannot read: a load that would end this process with
// SIGBUS reads zeros instead, and the mapping is marked as lost. Its owner checks the mark before it trusts the data.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <string>

#include "bindings.h"
#include "buffer.h"
#include "fault.h"

namespace tokamak {
namespace {

constexpr int MAX_RANGES = 4096;  // mapped files of a process

// [begin, end) of a mapping. SYNC: `end` is stored last and cleared first, so the handler never sees a partial range.
struct Range {
    std::atomic<u64> begin{0};
    std::atomic<u64> end{0};  // 0: free
    std::atomic<bool> is_lost{false};
};

Range ranges[MAX_RANGES];
std::atomic<int> num_ranges{0};  // including free ones
std::mutex lock;                 // for adding and removing ranges
struct sigaction previous;
u64 page_bytes = 4096;

// Zeroes the rest of the mapping: page by page, a large file would need more mappings than a process may have.
bool replace(Range &range, u64 address) {
    const u64 end = range.end.load(std::memory_order_acquire);
    const u64 begin = range.begin.load(std::memory_order_relaxed);
    if (address < begin || address >= end) return false;
    const u64 first = address / page_bytes * page_bytes;
    void *page = reinterpret_cast<void *>(first);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    range.is_lost.store(true, std::memory_order_release);
    return mmap(page, end - first, PROT_READ, flags, -1, 0) != MAP_FAILED;
}

void on_bus_error(int number, siginfo_t *info, void *context) {
    const int saved_errno = errno;
    const u64 address = reinterpret_cast<u64>(info->si_addr);
    const int count = num_ranges.load(std::memory_order_acquire);
    for (int index = 0; index < count; ++index) {
        if (replace(ranges[index], address)) {
            errno = saved_errno;
            return;
        }
    }
    // Another handler, such as Python's faulthandler, may raise the signal again, which then reaches this one.
    static std::atomic<bool> is_fatal{false};
    if (is_fatal.exchange(true)) {
        signal(number, SIG_DFL);
        return;
    }
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);  // the load is repeated when this returns, and ends the process
    } else {
        previous.sa_handler(number);
    }
}

// Handlers set since the last file was mapped are called after this one again.
void install() {
    page_bytes = static_cast<u64>(sysconf(_SC_PAGESIZE));
    struct sigaction present{};
    sigaction(SIGBUS, nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_bus_error) return;
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous);
}

// Returns the number with which the mapping is checked and released.
int guard_file(nb::handle memory) {
    const Buffer buffer(memory);
    const u64 begin = reinterpret_cast<u64>(buffer.data());
    const std::lock_guard<std::mutex> holder(lock);
    install();
    for (int index = 0; index < MAX_RANGES; ++index) {
        Range &range = ranges[index];
        if (range.end.load(std::memory_order_relaxed)) continue;
        range.begin.store(begin, std::memory_order_relaxed);
        range.is_lost.store(false, std::memory_order_relaxed);
        range.end.store(begin + buffer.num_bytes(), std::memory_order_release);
        if (index >= num_ranges.load(std::memory_order_relaxed)) num_ranges.store(index + 1, std::memory_order_release);
        return index;
    }
    throw Fault("more than " + std::to_string(MAX_RANGES) + " files are mapped by this process; use fewer, larger files");
}

bool is_file_lost(int number) { return ranges[number].is_lost.load(std::memory_order_acquire); }

void release_file(int number) {
    const std::lock_guard<std::mutex> holder(lock);
    ranges[number].end.store(0, std::memory_order_release);
}

}  // namespace

void bind_file_guard(nb::module_ &module) {
    module.def("guard_file", &guard_file, nb::arg("memory"));
    module.def("is_file_lost", &is_file_lost, nb::arg("number"));
    module.def("release_file", &release_file, nb::arg("number"));
}

}  // namespace tokamak

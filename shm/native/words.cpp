// Single words of mapped memory for Python: atomics, the futex, and the one process call that Python lacks.
#include <nanobind/stl/string.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

#include "bindings.h"
#include "buffer.h"
#include "sync.h"

namespace tokamak {
namespace {

template <class T>
T load(nb::handle memory, u64 offset) {
    return load_acquire(Buffer(memory).at<T>(offset));
}

template <class T>
void store(nb::handle memory, u64 offset, T value) {
    store_release(Buffer(memory).writable_at<T>(offset), value);
}

bool compare_exchange_u64(nb::handle memory, u64 offset, u64 expected, u64 desired) {
    return compare_exchange(Buffer(memory).writable_at<u64>(offset), expected, desired);
}

u64 fetch_add_u64(nb::handle memory, u64 offset, u64 count) {
    return __atomic_fetch_add(Buffer(memory).writable_at<u64>(offset), count, __ATOMIC_ACQ_REL);
}

// Looks words up in a table with linear probing of `num_slots` (a power of two) at `offset`, as shm/fingerprints.py describes it.
// Returns a byte for each of `words` (8 bytes each): 1 if it is there.
nb::bytes find_words(nb::handle memory, u64 offset, u64 num_slots, nb::handle words) {
    const Buffer buffer(memory);
    const Payload wanted(words);
    const u64 *slots = buffer.at<u64>(offset, num_slots);
    const u64 mask = num_slots - 1, num_words = wanted.num_bytes() / sizeof(u64);
    std::string found(num_words, 0);
    for (u64 index = 0; index < num_words; ++index) {
        u64 word;
        memcpy(&word, wanted.data() + index * sizeof(u64), sizeof(u64));
        u64 slot = word & mask;
        for (u64 tried = 0; tried < num_slots; ++tried, slot = (slot + 1) & mask) {
            const u64 present = load_acquire(slots + slot);  // SYNC: pairs with FingerprintWriter._store
            if (present == word) found[index] = 1;
            if (present == word || present == 0) break;
        }
    }
    return nb::bytes(found.data(), found.size());
}

// Returns true if woken, or if the word is not (or no longer) `expected`; false after a timeout, or a signal for Python to
// handle.
bool futex_wait_u32(nb::handle memory, u64 offset, u32 expected, i64 timeout_ns) {
    const Buffer buffer(memory);
    const u32 *word = buffer.at<u32>(offset);
    int error;
    {
        nb::gil_scoped_release release;
        error = futex_wait(word, expected, timeout_ns);
    }
    return error == 0 || error == EAGAIN;
}

int futex_wake_u32(nb::handle memory, u64 offset, int num_waiters) {
    return futex_wake(Buffer(memory).at<u32>(offset), num_waiters);
}

// Asks the kernel to send `signal` when the thread that created this process ends. The caller must check whether it ended
// before.
void set_parent_death_signal(int signal) {
    if (prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

}  // namespace

void bind_words(nb::module_ &module) {
    module.def("load_u32", &load<u32>, nb::arg("memory"), nb::arg("offset"));
    module.def("load_u64", &load<u64>, nb::arg("memory"), nb::arg("offset"));
    module.def("store_u32", &store<u32>, nb::arg("memory"), nb::arg("offset"), nb::arg("value"));
    module.def("store_u64", &store<u64>, nb::arg("memory"), nb::arg("offset"), nb::arg("value"));
    module.def("compare_exchange_u64", &compare_exchange_u64, nb::arg("memory"), nb::arg("offset"), nb::arg("expected"),
               nb::arg("desired"));
    module.def("fetch_add_u64", &fetch_add_u64, nb::arg("memory"), nb::arg("offset"), nb::arg("count"));
    module.def("find_words", &find_words, nb::arg("memory"), nb::arg("offset"), nb::arg("num_slots"), nb::arg("words"));
    module.def("fence", &fence);
    module.def("futex_wait", &futex_wait_u32, nb::arg("memory"), nb::arg("offset"), nb::arg("expected"), nb::arg("timeout_ns"));
    module.def("futex_wake", &futex_wake_u32, nb::arg("memory"), nb::arg("offset"), nb::arg("num_waiters") = 1);
    module.def("set_parent_death_signal", &set_parent_death_signal, nb::arg("signal"));
}

}  // namespace tokamak

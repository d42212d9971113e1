// Single words of mapped memory for Python: atomics, the futex, and the one process call that Python lacks.
#include <nanobind/stl/string.h>
#include <signal.h>
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
    module.def("fence", &fence);
    module.def("futex_wait", &futex_wait_u32, nb::arg("memory"), nb::arg("offset"), nb::arg("expected"), nb::arg("timeout_ns"));
    module.def("futex_wake", &futex_wake_u32, nb::arg("memory"), nb::arg("offset"), nb::arg("num_waiters") = 1);
    module.def("set_parent_death_signal", &set_parent_death_signal, nb::arg("signal"));
}

}  // namespace tokamak

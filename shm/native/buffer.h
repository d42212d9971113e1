// Mapped memory as a Python buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "fault.h"
#include "layout.h"

namespace tokamak {

namespace nb = nanobind;

// Keeps the mapping alive, so that a native object that outlives Segment.close() still has its memory.
class Buffer {
public:
    explicit Buffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) == 0) return;
        PyErr_Clear();
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    const u8 *data() const { return static_cast<const u8 *>(view_.buf); }
    u64 num_bytes() const { return static_cast<u64>(view_.len); }
    bool is_readonly() const { return view_.readonly; }

    // Returns `count` structs at `offset`; throws Fault unless they are inside the buffer and aligned.
    template <class T>
    T *at(u64 offset, u64 count = 1) const {
        const u64 room = num_bytes();
        if (offset > room || count > (room - offset) / sizeof(T)) {
            throw Fault("shared memory: offset " + std::to_string(offset) + " plus " + std::to_string(count) + " x " +
                        std::to_string(sizeof(T)) + " bytes is outside a segment of " + std::to_string(room) + " bytes");
        }
        u8 *address = static_cast<u8 *>(view_.buf) + offset;
        if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) {
            throw Fault("shared memory: offset " + std::to_string(offset) + " is not aligned to " + std::to_string(alignof(T)));
        }
        return reinterpret_cast<T *>(address);
    }

    template <class T>
    T *writable_at(u64 offset, u64 count = 1) const {
        if (is_readonly()) throw Fault("shared memory: this segment is mapped read-only");
        return at<T>(offset, count);
    }

private:
    Py_buffer view_;
};

// A payload from Python: any object with contiguous bytes.
class Payload {
public:
    explicit Payload(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Payload() { PyBuffer_Release(&view_); }
    Payload(const Payload &) = delete;
    Payload &operator=(const Payload &) = delete;
    const void *data() const { return view_.buf; }
    u64 num_bytes() const { return static_cast<u64>(view_.len); }

private:
    Py_buffer view_;
};

}  // namespace tokamak

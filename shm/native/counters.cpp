// Cells and histograms of the counters file (layout: CellLine, HistogramHeader). One writer each, so adding needs no locked
// instruction. A reader sees each word whole; the parts of a histogram may differ by one observation.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bindings.h"
#include "buffer.h"
#include "sync.h"

namespace tokamak {
namespace {

f64 to_f64(u64 word) {
    f64 value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

u64 to_word(f64 value) {
    u64 word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

f64 as_f64(nb::handle number) {
    const f64 value = PyFloat_AsDouble(number.ptr());
    if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

// A float is not rounded: passing one to an integer cell is an error of the caller.
i64 as_i64(nb::handle number) {
    const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
    if (!index.is_valid()) throw nb::python_error();
    const i64 value = PyLong_AsLongLong(index.ptr());
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

class Cell {
public:
    Cell(nb::handle memory, u64 offset, bool is_float) : buffer_(memory), word_(buffer_.at<u64>(offset)), is_float_(is_float) {}

    void add(nb::handle number) {
        const u64 old = load_relaxed(writable());
        store_relaxed(word_, is_float_ ? to_word(to_f64(old) + as_f64(number)) : old + static_cast<u64>(as_i64(number)));
    }

    void set(nb::handle number) {
        const u64 word = is_float_ ? to_word(as_f64(number)) : static_cast<u64>(as_i64(number));
        store_release(writable(), word);
    }

    nb::object value() const {
        const u64 word = load_acquire(word_);
        return is_float_ ? nb::object(nb::float_(to_f64(word))) : nb::object(nb::int_(static_cast<i64>(word)));
    }

private:
    u64 *writable() const {
        if (buffer_.is_readonly()) throw Fault("counters: this file is mapped read-only");
        return word_;
    }

    Buffer buffer_;
    u64 *word_;
    bool is_float_;
};

class Histogram {
public:
    Histogram(nb::handle memory, u64 offset, std::vector<f64> bounds)
        : buffer_(memory),
          bounds_(std::move(bounds)),
          sum_(buffer_.at<u64>(offset)),
          buckets_(buffer_.at<u64>(offset + sizeof(HistogramHeader), bounds_.size() + 1)) {}

    void observe(f64 value) { observe_many(value, 1); }

    void observe_many(f64 value, u64 count) {
        if (buffer_.is_readonly()) throw Fault("counters: this file is mapped read-only");
        if (std::isnan(value)) throw nb::value_error("a histogram cannot take NaN");
        const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
        store_relaxed(sum_, to_word(to_f64(load_relaxed(sum_)) + value * static_cast<f64>(count)));
        add_relaxed(buckets_ + bucket, count);
    }

    f64 sum() const { return to_f64(load_relaxed(sum_)); }

    std::vector<u64> buckets() const {
        std::vector<u64> counts(bounds_.size() + 1);
        for (std::size_t index = 0; index < counts.size(); ++index) counts[index] = load_relaxed(buckets_ + index);
        return counts;
    }

    u64 count() const {
        u64 total = 0;
        for (u64 count : buckets()) total += count;
        return total;
    }

    const std::vector<f64> &bounds() const { return bounds_; }

private:
    Buffer buffer_;
    std::vector<f64> bounds_;
    u64 *sum_;
    u64 *buckets_;
};

}  // namespace

void bind_counters(nb::module_ &module) {
    nb::class_<Cell>(module, "Cell")
        .def(nb::init<nb::handle, u64, bool>(), nb::arg("memory"), nb::arg("offset"), nb::arg("is_float") = false)
        .def("add", &Cell::add, nb::arg("count") = 1)
        .def("set", &Cell::set, nb::arg("value"))
        .def_prop_ro("value", &Cell::value);
    nb::class_<Histogram>(module, "Histogram")
        .def(nb::init<nb::handle, u64, std::vector<f64>>(), nb::arg("memory"), nb::arg("offset"), nb::arg("bounds"))
        .def("observe", &Histogram::observe, nb::arg("value"))
        .def("observe_many", &Histogram::observe_many, nb::arg("value"), nb::arg("count"))
        .def_prop_ro("sum", &Histogram::sum)
        .def_prop_ro("count", &Histogram::count)
        .def_prop_ro("buckets", &Histogram::buckets)
        .def_prop_ro("bounds", &Histogram::bounds);
}

}  // namespace tokamak

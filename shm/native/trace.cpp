// The writer of a trace's ring (layout: TraceHeader, TraceEvent).
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "bindings.h"
#include "buffer.h"
#include "sync.h"

namespace tokamak {
namespace {

class TraceWriter {
public:
    explicit TraceWriter(nb::handle memory)
        : buffer_(memory),
          header_(buffer_.writable_at<TraceHeader>(sizeof(SegmentHeader))),
          names_(buffer_.at<char>(header_->names_offset, header_->max_names * TRACE_NAME_BYTES)),
          num_events_(header_->num_events),
          events_(buffer_.at<TraceEvent>(header_->events_offset, num_events_)) {
        if (num_events_ == 0 || header_->max_names == 0) throw Fault("trace: the ring has no room");
    }

    // Returns the id of `name` in events; names that did not fit share the last id.
    u32 name_id(std::string_view name) {
        name = name.substr(0, TRACE_NAME_BYTES - 1);
        const u32 num_names = load_relaxed(&header_->num_names);
        for (u32 id = 0; id < num_names; ++id) {
            if (name == std::string_view(text_of(id), strnlen(text_of(id), TRACE_NAME_BYTES))) return id;
        }
        if (num_names == header_->max_names) return num_names - 1;
        std::memset(text_of(num_names), 0, TRACE_NAME_BYTES);
        std::memcpy(text_of(num_names), name.data(), name.size());
        store_release(&header_->num_names, num_names + 1);
        return num_names;
    }

    // Returns false when the trace is over.
    bool record(u32 name, u64 begin_ns, u64 end_ns, i64 value, std::string_view label, u32 track) {
        const u64 until_ns = load_acquire(&header_->until_ns);
        if (until_ns != 0 && end_ns > until_ns) return false;
        const u64 number = load_relaxed(&header_->num_written);
        TraceEvent &event = events_[number % num_events_];
        store_relaxed(&event.sequence, u64{0});
        fence();  // so that the new contents are never taken for the old event
        event.begin_ns = begin_ns;
        event.duration_ns = end_ns > begin_ns ? end_ns - begin_ns : 0;
        event.name = name;
        event.track = track;
        event.value = value;
        const std::size_t num_bytes = std::min(label.size(), sizeof(event.label) - 1);
        std::memcpy(event.label, label.data(), num_bytes);
        event.label[num_bytes] = 0;
        store_release(&event.sequence, number + 1);
        store_release(&header_->num_written, number + 1);
        return true;
    }

private:
    char *text_of(u32 id) { return names_ + id * TRACE_NAME_BYTES; }

    Buffer buffer_;
    TraceHeader *header_;
    char *names_;
    u64 num_events_;
    TraceEvent *events_;
};

}  // namespace

void bind_trace(nb::module_ &module) {
    module.attr("TRACE_NAME_BYTES") = TRACE_NAME_BYTES;
    nb::class_<TraceWriter>(module, "TraceWriter")
        .def(nb::init<nb::handle>(), nb::arg("memory"))
        .def("name_id", &TraceWriter::name_id, nb::arg("name"))
        .def("record", &TraceWriter::record, nb::arg("name"), nb::arg("begin_ns"), nb::arg("end_ns"), nb::arg("value") = 0,
             nb::arg("label") = "", nb::arg("track") = 0);
}

}  // namespace tokamak

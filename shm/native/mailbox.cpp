// The two ends of a mailbox (layout: MailboxHeader).
#include <vector>

#include "bindings.h"
#include "buffer.h"
#include "doorbell.h"
#include "record_ring.h"

namespace tokamak {
namespace {

struct MailboxRing {
    WriterLine *writer;
    ReaderLine *reader;
    RecordArea area;

    MailboxRing(const Buffer &buffer, u32 index) {
        const auto *header = buffer.writable_at<MailboxHeader>(sizeof(SegmentHeader));
        if (index >= header->num_rings) {
            throw Fault("mailbox: no ring " + std::to_string(index) + ", it has " + std::to_string(header->num_rings));
        }
        const u64 begin = header->rings_offset + index * header->ring_stride;
        writer = buffer.at<WriterLine>(begin);
        reader = buffer.at<ReaderLine>(begin + sizeof(WriterLine));
        area = {buffer.at<u8>(begin + sizeof(WriterLine) + sizeof(ReaderLine), header->capacity_bytes), header->capacity_bytes};
    }
};

DoorbellLine *doorbell_of(const Buffer &buffer) {
    return buffer.writable_at<DoorbellLine>(sizeof(SegmentHeader) + sizeof(MailboxHeader));
}

// One sender's end: its own ring, and the doorbell that it shares with the other senders.
class MailboxWriter {
public:
    MailboxWriter(nb::handle memory, u32 ring, u32 epoch)
        : buffer_(memory), ring_(buffer_, ring), writer_(ring_.writer, ring_.area, epoch), doorbell_(doorbell_of(buffer_)) {}

    bool try_send(nb::handle object) {
        const Payload payload(object);
        if (!writer_.push(payload.data(), payload.num_bytes(), [this] { return load_acquire(&ring_.reader->head); }))
            return false;
        doorbell_.ring();
        return true;
    }

    u64 max_record_bytes() const { return writer_.max_record_bytes(); }
    u64 fill_bytes() const { return writer_.tail() - load_relaxed(&ring_.reader->head); }
    u64 num_full_waits() const { return writer_.num_full_waits(); }

private:
    Buffer buffer_;
    MailboxRing ring_;
    RecordWriter writer_;
    Doorbell doorbell_;
};

// The receiver's end: all rings.
class MailboxReader {
public:
    MailboxReader(nb::handle memory, nb::list senders, u32 epoch)
        : buffer_(memory), senders_(senders), doorbell_(doorbell_of(buffer_)) {
        if (nb::len(senders) == 0) throw Fault("mailbox: it needs at least the control ring's sender");
        for (u32 index = 0; index < nb::len(senders); ++index) {
            const MailboxRing ring(buffer_, index);
            store_relaxed(&ring.reader->epoch, epoch);
            rings_.emplace_back(ring.writer, ring.reader, ring.area);
        }
        held_.resize(rings_.size());
    }

    // Takes from the control ring until it is empty, then one record of each ring in turn. A corrupt ring is reported only when
    // no record taken before would be lost with the error.
    nb::list receive(u64 max_records) {
        nb::list batch;
        try {
            while (nb::len(batch) < max_records && take(0, batch)) {
            }
            const u64 num_others = rings_.size() - 1;
            for (u64 num_empty = 0; num_empty < num_others && nb::len(batch) < max_records;) {
                num_empty = take(1 + turn_ % num_others, batch) ? 0 : num_empty + 1;
                ++turn_;
            }
        } catch (const Fault &) {
            if (nb::len(batch) == 0) throw;
        }
        return batch;
    }

    bool wait(i64 timeout_ns, i64 spin_ns) {
        nb::gil_scoped_release release;
        return doorbell_.wait(timeout_ns, spin_ns, [this] { return has_records(); });
    }

    // While a ring is held its records stay there: they are neither taken nor waited for. Any thread may wait meanwhile.
    void hold(u32 ring, bool is_held) {
        if (ring >= rings_.size()) throw Fault("mailbox: no ring " + std::to_string(ring));
        store_relaxed<u8>(&held_[ring], is_held);
    }

    u64 num_late_wakes() const { return doorbell_.num_late_wakes(); }

private:
    bool has_records() const {
        for (u64 index = 0; index < rings_.size(); ++index) {
            if (load_relaxed(&held_[index]) == 0 && rings_[index].has_records()) return true;
        }
        return false;
    }

    bool take(u64 index, nb::list &batch) {
        if (load_relaxed(&held_[index]) != 0) return false;
        RecordReader &ring = rings_[index];
        const bool has_taken = ring.next([&](const void *payload, u64 num_bytes) {
            batch.append(nb::make_tuple(senders_[index], nb::bytes(payload, num_bytes)));
        });
        ring.commit();
        return has_taken;
    }

    Buffer buffer_;
    nb::list senders_;
    Doorbell doorbell_;
    std::vector<RecordReader> rings_;
    std::vector<u8> held_;
    u64 turn_ = 0;
};

}  // namespace

void bind_mailbox(nb::module_ &module) {
    nb::class_<MailboxWriter>(module, "MailboxWriter")
        .def(nb::init<nb::handle, u32, u32>(), nb::arg("memory"), nb::arg("ring"), nb::arg("epoch"))
        .def("try_send", &MailboxWriter::try_send, nb::arg("payload"))
        .def_prop_ro("max_record_bytes", &MailboxWriter::max_record_bytes)
        .def_prop_ro("fill_bytes", &MailboxWriter::fill_bytes)
        .def_prop_ro("num_full_waits", &MailboxWriter::num_full_waits);
    nb::class_<MailboxReader>(module, "MailboxReader")
        .def(nb::init<nb::handle, nb::list, u32>(), nb::arg("memory"), nb::arg("senders"), nb::arg("epoch"))
        .def("receive", &MailboxReader::receive, nb::arg("max_records"))
        .def("wait", &MailboxReader::wait, nb::arg("timeout_ns"), nb::arg("spin_ns"))
        .def("hold", &MailboxReader::hold, nb::arg("ring"), nb::arg("is_held"))
        .def_prop_ro("num_late_wakes", &MailboxReader::num_late_wakes);
}

}  // namespace tokamak

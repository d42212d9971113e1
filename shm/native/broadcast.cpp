// The two ends of a broadcast ring (layout and states: BroadcastHeader).
#include <deque>
#include <optional>

#include "bindings.h"
#include "buffer.h"
#include "doorbell.h"
#include "record_ring.h"

namespace tokamak {
namespace {

u32 word(ReaderState state) { return static_cast<u32>(state); }

struct ReaderPlace {
    ReaderLine *line;
    Doorbell doorbell;

    ReaderPlace(const Buffer &buffer, const BroadcastHeader *header, u32 index)
        : line(buffer.at<ReaderLine>(begin_of(header, index))),
          doorbell(buffer.at<DoorbellLine>(begin_of(header, index) + sizeof(ReaderLine))) {}

    // SYNC: the load-acquire sees head and epoch as stored before the state.
    bool is(ReaderState state) const { return load_acquire(&line->state) == word(state); }

private:
    static u64 begin_of(const BroadcastHeader *header, u32 index) {
        if (index >= header->num_readers) {
            throw Fault("broadcast ring: no reader " + std::to_string(index) + ", it has places for " +
                        std::to_string(header->num_readers));
        }
        return header->readers_offset + index * (sizeof(ReaderLine) + sizeof(DoorbellLine));
    }
};

struct BroadcastParts {
    const BroadcastHeader *header;
    WriterLine *writer;
    RecordArea area;

    explicit BroadcastParts(const Buffer &buffer)
        : header(buffer.writable_at<BroadcastHeader>(sizeof(SegmentHeader))),
          writer(buffer.at<WriterLine>(sizeof(SegmentHeader) + sizeof(BroadcastHeader))),
          area{buffer.at<u8>(header->data_offset, header->capacity_bytes), header->capacity_bytes} {}
};

// Removes a reader from the set that the writer waits for, and wakes it so that it notices.
void evict_reader(ReaderPlace &place) {
    store_release(&place.line->state, word(ReaderState::EVICTED));
    place.doorbell.ring();
}

class BroadcastWriter {
public:
    BroadcastWriter(nb::handle memory, u32 epoch)
        : buffer_(memory), parts_(buffer_), writer_(parts_.writer, parts_.area, epoch) {
        for (u32 index = 0; index < parts_.header->num_readers; ++index) readers_.emplace_back(buffer_, parts_.header, index);
    }

    bool try_send(nb::handle object) {
        const Payload payload(object);
        admit();
        if (!writer_.push(payload.data(), payload.num_bytes(), [this] { return slowest_head(); })) return false;
        for (ReaderPlace &place : readers_) place.doorbell.ring();
        return true;
    }

    nb::list active_readers() {
        admit();
        nb::list active;
        for (u32 index = 0; index < readers_.size(); ++index) {
            if (readers_[index].is(ReaderState::ACTIVE)) active.append(index);
        }
        return active;
    }

    u64 max_record_bytes() const { return writer_.max_record_bytes(); }
    u64 fill_bytes() const { return writer_.tail() - slowest_head(); }
    u64 num_full_waits() const { return writer_.num_full_waits(); }

private:
    // Admits new readers, which start at the next record. A new reader that is evicted meanwhile stays evicted.
    void admit() {
        for (ReaderPlace &place : readers_) {
            if (!place.is(ReaderState::JOINING)) continue;
            store_relaxed(&place.line->head, writer_.tail());
            compare_exchange(&place.line->state, word(ReaderState::JOINING), word(ReaderState::ACTIVE));
        }
    }

    // SYNC: the load-acquire of head pairs with the store-release in RecordReader::commit.
    u64 slowest_head() const {
        const u64 tail = writer_.tail();
        u64 slowest = tail;
        for (const ReaderPlace &place : readers_) {
            if (!place.is(ReaderState::ACTIVE)) continue;
            const u64 head = load_acquire(&place.line->head);
            if (tail - head > tail - slowest) slowest = head;
        }
        return slowest;
    }

    Buffer buffer_;
    BroadcastParts parts_;
    RecordWriter writer_;
    std::deque<ReaderPlace> readers_;
};

class BroadcastReader {
public:
    BroadcastReader(nb::handle memory, u32 reader, u32 epoch)
        : buffer_(memory), parts_(buffer_), index_(reader), epoch_(epoch), place_(buffer_, parts_.header, reader) {
        join();
    }

    nb::list receive(u64 max_records) {
        nb::list batch;
        if (!is_joined()) return batch;
        try {
            const auto append = [&](const void *payload, u64 num_bytes) { batch.append(nb::bytes(payload, num_bytes)); };
            while (nb::len(batch) < max_records && ring_->next(append)) {
            }
        } catch (const Fault &) {
            check_place();
            if (nb::len(batch) == 0) throw;
        }
        // A reader that was taken for dead may have copied what the writer was overwriting.
        // SYNC: the fence orders the copies above before the check of the state.
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        check_place();
        ring_->commit();
        return batch;
    }

    bool wait(i64 timeout_ns, i64 spin_ns) {
        nb::gil_scoped_release release;
        return place_.doorbell.wait(timeout_ns, spin_ns, [this] { return has_news(); });
    }

    // Ends waits also when the word is not (or no longer) `seen`. The process that changes it rings this reader.
    void watch(nb::handle memory, u64 offset, u64 seen) {
        if (!watched_buffer_) watched_buffer_.emplace(memory);
        watched_ = watched_buffer_->at<u64>(offset);
        seen_ = seen;
    }

    u64 num_late_wakes() const { return place_.doorbell.num_late_wakes(); }

    bool is_active() const { return place_.is(ReaderState::ACTIVE) && is_mine(); }

    void leave() {
        if (is_mine()) store_release(&place_.line->state, word(ReaderState::FREE));
        ring_.reset();
    }

private:
    // SYNC: the store-release of the state publishes the epoch to an earlier life that may still run.
    void join() {
        store_relaxed(&place_.line->epoch, epoch_);
        store_release(&place_.line->state, word(ReaderState::JOINING));
    }

    bool is_mine() const { return load_relaxed(&place_.line->epoch) == epoch_; }

    // There is a record, or an eviction to report.
    bool has_news() const {
        if (!is_mine() || place_.is(ReaderState::EVICTED)) return true;
        if (watched_ != nullptr && load_acquire(watched_) != seen_) return true;
        return place_.is(ReaderState::ACTIVE) && load_acquire(&parts_.writer->tail) != load_relaxed(&place_.line->head);
    }

    bool is_joined() {
        if (place_.is(ReaderState::JOINING) && is_mine()) return false;
        check_place();
        if (!ring_) ring_.emplace(parts_.writer, place_.line, parts_.area);
        return true;
    }

    void check_place() const {
        if (is_active()) return;
        const std::string fate = !is_mine() ? "was replaced by epoch " + std::to_string(load_relaxed(&place_.line->epoch))
                                 : place_.is(ReaderState::FREE) ? "has left"
                                                                : "was evicted";
        throw Fault("broadcast ring: reader " + std::to_string(index_) + " of epoch " + std::to_string(epoch_) + " " + fate +
                    "; attach again to join at the tail");
    }

    Buffer buffer_;
    BroadcastParts parts_;
    u32 index_;
    u32 epoch_;
    ReaderPlace place_;
    std::optional<RecordReader> ring_;  // from the moment the writer admitted this reader
    std::optional<Buffer> watched_buffer_;
    const u64 *watched_ = nullptr;
    u64 seen_ = 0;
};

void ring_reader(nb::handle memory, u32 reader) {
    const Buffer buffer(memory);
    ReaderPlace(buffer, BroadcastParts(buffer).header, reader).doorbell.ring();
}

void evict(nb::handle memory, u32 reader) {
    const Buffer buffer(memory);
    ReaderPlace place(buffer, BroadcastParts(buffer).header, reader);
    evict_reader(place);
}

}  // namespace

void bind_broadcast(nb::module_ &module) {
    nb::class_<BroadcastWriter>(module, "BroadcastWriter")
        .def(nb::init<nb::handle, u32>(), nb::arg("memory"), nb::arg("epoch"))
        .def("try_send", &BroadcastWriter::try_send, nb::arg("payload"))
        .def("active_readers", &BroadcastWriter::active_readers)
        .def_prop_ro("max_record_bytes", &BroadcastWriter::max_record_bytes)
        .def_prop_ro("fill_bytes", &BroadcastWriter::fill_bytes)
        .def_prop_ro("num_full_waits", &BroadcastWriter::num_full_waits);
    nb::class_<BroadcastReader>(module, "BroadcastReader")
        .def(nb::init<nb::handle, u32, u32>(), nb::arg("memory"), nb::arg("reader"), nb::arg("epoch"))
        .def("receive", &BroadcastReader::receive, nb::arg("max_records"))
        .def("wait", &BroadcastReader::wait, nb::arg("timeout_ns"), nb::arg("spin_ns"))
        .def("watch", &BroadcastReader::watch, nb::arg("memory"), nb::arg("offset"), nb::arg("seen"))
        .def("leave", &BroadcastReader::leave)
        .def_prop_ro("num_late_wakes", &BroadcastReader::num_late_wakes)
        .def_prop_ro("is_active", &BroadcastReader::is_active);
    module.def("ring_reader", &ring_reader, nb::arg("memory"), nb::arg("reader"));
    module.def("evict", &evict, nb::arg("memory"), nb::arg("reader"));
}

}  // namespace tokamak

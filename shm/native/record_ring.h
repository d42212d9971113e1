// Records in a ring of bytes: the writer's half and the reader's half. Mailbox and broadcast ring are built from these.
// Independent of Python.
#pragma once

#include <cstring>
#include <string>
#include <utility>

#include "fault.h"
#include "sync.h"

namespace tokamak {

// The bytes of a ring; positions are taken modulo capacity only here.
struct RecordArea {
    u8 *data;
    u64 capacity;

    u64 offset(u64 position) const { return position % capacity; }
    u64 contiguous(u64 position) const { return capacity - offset(position); }
    static u64 span(u64 num_bytes) { return round_up(sizeof(RecordHeader) + num_bytes, RECORD_ALIGNMENT); }

    // Half the ring, so that a record and the PAD before it fit into an empty ring at any position.
    u64 max_record_bytes() const { return capacity / 2 - sizeof(RecordHeader); }
};

class RecordWriter {
public:
    // Continues after the last record that the last life published. A record that was begun but not published is beyond the
    // tail and gets overwritten. Numbers continue within an epoch and restart with a new one.
    RecordWriter(WriterLine *line, RecordArea area, u32 epoch) : line_(line), area_(area), epoch_(epoch) {
        tail_ = load_relaxed(&line->tail);
        seq_ = load_relaxed(&line->epoch) == epoch ? load_relaxed(&line->seq) : 0;
        store_relaxed(&line->seq, seq_);
        store_relaxed(&line->epoch, epoch);
    }

    u64 tail() const { return tail_; }
    u64 max_record_bytes() const { return area_.max_record_bytes(); }
    u64 num_full_waits() const { return load_relaxed(&line_->num_full_waits); }

    // Writes and publishes one record. False if there is no room. `slowest_head()` is called only if its last result leaves too
    // little room.
    template <class Head>
    bool push(const void *payload, u64 num_bytes, Head slowest_head) {
        if (num_bytes > max_record_bytes()) {
            throw Fault("a record of " + std::to_string(num_bytes) + " bytes does not fit: a ring of " +
                        std::to_string(area_.capacity) + " bytes takes records of up to " + std::to_string(max_record_bytes()) +
                        " bytes; make the ring larger or send the data through a slab");
        }
        const u64 span = RecordArea::span(num_bytes), gap = area_.contiguous(tail_);
        const u64 pad = span <= gap ? 0 : gap;
        if (!has_room(pad + span)) {
            head_ = slowest_head();
            if (tail_ - head_ > area_.capacity) {
                throw Fault("corrupt ring: reader position " + std::to_string(head_) + " against writer position " +
                            std::to_string(tail_) + " in a ring of " + std::to_string(area_.capacity) + " bytes");
            }
            if (!has_room(pad + span)) {
                add_relaxed<u64>(&line_->num_full_waits, 1);
                return false;
            }
        }
        if (pad) {
            const u32 words[2] = {static_cast<u32>(pad), PAD};
            std::memcpy(area_.data + area_.offset(tail_), words, sizeof words);
        }
        u8 *record = area_.data + area_.offset(tail_ + pad);
        const RecordHeader header{static_cast<u32>(num_bytes), RECORD, epoch_, 0, ++seq_};
        std::memcpy(record + sizeof header, payload, num_bytes);
        std::memcpy(record, &header, sizeof header);
        publish(tail_ + pad + span);
        return true;
    }

private:
    bool has_room(u64 needed) const { return tail_ + needed - head_ <= area_.capacity; }

    // SYNC: pairs with the load-acquire of tail in RecordReader::next.
    void publish(u64 tail) {
        tail_ = tail;
        store_relaxed(&line_->seq, seq_);
        store_release(&line_->tail, tail);
        add_relaxed<u64>(&line_->num_records, 1);
    }

    WriterLine *line_;
    RecordArea area_;
    u32 epoch_;
    u64 tail_;
    u64 seq_;
    u64 head_ = 0;  // last known head of the slowest reader; 0: not known
};

class RecordReader {
public:
    // Continues at the head that the last life left: records that it copied but did not commit come again.
    RecordReader(const WriterLine *writer, ReaderLine *line, RecordArea area)
        : writer_(writer),
          line_(line),
          area_(area),
          head_(load_acquire(&line->head)),
          last_(load_relaxed(&line->last_epoch), load_relaxed(&line->last_seq)) {}

    // Whether something is published beyond the committed head. Reads only shared words, so any thread may call it.
    bool has_records() const { return load_acquire(&writer_->tail) != load_relaxed(&line_->head); }

    // Calls take(payload, num_bytes) for the next record; false if there is none. If `take` throws, the record stays the next
    // one. Duplicates and records of a writer older than the last one are dropped. No space is returned to the writer before
    // commit().
    template <class Take>
    bool next(const Take &take) {
        // SYNC: pairs with the store-release of tail in RecordWriter::publish.
        const u64 tail = load_acquire(&writer_->tail);
        while (head_ != tail) {
            const RecordHeader header = header_at(head_, tail);
            if (header.kind == PAD) {
                head_ += header.num_bytes;
                continue;
            }
            const u64 begin = head_ + sizeof header;
            const std::pair<u32, u64> number{header.epoch, header.seq};
            if (number <= last_) {
                add_relaxed<u64>(&line_->num_dropped, 1);
                head_ += RecordArea::span(header.num_bytes);
                continue;
            }
            take(area_.data + area_.offset(begin), header.num_bytes);
            last_ = number;
            head_ += RecordArea::span(header.num_bytes);
            return true;
        }
        return false;
    }

    // Returns the space of what next() returned (or dropped) to the writer. SYNC: pairs with the load-acquire of head by the
    // writer. The order of the three stores is for the next life: if this one is killed between any two of them, it leaves a
    // number that is too low, never one that would drop a record not yet delivered.
    void commit() {
        if (head_ == load_relaxed(&line_->head)) return;
        store_release(&line_->head, head_);
        store_release(&line_->last_seq, last_.second);
        store_release(&line_->last_epoch, last_.first);
    }

private:
    RecordHeader header_at(u64 head, u64 tail) const {
        RecordHeader header{};
        const u64 published = tail - head, gap = area_.contiguous(head);
        if (published > area_.capacity || head % RECORD_ALIGNMENT != 0 || tail % RECORD_ALIGNMENT != 0) {
            throw Fault("corrupt ring: reader position " + std::to_string(head) + ", writer position " + std::to_string(tail) +
                        ", capacity " + std::to_string(area_.capacity) + " bytes");
        }
        const u8 *record = area_.data + area_.offset(head);
        std::memcpy(&header, record, 8);
        if (header.kind == PAD && header.num_bytes == gap && gap < published) return header;
        const u64 span = RecordArea::span(header.num_bytes);
        if (header.kind != RECORD || span > gap || span > published) {
            throw Fault("corrupt ring: at position " + std::to_string(head) + " a record of kind " +
                        std::to_string(header.kind) + " claims " + std::to_string(header.num_bytes) + " bytes, with " +
                        std::to_string(published) + " bytes published and " + std::to_string(gap) +
                        " up to the end of the ring");
        }
        std::memcpy(&header, record, sizeof header);
        return header;
    }

    const WriterLine *writer_;
    ReaderLine *line_;
    RecordArea area_;
    u64 head_;
    std::pair<u32, u64> last_;  // (epoch, seq) of the last record returned
};

}  // namespace tokamak

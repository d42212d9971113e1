// Slots of a tensor slab and their reference masks (layout: SlabHeader, SlotLine).
#include <optional>
#include <vector>

#include "bindings.h"
#include "buffer.h"
#include "sync.h"

namespace tokamak {
namespace {

constexpr u64 bit(u32 index) { return u64{1} << index; }

class Slab {
public:
    explicit Slab(nb::handle memory)
        : buffer_(memory),
          header_(buffer_.writable_at<SlabHeader>(sizeof(SegmentHeader))),
          slots_(buffer_.at<SlotLine>(sizeof(SegmentHeader) + sizeof(SlabHeader), header_->num_slots)) {
        if (header_->num_classes > MAX_SLAB_CLASSES) throw Fault("slab: corrupt header");
        cursors_.resize(header_->num_classes);
    }

    // Takes a free slot of the smallest class that has one and sets the producer's and the consumers' bits; returns (slot,
    // generation). Only the slab's producer may call this.
    nb::object allocate(u64 num_bytes, u64 consumers) {
        for (u32 index = 0; index < header_->num_classes; ++index) {
            const SlabClass &size = header_->classes[index];
            if (size.slot_bytes < num_bytes) continue;
            for (u32 turn = 0; turn < size.num_slots; ++turn) {
                u32 &cursor = cursors_[index];
                const u32 slot = size.first_slot + cursor;
                cursor = (cursor + 1) % size.num_slots;
                SlotLine &line = slots_[slot];
                // SYNC: pairs with the fetch-and of the last release.
                if (load_acquire(&line.mask) != 0) continue;
                const u64 generation = load_relaxed(&line.generation) + 1;
                store_relaxed(&line.generation, generation);
                store_relaxed(&line.num_bytes, num_bytes);
                store_release(&line.mask, consumers | bit(PRODUCER_BIT));
                return nb::make_tuple(slot, generation);
            }
        }
        return nb::none();
    }

    // Returns the beginning of the slot's payload. Throws Fault unless the slot holds (slot, generation, num_bytes) for
    // `holder`.
    u64 offset(u32 slot, u64 generation, u64 num_bytes, u32 holder) const {
        check(slot, generation, holder);
        if (load_relaxed(&slots_[slot].num_bytes) != num_bytes) {
            throw Fault("slab " + std::to_string(header_->slab_id) + ": slot " + std::to_string(slot) + " holds " +
                        std::to_string(load_relaxed(&slots_[slot].num_bytes)) + " bytes, the handle says " +
                        std::to_string(num_bytes));
        }
        for (u32 index = 0; index < header_->num_classes; ++index) {
            const SlabClass &size = header_->classes[index];
            if (slot < size.first_slot + size.num_slots) return size.data_offset + (slot - size.first_slot) * size.slot_bytes;
        }
        throw Fault("slab: corrupt header");
    }

    // SYNC: pairs with the load-acquire in allocate(): the holder's reads come before the slot is free.
    void release(u32 slot, u64 generation, u32 holder) {
        check(slot, generation, holder);
        __atomic_fetch_and(&slots_[slot].mask, ~bit(holder), __ATOMIC_ACQ_REL);
    }

    // Clears a dead holder's bit in every slot and returns how many had it. It is unknown whether the handles of a dead
    // producer's slots were sent: these slots are freed for all, with a new generation, so that a sent handle is refused.
    u32 clear(u32 holder) {
        u32 num_cleared = 0;
        for (u32 slot = 0; slot < header_->num_slots; ++slot) {
            SlotLine &line = slots_[slot];
            if (!(load_acquire(&line.mask) & bit(holder))) continue;
            ++num_cleared;
            if (holder == PRODUCER_BIT) {
                store_relaxed(&line.generation, load_relaxed(&line.generation) + 1);
                store_release<u64>(&line.mask, 0);
            } else {
                __atomic_fetch_and(&line.mask, ~bit(holder), __ATOMIC_ACQ_REL);
            }
        }
        return num_cleared;
    }

    u64 mask(u32 slot) const {
        if (slot >= header_->num_slots) throw Fault("slab: no slot " + std::to_string(slot));
        return load_acquire(&slots_[slot].mask);
    }

    u32 num_used() const {
        u32 num_used = 0;
        for (u32 slot = 0; slot < header_->num_slots; ++slot) num_used += load_relaxed(&slots_[slot].mask) != 0;
        return num_used;
    }

private:
    void check(u32 slot, u64 generation, u32 holder) const {
        const std::string name = "slab " + std::to_string(header_->slab_id) + ": slot " + std::to_string(slot);
        if (slot >= header_->num_slots) throw Fault(name + " does not exist, there are " + std::to_string(header_->num_slots));
        const SlotLine &line = slots_[slot];
        const u64 present = load_acquire(&line.generation);
        if (present != generation) {
            throw Fault(name + " is at generation " + std::to_string(present) + ", the handle's is " +
                        std::to_string(generation) + ": it was released or its producer died");
        }
        if (holder >= 64 || !(load_acquire(&line.mask) & bit(holder))) {
            throw Fault(name + ", generation " + std::to_string(generation) + ", is not held by consumer " +
                        std::to_string(holder));
        }
    }

    Buffer buffer_;
    SlabHeader *header_;
    SlotLine *slots_;
    std::vector<u32> cursors_;  // for each class: where the search for a free slot continues
};

}  // namespace

void bind_slab(nb::module_ &module) {
    module.attr("PRODUCER_BIT") = PRODUCER_BIT;
    module.attr("MAX_SLAB_CLASSES") = MAX_SLAB_CLASSES;
    nb::class_<Slab>(module, "Slab")
        .def(nb::init<nb::handle>(), nb::arg("memory"))
        .def("allocate", &Slab::allocate, nb::arg("num_bytes"), nb::arg("consumers"))
        .def("offset", &Slab::offset, nb::arg("slot"), nb::arg("generation"), nb::arg("num_bytes"), nb::arg("holder"))
        .def("release", &Slab::release, nb::arg("slot"), nb::arg("generation"), nb::arg("holder"))
        .def("clear", &Slab::clear, nb::arg("holder"))
        .def("mask", &Slab::mask, nb::arg("slot"))
        .def_prop_ro("num_used", &Slab::num_used);
}

}  // namespace tokamak

// Computes a step's metadata from one small copy from the host, in place: the same as the many ops of ops/paddle/metadata.py,
// bit for bit.
//
// One block computes all, because the sent values must be in the slots' memory before anything is read there. Sums over the
// sequences are in shared memory, where the sequence of a row or tile is searched.
#include "operands.h"

namespace {

constexpr int THREADS = 256, TILE_ROWS = 16, HEADER = 1, FOLLOWING = 1;  // the last two as in metadata.py

// Sequences of a step, or their kept rows; the last one, of the dummy slot, has the rows after all others.
struct Sequences {
    Buffer<int> slots, starts, offsets, first_tiles;  // [sequences + 1]; offsets and tiles one more
    int count;

    static constexpr int BUFFERS = 4;
    DEVICE int num_rows() const { return offsets[count]; }
    DEVICE int rows_of(int sequence) const { return offsets[sequence + 1] - offsets[sequence]; }
};

// The sequence of `index`: how many of ends[1], ends[2], ... ends[count] it has reached.
DEVICE int found_in(const Buffer<int> &ends, int count, int index) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ends[middle + 1] <= index) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct Writer {  // of the fields, one after another
    Buffer<int> to;
    long long at;

    template <typename Value>
    DEVICE void write(int count, Value value) {
        for (int i = threadIdx.x; i < count; i += THREADS) to[at + i] = value(i);
        at += count;
    }
};

DEVICE int position_of(const Sequences &own, int row) {
    int sequence = found_in(own.offsets, own.count, row);
    return sequence < own.count ? row + own.starts[sequence] - own.offsets[sequence] : 0;
}

// `num_rows`: as counted by the host, padding included; with one row per tile, each row is its own tile.
DEVICE void write_fields(Writer &writer, const Derive &o, const Sequences &own, int num_rows, int tile_rows) {
    int count = own.count;
    auto slot_of = [&](int row) { return own.slots[found_in(own.offsets, count, row)]; };
    writer.write(o.max_rows, [&](int row) { return position_of(own, row); });
    writer.write(count, [&](int i) { return own.slots[i]; });
    writer.write(count + 1, [&](int i) { return own.offsets[i]; });
    writer.write(count, [&](int i) { return own.starts[i]; });
    writer.write(count, [&](int i) { return own.starts[i] + own.rows_of(i); });
    if (tile_rows == 1) {
        auto used = [&](int i) { return i < num_rows ? i : 0; };
        writer.write(o.max_tiles, [&](int tile) { return tile < o.max_rows ? slot_of(tile) : count; });
        writer.write(o.max_tiles, [&](int tile) { return tile < o.max_rows ? position_of(own, tile) + 1 : 1; });
        writer.write(o.max_tiles * TILE_ROWS, used);
        writer.write(o.max_rows, used);
        return;
    }
    auto found = [&](int tile) { return found_in(own.first_tiles, count + 1, tile); };
    writer.write(o.max_tiles, [&](int tile) { return own.slots[min(found(tile), count)]; });
    writer.write(o.max_tiles, [&](int tile) {
        int sequence = found(tile);
        return sequence < count ? own.starts[sequence] + own.rows_of(sequence) : 1;
    });
    writer.write(o.max_tiles * TILE_ROWS, [&](int place) {
        int tile = place / TILE_ROWS, sequence = found(tile);
        if (sequence > count) return 0;
        int first = own.offsets[sequence] + (tile - own.first_tiles[sequence]) * TILE_ROWS, row = first + place % TILE_ROWS;
        int end = sequence < count ? own.offsets[sequence + 1] : num_rows;
        return row < end ? row : min(first, num_rows - 1);
    });
    writer.write(o.max_rows, [&](int row) {
        int sequence = found_in(own.offsets, count, row);
        return row < num_rows ? row + own.first_tiles[sequence] * TILE_ROWS - own.offsets[sequence] : 0;
    });
}

__global__ void __launch_bounds__(THREADS) derive(Derive o) {
    int count = o.num_slots, thread = threadIdx.x, written_at = HEADER + 5 * count;
    long long tables_at = static_cast<long long>(count + 1) * o.num_positions;
    long long lengths_at = tables_at + static_cast<long long>(count + 1) * o.num_blocks;
    for (int i = thread; i < o.sent[0]; i += THREADS) o.slots[o.sent[written_at + 2 * i]] = o.sent[written_at + 2 * i + 1];
    Sequences all, kept;
    int line = count + 2, part = 0;
    for (Sequences *each : {&all, &kept}) {
        each->count = count;
        for (Buffer<int> *buffer : {&each->slots, &each->starts, &each->offsets, &each->first_tiles})
            *buffer = dynamic_shared<int>(part++ * line * static_cast<int>(sizeof(int)), line);
    }
    auto sent = [&](int column, int i) { return o.sent[HEADER + column * count + i]; };  // slot, start, count, kept, flags
    __syncthreads();
    for (int i = thread; i <= count; i += THREADS) {
        int slot = i < count ? sent(0, i) : count, start = i < count ? sent(1, i) : 0;
        if (i < count && sent(4, i) == FOLLOWING) start = o.slots[lengths_at + slot] - 1;
        all.slots[i] = kept.slots[i] = slot;
        all.starts[i] = start;
        kept.starts[i] = i < count ? start + sent(2, i) - sent(3, i) : 0;
    }
    if (thread < 2) {
        const Sequences &own = thread == 0 ? all : kept;
        int row = 0, tile = 0;
        for (int i = 0; i <= count; ++i) {
            own.offsets[i] = row;
            own.first_tiles[i] = tile;
            int rows = i < count ? sent(2 + thread, i) : max(1, (thread == 0 ? o.num_rows : o.num_kept) - row);
            row += rows;
            tile += (rows + TILE_ROWS - 1) / TILE_ROWS;
        }
        own.first_tiles[count + 1] = tile;
    }
    __syncthreads();
    Writer writer{o.derived, 0};
    write_fields(writer, o, all, o.num_rows, o.tile_rows);
    auto is_row = [&](int row) { return row < all.num_rows(); };
    auto slot_of = [&](int row) { return all.slots[found_in(all.offsets, count, row)]; };
    writer.write(o.max_rows, [&](int row) {
        return is_row(row) ? o.slots[static_cast<long long>(slot_of(row)) * o.num_positions + position_of(all, row)] : 0;
    });
    writer.write(o.max_rows, slot_of);
    writer.write(o.max_rows, [&](int row) {
        int position = position_of(all, row);
        long long block = tables_at + static_cast<long long>(slot_of(row)) * o.num_blocks + position / o.block_size;
        return o.slots[block] * o.block_size + position % o.block_size;
    });
    write_fields(writer, o, kept, o.num_kept, o.kept_tile_rows);
    writer.write(o.max_rows, [&](int row) {  // same distance from its sequence's end among all rows as among the kept ones
        int sequence = found_in(kept.offsets, count, row);
        return sequence < count ? row + all.offsets[sequence + 1] - kept.offsets[sequence + 1] : 0;
    });
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Derive(const Derive *o, void *stream) {
    int num_bytes = 2 * Sequences::BUFFERS * (o->num_slots + 2) * static_cast<int>(sizeof(int));
    return launch<derive>(*o, dim3(1), THREADS, num_bytes, stream);
}
#endif

// Layout of every shared struct, the only definition of offsets. Python reads names and offsets from here (shm/layout.py),
// and the hash over all of them is in every segment's header, so that builds with different layouts never share a segment.
//
// Little-endian, 64-bit, as mapped. A "line" is 128 bytes: two cache lines, because the prefetcher pulls neighbours in
// pairs. Each line has one writer unless a word says otherwise. Bytes without a name are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokamak {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;
using f64 = double;

constexpr u64 MAGIC = 0x31'4B'41'4D'41'4B'4F'54;  // "TOKAMAK1"
constexpr u32 LAYOUT_VERSION = 2;
constexpr u64 LINE = 128;
constexpr u64 MAX_NAME_BYTES = 32;  // of an actor, with its final zero

// The start of every segment and of every arena that describes itself.
//
//        0                 8                16                24       28
//      0 | magic           | layout_hash     | total_bytes     | version | epoch   |
//     32 | creator_pid  | -| start_ticks     | boot_id (40 bytes, text) ...
//     88 | run_id (16, text)                 | kind (16, text)
//    120 | name (64, text) ...
//    184 | created_ns      | zero up to 256
//
// magic is written last: SYNC: the store-release in publish pairs with the load-acquire in _map_when_ready (shm/segment.py).
struct alignas(LINE) SegmentHeader {
    u64 magic;
    u64 layout_hash;
    u64 total_bytes;
    u32 layout_version;
    u32 epoch;
    u32 creator_pid;
    u32 reserved;
    u64 creator_start_ticks;
    char boot_id[40];
    char run_id[16];
    char kind[16];
    char name[64];
    u64 created_ns;
};
static_assert(sizeof(SegmentHeader) == 2 * LINE);

// A record in a ring, followed by its payload and zero to seven bytes, so that the next one starts at a multiple of 8.
//
//        0           4         8          12         16
//      0 | num_bytes | kind    | epoch    | reserved | seq       |
//     24 | payload (num_bytes) ...
//
// Kind PAD fills the rest of the ring before a record that would wrap; num_bytes is then the whole gap, this word included, and
// only the first 8 bytes exist.
struct RecordHeader {
    u32 num_bytes;
    u32 kind;
    u32 epoch;  // of the writer
    u32 reserved;
    u64 seq;  // from 1 in each epoch
};
static_assert(sizeof(RecordHeader) == 24);
constexpr u32 RECORD = 0x4345'5221;  // "!REC"
constexpr u32 PAD = 0x4441'5021;     // "!PAD"
constexpr u64 RECORD_ALIGNMENT = 8;

// Words written by the writer of a ring.
//
//        0                 8                16                24
//      0 | tail            | seq             | num_records     | num_full_waits  |
//     32 | epoch  | -      | owner (32, text: the sender)
//
// SYNC: tail's store-release (RecordWriter::publish) pairs with its load-acquire (RecordReader::next): a reader that sees
// the tail sees the record. Positions count bytes since the ring was made and never wrap.
struct alignas(LINE) WriterLine {
    u64 tail;
    u64 seq;
    u64 num_records;
    u64 num_full_waits;  // sends refused because the ring was full
    u32 epoch;
    u32 reserved;
    char owner[MAX_NAME_BYTES];
};
static_assert(sizeof(WriterLine) == LINE);

// Words written by the reader of a ring (state: see BroadcastHeader).
//
//        0                 8                16                24       28
//      0 | head            | last_seq        | num_dropped     | last_epoch | epoch |
//     32 | state  | -      | owner (32, text: the receiver)
//
// SYNC: head's store-release (RecordReader::commit) pairs with its load-acquire (RecordWriter::push): the writer
// overwrites only what the reader has copied.
struct alignas(LINE) ReaderLine {
    u64 head;
    u64 last_seq;
    u64 num_dropped;  // duplicates and records of an older writer
    u32 last_epoch;
    u32 epoch;
    u32 state;  // ReaderState, broadcast rings only
    u32 reserved;
    char owner[MAX_NAME_BYTES];
};
static_assert(sizeof(ReaderLine) == LINE);

// The futex that a reader sleeps on.
//
//        0        4
//      0 | parked | zero up to 128
//
// parked: 1 while the reader sleeps or is about to; set by the reader, cleared by the reader or a writer, whichever is first.
// SYNC: parked = 1, fence, load of the tails (Doorbell::wait) pairs with tail, fence, load of parked (Doorbell::ring): at least
// one of the two sees the other's store.
struct alignas(LINE) DoorbellLine {
    u32 parked;
};
static_assert(sizeof(DoorbellLine) == LINE);

// A mailbox: one SPSC ring for each sender, and one doorbell.
//
//      0 | SegmentHeader                                              256
//    256 | num_rings  | -  | capacity_bytes | rings_offset | ring_stride   128
//    384 | DoorbellLine                                               128
//    512 | ring 0: WriterLine, ReaderLine, data[capacity_bytes]       ring_stride
//        | ring 1 ...
//
// Ring 0 is the control ring. capacity_bytes is a multiple of 128.
struct alignas(LINE) MailboxHeader {
    u32 num_rings;
    u32 reserved;
    u64 capacity_bytes;
    u64 rings_offset;
    u64 ring_stride;
};
static_assert(sizeof(MailboxHeader) == LINE);

// A broadcast ring: one writer, and a position for each reader.
//
//      0 | SegmentHeader                                              256
//    256 | num_readers | - | capacity_bytes | readers_offset | data_offset   128
//    384 | WriterLine                                                 128
//    512 | reader 0: ReaderLine, DoorbellLine                         256
//        | reader 1 ...
//        | data[capacity_bytes]
//
// ReaderLine.state:
//     FREE, EVICTED, ACTIVE (of an earlier life) -> JOINING             a new reader (BroadcastReader::join)
//     JOINING -> ACTIVE, head = tail                                    the writer, before its next record (::admit)
//     any -> EVICTED                                                    supervisor or writer (BroadcastWriter::evict)
//     ACTIVE -> FREE                                                    the reader (BroadcastReader::leave)
// Only the writer admits, so the set of positions that it waits for never grows without its knowledge.
enum class ReaderState : u32 { FREE = 0, JOINING = 1, ACTIVE = 2, EVICTED = 3 };

struct alignas(LINE) BroadcastHeader {
    u32 num_readers;
    u32 reserved;
    u64 capacity_bytes;
    u64 readers_offset;
    u64 data_offset;
};
static_assert(sizeof(BroadcastHeader) == LINE);

// A tensor slab: slots of a few sizes in a memfd.
//
//      0 | SegmentHeader                                              256
//    256 | slab_id | num_classes | num_slots | - |                     16
//    272 | class 0: slot_bytes | first_slot | num_slots | data_offset  24
//        | ... 8 classes, ascending by slot_bytes; zero up to 512
//    512 | slot 0: SlotLine                                           128
//        | ...
//        | data of slot 0 at class.data_offset, and so on
struct SlabClass {
    u64 slot_bytes;  // a multiple of 128
    u32 first_slot;
    u32 num_slots;
    u64 data_offset;
};
static_assert(sizeof(SlabClass) == 24);
constexpr u32 MAX_SLAB_CLASSES = 8;

struct alignas(LINE) SlabHeader {
    u32 slab_id;
    u32 num_classes;
    u32 num_slots;
    u32 reserved;
    SlabClass classes[MAX_SLAB_CLASSES];
};
static_assert(sizeof(SlabHeader) == 2 * LINE);

// One slot. Bit 63 of the mask is the producer's, bit i is consumer i's; no bit set: free.
//
//        0                 8                16
//      0 | mask            | generation      | num_bytes       | zero up to 128
//
// SYNC: the fetch-and of a release (Slab::release, Slab::clear) pairs with the load-acquire in Slab::allocate: the
// producer writes into a slot only after the last consumer's reads. The ring that carries the handle ensures that a consumer
// sees the payload.
struct alignas(LINE) SlotLine {
    u64 mask;
    u64 generation;
    u64 num_bytes;
};
static_assert(sizeof(SlotLine) == LINE);
constexpr u32 PRODUCER_BIT = 63;

// Contents of the encoder arena from a row on; line i belongs to row i (shm/encoder_arena.py).
//
//        0                 8                16         20      24      28
//      0 | magic           | version         | num_rows | width | dtype | -     |
//     32 | unit_hash (32)                                    zero up to 128
//
// magic is ENCODER_MAGIC while the line and the rows are complete: cleared first, written last. SYNC: see EncoderArena.
struct alignas(LINE) EncoderLine {
    u64 magic;
    u64 version;  // of the weights
    u32 num_rows;
    u32 width;
    u32 dtype;  // 0: float32, 1: bfloat16
    u32 reserved;
    u8 unit_hash[32];
};
static_assert(sizeof(EncoderLine) == LINE);
constexpr u64 ENCODER_MAGIC = 0x31'45'52'55'54'41'45'46;  // "FEATURE1"

// The counters file.
//
//      0 | SegmentHeader                                              256
//    256 | num_actors | errors_per_actor | actors_offset | metadata_offset
//    280 | metadata_bytes | values_offset | values_bytes | errors_offset
//    312 | trace_generation                                           zero up to 384
//        | ActorLines of each actor                                   256 each
//        | for each actor: its rows: JSON, says where the cells of each are
//        | metadata: JSON, says where the rows of each actor are: {"api0": [offset, bytes], ...}
//        | values: cells (128 each) and histograms (a multiple of 128)
//        | for each actor: errors_per_actor ErrorEntries              512 each
//
// trace_generation: number of begins and ends of traces (shm/trace.py), each of which adds one (fetch-and-add).
struct alignas(LINE) CountersHeader {
    u32 num_actors;
    u32 errors_per_actor;
    u64 actors_offset;
    u64 metadata_offset;
    u64 metadata_bytes;
    u64 values_offset;
    u64 values_bytes;
    u64 errors_offset;
    u64 trace_generation;
};
static_assert(sizeof(CountersHeader) == LINE);

// One actor. The supervisor writes the first line, the actor the second (the supervisor writes SPAWNED before the actor exists
// and DEAD after it). Words are independent: a reader between two stores sees one old and one new.
//
//        0                 8                16                24
//      0 | name (32, text)
//     32 | role (16, text)                  | rank            | epoch           |
//     64 | pid             | start_ticks     | restarts        | zero up to 128
//    128 | state           | heartbeat_ns    | step            | zero up to 256
struct alignas(LINE) ActorLines {
    char name[MAX_NAME_BYTES];
    char role[16];
    u64 rank;
    u64 epoch;
    u64 pid;
    u64 start_ticks;
    u64 restarts;
    alignas(LINE) u64 state;
    u64 heartbeat_ns;
    u64 step;
};
static_assert(sizeof(ActorLines) == 2 * LINE);

// One counter or gauge: an i64, or an f64 if the metadata says so. One writer.
//
//        0
//      0 | value           | zero up to 128
struct alignas(LINE) CellLine {
    u64 value;
};
static_assert(sizeof(CellLine) == LINE);

// A histogram with n bounds: bucket i counts values <= bounds[i] (and above the one before), bucket n the rest. The count
// is the sum of the buckets. One writer.
//
//        0                 8
//      0 | sum (f64)       | buckets[n + 1] (i64) ...
struct HistogramHeader {
    f64 sum;
};

// One distinct error of one actor, written by that actor. The last entry of an actor's section counts the errors that did not
// fit.
//
//        0                 8                16                24
//      0 | count           | first_ns        | last_ns         | text (488 bytes, UTF-8 up to a zero) ...
//
// SYNC: the store-release of the first count (ErrorLog.record) pairs with the load-acquire in ErrorLog.entries: the text
// is complete.
struct alignas(LINE) ErrorEntry {
    u64 count;
    u64 first_ns;  // CLOCK_REALTIME
    u64 last_ns;
    char text[488];
};
static_assert(sizeof(ErrorEntry) == 4 * LINE);

// The trace of one actor: the last events of its lives, in a ring. The actor is the only writer of events; the process that
// requested the trace creates the ring and writes until_ns.
//
//      0 | SegmentHeader                                              256
//    256 | num_written | num_names | max_names | num_events | - | until_ns | names_offset | events_offset   128
//    384 | names: text, 64 bytes each
//        | events: TraceEvent                                         128 each
//
// num_written: events so far; event i is at i modulo num_events. until_ns: CLOCK_MONOTONIC, later events are not written; 0:
// all are. SYNC: the store-release of num_names (TraceWriter::name_id) pairs with the load-acquire in TraceRing.names: the text
// is complete.
struct alignas(LINE) TraceHeader {
    u64 num_written;
    u32 num_names;
    u32 max_names;
    u32 num_events;
    u32 reserved;
    u64 until_ns;
    u64 names_offset;
    u64 events_offset;
};
static_assert(sizeof(TraceHeader) == LINE);
constexpr u64 TRACE_NAME_BYTES = 64;

// An event from begin_ns to begin_ns + duration_ns (CLOCK_MONOTONIC).
//
//        0                 8                16                24     28
//      0 | sequence        | begin_ns        | duration_ns     | name | track |
//     32 | value           | label (88, text)
//
// sequence: 1 + the event's number; 0 while it is written. SYNC: its store-release (TraceWriter::record) pairs with the
// load-acquire in TraceRing.take, where a second load of num_written after a fence shows whether the event was overwritten
// meanwhile.
struct alignas(LINE) TraceEvent {
    u64 sequence;
    u64 begin_ns;
    u64 duration_ns;
    u32 name;
    u32 track;
    i64 value;
    char label[88];
};
static_assert(sizeof(TraceEvent) == LINE);

// Description of a struct for Python and the hash.
struct LayoutField {
    const char *struct_name;
    const char *field_name;
    u64 offset;
    u64 num_bytes;
};

#define TOKAMAK_FIELD(Struct, field) \
    LayoutField { #Struct, #field, offsetof(Struct, field), sizeof(Struct::field) }
#define TOKAMAK_SIZE(Struct) \
    LayoutField { #Struct, "", 0, sizeof(Struct) }

constexpr LayoutField LAYOUT[] = {
    TOKAMAK_SIZE(SegmentHeader),
    TOKAMAK_FIELD(SegmentHeader, magic),
    TOKAMAK_FIELD(SegmentHeader, layout_hash),
    TOKAMAK_FIELD(SegmentHeader, total_bytes),
    TOKAMAK_FIELD(SegmentHeader, layout_version),
    TOKAMAK_FIELD(SegmentHeader, epoch),
    TOKAMAK_FIELD(SegmentHeader, creator_pid),
    TOKAMAK_FIELD(SegmentHeader, creator_start_ticks),
    TOKAMAK_FIELD(SegmentHeader, boot_id),
    TOKAMAK_FIELD(SegmentHeader, run_id),
    TOKAMAK_FIELD(SegmentHeader, kind),
    TOKAMAK_FIELD(SegmentHeader, name),
    TOKAMAK_FIELD(SegmentHeader, created_ns),
    TOKAMAK_SIZE(RecordHeader),
    TOKAMAK_FIELD(RecordHeader, num_bytes),
    TOKAMAK_FIELD(RecordHeader, kind),
    TOKAMAK_FIELD(RecordHeader, epoch),
    TOKAMAK_FIELD(RecordHeader, seq),
    TOKAMAK_SIZE(WriterLine),
    TOKAMAK_FIELD(WriterLine, tail),
    TOKAMAK_FIELD(WriterLine, seq),
    TOKAMAK_FIELD(WriterLine, num_records),
    TOKAMAK_FIELD(WriterLine, num_full_waits),
    TOKAMAK_FIELD(WriterLine, epoch),
    TOKAMAK_FIELD(WriterLine, owner),
    TOKAMAK_SIZE(ReaderLine),
    TOKAMAK_FIELD(ReaderLine, head),
    TOKAMAK_FIELD(ReaderLine, last_seq),
    TOKAMAK_FIELD(ReaderLine, num_dropped),
    TOKAMAK_FIELD(ReaderLine, last_epoch),
    TOKAMAK_FIELD(ReaderLine, epoch),
    TOKAMAK_FIELD(ReaderLine, state),
    TOKAMAK_FIELD(ReaderLine, owner),
    TOKAMAK_SIZE(DoorbellLine),
    TOKAMAK_FIELD(DoorbellLine, parked),
    TOKAMAK_SIZE(MailboxHeader),
    TOKAMAK_FIELD(MailboxHeader, num_rings),
    TOKAMAK_FIELD(MailboxHeader, capacity_bytes),
    TOKAMAK_FIELD(MailboxHeader, rings_offset),
    TOKAMAK_FIELD(MailboxHeader, ring_stride),
    TOKAMAK_SIZE(BroadcastHeader),
    TOKAMAK_FIELD(BroadcastHeader, num_readers),
    TOKAMAK_FIELD(BroadcastHeader, capacity_bytes),
    TOKAMAK_FIELD(BroadcastHeader, readers_offset),
    TOKAMAK_FIELD(BroadcastHeader, data_offset),
    TOKAMAK_SIZE(SlabClass),
    TOKAMAK_FIELD(SlabClass, slot_bytes),
    TOKAMAK_FIELD(SlabClass, first_slot),
    TOKAMAK_FIELD(SlabClass, num_slots),
    TOKAMAK_FIELD(SlabClass, data_offset),
    TOKAMAK_SIZE(SlabHeader),
    TOKAMAK_FIELD(SlabHeader, slab_id),
    TOKAMAK_FIELD(SlabHeader, num_classes),
    TOKAMAK_FIELD(SlabHeader, num_slots),
    TOKAMAK_FIELD(SlabHeader, classes),
    TOKAMAK_SIZE(SlotLine),
    TOKAMAK_FIELD(SlotLine, mask),
    TOKAMAK_FIELD(SlotLine, generation),
    TOKAMAK_FIELD(SlotLine, num_bytes),
    TOKAMAK_SIZE(EncoderLine),
    TOKAMAK_FIELD(EncoderLine, magic),
    TOKAMAK_FIELD(EncoderLine, version),
    TOKAMAK_FIELD(EncoderLine, num_rows),
    TOKAMAK_FIELD(EncoderLine, width),
    TOKAMAK_FIELD(EncoderLine, dtype),
    TOKAMAK_FIELD(EncoderLine, unit_hash),
    TOKAMAK_SIZE(CountersHeader),
    TOKAMAK_FIELD(CountersHeader, num_actors),
    TOKAMAK_FIELD(CountersHeader, errors_per_actor),
    TOKAMAK_FIELD(CountersHeader, actors_offset),
    TOKAMAK_FIELD(CountersHeader, metadata_offset),
    TOKAMAK_FIELD(CountersHeader, metadata_bytes),
    TOKAMAK_FIELD(CountersHeader, values_offset),
    TOKAMAK_FIELD(CountersHeader, values_bytes),
    TOKAMAK_FIELD(CountersHeader, errors_offset),
    TOKAMAK_FIELD(CountersHeader, trace_generation),
    TOKAMAK_SIZE(ActorLines),
    TOKAMAK_FIELD(ActorLines, name),
    TOKAMAK_FIELD(ActorLines, role),
    TOKAMAK_FIELD(ActorLines, rank),
    TOKAMAK_FIELD(ActorLines, epoch),
    TOKAMAK_FIELD(ActorLines, pid),
    TOKAMAK_FIELD(ActorLines, start_ticks),
    TOKAMAK_FIELD(ActorLines, restarts),
    TOKAMAK_FIELD(ActorLines, state),
    TOKAMAK_FIELD(ActorLines, heartbeat_ns),
    TOKAMAK_FIELD(ActorLines, step),
    TOKAMAK_SIZE(CellLine),
    TOKAMAK_FIELD(CellLine, value),
    TOKAMAK_SIZE(HistogramHeader),
    TOKAMAK_FIELD(HistogramHeader, sum),
    TOKAMAK_SIZE(ErrorEntry),
    TOKAMAK_FIELD(ErrorEntry, count),
    TOKAMAK_FIELD(ErrorEntry, first_ns),
    TOKAMAK_FIELD(ErrorEntry, last_ns),
    TOKAMAK_FIELD(ErrorEntry, text),
    TOKAMAK_SIZE(TraceHeader),
    TOKAMAK_FIELD(TraceHeader, num_written),
    TOKAMAK_FIELD(TraceHeader, num_names),
    TOKAMAK_FIELD(TraceHeader, max_names),
    TOKAMAK_FIELD(TraceHeader, num_events),
    TOKAMAK_FIELD(TraceHeader, until_ns),
    TOKAMAK_FIELD(TraceHeader, names_offset),
    TOKAMAK_FIELD(TraceHeader, events_offset),
    TOKAMAK_SIZE(TraceEvent),
    TOKAMAK_FIELD(TraceEvent, sequence),
    TOKAMAK_FIELD(TraceEvent, begin_ns),
    TOKAMAK_FIELD(TraceEvent, duration_ns),
    TOKAMAK_FIELD(TraceEvent, name),
    TOKAMAK_FIELD(TraceEvent, track),
    TOKAMAK_FIELD(TraceEvent, value),
    TOKAMAK_FIELD(TraceEvent, label),
};

#undef TOKAMAK_FIELD
#undef TOKAMAK_SIZE

// FNV-1a over version, names, offsets and sizes.
constexpr u64 layout_hash() {
    u64 hash = 0xcbf29ce484222325;
    auto mix = [&hash](u64 value) {
        for (int byte = 0; byte < 8; ++byte) hash = (hash ^ ((value >> (8 * byte)) & 0xff)) * 0x100000001b3;
    };
    mix(LAYOUT_VERSION);
    for (const LayoutField &field : LAYOUT) {
        for (const char *text : {field.struct_name, field.field_name}) {
            for (; *text; ++text) mix(static_cast<u8>(*text));
        }
        mix(field.offset);
        mix(field.num_bytes);
    }
    return hash;
}
constexpr u64 LAYOUT_HASH = layout_hash();

constexpr u64 round_up(u64 value, u64 multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace tokamak

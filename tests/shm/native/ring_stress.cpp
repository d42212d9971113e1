// One writer and one reader of a ring, as threads, so that ThreadSanitizer sees both: every record arrives whole and in order,
// and no byte is read and written at the same time. Each incarnation of the reader ends after some records and another goes on.
// Built and run by tools/test --sanitize, and without a sanitizer by test_programs.py.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../../shm/native/doorbell.h"
#include "../../../shm/native/record_ring.h"

using namespace tokamak;

constexpr u64 CAPACITY = 4096;
constexpr u64 RECORDS_OF_A_LIFE = 10'000;

struct Shared {
    WriterLine writer;
    ReaderLine reader;
    DoorbellLine doorbell;
    alignas(LINE) u8 data[CAPACITY];
};

u64 size_of(u64 number) { return number * 2654435761u % 700; }
u8 byte_of(u64 number, u64 index) { return static_cast<u8>(number * 31 + index); }

void write(Shared &shared, u64 num_records) {
    RecordWriter writer(&shared.writer, {shared.data, CAPACITY}, 1);
    Doorbell doorbell(&shared.doorbell);
    std::vector<u8> payload;
    for (u64 number = 0; number < num_records; ++number) {
        payload.resize(size_of(number));
        for (u64 index = 0; index < payload.size(); ++index) payload[index] = byte_of(number, index);
        while (!writer.push(payload.data(), payload.size(), [&] { return load_acquire(&shared.reader.head); })) sched_yield();
        doorbell.ring();
    }
}

u64 read(Shared &shared, u64 num_records) {
    u64 number = 0, num_wrong = 0;
    Doorbell doorbell(&shared.doorbell);
    while (number < num_records) {
        RecordReader reader(&shared.writer, &shared.reader, {shared.data, CAPACITY});
        const u64 end = std::min(num_records, number + RECORDS_OF_A_LIFE);
        while (number < end) {
            const bool has_taken = reader.next([&](const u8 *payload, u64 num_bytes) {
                num_wrong += num_bytes != size_of(number);
                for (u64 index = 0; index < num_bytes; ++index) num_wrong += payload[index] != byte_of(number, index);
            });
            reader.commit();
            if (has_taken) {
                ++number;
            } else {
                doorbell.wait(MAX_SLEEP_NS, 0, [&] { return reader.has_records(); });
            }
        }
    }
    return num_wrong;
}

int main(int, char **arguments) {
    const u64 num_records = std::strtoull(arguments[1], nullptr, 10);
    static Shared shared;
    std::thread writer([&] { write(shared, num_records); });
    const u64 num_wrong = read(shared, num_records);
    writer.join();
    std::printf("%llu wrong of %llu\n", static_cast<unsigned long long>(num_wrong),
                static_cast<unsigned long long>(num_records));
    return num_wrong != 0;
}

#include "probe.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tokamak::cpu {
namespace {

constexpr i64 PIECE_BYTES = 1 << 18;  // bytes that a thread reads at a time
constexpr i64 PIECES_PER_THREAD = 4;  // of a unit's run, so that others take the pieces of a delayed thread
constexpr i64 TURN_BYTES = 128;       // two cache lines, so that loads do not wait for each other
typedef std::uint64_t Words __attribute__((vector_size(16)));

std::uint64_t folded(const char *begin, i64 num_turns) {
    Words sums[TURN_BYTES / sizeof(Words)] = {};
    for (i64 turn = 0; turn < num_turns; ++turn) {
        for (std::size_t part = 0; part < TURN_BYTES / sizeof(Words); ++part) {
            Words words;
            std::memcpy(&words, begin + turn * TURN_BYTES + part * sizeof(Words), sizeof words);
            sums[part] ^= words;
        }
    }
    std::uint64_t sum = 0;
    for (const Words &part : sums) sum ^= part[0] ^ part[1];
    return sum;
}

}  // namespace

std::uint64_t read_memory(Engine &engine, const void *memory, i64 num_bytes) {
    const auto *bytes = static_cast<const char *>(memory);
    std::atomic<std::uint64_t> sum{0};
    engine.pool().run((num_bytes + PIECE_BYTES - 1) / PIECE_BYTES, [&](i64 piece, int) {
        const i64 size = std::min(PIECE_BYTES, num_bytes - piece * PIECE_BYTES);
        sum.fetch_xor(folded(bytes + piece * PIECE_BYTES, size / TURN_BYTES), std::memory_order_relaxed);
    });
    return sum.load(std::memory_order_relaxed);
}

i64 run_unit(Engine &engine, const Kernels &kernels, Unit unit, i64 turns) {
    const auto run = kernels.units[static_cast<int>(unit)];
    if (run == nullptr) throw std::invalid_argument(std::string(kernels.name) + " has no such unit");
    std::atomic<i64> operations{0};
    engine.pool().run(engine.pool().num_threads() * PIECES_PER_THREAD,
                      [&](i64, int) { operations.fetch_add(run(turns), std::memory_order_relaxed); });
    return operations.load(std::memory_order_relaxed);
}

}  // namespace tokamak::cpu

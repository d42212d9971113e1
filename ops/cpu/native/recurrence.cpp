// Recurrence of heads over the rows of sequences, divided among threads by sequences and heads, and by values of a head if there
// are few of these.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "states.h"
#include "tasks.h"

namespace tokamak::cpu {
namespace {

// A sequence's row of `States::sequences`.
struct StateRow {
    i32 read, position, write, keep, keep_at, num_certain;
};

void check_range(const char *name, i64 value, i64 least, i64 most, i64 sequence) {
    if (value >= least && value <= most) return;
    throw std::out_of_range(std::string("state of sequence ") + std::to_string(sequence) + ": " + name + " is " +
                            std::to_string(value) + ", allowed are " + std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

std::vector<StateRun> runs_of(const States &states) {
    const auto *rows = reinterpret_cast<const StateRow *>(states.sequences);
    const i64 count = states.num_sequences.get();
    std::vector<StateRun> runs;
    for (i64 i = 0; i < count; ++i) {
        const StateRow &row = rows[i];
        const i64 first = states.offsets[i], num_rows = states.offsets[i + 1] - first;
        if (num_rows == 0 && row.write == 0 && row.keep == 0) continue;
        const i64 replayed = states.starts[i] - row.position, drafts = num_rows - row.num_certain;
        for (const i64 slot : {row.read, row.write, row.keep}) check_range("slot", slot, 0, states.num_slots - 1, i);
        check_range("start after the state's position", replayed, 0, states.num_logged, i);
        check_range("number of certain rows", row.num_certain, 0, num_rows, i);
        check_range("number of drafts", drafts, 0, states.num_logged, i);
        const auto slot_at = [&](i32 slot) { return slot == 0 ? nullptr : states.memory + slot * states.slot_bytes; };
        if ((row.write != 0 && row.write == row.read) || (row.keep != 0 && row.keep == row.read)) {
            throw std::out_of_range("state of sequence " + std::to_string(i) + ": slot " + std::to_string(row.read) +
                                    " would be written in place");
        }
        const i64 kept = row.keep == 0 ? -1 : row.keep_at - row.position;
        if (row.keep != 0 && kept < 0) check_range("position to keep", row.keep_at, row.position, INT32_MAX, i);
        runs.push_back({first, num_rows, row.num_certain, replayed, kept > replayed + row.num_certain ? -1 : kept,
                        states.memory + row.read * states.slot_bytes, slot_at(row.write), slot_at(row.keep)});
    }
    return runs;
}

void recur(Engine &engine, const Recur &op) {
    std::vector<StateRun> runs = runs_of(op.states);
    if (runs.empty()) return;
    const RecurrenceShape &shape = op.shape;
    const i64 threads = engine.pool().num_threads(), blocks = divide_up(shape.value_dim, STATE_COLUMNS);
    const i64 num_heads = static_cast<i64>(runs.size()) * op.own_heads;
    const i64 parts =
        std::clamp(divide_up(threads * TASKS_PER_THREAD, num_heads), divide_up(shape.value_dim, MAX_STATE_COLUMNS), blocks);
    i64 rows = 0;
    for (const StateRun &run : runs) rows += run.count + run.replayed + 1;
    const auto work = [&](i64 task, int thread) {
        const i64 part = task % parts, head = task / parts % op.own_heads;
        const i64 begin = blocks * part / parts * STATE_COLUMNS, end = blocks * (part + 1) / parts * STATE_COLUMNS;
        float *scratch = engine.scratch(thread, recurrence_floats(shape, end - begin) + 16);
        scratch += -reinterpret_cast<std::uintptr_t>(scratch) % 64 / sizeof(float);
        engine.kernels().recur(shape, runs[task / parts / op.own_heads], shape.first_head + head, begin,
                               std::min(end, shape.value_dim), scratch);
    };
    if (rows * op.own_heads * shape.key_dim * shape.value_dim <= engine.pool().small(SMALL_PRODUCT)) {
        for (i64 task = 0; task < num_heads * parts; ++task) work(task, 0);
        return;
    }
    std::stable_sort(runs.begin(), runs.end(), [](const StateRun &a, const StateRun &b) { return a.count > b.count; });
    engine.pool().run(num_heads * parts, work);
}

}  // namespace tokamak::cpu

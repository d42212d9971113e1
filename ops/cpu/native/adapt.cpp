// Terms of adapters, divided among threads by rows. A step without adapters only checks its slots.

#include <stdexcept>
#include <string>

#include "tasks.h"

namespace tokamak::cpu {
namespace {

// Multiply-adds of a row, assuming the largest rank of any slot.
i64 products_of_row(const Adapt &op) {
    i64 products = 0;
    for (const AdaptedPart &part : op.parts) {
        i64 rank = 0;
        for (i64 slot = 0; slot < op.num_slots; ++slot) {
            rank = std::max<i64>(rank, op.shape.ranks[slot * op.shape.modules + part.index]);
        }
        products += rank * (op.shape.inputs + (part.panel_end - part.panel_begin) * PANEL);
    }
    return products;
}

}  // namespace

void adapt(Engine &engine, const Adapt &op) {
    const i64 rows = op.rows.get();
    i64 num_adapted = 0;
    for (i64 row = 0; row < rows; ++row) {
        const i32 slot = op.shape.adapter_slots[row];
        if (slot < -1 || slot >= op.num_slots) {
            throw std::out_of_range("adapter slot " + std::to_string(slot) + " of " + std::to_string(op.num_slots));
        }
        num_adapted += slot >= 0;
    }
    if (num_adapted == 0) return;
    AdaptShape shape = op.shape;
    shape.parts = op.parts.data();
    shape.num_parts = static_cast<i64>(op.parts.size());
    const i64 threads = engine.pool().num_threads();
    const i64 blocks = rows >= 8 * threads ? divide_up(rows, 4) : rows;  // blocks of rows that share an adapter
    const i64 tasks = num_adapted * products_of_row(op) <= engine.pool().small(SMALL_PRODUCT)
                          ? 1
                          : std::min(blocks, threads * TASKS_PER_THREAD);
    if (tasks == 1) {
        engine.kernels().adapt(shape, 0, rows);
        return;
    }
    engine.pool().run(tasks,
                      [&](i64 task, int) { engine.kernels().adapt(shape, rows * task / tasks, rows * (task + 1) / tasks); });
}

}  // namespace tokamak::cpu

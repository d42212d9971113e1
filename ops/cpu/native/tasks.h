// Division of ops into tasks for the rank's threads.
#pragma once

#include <algorithm>

#include "ops.h"

namespace tokamak::cpu {

constexpr i64 SMALL_COUNT = 8192;       // elements that one thread does alone rather than share
constexpr i64 SMALL_PRODUCT = 1 << 16;  // multiply-adds, likewise
constexpr i64 FEW_WEIGHTS =
    1 << 18;  // of a linear that fits in a core's own cache: its ops neither wake threads nor keep them awake
constexpr i64 MANY_PRODUCTS = 1 << 30;  // per task, at most: seconds on a slow core; each end is a heartbeat
constexpr i64 TASKS_PER_THREAD = 6;     // so that others take the tasks of a delayed thread
constexpr i64 PANEL_GROUP = 4;          // panels per task, good for micro-kernels of few rows; fewer with many threads

inline i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// First row of part `part` of `parts`, with about equally many tiles per part.
inline i64 first_row(i64 rows, i64 tiles, i64 part, i64 parts) { return rows * (tiles * part / parts) / tiles; }

// Calls function(begin, end) over [0, rows), at once if it is little work.
template <class Function>
void for_rows(Engine &engine, i64 rows, i64 width, const Function &function) {
    if (rows * width <= engine.pool().small(SMALL_COUNT)) {
        if (rows > 0) function(i64{0}, rows);
        return;
    }
    const i64 most = engine.pool().num_threads() * TASKS_PER_THREAD;
    const i64 num_tasks = std::min({rows, most, divide_up(rows * width, SMALL_COUNT / 4)});
    engine.pool().run(num_tasks, [&](i64 task, int) { function(rows * task / num_tasks, rows * (task + 1) / num_tasks); });
}

}  // namespace tokamak::cpu

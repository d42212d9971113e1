// Division of ops into tasks for the rank's threads.
#pragma once

#include <algorithm>

#include "ops.h"

namespace tokamak::cpu {

constexpr i64 SMALL_COUNT = 8192;       // elements that one thread does sooner than it shares them with others
constexpr i64 SMALL_PRODUCT = 1 << 16;  // multiply-adds, likewise
constexpr i64 FEW_WEIGHTS = 1 << 18;  // of a linear that a core's own cache holds: its ops wake nobody, nor keep anybody awake
constexpr i64 MANY_PRODUCTS = 1 << 30;  // of a task: seconds even on a slow core; a heartbeat comes with the end of each
constexpr i64 TASKS_PER_THREAD = 6;     // so that a thread that is kept from its core leaves its share to the others
constexpr i64 PANEL_GROUP = 4;          // of tasks, as the micro-kernels for few rows like them; fewer for many threads

inline i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// Where part number `part` of `parts` begins of rows that are so many tiles, of which each part has about as many.
inline i64 first_row(i64 rows, i64 tiles, i64 part, i64 parts) { return rows * (tiles * part / parts) / tiles; }

// function(begin, end) over [0, rows), in one piece where it is little.
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

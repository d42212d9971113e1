// A separate small product for each head: y = x W with rows [inputs] and weights [outputs, inputs] of the head. Uses the
// kernels of `linear`, which need contiguous rows, so a head's rows are copied first.
#include <algorithm>

#include "ops.h"
#include "tasks.h"

namespace tokamak::cpu {
namespace {

constexpr i64 BLOCK_ROWS = 64;  // of a task: they stay in the L2 cache with the head's weights

void multiply_block(Engine &engine, const HeadLinear &op, i64 head, i64 begin, i64 end, int thread) {
    const LinearKernels &kernels = engine.kernels().linears[static_cast<int>(op.kind)];
    const i64 rows = end - begin, inputs = op.shape.inputs, outputs = op.shape.outputs, floats = sizeof(float);
    LinearShape shape = op.shape;
    shape.rows = rows;
    shape.weight = static_cast<const char *>(op.shape.weight) + head * op.weight_bytes;
    const i64 prepared_bytes = kernels.prepared_bytes(shape);
    float *scratch = engine.scratch(thread, 16 + rows * (prepared_bytes / floats + 1 + inputs + outputs));
    scratch += -reinterpret_cast<std::uintptr_t>(scratch) % 64 / floats;
    float *const x = scratch + (rows * prepared_bytes + floats - 1) / floats, *const y = x + rows * inputs;
    for (i64 row = 0; row < rows; ++row) {
        std::copy_n(op.shape.x + ((begin + row) * op.heads + head) * op.stride, inputs, x + row * inputs);
    }
    shape.x = x;
    shape.y = y;
    if (prepared_bytes > 0) {
        shape.prepared = scratch;
        kernels.prepare(shape, 0, rows);
    }
    kernels.linear(shape, 0, rows, 0, divide_up(outputs, PANEL));
    for (i64 row = 0; row < rows; ++row) {
        std::copy_n(y + row * outputs, outputs, op.shape.y + ((begin + row) * op.heads + head) * outputs);
    }
}

}  // namespace

void multiply_heads(Engine &engine, const HeadLinear &op) {
    const i64 rows = op.rows.get(), blocks = divide_up(rows, BLOCK_ROWS);
    const auto multiply = [&](i64 task, int thread) {
        const i64 head = task / blocks, block = task % blocks;  // consecutive tasks share weights
        multiply_block(engine, op, head, rows * block / blocks, rows * (block + 1) / blocks, thread);
    };
    if (rows * op.heads * op.shape.inputs * op.shape.outputs > engine.pool().small(SMALL_PRODUCT)) {
        engine.pool().run(blocks * op.heads, multiply);
    } else {
        for (i64 task = 0; task < blocks * op.heads; ++task) multiply(task, 0);
    }
}

}  // namespace tokamak::cpu

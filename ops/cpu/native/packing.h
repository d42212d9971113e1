// Weights on their way into the layouts that the kernels read. Done once, when a checkpoint is loaded.
#pragma once

#include "kernels.h"

namespace tokamak::cpu {

// Numbers where a checkpoint has them: [rows, columns] with any strides, counted in numbers.
struct Matrix {
    const void *values;  // float32, or bfloat16
    bool is_bfloat16;
    i64 row_stride, column_stride, rows, columns;
};

// [outputs, inputs] -> panels [begin, end) of float32 or bfloat16 lines, zero where there is no output or no input.
void pack_panels(void *packed, WeightKind kind, const Matrix &weight, i64 begin, i64 end);

// [rows, columns] -> rows [begin, end) of float32 or bfloat16, one after another.
void pack_rows(void *packed, WeightKind kind, const Matrix &weight, i64 begin, i64 end);

}  // namespace tokamak::cpu

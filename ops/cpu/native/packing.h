// Packing of weights into the layouts that kernels read. Done once, when a checkpoint is loaded.
#pragma once

#include "ops.h"

namespace tokamak::cpu {

// [outputs, inputs] -> panels [begin, end) of float32 or bfloat16 lines, padded with zeros.
void pack_panels(void *packed, WeightKind kind, const Matrix &weight, i64 begin, i64 end);

// [rows, columns] -> rows [begin, end) of float32 or bfloat16, one after another.
void pack_rows(void *packed, WeightKind kind, const Matrix &weight, i64 begin, i64 end);

// Rounded weights, as in `LinearShape`.
struct PackedIntegers {
    std::uint8_t *lines;
    float *scales;
    std::int8_t *multipliers;  // of int4
    WeightKind kind;
    i64 group_size;
    bool has_narrow_scales;    // int8: scales are numbers of bfloat16
    const float *importances;  // of each input: what a squared error costs, usually its mean square; null: by |w|
};

// [outputs, inputs] -> panels [begin, end) of int8, or of int4 with multipliers.
void quantize_panels(Engine &engine, const PackedIntegers &to, const Matrix &weight, i64 begin, i64 end, int thread);

// Whether all floats, of 2 or 4 bytes, are finite: no exponent has all bits set.
bool are_finite(const void *values, i64 count, i32 num_bytes, std::uint32_t exponent);

// A checkpoint's integers: signed int8, or int4 with one per byte. [outputs, inputs] with any strides.
struct IntMatrix {
    const std::uint8_t *values;
    i64 row_stride, column_stride, rows, columns;
};

// -> panels [begin, end) of lines, padded with `zero`.
void lay_integers(std::uint8_t *packed, WeightKind kind, const IntMatrix &weight, std::uint8_t zero, i64 begin, i64 end);

}  // namespace tokamak::cpu

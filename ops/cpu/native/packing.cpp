#include "packing.h"

#include <algorithm>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VECTOR_BYTES 16

namespace tokamak::cpu {
namespace {

#include "vector.inc"

constexpr i64 BLOCK = 64;  // inputs of a panel: what is written together stays in the first cache

using Bits = std::uint16_t;  // of a bfloat16

float as(float x, float) { return x; }
Bits as(Bits x, Bits) { return x; }
Bits as(float x, Bits) { return round_to_bfloat16(x); }
float as(Bits x, float) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// `side` inputs of an output lie side by side in a line.
template <class To, class From>
void fill_panels(To *packed, const Matrix &weight, i64 begin, i64 end) {
    constexpr i64 side = sizeof(float) / sizeof(To);
    const From *values = static_cast<const From *>(weight.values);
    const i64 inputs = weight.columns, padded = (inputs + side - 1) / side * side, stride = weight.column_stride;
    for (i64 panel = begin; panel < end; ++panel) {
        To *to = packed + panel * padded * PANEL;
        for (i64 block = 0; block < padded; block += BLOCK) {
            const i64 block_end = std::min(block + BLOCK, padded), given = std::min(block_end, inputs);
            for (i64 lane = 0; lane < PANEL; ++lane) {
                const i64 output = panel * PANEL + lane;
                const auto place = [&](i64 input) { return (input / side * PANEL + lane) * side + input % side; };
                if (output >= weight.rows) {
                    for (i64 input = block; input < block_end; ++input) to[place(input)] = To{};
                    continue;
                }
                const From *from = values + output * weight.row_stride;
                for (i64 input = block; input < given; ++input) to[place(input)] = as(from[input * stride], To{});
                for (i64 input = given; input < block_end; ++input) to[place(input)] = To{};
            }
        }
    }
}

template <class To, class From>
void fill_rows(To *packed, const Matrix &weight, i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
        const From *from = static_cast<const From *>(weight.values) + row * weight.row_stride;
        To *to = packed + row * weight.columns;
        for (i64 column = 0; column < weight.columns; ++column) to[column] = as(from[column * weight.column_stride], To{});
    }
}

}  // namespace

void pack_panels(void *packed, WeightKind kind, const Matrix &weight, i64 begin, i64 end) {
    if (kind == WeightKind::FLOAT32) {
        const auto fill = weight.is_bfloat16 ? fill_panels<float, Bits> : fill_panels<float, float>;
        fill(static_cast<float *>(packed), weight, begin, end);
    } else {
        const auto fill = weight.is_bfloat16 ? fill_panels<Bits, Bits> : fill_panels<Bits, float>;
        fill(static_cast<Bits *>(packed), weight, begin, end);
    }
}

void pack_rows(void *packed, WeightKind kind, const Matrix &weight, i64 begin, i64 end) {
    if (kind == WeightKind::FLOAT32) {
        const auto fill = weight.is_bfloat16 ? fill_rows<float, Bits> : fill_rows<float, float>;
        fill(static_cast<float *>(packed), weight, begin, end);
    } else {
        const auto fill = weight.is_bfloat16 ? fill_rows<Bits, Bits> : fill_rows<Bits, float>;
        fill(static_cast<Bits *>(packed), weight, begin, end);
    }
}

void lay_integers(std::uint8_t *packed, WeightKind kind, const IntMatrix &weight, std::uint8_t zero, i64 begin, i64 end) {
    const bool is_int8 = kind == WeightKind::INT8;
    const i64 inputs_per_line = is_int8 ? 4 : 8, num_lines = (weight.columns + inputs_per_line - 1) / inputs_per_line;
    for (i64 output = begin * PANEL; output < end * PANEL; ++output) {
        std::uint8_t *to = packed + output / PANEL * num_lines * LINE + output % PANEL * 4;
        const std::uint8_t *from = weight.values + output * weight.row_stride;
        const auto stored = [&](i64 input) -> unsigned {
            if (output >= weight.rows || input >= weight.columns) return zero;
            const unsigned value = from[input * weight.column_stride];
            return is_int8 ? value ^ 128 : value;  // plus 128, or in [0, 16)
        };
        for (i64 line = 0; line < num_lines; ++line, to += LINE) {
            for (i64 k = 0; k < 4; ++k) {
                const i64 input = line * inputs_per_line + k;
                to[k] = static_cast<std::uint8_t>(is_int8 ? stored(input) : stored(input) | stored(input + 4) << 4);
            }
        }
    }
}

}  // namespace tokamak::cpu

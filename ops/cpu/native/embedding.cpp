// Rows of an embedding, from its own weight or from the panels of the tied head; and features that replace them, or are added
// to hidden states.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace tokamak::cpu {
namespace {

constexpr i64 AHEAD = 32;  // lines of a panel prefetched before their use

float widened(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

float widened_half(std::uint16_t bits) {
    const std::uint32_t magnitude = bits & 0x7fffu;
    const float value = magnitude > 0x7c00u    ? NAN
                        : magnitude == 0x7c00u ? INFINITY
                        : magnitude < 0x400u   ? static_cast<float>(magnitude) * 0x1p-24f
                                               : std::ldexp(static_cast<float>((magnitude & 0x3ffu) | 0x400u),
                                                            static_cast<int>(magnitude >> 10) - 25);
    return (bits & 0x8000u) == 0 ? value : -value;
}

float number_at(const Scales &scales, i64 place) {
    if (scales.kind == ScaleKind::FLOAT32) return static_cast<const float *>(scales.values)[place];
    const std::uint16_t bits = static_cast<const std::uint16_t *>(scales.values)[place];
    return scales.kind == ScaleKind::FLOAT16 ? widened_half(bits) : widened(bits);
}

void take_row(float *y, const Embed &op, i64 token) {
    if (op.kind == WeightKind::FLOAT32) {
        std::memcpy(y, static_cast<const float *>(op.weight) + token * op.width, op.width * sizeof(float));
        return;
    }
    const std::uint16_t *row = static_cast<const std::uint16_t *>(op.weight) + token * op.width;
    for (i64 i = 0; i < op.width; ++i) y[i] = widened(row[i]);
}

constexpr std::int8_t DOUBLED_E2M1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Quads of inputs: one per line (int8), or two (int4: low halves of bytes, then high ones).
void take_integers(float *y, const Embed &op, i64 token) {
    const bool is_int8 = op.kind == WeightKind::INT8;
    const i64 in_line = is_int8 ? 4 : 8, lines = (op.width + in_line - 1) / in_line, lane = token % PANEL;
    const i64 group_size = op.group_size == 0 ? op.width : op.group_size, groups = (op.width + group_size - 1) / group_size;
    const std::uint8_t *line = static_cast<const std::uint8_t *>(op.weight) + token / PANEL * lines * LINE + lane * 4;
    const bool is_float4 = op.kind == WeightKind::FLOAT4;
    const i32 zero = is_float4 ? 0 : is_int8 ? 128 : op.offsets ? 0 : 8;
    for (i64 group = 0; group < groups; ++group) {
        const i64 place = (token / PANEL * groups + group) * PANEL + lane, begin = group * group_size;
        const float scale = number_at(op.scales, op.multipliers == nullptr ? place : token);
        const float offset = op.offsets ? number_at(op.offsets, place) : 0.0f;
        const i32 multiplier = op.multipliers == nullptr ? 1 : op.multipliers[place];
        for (i64 i = begin; i < std::min(begin + group_size, op.width); ++i) {
            const std::uint8_t *quad = line + i / in_line * LINE;
            if (i % in_line == 0) __builtin_prefetch(quad + AHEAD * LINE);
            const i32 bits = is_int8 ? quad[i % 4] : quad[i % 4] >> (i % 8 < 4 ? 0 : 4) & 15;
            const i32 stored = is_float4 ? DOUBLED_E2M1[bits] : bits;
            y[i] = static_cast<float>((stored - zero) * multiplier) * scale - offset;
        }
    }
}

// A token's numbers are at the same place in each line of its panel.
void take_floats(float *y, const Embed &op, i64 token) {
    const i64 side = op.kind == WeightKind::FLOAT32 ? 1 : 2, lines = (op.width + side - 1) / side, lane = token % PANEL;
    const char *line = static_cast<const char *>(op.weight) + token / PANEL * lines * LINE;
    if (op.kind == WeightKind::FLOAT32) {
        for (i64 i = 0; i < op.width; ++i, line += LINE) {
            __builtin_prefetch(line + AHEAD * LINE);
            std::memcpy(y + i, line + lane * sizeof(float), sizeof(float));
        }
        return;
    }
    for (i64 i = 0; i < op.width; i += 2, line += LINE) {
        __builtin_prefetch(line + AHEAD * LINE);
        std::uint16_t pair[2];
        std::memcpy(pair, line + lane * sizeof pair, sizeof pair);
        y[i] = widened(pair[0]);
        if (i + 1 < op.width) y[i + 1] = widened(pair[1]);
    }
}

}  // namespace

void take_features(const TakeFeatures &op, i64 row) {
    if (op.feature_rows[row] < 0) return;
    float *y = op.y + row * op.width;
    const char *features = op.features + op.feature_rows[row] * op.feature_bytes;
    const auto take = [&](const auto *values, const auto &widen) {
        for (i64 i = 0; i < op.width; ++i) y[i] = op.is_added ? y[i] + widen(values[i]) : widen(values[i]);
    };
    if (op.is_bfloat16) {
        take(reinterpret_cast<const std::uint16_t *>(features) + op.at, widened);
    } else {
        take(reinterpret_cast<const float *>(features) + op.at, [](float x) { return x; });
    }
}

void look_up(const Embed &op, i64 row) {
    float *y = op.y + row * op.width;
    if (op.kind == WeightKind::INT8 || op.kind == WeightKind::INT4 || op.kind == WeightKind::FLOAT4) {
        take_integers(y, op, op.token_ids[row]);
    } else if (op.is_in_panels) {
        take_floats(y, op, op.token_ids[row]);
    } else {
        take_row(y, op, op.token_ids[row]);
    }
}

}  // namespace tokamak::cpu

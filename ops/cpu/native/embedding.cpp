// One row of an embedding, whose weight is rows of its own or the panels of the head that it is tied to.
#include <cstring>

#include "ops.h"

namespace tokamak::cpu {
namespace {

constexpr i64 AHEAD = 32;  // lines of a panel that are fetched before their use

float widened(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

void take_row(float *y, const Embed &op, i64 token) {
    if (op.kind == WeightKind::FLOAT32) {
        std::memcpy(y, static_cast<const float *>(op.weight) + token * op.width, op.width * sizeof(float));
        return;
    }
    const std::uint16_t *row = static_cast<const std::uint16_t *>(op.weight) + token * op.width;
    for (i64 i = 0; i < op.width; ++i) y[i] = widened(row[i]);
}

// A token's numbers lie at the same place of each line of its panel. A further kind of weights is one more branch here.
void take_from_panel(float *y, const Embed &op, i64 token) {
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

void look_up(const Embed &op, i64 row) {
    float *y = op.y + row * op.width;
    if (op.is_in_panels) {
        take_from_panel(y, op, op.token_ids[row]);
    } else {
        take_row(y, op, op.token_ids[row]);
    }
}

}  // namespace tokamak::cpu

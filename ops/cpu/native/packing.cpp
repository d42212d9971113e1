// A panel consists of words of 4 bytes: an output's weights for one input (float32), two (bfloat16) or four (integers). In a
// matrix the words of an output are contiguous, in a panel those of PANEL outputs: each layout is a transposition of words,
// followed by widening, rounding or joining at most.
#include "packing.h"

#include <algorithm>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VECTOR_BYTES 16

namespace tokamak::cpu {
namespace {

#include "vector.inc"

constexpr i64 BLOCK = 64;  // words of an output transposed at a time: source and result stay in the L1 cache

using Bits = std::uint16_t;  // of a bfloat16
using Word = std::uint32_t;

float as(float x, float) { return x; }
Bits as(Bits x, Bits) { return x; }
Bits as(float x, Bits) { return round_to_bfloat16(x); }
float as(Bits x, float) {
    const Word bits = static_cast<Word>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// [rows, columns] with any strides, as `Element`s.
template <class Element>
struct Elements {
    const Element *values;
    i64 row_stride, column_stride, rows, columns;
};

// Four outputs' words, `count` of each (a multiple of four), to words [count][PANEL].
void turn(Word *to, const void *const (&from)[4], i64 count) {
    for (i64 word = 0; word < count; word += 4) {
        Vector v[4];
        for (int k = 0; k < 4; ++k) v[k] = (Vector)load_ints(static_cast<const Word *>(from[k]) + word);
        const Vector a = SHUFFLE(v[0], v[1], 0, 4, 1, 5), b = SHUFFLE(v[2], v[3], 0, 4, 1, 5);
        const Vector c = SHUFFLE(v[0], v[1], 2, 6, 3, 7), d = SHUFFLE(v[2], v[3], 2, 6, 3, 7);
        const Vector turned[4] = {SHUFFLE(a, b, 0, 1, 4, 5), SHUFFLE(a, b, 2, 3, 6, 7), SHUFFLE(c, d, 0, 1, 4, 5),
                                  SHUFFLE(c, d, 2, 3, 6, 7)};
        for (int k = 0; k < 4; ++k) std::memcpy(to + (word + k) * PANEL, &turned[k], sizeof turned[k]);
    }
}

// Weights of a panel's outputs for the inputs from `input` on: words [BLOCK][PANEL], padded with `filler`.
template <class Element>
void take_words(Word *to, const Elements<Element> &matrix, i64 panel, i64 input, Element filler) {
    constexpr i64 in_block = BLOCK * sizeof(Word) / sizeof(Element);
    alignas(16) Element copies[4][in_block];
    const i64 given = std::min(in_block, matrix.columns - input);
    for (i64 lane = 0; lane < PANEL; lane += 4) {
        const void *from[4];
        for (i64 k = 0; k < 4; ++k) {
            const i64 output = panel * PANEL + lane + k;
            const Element *begin = matrix.values + output * matrix.row_stride + input * matrix.column_stride;
            const i64 count = output < matrix.rows ? given : 0;
            from[k] = begin;
            if (count == in_block && matrix.column_stride == 1) continue;
            for (i64 i = 0; i < count; ++i) copies[k][i] = begin[i * matrix.column_stride];
            std::fill(copies[k] + count, copies[k] + in_block, filler);
            from[k] = copies[k];
        }
        turn(to + lane, from, BLOCK);
    }
}

// Words of a panel -> `count` lines of it.
void write_lines(float *to, const Word *words, i64 count, float) { std::memcpy(to, words, count * LINE); }
void write_lines(Bits *to, const Word *words, i64 count, Bits) { std::memcpy(to, words, count * LINE); }

void write_lines(float *to, const Word *words, i64 count, Bits) {
    for (i64 line = 0; line < count; ++line) {
        const Word *pairs = words + line / 2 * PANEL;
        for (i64 lane = 0; lane < PANEL; lane += LANES) {
            const IntVector pair = load_ints(pairs + lane);
            store(to + line * PANEL + lane, line % 2 == 0 ? first_of_pairs(pair) : second_of_pairs(pair));
        }
    }
}

void write_lines(Bits *to, const Word *words, i64 count, float) {
    const auto rounded = [](const Word *of) {  // as round_to_bfloat16, in the upper half
        const IntVector bits = load_ints(of), even = bits >> 16 & 1;
        return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : bits + 0x7fff + even;
    };
    for (i64 line = 0; line < count; ++line) {
        for (i64 lane = 0; lane < PANEL; lane += LANES) {
            const Word *first = words + 2 * line * PANEL + lane;
            const IntVector low = rounded(first) >> 16 & 0xffff, high = rounded(first + PANEL) & static_cast<i32>(0xffff0000u);
            const IntVector pair = low | high;
            std::memcpy(to + (line * PANEL + lane) * 2, &pair, sizeof pair);
        }
    }
}

// `side` inputs of an output are side by side in a line.
template <class To, class From>
void fill_panels(To *packed, const Matrix &weight, i64 begin, i64 end) {
    constexpr i64 side = sizeof(Word) / sizeof(To), in_block = BLOCK * sizeof(Word) / sizeof(From);
    const Elements<From> matrix{static_cast<const From *>(weight.values), weight.row_stride, weight.column_stride, weight.rows,
                                weight.columns};
    const i64 num_lines = (weight.columns + side - 1) / side;
    alignas(64) Word words[BLOCK * PANEL];
    for (i64 panel = begin; panel < end; ++panel) {
        for (i64 input = 0; input < weight.columns; input += in_block) {
            take_words(words, matrix, panel, input, From{});
            const i64 line = input / side, count = std::min(in_block / side, num_lines - line);
            write_lines(packed + (panel * num_lines + line) * side * PANEL, words, count, From{});
        }
    }
}

template <class To, class From>
void fill_rows(To *packed, const Matrix &weight, i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
        const From *from = static_cast<const From *>(weight.values) + row * weight.row_stride;
        To *to = packed + row * weight.columns;
        if (std::is_same_v<To, From> && weight.column_stride == 1) {
            std::memcpy(to, from, weight.columns * sizeof(To));
            continue;
        }
        for (i64 column = 0; column < weight.columns; ++column) to[column] = as(from[column * weight.column_stride], To{});
    }
}

template <class Float>
bool are_finite(const Float *values, i64 count, Float exponent) {
    typedef Float Floats __attribute__((vector_size(VECTOR_BYTES)));
    constexpr i64 lanes = sizeof(Floats) / sizeof(Float);
    Floats found = {}, v = {};
    i64 i = 0;
    for (; i + lanes <= count; i += lanes) {
        std::memcpy(&v, values + i, sizeof v);
        found |= (Floats)((v & exponent) == exponent);
    }
    Float any = 0;
    for (i64 lane = 0; lane < lanes; ++lane) any |= found[lane];
    for (; i < count; ++i) any |= (values[i] & exponent) == exponent;
    return any == 0;
}

}  // namespace

bool are_finite(const void *values, i64 count, i32 num_bytes, std::uint32_t exponent) {
    if (num_bytes == 4) return are_finite(static_cast<const Word *>(values), count, exponent);
    return are_finite(static_cast<const Bits *>(values), count, static_cast<Bits>(exponent));
}

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

void quantize_panels(Engine &engine, const PackedIntegers &to, const Matrix &weight, i64 begin, i64 end, int thread) {
    const i64 in_line = to.kind == WeightKind::INT8 ? 4 : 8, num_lines = (weight.columns + in_line - 1) / in_line;
    const i64 group_size = to.group_size == 0 ? weight.columns : to.group_size;
    const i64 num_groups = (weight.columns + group_size - 1) / group_size;
    const i64 num_scales = to.multipliers == nullptr ? num_groups : 1;
    const i64 padded = num_lines * in_line;
    float *weights = engine.scratch(thread, (padded + 2 * num_groups) * PANEL + padded);
    float *group_scales = weights + padded * PANEL, *importances = group_scales + 2 * num_groups * PANEL;
    std::fill(weights + weight.columns * PANEL, group_scales, 0.0f);
    if (to.importances != nullptr) {
        std::fill(std::copy(to.importances, to.importances + weight.columns, importances), importances + padded, 0.0f);
    }
    for (i64 panel = begin; panel < end; ++panel) {
        Matrix rows = weight;  // those of the panel
        const i64 skipped = panel * PANEL * weight.row_stride;
        rows.values = static_cast<const char *>(weight.values) + skipped * (weight.is_bfloat16 ? 2 : 4);
        rows.rows = weight.rows - panel * PANEL;
        pack_panels(weights, WeightKind::FLOAT32, rows, 0, 1);
        PanelRounding rounding{weights,
                               nullptr,
                               weight.columns,
                               group_size,
                               to.kind,
                               to.lines + panel * num_lines * LINE,
                               to.scales + panel * num_scales * PANEL,
                               to.has_narrow_scales,
                               nullptr,
                               group_scales};
        if (to.importances != nullptr) rounding.importances = importances;
        if (to.multipliers != nullptr) rounding.multipliers = to.multipliers + panel * num_groups * PANEL;
        engine.kernels().quantize_panel(rounding);
    }
}

void lay_integers(std::uint8_t *packed, WeightKind kind, const IntMatrix &weight, std::uint8_t zero, i64 begin, i64 end) {
    const bool is_int8 = kind == WeightKind::INT8;
    const Elements<std::uint8_t> matrix{weight.values, weight.row_stride, weight.column_stride, weight.rows, weight.columns};
    const i64 in_line = is_int8 ? 4 : 8, num_lines = (weight.columns + in_line - 1) / in_line, at_once = BLOCK * 4 / in_line;
    alignas(64) Word words[BLOCK * PANEL];
    for (i64 panel = begin; panel < end; ++panel) {
        for (i64 line = 0; line < num_lines; line += at_once) {
            // int8 are stored with an offset of 128: the upper bit is inverted
            take_words(words, matrix, panel, line * in_line, static_cast<std::uint8_t>(is_int8 ? zero ^ 128 : zero));
            const i64 count = std::min(at_once, num_lines - line);
            Word *to = reinterpret_cast<Word *>(packed + (panel * num_lines + line) * LINE);
            for (i64 i = 0; i < count; ++i) {
                const Word *first = words + i * (in_line / 4) * PANEL;
                for (i64 lane = 0; lane < PANEL; ++lane) {
                    to[i * PANEL + lane] = is_int8 ? first[lane] ^ 0x80808080u : first[lane] | first[PANEL + lane] << 4;
                }
            }
        }
    }
}

}  // namespace tokamak::cpu

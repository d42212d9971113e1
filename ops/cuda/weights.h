// Weights of linears, packed once so that a warp reads whole lines: a unit of 32 inputs of UNIT_OUTPUTS outputs is 512 bytes
// (in float32 1024), of which lane 4 g + t uses the 16 bytes at its place: inputs 8 t to 8 t + 7 of output g, then those of
// outputs g + 8, g + 16 and g + 24, as many as fit. Integers are unpacked in registers: a word has its even numbers first, then
// its odd ones, so that one shift and one mask find a pair.
//
//   unit, first output | unit, second output | ...      one after another: steps of 32 inputs of the same outputs,
//   512 bytes          |                                then those of the next outputs; outputs are padded to whole units
//
// `packing.py` packs them. Scales (and offsets) have a unit's outputs side by side, too: [units, groups, UNIT_OUTPUTS].
#pragma once

#include "operands.h"
#include "products.h"

template <int kBits_>
struct Integer {
    static constexpr int BITS = kBits_;
};

struct Float4 {};  // codes of E2M1; doubled, their values are integers

template <typename W>
constexpr int INTEGER_BITS = 0;  // 0: weights are numbers of x's type
template <int BITS>
constexpr int INTEGER_BITS<Integer<BITS>> = BITS;
template <>
constexpr int INTEGER_BITS<Float4> = 4;

template <typename W>
constexpr int UNIT_OUTPUTS = INTEGER_BITS<W> == 0 ? 8 : 128 / INTEGER_BITS<W>;

template <typename W>
DEVICE int padded_outputs(const Weights &w) {
    return (w.num_outputs + UNIT_OUTPUTS<W> - 1) / UNIT_OUTPUTS<W> * UNIT_OUTPUTS<W>;
}

// Integers are multiplied as they are, which is exact; the scale is applied to the sum of a segment. With offsets, or in groups
// that are not multiples of a step, they are converted to the numbers that they represent.
template <typename W>
DEVICE bool has_scaled_segments(const Weights &w) {
    return INTEGER_BITS<W> != 0 && w.offsets.is_empty() && w.group_size % STEP == 0;
}

template <typename W>
DEVICE uint32_t zero_of(const Weights &w) {
    return INTEGER_BITS<W> == 4 && w.offsets.is_empty() ? 8u : 0u;
}

template <typename W>
DEVICE long long unit_of(const Weights &w, long long output, int input) {
    return output / UNIT_OUTPUTS<W> * (w.padded_inputs / STEP) + input / STEP;
}

template <typename W>
DEVICE long long scale_place(const Weights &w, long long output, int input) {
    constexpr int OUTPUTS = UNIT_OUTPUTS<W>;
    return (output / OUTPUTS * (w.padded_inputs / w.group_size) + input / w.group_size) * OUTPUTS + output % OUTPUTS;
}

// Constants in both numbers of a pair. The digits of an integer are set in a number of 2^k where the last one stands for 1, which
// is then subtracted; an eighth digit counts negatively, so it is set in what is subtracted.
template <typename T>
struct Pairs {
    static constexpr uint32_t ONE = 0x3f803f80u, LARGE = 0x43004300u, FLOAT4_UNIT = 0x7f007f00u,
                              FLOAT4_SHIFT = 6;  // 128, 2^127
};
template <>
struct Pairs<Float16> {
    static constexpr uint32_t ONE = 0x3c003c00u, LARGE = 0x64006400u, FLOAT4_UNIT = 0x78007800u,
                              FLOAT4_SHIFT = 9;  // 1024, 2^15
};
constexpr uint32_t MINUS_PAIR = 0x80008000u;

// Eight integers of a word of 4 bits each, or of two of 8 bits each.
template <typename T, typename W>
DEVICE Eight<T> unpacked(const uint32_t *words, uint32_t zero) {
    constexpr bool IS_BYTE = INTEGER_BITS<W> == 8;
    Eight<T> result;
    if constexpr (sizeof(T) == 4) {
        for (int i = 0; i < 8; ++i) {
            if constexpr (IS_BYTE) result.values[i] = static_cast<int8_t>(words[i / 4] >> (i % 4 / 2 * 8 + i % 2 * 16));
            else {
                uint32_t code = (words[0] >> (i / 2 * 4 + i % 2 * 16)) & 15u;
                int magnitude = code & 7u, number = code;
                if (magnitude > 3) magnitude = (2 + magnitude % 2) << (magnitude / 2 - 1);
                if constexpr (IS_SAME<W, Float4>) result.values[i] = code < 8 ? magnitude : -magnitude;
                else result.values[i] = number - static_cast<int>(zero);
            }
        }
    } else {
        using Of = Pairs<T>;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t word = IS_BYTE ? words[i / 2] >> (8 * (i % 2)) : words[0] >> (4 * i);
            if constexpr (IS_SAME<W, Float4>) {
                uint32_t digits = (word & 0x00070007u) << Of::FLOAT4_SHIFT | (word & 0x00080008u) << 12;
                result.words[i] = multiply_add_pairs<T>(digits, Of::FLOAT4_UNIT, MINUS_PAIR);
            } else {
                uint32_t digits = word & (IS_BYTE ? 0x007f007fu : 0x000f000fu);
                uint32_t subtracted = IS_BYTE ? word & 0x00800080u : zero | zero << 16;
                result.words[i] = multiply_add_pairs<T>(digits | Of::LARGE, Of::ONE, subtracted | Of::LARGE | MINUS_PAIR);
            }
        }
    }
    return result;
}

// The numbers that integers represent.
template <typename T>
DEVICE Eight<T> converted(const Eight<T> &integers, float scale, float offset) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = number(integers, i) * scale - offset;
    return eight_of<T>(values);
}

// Eight weights of an output, from input `first` on; integers without their scales if segments have these.
template <typename T, typename W>
DEVICE Eight<T> load_weights(const Weights &w, long long output, int first) {
    constexpr int OUTPUTS = UNIT_OUTPUTS<W>;
    long long place = unit_of<W>(w, output, first) * OUTPUTS * STEP + (output % 8 * 4 + first % STEP / 8) * OUTPUTS +
                      output % OUTPUTS / 8 * 8;
    if constexpr (INTEGER_BITS<W> == 0) {
        return load(Buffer<T>{reinterpret_cast<T *>(w.values.data), w.values.count / static_cast<long long>(sizeof(T))}, place);
    } else {
        uint32_t words[2];
        for (int i = 0; i < INTEGER_BITS<W> / 4; ++i)
            words[i] = w.values.template vector<uint32_t>(place * INTEGER_BITS<W> / 8 + 4 * i);
        Eight<T> integers = unpacked<T, W>(words, zero_of<W>(w));
        if (has_scaled_segments<W>(w)) return integers;
        long long group = scale_place<W>(w, output, first);
        return converted(integers, w.scales[group], w.offsets.is_empty() ? 0.0f : w.offsets[group]);
    }
}

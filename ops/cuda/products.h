// Products of 16 rows and 8 columns that a warp computes from memory, 32 inputs at a time.
//
// Lane 4 g + t reads eight consecutive inputs from 8 t on, of rows g and g + 8 and of column g: the first four of each lane are
// the inputs of one product of the warp, the others of the next. The numbering of inputs only affects the order of the sum, and
// that order is the same for every row and column. In float32 there is no such product: lanes compute the four sums that they
// keep, one input after another.
#pragma once

#include "numbers.h"

constexpr int STEP = 32;  // inputs

template <typename T>
struct Eight {  // consecutive numbers, as words of two
    uint32_t words[4];
};

template <>
struct Eight<float> {
    float values[8];
};

// c [16, 8] += a b of one step: of lane 4 g + t, inputs 8 t to 8 t + 7 of rows g (`low`) and g + 8 (`high`) and of column g.
template <typename T>
DEVICE void multiply_eights(float (&c)[4], const Eight<T> &low, const Eight<T> &high, const Eight<T> &column) {
    multiply<T>(c, {low.words[0], high.words[0], low.words[1], high.words[1]}, {column.words[0], column.words[1]});
    multiply<T>(c, {low.words[2], high.words[2], low.words[3], high.words[3]}, {column.words[2], column.words[3]});
}

// The same; `a(row, first)` and `b(column, first)` give Eight<T>, or zeros after the end.
template <typename T, typename A, typename B>
DEVICE void multiply_step(float (&c)[4], int lane, A a, B b) {
    int g = lane / 4, t = lane % 4;
    if constexpr (sizeof(T) == 4) {
#pragma unroll 1  // 32 numbers of each are enough registers; attention's sums have up to 128
        for (int first = 0; first < STEP; first += 8) {
            Eight<float> low = a(g, first), high = a(g + 8, first), left = b(2 * t, first), right = b(2 * t + 1, first);
            for (int i = 0; i < 8; ++i) {
                c[0] = fmaf(low.values[i], left.values[i], c[0]);
                c[1] = fmaf(low.values[i], right.values[i], c[1]);
                c[2] = fmaf(high.values[i], left.values[i], c[2]);
                c[3] = fmaf(high.values[i], right.values[i], c[3]);
            }
        }
    } else {
        Eight<T> low = a(g, 8 * t), high = a(g + 8, 8 * t), column = b(g, 8 * t);
        multiply_eights(c, low, high, column);
    }
}

DEVICE float number(const Eight<float> &eight, int i) { return eight.values[i]; }

template <typename T>
DEVICE float number(const Eight<T> &eight, int i) {
    return to_float(T{static_cast<uint16_t>(eight.words[i / 2] >> (16 * (i % 2)))});
}

template <typename T>
DEVICE Eight<T> zeros() {
    return {};
}

// Eight consecutive numbers from `index` on, a multiple of eight in memory aligned to a line.
template <typename T>
DEVICE Eight<T> load(const Buffer<T> &from, long long index) {
    Eight<T> result;
    if constexpr (sizeof(T) == 4) {
        for (int i = 0; i < 8; ++i) result.values[i] = from[index + i];
    } else {
        const uint4 &words = from.template vector<uint4>(index);
        result.words[0] = words.x, result.words[1] = words.y, result.words[2] = words.z, result.words[3] = words.w;
    }
    return result;
}

template <typename T>
DEVICE Eight<T> eight_of(const float (&values)[8]) {
    Eight<T> result;
    if constexpr (sizeof(T) == 4) {
        for (int i = 0; i < 8; ++i) result.values[i] = values[i];
    } else {
        for (int i = 0; i < 4; ++i) result.words[i] = pair(from_float<T>(values[2 * i]), from_float<T>(values[2 * i + 1]));
    }
    return result;
}

// The same for a row of `width` numbers from `start` on; its last eight may be incomplete.
template <typename T>
DEVICE Eight<T> load_within(const Buffer<T> &from, long long start, int first, int width) {
    if (first + 8 <= width && width % 8 == 0 && start % 8 == 0) return load(from, start + first);
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = first + i < width ? to_float(from[start + first + i]) : 0.0f;
    return eight_of<T>(values);
}

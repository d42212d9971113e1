// Tile of a linear for few rows: 16 rows and 16 outputs, with a warp for each quarter of the inputs. For all rows, or for
// those of an expert.
//
// The inputs are divided into segments (a scale's group; without scales a step), the segments into four quarters. The sum of
// a quarter adds its segments in order, each times its scale; the four are added in order.
#pragma once

#include "operands.h"
#include "products.h"

constexpr int TILE_ROWS = 16, TILE_OUTPUTS = 16, QUARTERS = 4, TILE_THREADS = QUARTERS * WARP;

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

template <typename A, typename B>
constexpr bool IS_SAME = false;
template <typename A>
constexpr bool IS_SAME<A, A> = true;

// Twice the value of an E2M1 code: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
HOST_AND_DEVICE inline float doubled_float4(uint32_t code) {
    int number = code & 7, magnitude = number < 4 ? number : (2 + number % 2) << (number / 2 - 1);
    return static_cast<float>(code < 8 ? magnitude : -magnitude);
}

// The first of `num_segments` in a quarter.
HOST_AND_DEVICE inline int quarter_begin(int quarter, int num_segments) {
    return static_cast<int>(static_cast<long long>(quarter) * num_segments / QUARTERS);
}

// Integers are multiplied as they are, which is exact; the scale is applied to the sum of a segment. With offsets, or in groups
// that are not multiples of a step, they are converted to the numbers that they represent.
template <typename W>
DEVICE bool has_scaled_segments(const Weights &w) {
    return INTEGER_BITS<W> != 0 && w.offsets.is_empty() && w.group_size % STEP == 0;
}

// Eight weights of an output, from input `first` on.
template <typename T, typename W>
DEVICE Eight<T> load_weights(const Weights &w, long long output, int first) {
    long long place = output * w.padded_inputs + first;
    if constexpr (INTEGER_BITS<W> == 0) {
        Buffer<T> values{reinterpret_cast<T *>(w.values.data), w.values.count / static_cast<long long>(sizeof(T))};
        return load(values, place);
    } else {
        float values[8];
        if constexpr (INTEGER_BITS<W> == 8) {
            const uint2 &words = w.values.template vector<uint2>(place);
            for (int i = 0; i < 8; ++i) values[i] = static_cast<int8_t>((i < 4 ? words.x : words.y) >> (8 * (i % 4)));
        } else {
            uint32_t word = w.values.template vector<uint32_t>(place / 2);
            float zero = w.offsets.is_empty() ? 8.0f : 0.0f;
            for (int i = 0; i < 8; ++i) {
                uint32_t code = (word >> (4 * i)) & 15u;
                values[i] = IS_SAME<W, Float4> ? doubled_float4(code) : static_cast<float>(code) - zero;
            }
        }
        if (!has_scaled_segments<W>(w)) {
            long long group = output * (w.padded_inputs / w.group_size) + first / w.group_size;
            float scale = w.scales[group], offset = w.offsets.is_empty() ? 0.0f : w.offsets[group];
            for (int i = 0; i < 8; ++i) values[i] = values[i] * scale - offset;
        }
        return eight_of<T>(values);
    }
}

// `start_of(row)`: where the row of x begins for a row of the tile, -1: none. `store(row, output, sum)` gets each sum of the existing rows.
template <typename T, typename W, typename StartOf, typename Store>
DEVICE void multiply_tile(const Buffer<T> &x, const Weights &w, long long first_weight, int first_output, StartOf start_of,
                          Store store) {
    SHARED Shared<float, QUARTERS * TILE_ROWS * TILE_OUTPUTS> sums;
    int thread = threadIdx.x, lane = thread % WARP, quarter = thread / WARP;
    bool has_scales = has_scaled_segments<W>(w);
    int segment = has_scales ? w.group_size : STEP, num_segments = w.padded_inputs / segment;
    float total[2][4] = {}, sum[2][4] = {};
    auto rows = [&](int row, int first) {
        long long start = start_of(row);
        return start < 0 ? zeros<T>() : load_within(x, start, first, w.num_inputs);
    };
    for (int number = quarter_begin(quarter, num_segments); number < quarter_begin(quarter + 1, num_segments); ++number) {
        for (int input = number * segment; input < (number + 1) * segment; input += STEP)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                multiply_step<T>(
                    sum[j], lane, [&](int row, int first) { return rows(row, input + first); },
                    [&](int column, int first) {
                        int output = first_output + 8 * j + column;
                        return output < w.num_outputs ? load_weights<T, W>(w, first_weight + output, input + first)
                                                      : zeros<T>();
                    });
        if (!has_scales) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int output = first_output + 8 * (i / 4) + lane % 4 * 2 + i % 2;
            float scale = output < w.num_outputs ? w.scales[(first_weight + output) * num_segments + number] : 0.0f;
            total[i / 4][i % 4] = fmaf(sum[i / 4][i % 4], scale, total[i / 4][i % 4]);
            sum[i / 4][i % 4] = 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int row = lane / 4 + i % 4 / 2 * 8, column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
        sums[(quarter * TILE_ROWS + row) * TILE_OUTPUTS + column] = has_scales ? total[i / 4][i % 4] : sum[i / 4][i % 4];
    }
    __syncthreads();
    for (int place = thread; place < TILE_ROWS * TILE_OUTPUTS; place += TILE_THREADS) {
        int row = place / TILE_OUTPUTS, output = first_output + place % TILE_OUTPUTS;
        if (start_of(row) < 0 || output >= w.num_outputs) continue;
        float sum = 0.0f;
        for (int part = 0; part < QUARTERS; ++part) sum += sums[part * TILE_ROWS * TILE_OUTPUTS + place];
        store(row, output, sum);
    }
}

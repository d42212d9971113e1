// Linears: y = x W + b of rows, with weights as numbers of x's type or as integers in groups. `linear.h` says in which order the
// inputs are added up. Both kernels here keep it: that of few rows gives each quarter to a warp, since weights come faster the
// more warps ask for them; that of many rows makes the quarters one after another and keeps what its warps share in shared
// memory. So a row has the same bits in both.
#include "linear.h"

namespace {

template <typename T, typename W>
__global__ void __launch_bounds__(kTileThreads, 1) linear_of_tiles(Linear o) {
    Buffer<T> x = o.x.as<T>(), y = o.y.as<T>();
    int first_row = blockIdx.y * kTileRows;
    auto row_of = [&](int row) { return first_row + row < o.num_rows ? static_cast<long long>(first_row + row) : -1; };
    multiply_tile<T, W>(x, o.weights, 0, blockIdx.x * kTileOutputs, row_of, [&](int row, int output, float sum) {
        if (!o.bias.is_empty()) sum += o.bias[output];
        y[row_of(row) * o.weights.num_outputs + output] = from_float<T>(sum);
    });
}

constexpr int kLargeRows = 128, kLargeOutputs = 128, kLargeThreads = 256, kStages = 3;
constexpr int kStride = kStep + 8;  // of a line in shared memory: eight lines begin in different banks

// Numbers of x's type alone. Eight warps, of 64 rows and 32 outputs each.
template <typename T>
__global__ void __launch_bounds__(kLargeThreads) large_linear(Linear o) {
    Buffer<T> x = o.x.as<T>(), y = o.y.as<T>();
    Buffer<T> weights{reinterpret_cast<T *>(o.weights.values.data), o.weights.values.count / static_cast<long long>(sizeof(T))};
    constexpr int kPart = kLargeRows * kStride;
    Buffer<T> shared = dynamic_shared<T>(0, 2 * kStages * kPart);
    int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    int first_row = blockIdx.y * kLargeRows, first_output = blockIdx.x * kLargeOutputs;
    int row_of_warp = warp / 4 * 64, output_of_warp = warp % 4 * 32;
    int num_steps = o.weights.padded_inputs / kStep;

    auto fetch = [&](int step) {
        int stage = step % kStages * 2 * kPart;
        for (int piece = thread; piece < kLargeRows * kStep / 8; piece += kLargeThreads) {
            int line = piece / (kStep / 8), first = piece % (kStep / 8) * 8, input = step * kStep + first;
            bool is_row = first_row + line < o.num_rows && input < o.weights.num_inputs;
            bool is_output = first_output + line < o.weights.num_outputs;
            copy_16_bytes(&shared[stage + line * kStride + first],
                          is_row ? &x[(first_row + line) * static_cast<long long>(o.weights.num_inputs) + input] : x.data,
                          is_row);
            copy_16_bytes(&shared[stage + kPart + line * kStride + first],
                          is_output ? &weights[(first_output + line) * static_cast<long long>(o.weights.padded_inputs) + input]
                                    : weights.data,
                          is_output);
        }
    };

    float total[4][4][4] = {}, sum[4][4][4] = {};
    for (int step = 0; step < kStages - 1; ++step) {
        if (step < num_steps) fetch(step);
        close_copies();
    }
    for (int step = 0; step < num_steps; ++step) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        if (step + kStages - 1 < num_steps) fetch(step + kStages - 1);
        close_copies();
        int stage = step % kStages * 2 * kPart;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply_step<T>(
                    sum[i][j], lane,
                    [&](int row, int first) { return load(shared, stage + (row_of_warp + 16 * i + row) * kStride + first); },
                    [&](int column, int first) {
                        return load(shared, stage + kPart + (output_of_warp + 8 * j + column) * kStride + first);
                    });
        bool is_end = false;  // of a quarter
        for (int quarter = 1; quarter <= kQuarters; ++quarter) is_end |= step + 1 == quarter_begin(quarter, num_steps);
        if (is_end) {
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                float &of_all = total[i / 16][i / 4 % 4][i % 4], &own = sum[i / 16][i / 4 % 4][i % 4];
                of_all += own;
                own = 0.0f;
            }
        }
    }
    wait_for_copies<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        int part = i % 4, row = first_row + row_of_warp + 16 * (i / 16) + lane / 4 + part / 2 * 8;
        int output = first_output + output_of_warp + 8 * (i / 4 % 4) + lane % 4 * 2 + part % 2;
        if (row >= o.num_rows || output >= o.weights.num_outputs) continue;
        float value = total[i / 16][i / 4 % 4][part];
        if (!o.bias.is_empty()) value += o.bias[output];
        y[static_cast<long long>(row) * o.weights.num_outputs + output] = from_float<T>(value);
    }
}

template <typename T, typename W>
int run_tiles(const Linear &o, void *stream) {
    dim3 grid((o.weights.num_outputs + kTileOutputs - 1) / kTileOutputs, (o.num_rows + kTileRows - 1) / kTileRows);
    return launch<linear_of_tiles<T, W>>(o, grid, kTileThreads, 0, stream);
}

template <typename T>
int run(const Linear &o, void *stream) {
    if (o.weights.type == kInt8) return run_tiles<T, Integer<8>>(o, stream);
    if (o.weights.type == kInt4) return run_tiles<T, Integer<4>>(o, stream);
    if constexpr (sizeof(T) == 2) {
        if (o.num_rows > 4 * kTileRows && o.weights.num_inputs % 8 == 0) {
            dim3 grid((o.weights.num_outputs + kLargeOutputs - 1) / kLargeOutputs, (o.num_rows + kLargeRows - 1) / kLargeRows);
            return launch<large_linear<T>>(o, grid, kLargeThreads, 2 * kStages * kLargeRows * kStride * sizeof(T), stream);
        }
    }
    return run_tiles<T, T>(o, stream);
}

}  // namespace

extern "C" int tokamak_Linear(const Linear *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}

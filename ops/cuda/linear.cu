// Linears: y = x W + b of rows, with weights as numbers of x's type or as integers in groups. `linear.h` defines the order of
// summation. Both kernels here keep it: the one for few rows gives each quarter to a warp, since more warps load weights
// faster; the one for many rows computes the quarters one after another and keeps data shared by its warps in shared memory. So
// a row has the same bits in both.
#include "linear.h"

namespace {

template <typename T>
DEVICE void keep(const Linear &o, long long place, float value) {
    if (o.floats.is_empty()) o.y.as<T>()[place] = from_float<T>(value);
    else o.floats[place] = value;
}

template <typename T, typename W>
__global__ void __launch_bounds__(TILE_THREADS, 1) linear_of_tiles(Linear o) {
    long long first_row = static_cast<long long>(blockIdx.y) * TILE_ROWS;
    auto start_of = [&](int row) { return first_row + row < o.num_rows ? (first_row + row) * o.weights.num_inputs : -1; };
    multiply_tile<T, W>(o.x.as<T>(), o.weights, 0, blockIdx.x * TILE_OUTPUTS, start_of, [&](int row, int output, float sum) {
        if (!o.bias.is_empty()) sum += o.bias[output];
        keep<T>(o, (first_row + row) * o.weights.num_outputs + output, sum);
    });
}

template <typename T, typename W>
__global__ void __launch_bounds__(TILE_THREADS, 1) head_linear(HeadLinear o) {
    Buffer<T> y = o.y.as<T>();
    int head = blockIdx.z, num_outputs = o.weights.num_outputs;
    long long first_row = static_cast<long long>(blockIdx.y) * TILE_ROWS;
    auto start_of = [&](int row) {
        return first_row + row < o.num_rows ? ((first_row + row) * o.heads + head) * o.stride : -1;
    };
    multiply_tile<T, W>(o.x.as<T>(), o.weights, static_cast<long long>(head) * num_outputs, blockIdx.x * TILE_OUTPUTS, start_of,
                        [&](int row, int output, float sum) {
                            y[((first_row + row) * o.heads + head) * num_outputs + output] = from_float<T>(sum);
                        });
}

constexpr int LARGE_ROWS = 128, LARGE_OUTPUTS = 128, LARGE_THREADS = 256, STAGES = 3;
constexpr int STRIDE = STEP + 8;  // length of a line in shared memory: eight lines begin in different banks

// Only for weights of x's type. Eight warps, with 64 rows and 32 outputs each.
template <typename T>
__global__ void __launch_bounds__(LARGE_THREADS) large_linear(Linear o) {
    Buffer<T> x = o.x.as<T>();
    Buffer<T> weights{reinterpret_cast<T *>(o.weights.values.data), o.weights.values.count / static_cast<long long>(sizeof(T))};
    constexpr int PART = LARGE_ROWS * STRIDE;
    Buffer<T> shared = dynamic_shared<T>(0, 2 * STAGES * PART);
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int first_row = blockIdx.y * LARGE_ROWS, first_output = blockIdx.x * LARGE_OUTPUTS;
    int row_of_warp = warp / 4 * 64, output_of_warp = warp % 4 * 32;
    int num_steps = o.weights.padded_inputs / STEP;

    auto fetch = [&](int step) {
        int stage = step % STAGES * 2 * PART;
        for (int piece = thread; piece < LARGE_ROWS * STEP / 8; piece += LARGE_THREADS) {
            int line = piece / (STEP / 8), first = piece % (STEP / 8) * 8, input = step * STEP + first;
            bool is_row = first_row + line < o.num_rows && input < o.weights.num_inputs;
            bool is_output = first_output + line < o.weights.num_outputs;
            copy_16_bytes(&shared[stage + line * STRIDE + first],
                          is_row ? &x[(first_row + line) * static_cast<long long>(o.weights.num_inputs) + input] : x.data,
                          is_row);
            copy_16_bytes(&shared[stage + PART + line * STRIDE + first],
                          is_output ? &weights[(first_output + line) * static_cast<long long>(o.weights.padded_inputs) + input]
                                    : weights.data,
                          is_output);
        }
    };

    float total[4][4][4] = {}, sum[4][4][4] = {};
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < num_steps) fetch(step);
        close_copies();
    }
    for (int step = 0; step < num_steps; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < num_steps) fetch(step + STAGES - 1);
        close_copies();
        int stage = step % STAGES * 2 * PART;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply_step<T>(
                    sum[i][j], lane,
                    [&](int row, int first) { return load(shared, stage + (row_of_warp + 16 * i + row) * STRIDE + first); },
                    [&](int column, int first) {
                        return load(shared, stage + PART + (output_of_warp + 8 * j + column) * STRIDE + first);
                    });
        bool is_end = false;  // of a quarter
        for (int quarter = 1; quarter <= QUARTERS; ++quarter) is_end |= step + 1 == quarter_begin(quarter, num_steps);
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
        keep<T>(o, static_cast<long long>(row) * o.weights.num_outputs + output, value);
    }
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

template <typename T, typename W>
int run_tiles(const Linear &o, void *stream) {
    dim3 grid((o.weights.num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, (o.num_rows + TILE_ROWS - 1) / TILE_ROWS);
    return launch<linear_of_tiles<T, W>>(o, grid, TILE_THREADS, 0, stream);
}

template <typename T, typename W>
int run_heads(const HeadLinear &o, void *stream) {
    dim3 grid((o.weights.num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, (o.num_rows + TILE_ROWS - 1) / TILE_ROWS, o.heads);
    return launch<head_linear<T, W>>(o, grid, TILE_THREADS, 0, stream);
}

template <typename T>
int run(const Linear &o, void *stream) {
    if (o.weights.type == INT8) return run_tiles<T, Integer<8>>(o, stream);
    if (o.weights.type == INT4) return run_tiles<T, Integer<4>>(o, stream);
    if (o.weights.type == FLOAT4) return run_tiles<T, Float4>(o, stream);
    if constexpr (sizeof(T) == 2) {
        if (o.num_rows > 4 * TILE_ROWS && o.weights.num_inputs % 8 == 0) {
            dim3 grid((o.weights.num_outputs + LARGE_OUTPUTS - 1) / LARGE_OUTPUTS, (o.num_rows + LARGE_ROWS - 1) / LARGE_ROWS);
            return launch<large_linear<T>>(o, grid, LARGE_THREADS, 2 * STAGES * LARGE_ROWS * STRIDE * sizeof(T), stream);
        }
    }
    return run_tiles<T, T>(o, stream);
}

}  // namespace

extern "C" int tokamak_Linear(const Linear *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}

extern "C" int tokamak_HeadLinear(const HeadLinear *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run_heads<decltype(x), decltype(x)>(*o, stream); });
}
#endif

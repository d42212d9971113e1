// Linears: y = x W + b of rows, with weights as numbers of x's type or as integers in groups. `linear.h` defines the order of
// summation. The kernels keep it: those for few rows give each part of the inputs to a warp, the one for many rows computes the
// parts one after another. So a row has the same bits in all.
#include "linear.h"

namespace {

template <typename T>
DEVICE void keep(const Linear &o, long long place, float value) {
    if (o.floats.is_empty()) o.y.as<T>()[place] = from_float<T>(value);
    else o.floats[place] = value;
}

template <typename T, typename W, int ROWS>
__global__ void __launch_bounds__(TILE_THREADS, ROWS == TILE_ROWS ? TILE_BLOCKS<T> : 1) linear_of_tiles(Linear o) {
    long long first_row = static_cast<long long>(blockIdx.y) * ROWS;
    auto start_of = [&](int row) { return first_row + row < o.num_rows ? (first_row + row) * o.weights.num_inputs : -1; };
    multiply_tile<T, W, ROWS>(o.x.as<T>(), o.weights, 0, blockIdx.x * TILE_OUTPUTS, start_of, o.parts, o.arrivals,
                              [&](int row, int output, float sum) {
                                  if (!o.bias.is_empty()) sum += o.bias[output];
                                  keep<T>(o, (first_row + row) * o.weights.num_outputs + output, sum);
                              });
}

template <typename T, typename W>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS<T>) head_linear(HeadLinear o) {
    Buffer<T> y = o.y.as<T>();
    int head = blockIdx.z, num_outputs = o.weights.num_outputs;
    long long first_row = static_cast<long long>(blockIdx.y) * TILE_ROWS;
    auto start_of = [&](int row) {
        return first_row + row < o.num_rows ? ((first_row + row) * o.heads + head) * o.stride : -1;
    };
    multiply_tile<T, W, TILE_ROWS>(o.x.as<T>(), o.weights, static_cast<long long>(head) * padded_outputs<W>(o.weights),
                                   blockIdx.x * TILE_OUTPUTS, start_of, {}, {}, [&](int row, int output, float sum) {
                                       y[((first_row + row) * o.heads + head) * num_outputs + output] = from_float<T>(sum);
                                   });
}

constexpr int LARGE_OUTPUTS = 128, LARGE_STAGES = 4, ROW_TILES = 16;

template <typename W>
constexpr int LARGE_ROWS = INTEGER_BITS<W> == 0 ? 128 : 64;  // sums of segments take registers

// Numbers of a stage: of the rows, 32 of each one after another, and of units of weights.
template <typename W>
constexpr int LARGE_STAGE = LARGE_ROWS<W> * STEP + LARGE_OUTPUTS / UNIT_OUTPUTS<W> * WARP_PIECE / 2;

// Eight warps, two by four, with 32 outputs each. Lanes read 16 bytes of rows and of weights at consecutive places, so there are no
// conflicts of banks. Blocks that run together have few tiles of rows and of outputs: their operands stay in the L2 cache.
template <typename T, typename W>
__global__ void __launch_bounds__(TILE_THREADS) large_linear(Linear o) {
    constexpr int ROWS = LARGE_ROWS<W>, BLOCKS = ROWS / 32, UNITS = LARGE_OUTPUTS / UNIT_OUTPUTS<W>, STAGE = LARGE_STAGE<W>;
    const Weights &w = o.weights;
    Buffer<T> x = o.x.as<T>(), shared = dynamic_shared<T>(0, LARGE_STAGES * STAGE);
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, num_steps = w.padded_inputs / STEP;
    int row_tiles = (o.num_rows + ROWS - 1) / ROWS, output_tiles = (w.num_outputs + LARGE_OUTPUTS - 1) / LARGE_OUTPUTS;
    int first_of_group = blockIdx.x / (ROW_TILES * output_tiles) * ROW_TILES;
    int in_group = blockIdx.x % (ROW_TILES * output_tiles), group_rows = min(ROW_TILES, row_tiles - first_of_group);
    int first_row = (first_of_group + in_group % group_rows) * ROWS, first_output = in_group / group_rows * LARGE_OUTPUTS;
    int row_of_warp = warp / 4 * (ROWS / 2), output_of_warp = warp % 4 * TILE_OUTPUTS;

    auto fetch = [&](int step) {
        int stage = step % LARGE_STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < ROWS * 4 / TILE_THREADS; ++i) {
            int piece = thread + i * TILE_THREADS, row = first_row + piece / 4, input = step * STEP + piece % 4 * 8;
            bool is_there = row < o.num_rows && input < w.num_inputs;
            long long from = is_there ? static_cast<long long>(row) * w.num_inputs + input : 0;
            copy_16_bytes(&shared[stage + piece * 8], &x.template vector<uint4>(from), is_there);
        }
        for (int piece = thread; piece < UNITS * WARP; piece += TILE_THREADS) {
            int output = first_output + piece / WARP * UNIT_OUTPUTS<W>;
            bool is_there = output < w.num_outputs;
            long long from = is_there ? unit_of<W>(w, output, step * STEP) * WARP_PIECE + piece % WARP * PIECE : 0;
            copy_16_bytes(&shared[stage + ROWS * STEP + piece * 8], &w.values.template vector<uint4>(from), is_there);
        }
    };

    float total[BLOCKS * PANELS * 4] = {};
    PartSums<W, BLOCKS> sums;
    bool has_scales = has_scaled_segments<W>(w);
    int part = 0, end = part_begin(1, w.num_parts, num_steps);
    sums.scales.load(w, 0, first_output + output_of_warp, 0, lane);
    for (int step = 0; step < LARGE_STAGES - 1; ++step) {
        if (step < num_steps) fetch(step);
        close_copies();
    }
    for (int step = 0; step < num_steps; ++step) {
        wait_for_copies<LARGE_STAGES - 2>();
        __syncthreads();
        if (step + LARGE_STAGES - 1 < num_steps) fetch(step + LARGE_STAGES - 1);
        close_copies();
        while (end <= step) end = part_begin(++part + 1, w.num_parts, num_steps);
        int rows = step % LARGE_STAGES * STAGE + row_of_warp * STEP + lane * 8;
        int units = step % LARGE_STAGES * STAGE + ROWS * STEP + output_of_warp / UNIT_OUTPUTS<W> * WARP * 8 + lane * 8;
        multiply_panels<T>(
            sums, w, [&](int i) { return load(shared, rows + 8 * i * STEP); },
            [&](int i) -> const uint4 & { return shared.template vector<uint4>(units + i * WARP * 8); });
        sums.end_step(w, 0, first_output + output_of_warp, step, end, lane);
        if (step + 1 < end) continue;
#pragma unroll
        for (int i = 0; i < BLOCKS * PANELS * 4; ++i) {
            total[i] += sums.of(has_scales, i);
            sums.clear(i);
        }
        if (step + 1 < num_steps) sums.scales.load(w, 0, first_output + output_of_warp, step + 1, lane);
    }
    wait_for_copies<0>();
#pragma unroll
    for (int i = 0; i < BLOCKS * PANELS * 4; ++i) {
        int row = first_row + row_of_warp + 16 * (i / 16) + lane / 4 + i % 4 / 2 * 8;
        int output = first_output + output_of_warp + 8 * (i / 4 % 4) + lane % 4 * 2 + i % 2;
        if (row >= o.num_rows || output >= w.num_outputs) continue;
        if (!o.bias.is_empty()) total[i] += o.bias[output];
        keep<T>(o, static_cast<long long>(row) * w.num_outputs + output, total[i]);
    }
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

constexpr int FEWEST_LARGE_TILES = 32;  // fewer leave too much of a card idle; tiles for 64 rows are quicker then

int tiles_of(int count, int size) { return (count + size - 1) / size; }

template <typename T, typename W, int ROWS>
int run_tiles(const Linear &o, void *stream) {
    Linear own = o;
    if (o.num_rows > TILE_ROWS) own.parts = {};
    unsigned sharing = own.parts.is_empty() ? 1 : o.weights.num_parts / TILE_WARPS;
    dim3 grid(tiles_of(o.weights.num_outputs, TILE_OUTPUTS), tiles_of(o.num_rows, ROWS), sharing);
    return launch<linear_of_tiles<T, W, ROWS>>(own, grid, TILE_THREADS, TileMemory<T, W, ROWS>::BYTES, stream);
}

template <typename T, typename W>
int run(const Linear &o, void *stream) {
    if constexpr (sizeof(T) == 2) {
        int num_large = tiles_of(o.num_rows, LARGE_ROWS<W>) * tiles_of(o.weights.num_outputs, LARGE_OUTPUTS);
        if (o.num_rows > MIDDLE_ROWS && num_large >= FEWEST_LARGE_TILES && o.weights.num_inputs % 8 == 0)
            return launch<large_linear<T, W>>(o, dim3(num_large), TILE_THREADS, LARGE_STAGES * LARGE_STAGE<W> * 2, stream);
        if (o.num_rows > TILE_ROWS) return run_tiles<T, W, MIDDLE_ROWS>(o, stream);
    }
    return run_tiles<T, W, TILE_ROWS>(o, stream);
}

template <typename T>
int run(const Linear &o, void *stream) {
    if (o.weights.type == INT8) return run<T, Integer<8>>(o, stream);
    if (o.weights.type == INT4) return run<T, Integer<4>>(o, stream);
    if (o.weights.type == FLOAT4) return run<T, Float4>(o, stream);
    return run<T, T>(o, stream);
}

template <typename T>
int run_heads(const HeadLinear &o, void *stream) {
    dim3 grid(tiles_of(o.weights.num_outputs, TILE_OUTPUTS), tiles_of(o.num_rows, TILE_ROWS), o.heads);
    return launch<head_linear<T, T>>(o, grid, TILE_THREADS, TileMemory<T, T, TILE_ROWS>::BYTES, stream);
}

}  // namespace

extern "C" int tokamak_Linear(const Linear *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}

extern "C" int tokamak_HeadLinear(const HeadLinear *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run_heads<decltype(x)>(*o, stream); });
}
#endif

// Tile of a linear: 16 or 64 rows and 32 outputs, of all rows or of those of an expert.
//
// The inputs are divided into `num_parts` parts, a number that depends on the matrix alone. The sum of a part adds its steps in
// order, for integers its segments (a scale's group, or what a part has of it), each times its scale; the parts are added in
// order. All kernels keep this order, so a row has the same bits in each.
//
// Decoding takes as long as the weights take to arrive, so a tile's warps have different parts, and each lane copies what it
// needs itself, several steps ahead, into memory that no other lane uses: no barrier until the parts are added.
#pragma once

#include "weights.h"

constexpr int TILE_ROWS = 16, MIDDLE_ROWS = 64, TILE_OUTPUTS = 32, TILE_WARPS = 8, TILE_THREADS = TILE_WARPS * WARP;
template <typename T>
constexpr int TILE_BLOCKS = sizeof(T) == 4 ? 1 : 2;  // of tiles of 16 rows, on a multiprocessor at least
constexpr int PANELS = TILE_OUTPUTS / 8, PIECE = 16, WARP_PIECE = WARP * PIECE;  // bytes

HOST_AND_DEVICE inline int part_begin(int part, int num_parts, int num_steps) {
    return static_cast<int>(static_cast<long long>(part) * num_steps / num_parts);
}

// Memory of a tile: pieces that a lane copies for a step, in stages; then the sums of the warps. The largest blocks have 99 KiB on
// some cards.
template <typename T, typename W, int ROWS>
struct TileMemory {
    static constexpr int ROW_PIECES = ROWS / 8, WEIGHT_PIECES = TILE_OUTPUTS / UNIT_OUTPUTS<W>;
    static constexpr int PIECES = ROW_PIECES + WEIGHT_PIECES, STAGE_BYTES = TILE_WARPS * PIECES * WARP_PIECE;
    static constexpr int MAX_STAGES = (96 << 10) / STAGE_BYTES, STAGES = MAX_STAGES < 8 ? MAX_STAGES : 8;
    static constexpr int SUM_STRIDE = TILE_OUTPUTS + 8, SUM_BYTES = TILE_WARPS * ROWS * SUM_STRIDE * 4;
    static constexpr int COPIED_BYTES = sizeof(T) == 4 ? 0 : STAGES * STAGE_BYTES;
    static constexpr int BYTES = COPIED_BYTES > SUM_BYTES ? COPIED_BYTES : SUM_BYTES;
};

// Scales and offsets of 32 outputs that a lane needs in a step: of its sums' columns 8 panel + 2 t and 8 panel + 2 t + 1, or of the
// weights that it converts, of column 8 panel + g.
template <typename W>
struct Scales {
    float scale[PANELS][2] = {}, offset[PANELS] = {};

    DEVICE void load(const Weights &w, long long first_weight, int first_output, int step, int lane) {
        if constexpr (INTEGER_BITS<W> != 0) {
            bool has_segments = has_scaled_segments<W>(w);
            int input = step * STEP + (has_segments ? 0 : lane % 4 * 8), own = has_segments ? lane % 4 * 2 : lane / 4;
#pragma unroll
            for (int first = 0; first < TILE_OUTPUTS; first += UNIT_OUTPUTS<W>) {
                long long unit = scale_place<W>(w, first_weight + first_output + first, input) + own;
#pragma unroll
                for (int i = 0; i < UNIT_OUTPUTS<W> / 8; ++i) {
                    int panel = first / 8 + i;
                    if (first_output + 8 * panel >= w.num_outputs) continue;
                    if (has_segments) {
                        float2 both = w.scales.template vector<float2>(unit + 8 * i);
                        scale[panel][0] = both.x, scale[panel][1] = both.y;
                    } else {
                        scale[panel][0] = w.scales[unit + 8 * i];
                        offset[panel] = w.offsets.is_empty() ? 0.0f : w.offsets[unit + 8 * i];
                    }
                }
            }
        }
    }
};

// Sums of a warp: 16 BLOCKS rows by 32 outputs, of a segment and of a part.
template <typename W, int BLOCKS>
struct PartSums {
    float segment[BLOCKS][PANELS][4] = {}, part[BLOCKS][PANELS][4] = {};
    Scales<W> scales;

    // Where a segment ends with this step, adds it to the part. Then gets the scales of the next step.
    DEVICE void end_step(const Weights &w, long long first_weight, int first_output, int step, int end, int lane) {
        if constexpr (INTEGER_BITS<W> != 0) {
            bool has_scales = has_scaled_segments<W>(w), is_last = step + 1 == end;
            if (has_scales && !is_last && (step + 1) * STEP % w.group_size != 0) return;
            if (has_scales) {
#pragma unroll
                for (int i = 0; i < BLOCKS * PANELS * 4; ++i) {
                    float &sum = segment[i / 16][i / 4 % 4][i % 4], &total = part[i / 16][i / 4 % 4][i % 4];
                    total = fmaf(sum, scales.scale[i / 4 % 4][i % 2], total);
                    sum = 0.0f;
                }
            }
            if (!is_last) scales.load(w, first_weight, first_output, step + 1, lane);
        }
    }

    DEVICE float of(bool has_scales, int i) const {
        float sum = segment[i / 16][i / 4 % 4][i % 4], scaled = part[i / 16][i / 4 % 4][i % 4];
        return INTEGER_BITS<W> != 0 && has_scales ? scaled : sum;
    }

    DEVICE void clear(int i) { segment[i / 16][i / 4 % 4][i % 4] = part[i / 16][i / 4 % 4][i % 4] = 0.0f; }
};

// Adds a step. `row(i)`: a lane's eight inputs of row 8 i + g; `unit(i)`: its 16 bytes of the weights' unit i.
template <typename T, typename W, int BLOCKS, typename Row, typename Unit>
DEVICE void multiply_panels(PartSums<W, BLOCKS> &sums, const Weights &w, Row row, Unit unit) {
    Eight<T> rows[2 * BLOCKS];
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) rows[i] = row(i);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        constexpr int OF_UNIT = UNIT_OUTPUTS<W> / 8;
        const uint4 &piece = unit(panel / OF_UNIT);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        Eight<T> column;
        if constexpr (INTEGER_BITS<W> == 0) {
            for (int i = 0; i < 4; ++i) column.words[i] = words[i];
        } else {
            column = unpacked<T, W>(&words[panel % OF_UNIT * (4 / OF_UNIT)], zero_of<W>(w));
            if (!has_scaled_segments<W>(w)) column = converted(column, sums.scales.scale[panel][0], sums.scales.offset[panel]);
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) multiply_eights(sums.segment[i][panel], rows[2 * i], rows[2 * i + 1], column);
    }
}

// A warp's sums of the steps in [begin, end), for rows of 16 bits. `starts`: where the lane's rows 8 i + g begin in x; -1: none.
template <typename T, typename W, int ROWS>
DEVICE void add_part(PartSums<W, ROWS / 16> &sums, const Buffer<T> &x, const Weights &w, long long first_weight,
                     int first_output, const long long (&starts)[ROWS / 8], int begin, int end) {
    using Memory = TileMemory<T, W, ROWS>;
    constexpr int STAGE_NUMBERS = Memory::STAGE_BYTES / 2;
    int lane = threadIdx.x % WARP, own = (threadIdx.x / WARP * Memory::PIECES * WARP + lane) * 8;
    Buffer<T> copied = dynamic_shared<T>(0, Memory::COPIED_BYTES / 2);
    auto place = [&](int step, int piece) { return step % Memory::STAGES * STAGE_NUMBERS + own + piece * WARP * 8; };
    auto fetch = [&](int step) {
        int input = step * STEP + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < Memory::WEIGHT_PIECES; ++i) {
            int output = first_output + i * UNIT_OUTPUTS<W>;
            bool is_there = output < w.num_outputs;
            long long from = is_there ? unit_of<W>(w, first_weight + output, step * STEP) * WARP_PIECE + lane * PIECE : 0;
            copy_16_bytes(&copied[place(step, i)], &w.values.template vector<uint4>(from), is_there);
        }
#pragma unroll
        for (int i = 0; i < Memory::ROW_PIECES; ++i) {
            int to = place(step, Memory::WEIGHT_PIECES + i);
            bool is_there = starts[i] >= 0 && input < w.num_inputs;
            if (is_there && (w.num_inputs % 8 != 0 || starts[i] % 8 != 0)) {
                Eight<T> eight = load_within(x, starts[i], input, w.num_inputs);
                for (int j = 0; j < 8; ++j) copied[to + j] = T{static_cast<uint16_t>(eight.words[j / 2] >> (16 * (j % 2)))};
            } else {
                const void *from = x.data;
                if (is_there) from = &x.template vector<uint4>(starts[i] + input);
                copy_16_bytes(&copied[to], from, is_there);
            }
        }
    };
    for (int step = begin; step < begin + Memory::STAGES - 1; ++step) {
        if (step < end) fetch(step);
        close_copies();
    }
    for (int step = begin; step < end; ++step) {
        wait_for_copies<Memory::STAGES - 2>();
        multiply_panels<T>(
            sums, w, [&](int i) { return load(copied, place(step, Memory::WEIGHT_PIECES + i)); },
            [&](int i) -> const uint4 & { return copied.template vector<uint4>(place(step, i)); });
        if (step + Memory::STAGES - 1 < end) fetch(step + Memory::STAGES - 1);
        close_copies();
        sums.end_step(w, first_weight, first_output, step, end, lane);
    }
    wait_for_copies<0>();
}

// The same for rows of float32, directly from memory.
template <typename W, typename StartOf>
DEVICE void add_part(PartSums<W, 1> &sums, const Buffer<float> &x, const Weights &w, long long first_weight, int first_output,
                     StartOf start_of, int begin, int end) {
    int lane = threadIdx.x % WARP;
    auto rows = [&](int row, int first) {
        long long start = start_of(row);
        return start < 0 ? zeros<float>() : load_within(x, start, first, w.num_inputs);
    };
    for (int step = begin; step < end; ++step) {
        int input = step * STEP;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            multiply_step<float>(
                sums.segment[0][panel], lane, [&](int row, int first) { return rows(row, input + first); },
                [&](int column, int first) {
                    int output = first_output + 8 * panel + column;
                    return output < w.num_outputs ? load_weights<float, W>(w, first_weight + output, input + first)
                                                  : zeros<float>();
                });
        sums.end_step(w, first_weight, first_output, step, end, lane);
    }
}

// `first_weight`: output 0 of the matrix among those of all. `start_of(row)`: where the row of x begins for a row of the tile, -1:
// none. `parts` [num_parts, 16, num_outputs], if there is any: each block of a tile (blockIdx.z) leaves sums of eight parts there,
// and the last one, which `arrivals` [tiles of outputs] show, adds all. `store(row, output, sum)` gets each sum of the existing rows.
template <typename T, typename W, int ROWS, typename StartOf, typename Store>
DEVICE void multiply_tile(const Buffer<T> &x, const Weights &w, long long first_weight, int first_output, StartOf start_of,
                          const Buffer<float> &parts, const Buffer<int> &arrivals, Store store) {
    constexpr int OWN = ROWS * TILE_OUTPUTS / TILE_THREADS, SUM_STRIDE = TileMemory<T, W, ROWS>::SUM_STRIDE;
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, num_steps = w.padded_inputs / STEP;
    bool is_shared = !parts.is_empty(), has_scales = has_scaled_segments<W>(w);
    int first_part = is_shared ? blockIdx.z * TILE_WARPS : 0, end_part = is_shared ? first_part + TILE_WARPS : w.num_parts;
    Buffer<float> of_warps = dynamic_shared<float>(0, TILE_WARPS * ROWS * SUM_STRIDE);
    float totals[OWN] = {};
    auto place_in_parts = [&](int part, int place) {
        int row = part * TILE_ROWS + place / TILE_OUTPUTS;
        return static_cast<long long>(row) * w.num_outputs + first_output + place % TILE_OUTPUTS;
    };
    auto is_there = [&](int place) {
        return first_output + place % TILE_OUTPUTS < w.num_outputs && start_of(place / TILE_OUTPUTS) >= 0;
    };
    for (int part = first_part; part < end_part; part += TILE_WARPS) {
        PartSums<W, ROWS / 16> sums;
        int begin = part_begin(part + warp, w.num_parts, num_steps), end = part_begin(part + warp + 1, w.num_parts, num_steps);
        if (begin < end) sums.scales.load(w, first_weight, first_output, begin, lane);
        if constexpr (sizeof(T) == 4) {
            add_part(sums, x, w, first_weight, first_output, start_of, begin, end);
        } else {
            long long starts[ROWS / 8];
#pragma unroll
            for (int i = 0; i < ROWS / 8; ++i) starts[i] = start_of(8 * i + lane / 4);
            add_part<T, W, ROWS>(sums, x, w, first_weight, first_output, starts, begin, end);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            int row = warp * ROWS + 16 * (i / 16) + lane / 4 + i % 4 / 2 * 8, column = 8 * (i / 4 % 4) + lane % 4 * 2 + i % 2;
            of_warps[row * SUM_STRIDE + column] = sums.of(has_scales, i);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int place = thread + i * TILE_THREADS;
            if (!is_there(place)) continue;
            for (int each = 0; each < TILE_WARPS; ++each) {
                float sum = of_warps[(each * ROWS + place / TILE_OUTPUTS) * SUM_STRIDE + place % TILE_OUTPUTS];
                if (is_shared) parts[place_in_parts(part + each, place)] = sum;
                else totals[i] += sum;
            }
        }
        __syncthreads();
    }
    if (is_shared) {
        SHARED Shared<int, 1> arrived;
        __threadfence();
        __syncthreads();
        if (thread == 0) arrived[0] = 1 + atomicAdd(&arrivals[blockIdx.x], 1);
        __syncthreads();
        if (arrived[0] * TILE_WARPS < w.num_parts) return;
        if (thread == 0) arrivals[blockIdx.x] = 0;
        __threadfence();
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int place = thread + i * TILE_THREADS;
            if (!is_there(place)) continue;
#pragma unroll 8
            for (int part = 0; part < w.num_parts; ++part) totals[i] += load_beyond_l1(&parts[place_in_parts(part, place)]);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int place = thread + i * TILE_THREADS;
        if (is_there(place)) store(place / TILE_OUTPUTS, first_output + place % TILE_OUTPUTS, totals[i]);
    }
}

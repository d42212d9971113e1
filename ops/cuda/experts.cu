// Experts: routing of rows, the linears of each expert over its rows, and the sum of a row's results.
//
// The result of a choice depends only on its row and expert, not on its tile, so the order in which `dispatch` lists an
// expert's choices changes no bit.
#include "linear.h"

namespace {

constexpr int MAX_EXPERTS = 1024, ROUTE_THREADS = WARP, DISPATCH_THREADS = 256;

struct Found {
    float value;
    int index;
};

// The largest of the warp; ties go to the first.
DEVICE Found best_of_warp(Found own) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        float value = __shfl_xor_sync(ALL_LANES, own.value, mask);
        int index = __shfl_xor_sync(ALL_LANES, own.index, mask);
        if (value > own.value || (value == own.value && index < own.index)) own = {value, index};
    }
    return own;
}

constexpr float LEFT_OUT = -INF;

// One warp per row.
__global__ void __launch_bounds__(ROUTE_THREADS) route(Route o) {
    SHARED Shared<float, MAX_EXPERTS> scores, left;
    SHARED Shared<float, MAX_EXPERTS> groups;
    int row = blockIdx.x, lane = threadIdx.x, size = o.num_experts / o.num_groups;
    long long first = static_cast<long long>(row) * o.num_experts, out = static_cast<long long>(row) * o.num_chosen;
    float largest = LEFT_OUT, sum = 0.0f;
    for (int i = lane; i < o.num_experts; i += WARP) largest = fmaxf(largest, o.logits[first + i]);
    largest = warp_max(largest);
    for (int i = lane; i < o.num_experts; i += WARP) {
        scores[i] = o.has_sigmoid ? sigmoid(o.logits[first + i]) : expf(o.logits[first + i] - largest);
        sum += scores[i];
    }
    sum = warp_sum(sum);
    for (int i = lane; i < o.num_experts; i += WARP) {
        if (!o.has_sigmoid) scores[i] = scores[i] / sum;
        left[i] = o.correction.is_empty() ? scores[i] : scores[i] + o.correction[i];
    }
    __syncwarp();
    if (o.num_groups > 1) {
        for (int group = lane; group < o.num_groups; group += WARP) {
            float best = LEFT_OUT, second = LEFT_OUT;
            for (int i = group * size; i < (group + 1) * size; ++i) {
                float value = left[i];
                second = fmaxf(second, fminf(best, value));
                best = fmaxf(best, value);
            }
            groups[group] = size > 1 && o.num_best > 1 ? best + second : best;
        }
        __syncwarp();
        unsigned long long kept = 0;  // of at most 64 groups
        for (int chosen = 0; chosen < o.num_chosen_groups; ++chosen) {
            Found own{LEFT_OUT, o.num_groups};
            for (int group = lane; group < o.num_groups; group += WARP)
                if (!(kept >> group & 1) && groups[group] > own.value) own = {groups[group], group};
            kept |= 1ull << best_of_warp(own).index;
        }
        for (int i = lane; i < o.num_experts; i += WARP)
            if (!(kept >> i / size & 1)) left[i] = LEFT_OUT;
        __syncwarp();
    }
    float total = 0.0f;
    for (int number = 0; number < o.num_chosen; ++number) {
        Found own{LEFT_OUT, o.num_experts};
        for (int i = lane; i < o.num_experts; i += WARP)
            if (left[i] > own.value) own = {left[i], i};
        int best = min(best_of_warp(own).index, o.num_experts - 1);
        total += scores[best];
        __syncwarp();
        if (lane == 0) {
            left[best] = LEFT_OUT;
            o.ids[out + number] = best;
            o.weights[out + number] = scores[best];
        }
        __syncwarp();
    }
    bool is_own =
        (o.expert_sets.is_empty() || o.expert_sets[row] == o.set) && (o.num_tokens.is_empty() || row < o.num_tokens[0]);
    float divisor = o.is_normalized ? fmaxf(total + o.added_to_sum, o.smallest_sum) : 1.0f;
    for (int number = lane; number < o.num_chosen; number += WARP) {
        float scale = o.scales.is_empty() ? 1.0f : o.scales[o.ids[out + number]];
        o.weights[out + number] = is_own ? o.weights[out + number] / divisor * o.factor * scale : 0.0f;
        if (!is_own) o.ids[out + number] = -1;
    }
}

// One block.
__global__ void __launch_bounds__(DISPATCH_THREADS) dispatch(Dispatch o) {
    SHARED Shared<int, MAX_EXPERTS> counts;
    SHARED Shared<int, MAX_EXPERTS + 1> firsts, tiles;
    int thread = threadIdx.x;
    for (int expert = thread; expert < o.num_experts; expert += DISPATCH_THREADS) counts[expert] = 0;
    __syncthreads();
    for (int choice = thread; choice < o.num_choices; choice += DISPATCH_THREADS)
        if (o.ids[choice] >= 0) atomicAdd(&counts[o.ids[choice]], 1);
    __syncthreads();
    if (thread == 0) {
        int num_choices = 0, num_tiles = 0;
        for (int expert = 0; expert < o.num_experts; ++expert) {
            firsts[expert] = num_choices, tiles[expert] = num_tiles;
            num_choices += counts[expert];
            num_tiles += (counts[expert] + TILE_ROWS - 1) / TILE_ROWS;
        }
        firsts[o.num_experts] = num_choices, tiles[o.num_experts] = num_tiles;
    }
    __syncthreads();
    for (int expert = thread; expert <= o.num_experts; expert += DISPATCH_THREADS) o.offsets[expert] = firsts[expert];
    for (int tile = thread; tile < o.max_tiles; tile += DISPATCH_THREADS) o.tile_experts[tile] = -1;
    __syncthreads();
    for (int expert = thread; expert < o.num_experts; expert += DISPATCH_THREADS) {
        for (int tile = tiles[expert]; tile < tiles[expert + 1]; ++tile) {
            o.tile_experts[tile] = expert;
            o.tile_firsts[tile] = firsts[expert] + (tile - tiles[expert]) * TILE_ROWS;
        }
        counts[expert] = 0;
    }
    __syncthreads();
    for (int choice = thread; choice < o.num_choices; choice += DISPATCH_THREADS) {
        int expert = o.ids[choice];
        if (expert >= 0) o.choices[firsts[expert] + atomicAdd(&counts[expert], 1)] = choice;
    }
}

template <typename T, typename W>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS<T>) expert_linear(ExpertLinear o) {
    int parts = (o.weights.num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, part = blockIdx.x % parts, tile = blockIdx.x / parts;
    int expert = o.tile_experts[tile];
    if (expert < 0) return;
    Buffer<T> x = o.x.as<T>(), y = o.y.as<T>();
    int first = o.tile_firsts[tile], end = o.offsets[expert + 1];
    auto choice_of = [&](int row) { return first + row < end ? static_cast<long long>(o.choices[first + row]) : -1; };
    multiply_tile<T, W, TILE_ROWS>(
        x, o.weights, static_cast<long long>(expert) * padded_outputs<W>(o.weights), part * TILE_OUTPUTS,
        [&](int row) {
            long long choice = choice_of(row);
            return choice < 0 ? choice : choice / o.x_divisor * o.weights.num_inputs;
        },
        {}, {},
        [&](int row, int output, float sum) {
            if (!o.bias.is_empty()) sum += o.bias[static_cast<long long>(expert) * o.weights.num_outputs + output];
            y[choice_of(row) * o.weights.num_outputs + output] = from_float<T>(sum);
        });
}

template <typename T>
__global__ void combine(Combine o) {
    Buffer<T> results = o.results.as<T>(), shared = o.shared.as<T>(), y = o.y.as<T>();
    long long row = blockIdx.x;
    for (int i = threadIdx.x; i < o.width; i += blockDim.x) {
        float sum = 0.0f;
        for (int number = 0; number < o.num_chosen; ++number) {
            long long choice = row * o.num_chosen + number;
            if (o.ids[choice] >= 0) sum = fmaf(to_float(results[choice * o.width + i]), o.weights[choice], sum);
        }
        if (!shared.is_empty()) sum += to_float(shared[row * o.width + i]);
        y[row * o.width + i] = from_float<T>(sum);
    }
}

template <typename T>
__global__ void choose(Choose o) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= o.num_rows) return;
    long long choice = static_cast<long long>(row) * o.num_chosen + o.index;
    o.chosen[row] = o.ids[choice];
    o.ones[row] = 1.0f;
    o.factors.as<T>()[row] = from_float<T>(o.weights[choice]);
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

template <typename T, typename W>
int run_linear(const ExpertLinear &o, void *stream) {
    // Only this dimension has no small limit.
    dim3 grid((o.weights.num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS * o.max_tiles);
    return launch<expert_linear<T, W>>(o, grid, TILE_THREADS, TileMemory<T, W, TILE_ROWS>::BYTES, stream);
}

template <typename T>
int run_linear(const ExpertLinear &o, void *stream) {
    if (o.weights.type == INT8) return run_linear<T, Integer<8>>(o, stream);
    if (o.weights.type == INT4) return run_linear<T, Integer<4>>(o, stream);
    if (o.weights.type == FLOAT4) return run_linear<T, Float4>(o, stream);
    return run_linear<T, T>(o, stream);
}

}  // namespace

extern "C" int tokamak_Route(const Route *o, void *stream) {
    return launch<route>(*o, dim3(o->num_rows), ROUTE_THREADS, 0, stream);
}

extern "C" int tokamak_Dispatch(const Dispatch *o, void *stream) {
    return launch<dispatch>(*o, dim3(1), DISPATCH_THREADS, 0, stream);
}

extern "C" int tokamak_ExpertLinear(const ExpertLinear *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run_linear<decltype(x)>(*o, stream); });
}

extern "C" int tokamak_Combine(const Combine *o, void *stream) {
    return with_type(o->type, [&](auto x) { return launch<combine<decltype(x)>>(*o, dim3(o->num_rows), 128, 0, stream); });
}

extern "C" int tokamak_Choose(const Choose *o, void *stream) {
    constexpr int THREADS = 128;
    dim3 grid((o->num_rows + THREADS - 1) / THREADS);
    return with_type(o->type, [&](auto x) { return launch<choose<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}
#endif

// Norms: of whole rows, or of each group of columns. One block per row and group; the number of its threads, which gives the
// order of the sums, depends on the width alone.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int MOST_THREADS = 256;

// The sum of all threads' values, in the order of the warps; each thread gets it.
DEVICE float block_sum(Shared<float, MOST_THREADS / WARP> &parts, float value) {
    value = warp_sum(value);
    __syncthreads();  // the last sum was read
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / WARP; ++warp) sum += parts[warp];
    return sum;
}

template <typename T>
__global__ void __launch_bounds__(MOST_THREADS) norm(Norm o) {
    SHARED Shared<float, MOST_THREADS / WARP> parts;
    Buffer<T> x = o.x.as<T>(), other = o.other.as<T>(), total = o.total.as<T>(), y = o.y.as<T>();
    long long begin = static_cast<long long>(blockIdx.x) * o.stride + o.first + static_cast<long long>(blockIdx.y) * o.width;
    int weight = blockIdx.y * o.width, thread = threadIdx.x, num_threads = blockDim.x;
    Buffer<T> from = other.is_empty() ? x : total;
    float sum = 0.0f;
    for (int i = thread; i < o.width; i += num_threads) {
        float value = to_float(x[begin + i]);
        if (!other.is_empty()) {
            total[begin + i] = from_float<T>(value + to_float(other[begin + i]));
            value = to_float(total[begin + i]);
        }
        sum = o.is_centered ? sum + value : fmaf(value, value, sum);
    }
    float width = static_cast<float>(o.width), mean = 0.0f;
    sum = block_sum(parts, sum);
    if (o.is_centered) {
        mean = sum / width;
        sum = 0.0f;
        for (int i = thread; i < o.width; i += num_threads) {
            float off = to_float(from[begin + i]) - mean;
            sum = fmaf(off, off, sum);
        }
        sum = block_sum(parts, sum);
    }
    float factor = rsqrtf(sum / width + o.epsilon);
    for (int i = thread; i < o.width; i += num_threads) {
        float value = (to_float(from[begin + i]) - mean) * factor * o.weight[weight + i];
        y[begin + i] = from_float<T>(o.bias.is_empty() ? value : value + o.bias[weight + i]);
    }
}

template <typename T>
__global__ void __launch_bounds__(MOST_THREADS) gate_and_norm(GateAndNorm o) {
    SHARED Shared<float, MOST_THREADS / WARP> parts;
    Buffer<T> x = o.x.as<T>(), gates = o.gate.as<T>(), y = o.y.as<T>();
    int first = blockIdx.y * o.group, weight = o.weight_width == o.group ? 0 : first;
    long long row = blockIdx.x, begin = row * o.width + first;
    auto gate_of = [&](int i) {
        if (gates.is_empty()) return 1.0f;
        float gate = to_float(gates[row * o.gate_stride + o.gate_first + first + i]), share = sigmoid(gate);
        return o.is_sigmoid ? share : gate * share;
    };
    auto input = [&](int i) { return o.is_gated_first ? to_float(x[begin + i]) * gate_of(i) : to_float(x[begin + i]); };
    float factor = 1.0f;
    if (!o.weight.is_empty()) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < o.group; i += blockDim.x) sum = fmaf(input(i), input(i), sum);
        factor = rsqrtf(block_sum(parts, sum) / static_cast<float>(o.group) + o.epsilon);
    }
    for (int i = threadIdx.x; i < o.group; i += blockDim.x) {
        float value = o.weight.is_empty() ? input(i) : input(i) * factor * o.weight[weight + i];
        y[begin + i] = from_float<T>(o.is_gated_first ? value : value * gate_of(i));
    }
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Norm(const Norm *o, void *stream) {
    int num_threads = o->width <= 256 ? WARP : o->width <= 1024 ? 128 : MOST_THREADS;
    return with_type(
        o->type, [&](auto x) { return launch<norm<decltype(x)>>(*o, dim3(o->num_rows, o->groups), num_threads, 0, stream); });
}

extern "C" int tokamak_GateAndNorm(const GateAndNorm *o, void *stream) {
    dim3 grid(o->num_rows, o->width / o->group);
    return with_type(o->type, [&](auto x) { return launch<gate_and_norm<decltype(x)>>(*o, grid, 128, 0, stream); });
}
#endif

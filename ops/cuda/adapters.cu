// The terms of adapters (LoRA), each row's own. One block per row: its warps divide the inputs into quarters, which are added in
// order, and its threads divide the outputs.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP, MAX_RANK = 512, LINE = 16;

template <typename T>
__global__ void __launch_bounds__(THREADS) adapt(Adapt o) {
    SHARED Shared<float, WARPS * MAX_RANK> sums;
    int slot = o.slots_of_rows[blockIdx.x / o.num_chosen], expert = o.ids.is_empty() ? 0 : o.ids[blockIdx.x];
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    if (slot < 0 || expert < 0) return;
    int rank = o.ranks[static_cast<long long>(slot) * o.num_modules + o.index + expert * o.index_step];
    if (rank == 0) return;
    Buffer<T> x = o.x.as<T>(), y = o.y.as<T>();
    long long row = blockIdx.x, row_of_x = row / o.x_divisor;
    long long begin = slot * o.slot_numbers + expert * o.number_step;
    int room = (rank + LINE - 1) / LINE * LINE;
    int first = static_cast<int>(static_cast<long long>(warp) * o.num_inputs / WARPS);
    int end = static_cast<int>(static_cast<long long>(warp + 1) * o.num_inputs / WARPS);
    for (int r = lane; r < rank; r += WARP) {
        float sum = 0.0f;
        for (int i = first; i < end; ++i)
            sum = fmaf(to_float(x[row_of_x * o.num_inputs + i]),
                       o.slots[begin + o.first_a + static_cast<long long>(i) * room + r], sum);
        sums[warp * MAX_RANK + r] = sum;
    }
    __syncthreads();
    for (int r = thread; r < rank; r += THREADS) {
        float sum = 0.0f;
        for (int part = 0; part < WARPS; ++part) sum += sums[part * MAX_RANK + r];
        sums[r] = sum;
    }
    __syncthreads();
    for (int output = thread; output < o.num_outputs; output += THREADS) {
        int number = o.first_output + output;
        long long panel = begin + o.first_b + static_cast<long long>(number / LINE) * rank * LINE + number % LINE;
        float sum = 0.0f;
        for (int r = 0; r < rank; ++r) sum = fmaf(sums[r], o.slots[panel + static_cast<long long>(r) * LINE], sum);
        long long place = row * o.width + o.first + output;
        y[place] = from_float<T>(to_float(y[place]) + sum);
    }
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Adapt(const Adapt *o, void *stream) {
    return with_type(o->type, [&](auto x) { return launch<adapt<decltype(x)>>(*o, dim3(o->num_rows), THREADS, 0, stream); });
}
#endif

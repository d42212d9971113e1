// The maximum arithmetic of a card: sums in registers, without reading memory. `tools/device/rows.py` compares the arithmetic
// of other rows with it.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int THREADS = 256, CHAINS = 8;  // independent chains of each thread

template <typename T>
__global__ void __launch_bounds__(THREADS) peak(Peak o) {
    float sums[CHAINS][4] = {};
    float factor = 1.0f + static_cast<float>(threadIdx.x % WARP) / 1024;
    uint32_t word = 0;
    if constexpr (sizeof(T) == 2) word = pair(from_float<T>(factor), from_float<T>(factor));
    for (int step = 0; step < o.num_steps; ++step)
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            if constexpr (sizeof(T) == 2) multiply<T>(sums[chain], {word, word, word, word}, {word, word});
            else
                for (float &sum : sums[chain]) sum = fmaf(sum, factor, factor);
        }
    float total = 0.0f;
    for (auto &chain : sums)
        for (float sum : chain) total += sum;
    o.sums[static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x] = total;
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Peak(const Peak *o, void *stream) {
    return with_type(o->type, [&](auto x) { return launch<peak<decltype(x)>>(*o, dim3(o->num_blocks), THREADS, 0, stream); });
}
#endif

// Kernels that do what a card would not notice: each is told by the emulation, or by its bits under another seed.
#include "numbers.h"

struct Sums {
    Buffer<float> x;
    Buffer<float> y;
};

namespace {

constexpr int THREADS = 64;

__global__ void read_behind_the_end(Sums o) { o.y[threadIdx.x] = o.x[threadIdx.x + 1]; }

__global__ void read_before_the_barrier(Sums o) {
    SHARED Shared<float, THREADS> shared;
    shared[threadIdx.x] = o.x[threadIdx.x];
    o.y[threadIdx.x] = shared[(threadIdx.x + 1) % THREADS];
}

__global__ void read_behind_the_barrier(Sums o) {
    SHARED Shared<float, THREADS> shared;
    shared[threadIdx.x] = o.x[threadIdx.x];
    __syncthreads();
    o.y[threadIdx.x] = shared[(threadIdx.x + 1) % THREADS];
}

__global__ void add_up_in_any_order(Sums o) {
    float before = o.y[0];
    o.y[0] = before + o.x[threadIdx.x];
}

__global__ void wait_apart(Sums o) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    else __syncwarp();
}

__global__ void read_a_copy_too_early(Sums o) {
    Buffer<float> shared = dynamic_shared<float>(0, 4 * THREADS);
    copy_16_bytes(&shared[4 * threadIdx.x], &o.x[0], true);
    close_copies();
    o.y[threadIdx.x] = shared[4 * threadIdx.x];
    wait_for_copies<0>();
}

__global__ void read_more_shared_memory(Sums) { dynamic_shared<float>(4 * THREADS * 4, 1); }

__global__ void product(Sums o) {  // c [16, 8] of a [16, 16] and b [16, 8], bfloat16
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    auto a = [&](int row, int column) { return from_float<Bfloat16>(o.x[row * 16 + column]); };
    auto b = [&](int row, int column) { return from_float<Bfloat16>(o.x[256 + row * 8 + column]); };
    float c[4] = {};
    multiply<Bfloat16>(c,
                       {pair(a(g, 2 * t), a(g, 2 * t + 1)), pair(a(g + 8, 2 * t), a(g + 8, 2 * t + 1)),
                        pair(a(g, 2 * t + 8), a(g, 2 * t + 9)), pair(a(g + 8, 2 * t + 8), a(g + 8, 2 * t + 9))},
                       {pair(b(2 * t, g), b(2 * t + 1, g)), pair(b(2 * t + 8, g), b(2 * t + 9, g))});
    for (int i = 0; i < 4; ++i) o.y[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

}  // namespace

extern "C" int run_kernel(int number, const Sums *o) {
    constexpr int NUM_SHARED_BYTES = 4 * THREADS * sizeof(float);
    switch (number) {
        case 0: return launch<read_behind_the_end>(*o, dim3(1), THREADS, 0, nullptr);
        case 1: return launch<read_before_the_barrier>(*o, dim3(1), THREADS, 0, nullptr);
        case 2: return launch<read_behind_the_barrier>(*o, dim3(1), THREADS, 0, nullptr);
        case 3: return launch<add_up_in_any_order>(*o, dim3(1), THREADS, 0, nullptr);
        case 4: return launch<wait_apart>(*o, dim3(1), THREADS, 0, nullptr);
        case 5: return launch<read_a_copy_too_early>(*o, dim3(1), THREADS, NUM_SHARED_BYTES, nullptr);
        case 6: return launch<read_more_shared_memory>(*o, dim3(1), THREADS, NUM_SHARED_BYTES, nullptr);
        default: return launch<product>(*o, dim3(1), WARP, 0, nullptr);
    }
}

extern "C" const char *last_error() { return emulation::error(); }
extern "C" void set_seed(unsigned value) { emulation::seed(value); }

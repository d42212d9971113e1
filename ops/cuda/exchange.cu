// Gathers the columns of several ranks, each with a card of its own, through memory that they lend each other.
//
// A rank writes its columns into its own memory, tells the others, waits for theirs and copies all. The halves alternate: a rank
// writes a half again only after all others began the gather in between, so they have read it.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int THREADS = 256, LINE = 16, LINE_BYTES = 64;

DEVICE unsigned char *window_of(const Gather &o, int rank) {
    uint64_t address = 0;
    for (int i = 7; i >= 0; --i) address = address << 8 | o.windows[8 * rank + i];
    return reinterpret_cast<unsigned char *>(static_cast<uintptr_t>(address));
}

#ifdef __CUDACC__
DEVICE int load_from_all(const int *place) {
    int value;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}
DEVICE void store_for_all(int *place, int value) {
    asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
#else
inline int load_from_all(const int *place) {
    emulation::give_way();
    return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}
inline void store_for_all(int *place, int value) { __atomic_store_n(place, value, __ATOMIC_RELEASE); }
#endif

DEVICE unsigned char *half_of(const Gather &o, unsigned char *window, int count) {
    return window + LINE_BYTES + static_cast<long long>(count & 1) * o.half_bytes;
}

// One thread for each number.
template <typename T>
__global__ void __launch_bounds__(THREADS) lend_columns(Gather o) {
    unsigned char *window = window_of(o, o.place);
    unsigned char *half = half_of(o, window, *reinterpret_cast<int *>(window) + 1);
    long long place = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (place < 2) reinterpret_cast<int *>(half)[place] = place == 0 ? o.begin : o.begin + o.own;
    if (place < static_cast<long long>(o.num_rows) * o.own)
        reinterpret_cast<T *>(half + LINE_BYTES)[place] = o.x.as<T>()[place];
}

// One thread for each rank, in one block.
__global__ void __launch_bounds__(WARP) meet(Gather o) {
    int rank = threadIdx.x;
    int *own = reinterpret_cast<int *>(window_of(o, o.place));
    int count = *own + 1;
    __syncthreads();
    if (rank == 0) store_for_all(own, count);
    __syncthreads();
    if (rank < o.num_ranks) {
        const int *other = reinterpret_cast<const int *>(window_of(o, rank));
        while (load_from_all(other) - count < 0)
            if (load_from_all(&o.epoch[0]) != own[1]) break;
    }
}

// One thread for each number of the result.
template <typename T>
__global__ void __launch_bounds__(THREADS) take_columns(Gather o) {
    long long place = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x, row = place / o.width,
              column = place % o.width;
    if (row >= o.num_rows) return;
    int count = *reinterpret_cast<int *>(window_of(o, o.place));
    for (int rank = 0; rank < o.num_ranks; ++rank) {
        unsigned char *half = half_of(o, window_of(o, rank), count);
        int begin = reinterpret_cast<volatile int *>(half)[0], end = reinterpret_cast<volatile int *>(half)[1];
        if (column < begin || column >= end) continue;
        o.y.as<T>()[place] = reinterpret_cast<const T *>(half + LINE_BYTES)[row * (end - begin) + column - begin];
        return;
    }
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

dim3 grid_of(int num_rows, int width) {
    return dim3(static_cast<unsigned>((static_cast<long long>(num_rows) * width + THREADS - 1) / THREADS));
}

template <typename T>
int run(const Gather &o, void *stream) {
    if (int status = launch<lend_columns<T>>(o, grid_of(o.num_rows, o.own), THREADS, 0, stream)) return status;
    if (int status = launch<meet>(o, dim3(1), WARP, 0, stream)) return status;
    return launch<take_columns<T>>(o, grid_of(o.num_rows, o.width), THREADS, 0, stream);
}

}  // namespace

extern "C" int tokamak_Gather(const Gather *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}
#endif

// Exchanges between ranks, each with a card of its own, through memory that they lend each other.
//
// Columns: a rank writes its own into its memory, meets the others and copies theirs. The halves alternate: a rank writes a half
// again only after all others began the gather in between, so they have read it.
//
// Experts: a rank writes rows into its memory, meets the others, and takes those that it computes experts for. It writes the
// results into the memory of the ranks that have the rows, and all meet again. So no rank writes what another may still read.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int THREADS = 256, LINE_BYTES = 64, MAX_EXPERTS = 1024;

// Null: a rank that takes no part.
DEVICE unsigned char *window_of(const Windows &windows, int rank) {
    uint64_t address = 0;
    for (int i = 7; i >= 0; --i) address = address << 8 | windows.addresses[8 * rank + i];
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

// One thread for each rank, in one block.
__global__ void __launch_bounds__(WARP) meet(Windows windows) {
    int *own = reinterpret_cast<int *>(window_of(windows, windows.place));
    int count = *own + 1;
    __syncthreads();
    if (threadIdx.x == 0) store_for_all(own, count);
    __syncthreads();
    for (int rank = threadIdx.x; rank < windows.num_ranks; rank += WARP) {
        const int *other = reinterpret_cast<const int *>(window_of(windows, rank));
        while (other != nullptr && load_from_all(other) - count < 0)
            if (load_from_all(&windows.epoch[0]) != own[1]) break;
    }
}

DEVICE unsigned char *half_of(const Gather &o, unsigned char *window, int count) {
    return window + LINE_BYTES + static_cast<long long>(count & 1) * o.half_bytes;
}

// One thread for each number.
template <typename T>
__global__ void __launch_bounds__(THREADS) lend_columns(Gather o) {
    unsigned char *window = window_of(o.windows, o.windows.place);
    unsigned char *half = half_of(o, window, *reinterpret_cast<int *>(window) + 1);
    long long place = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (place < 2) reinterpret_cast<int *>(half)[place] = place == 0 ? o.begin : o.begin + o.own;
    if (place < static_cast<long long>(o.num_rows) * o.own)
        reinterpret_cast<T *>(half + LINE_BYTES)[place] = o.x.as<T>()[place];
}

// One thread for each number of the result.
template <typename T>
__global__ void __launch_bounds__(THREADS) take_columns(Gather o) {
    long long place = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x, row = place / o.width,
              column = place % o.width;
    if (row >= o.num_rows) return;
    int count = *reinterpret_cast<int *>(window_of(o.windows, o.windows.place));
    for (int rank = 0; rank < o.windows.num_ranks; ++rank) {
        unsigned char *half = half_of(o, window_of(o.windows, rank), count);
        int begin = reinterpret_cast<volatile int *>(half)[0], end = reinterpret_cast<volatile int *>(half)[1];
        if (column < begin || column >= end) continue;
        o.y.as<T>()[place] = reinterpret_cast<const T *>(half + LINE_BYTES)[row * (end - begin) + column - begin];
        return;
    }
}

// The parts of a rank's memory that `Offer` describes.
template <typename T>
struct Offered {
    int *line, *ids, *slots;
    T *rows, *results;

    DEVICE Offered(const Offer &o, int rank) {
        unsigned char *window = window_of(o.windows, rank);
        line = reinterpret_cast<int *>(window);
        ids = reinterpret_cast<int *>(window + LINE_BYTES);
        slots = reinterpret_cast<int *>(window + o.adapters_at);
        rows = reinterpret_cast<T *>(window + o.rows_at);
        results = reinterpret_cast<T *>(window + o.results_at);
    }
    DEVICE bool is_there() const { return line != nullptr; }
    DEVICE int num_rows() const { return line[2]; }
    DEVICE int first_row() const { return line[3]; }
};

// One block for each row.
template <typename T>
__global__ void __launch_bounds__(THREADS) send_rows(ShareRows o) {
    Offered<T> own(o.offer, o.offer.windows.place);
    int sent = blockIdx.x, thread = threadIdx.x;
    if (sent == 0 && thread < 2) own.line[2 + thread] = thread == 0 ? o.num_sent : o.first;
    if (sent >= o.num_sent) return;
    long long row = o.first + sent;
    for (int i = thread; i < o.width; i += THREADS)
        own.rows[static_cast<long long>(sent) * o.width + i] = o.x.as<T>()[row * o.width + i];
    for (int i = thread; i < o.num_chosen; i += THREADS) own.ids[sent * o.num_chosen + i] = o.ids[row * o.num_chosen + i];
    if (thread == 0) own.slots[sent] = o.slots_of_rows.is_empty() ? -1 : o.slots_of_rows[row];
}

// One block.
__global__ void __launch_bounds__(THREADS) count_rows(ShareRows o) {
    SHARED Shared<int, MAX_EXPERTS> counts;
    for (int expert = threadIdx.x; expert < o.num_experts; expert += THREADS) counts[expert] = 0;
    __syncthreads();
    for (int i = o.first * o.num_chosen + threadIdx.x; i < (o.first + o.num_sent) * o.num_chosen; i += THREADS)
        if (o.ids[i] >= 0) atomicAdd(&counts[o.ids[i]], 1);
    __syncthreads();
    uint64_t *all = reinterpret_cast<uint64_t *>(&o.counts[0]);
    for (int expert = threadIdx.x; expert < o.num_experts; expert += THREADS)
        if (counts[expert] > 0) all[expert] += counts[expert];
}

// One block for each row that any rank may have sent.
template <typename T>
__global__ void __launch_bounds__(THREADS) take_rows_of_experts(ShareRows o) {
    int place = blockIdx.x, home = place / o.most_rows, row = place % o.most_rows, thread = threadIdx.x;
    Offered<T> other(o.offer, home);
    bool is_row = other.is_there() && row < other.num_rows(), is_wanted = false;
    for (int number = 0; number < o.num_chosen; ++number) {
        int expert = is_row ? other.ids[row * o.num_chosen + number] : -1;
        if (expert >= 0) {
            long long first = static_cast<long long>(expert) * (1 + o.offer.windows.num_ranks);
            int rank = o.owners[first + 1 + (home + row) % o.owners[first]];
            if (rank != o.offer.windows.place) expert = -1;
        }
        is_wanted |= expert >= 0;
        if (thread == 0) o.own_ids[static_cast<long long>(place) * o.num_chosen + number] = expert;
    }
    if (thread == 0) o.own_slots[place] = is_row ? other.slots[row] : -1;
    if (!is_wanted) return;
    for (int i = thread; i < o.width; i += THREADS)
        o.rows.as<T>()[static_cast<long long>(place) * o.width + i] = other.rows[static_cast<long long>(row) * o.width + i];
}

// One block for each choice of such a row.
template <typename T>
__global__ void __launch_bounds__(THREADS) return_results(ReturnResults o) {
    long long choice = blockIdx.x;
    if (o.own_ids[choice] < 0) return;
    int place = static_cast<int>(choice / o.num_chosen), home = place / o.most_rows, same = o.offer.num_same;
    long long row = Offered<T>(o.offer, home).first_row() + place % o.most_rows;
    for (int rank = home / same * same; rank < home / same * same + same; ++rank) {
        Offered<T> other(o.offer, rank);
        if (!other.is_there()) continue;
        T *to = other.results + (row * o.num_chosen + choice % o.num_chosen) * o.width;
        for (int i = threadIdx.x; i < o.width; i += THREADS) to[i] = o.results.as<T>()[choice * o.width + i];
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
    if (int status = launch<meet>(o.windows, dim3(1), WARP, 0, stream)) return status;
    return launch<take_columns<T>>(o, grid_of(o.num_rows, o.width), THREADS, 0, stream);
}

template <typename T>
int share(const ShareRows &o, void *stream) {
    if (int status = launch<send_rows<T>>(o, dim3(std::max(1, o.num_sent)), THREADS, 0, stream)) return status;
    if (!o.counts.is_empty())
        if (int status = launch<count_rows>(o, dim3(1), THREADS, 0, stream)) return status;
    if (int status = launch<meet>(o.offer.windows, dim3(1), WARP, 0, stream)) return status;
    return launch<take_rows_of_experts<T>>(o, dim3(o.offer.windows.num_ranks * o.most_rows), THREADS, 0, stream);
}

template <typename T>
int give_back(const ReturnResults &o, void *stream) {
    dim3 grid(static_cast<unsigned>(o.offer.windows.num_ranks) * o.most_rows * o.num_chosen);
    if (int status = launch<return_results<T>>(o, grid, THREADS, 0, stream)) return status;
    return launch<meet>(o.offer.windows, dim3(1), WARP, 0, stream);
}

}  // namespace

extern "C" int tokamak_Gather(const Gather *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}

extern "C" int tokamak_ShareRows(const ShareRows *o, void *stream) {
    return with_type(o->type, [&](auto x) { return share<decltype(x)>(*o, stream); });
}

extern "C" int tokamak_ReturnResults(const ReturnResults *o, void *stream) {
    return with_type(o->type, [&](auto x) { return give_back<decltype(x)>(*o, stream); });
}
#endif

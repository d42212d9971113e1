// After the projections of attention: normalizes and rotates heads, and writes keys and values to the cache. One block per row;
// each warp takes one head at a time.
#include "cache.h"
#include "operands.h"

namespace {

constexpr int WARPS = 4, MAX_DIM = 512;

// y = normalized x, or x, for a head of `dim` numbers in shared memory, by all lanes of the warp.
DEVICE void normalize(const Buffer<float> &head, const Buffer<float> &weight, int first_weight, int dim, float epsilon,
                      int lane) {
    float squares = 0.0f;
    for (int i = lane; i < dim; i += WARP) squares = fmaf(head[i], head[i], squares);
    float factor = rsqrtf(warp_sum(squares) / static_cast<float>(dim) + epsilon);
    for (int i = lane; i < dim; i += WARP) head[i] = head[i] * factor * weight[first_weight + i];
    __syncwarp();
}

DEVICE float rotated(const Buffer<float> &head, int i, const Buffer<float> &cosines, const Buffer<float> &sines,
                     const Buffer<int> &partners, long long angle) {
    return fmaf(head[i], cosines[angle + i], head[partners[i]] * sines[angle + i]);
}

// Rotates a head in place, by all lanes of the warp.
DEVICE void rotate(const Buffer<float> &head, const Buffer<float> &cosines, const Buffer<float> &sines,
                   const Buffer<int> &partners, long long angle, int dim, int lane) {
    float own[MAX_DIM / WARP];
    for (int i = lane; i < dim; i += WARP) own[i / WARP] = rotated(head, i, cosines, sines, partners, angle);
    __syncwarp();
    for (int i = lane; i < dim; i += WARP) head[i] = own[i / WARP];
    __syncwarp();
}

// The part of the block's memory for one warp.
DEVICE Buffer<float> own_head(Shared<float, WARPS * MAX_DIM> &heads, int warp) { return {&heads[warp * MAX_DIM], MAX_DIM}; }

template <typename T>
__global__ void __launch_bounds__(WARPS *WARP, 1) rotate_and_store(RotateAndStore o) {
    SHARED Shared<float, WARPS * MAX_DIM> heads;
    Buffer<T> qkv = o.qkv.as<T>(), queries = o.queries.as<T>();
    int row = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, dim = o.cache.key_dim;
    Buffer<float> head = own_head(heads, warp);
    int num_all = o.heads + 2 * o.kv_heads, slot = o.slot_mapping[row];
    long long angle = static_cast<long long>(o.angle_rows[row]) * dim;
    for (int number = warp; number < num_all; number += WARPS) {
        bool is_value = number >= o.heads + o.kv_heads, is_query = number < o.heads;
        __syncwarp();
        for (int i = lane; i < dim; i += WARP)
            head[i] = to_float(qkv[(static_cast<long long>(row) * num_all + number) * dim + i]);
        __syncwarp();
        bool is_normalized = !o.norm_weight.is_empty() && (!is_value || o.has_values);
        bool is_rotated = is_normalized && o.is_normalized_after && !is_value;
        if (is_rotated) rotate(head, o.cosines, o.sines, o.partners, angle, dim, lane);
        if (is_normalized) normalize(head, o.norm_weight, is_query ? 0 : is_value ? 2 * dim : dim, dim, o.epsilon, lane);
        auto value = [&](int i) { return is_rotated ? head[i] : rotated(head, i, o.cosines, o.sines, o.partners, angle); };
        if (is_query) {
            for (int i = lane; i < dim; i += WARP)
                queries[(static_cast<long long>(row) * o.heads + number) * dim + i] = from_float<T>(value(i));
        } else {
            int of_cache = o.first_kv + (number - o.heads) % o.kv_heads;
            store_head(o.cache, is_value, slot, of_cache, lane,
                       [&](int i) { return to_float(from_float<T>(is_value ? head[i] : value(i))); });
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(WARPS *WARP, 1) store_latent(StoreLatent o) {
    SHARED Shared<float, WARPS * MAX_DIM> heads;
    Buffer<T> queries = o.queries.as<T>(), compressed = o.compressed.as<T>(), results = o.rotated.as<T>();
    int row = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int latent_dim = o.cache.value_dim, rotary_dim = o.cache.key_dim, dim = o.plain_dim + rotary_dim,
        slot = o.slot_mapping[row];
    long long angle = static_cast<long long>(o.angle_rows[row]) * rotary_dim;
    long long first = static_cast<long long>(row) * (latent_dim + rotary_dim);
    Buffer<float> head = own_head(heads, warp);
    for (int number = warp; number < o.heads + 2; number += WARPS) {  // the queries' heads, the latent, the key
        long long of_queries = (static_cast<long long>(row) * o.heads + number) * dim;
        bool is_latent = number == o.heads, is_key = number == o.heads + 1;
        int width = is_latent ? latent_dim : rotary_dim;
        __syncwarp();
        for (int i = lane; i < width; i += WARP)
            head[i] = to_float(is_latent ? compressed[first + i]
                               : is_key  ? compressed[first + latent_dim + i]
                                         : queries[of_queries + o.plain_dim + i]);
        __syncwarp();
        if (is_latent) {
            normalize(head, o.norm_weight, 0, latent_dim, o.epsilon, lane);
            store_head(o.cache, true, slot, 0, lane, [&](int i) { return to_float(from_float<T>(head[i])); });
        } else if (is_key) {
            store_head(o.cache, false, slot, 0, lane,
                       [&](int i) { return to_float(from_float<T>(rotated(head, i, o.cosines, o.sines, o.partners, angle))); });
        } else {
            for (int i = lane; i < o.plain_dim; i += WARP) results[of_queries + i] = queries[of_queries + i];
            for (int i = lane; i < rotary_dim; i += WARP)
                results[of_queries + o.plain_dim + i] = from_float<T>(rotated(head, i, o.cosines, o.sines, o.partners, angle));
        }
    }
}

__global__ void begin(Begin o) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= o.num_rows) return;
    int position = o.positions[row];
    int block = o.block_tables[static_cast<long long>(o.row_slots[row]) * o.blocks_per_slot + position / o.block_size];
    o.slot_mapping[row] = block * o.block_size + position % o.block_size;
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Begin(const Begin *o, void *stream) {
    constexpr int THREADS = 128;
    return launch<begin>(*o, dim3((o->num_rows + THREADS - 1) / THREADS), THREADS, 0, stream);
}

extern "C" int tokamak_RotateAndStore(const RotateAndStore *o, void *stream) {
    return with_type(
        o->type, [&](auto x) { return launch<rotate_and_store<decltype(x)>>(*o, dim3(o->num_rows), WARPS * WARP, 0, stream); });
}

extern "C" int tokamak_StoreLatent(const StoreLatent *o, void *stream) {
    return with_type(o->type,
                     [&](auto x) { return launch<store_latent<decltype(x)>>(*o, dim3(o->num_rows), WARPS * WARP, 0, stream); });
}
#endif

// Paged attention, also of latents (MLA): rows of any chunk or batch against the cache's keys and values.
//
// A row's keys are processed in splits of 64 and parts of 512, both counted from position 0. Within a part the softmax is
// online (Milakov and Gimelshein 2018; Dao et al. 2022); parts are joined in order. So a row's bits depend only on its queries
// and keys, not on its tile, nor on whether one block computes all its parts or each has its own block.
//
// A block has 16 rows, each a query with one of the heads that share a KV head. Its four warps divide a split's keys for the
// scores, and the columns of values for the sums.
#include "cache.h"
#include "operands.h"
#include "products.h"

namespace {

constexpr int SPLIT = 64, SPLITS_OF_PART = 8, PART = SPLIT * SPLITS_OF_PART, ROWS = 16, WARPS = 4;
constexpr int PADDING = 8;  // numbers after a line of shared memory: eight lines begin in different banks

HOST_AND_DEVICE constexpr int lines_of(int dim) { return (dim + STEP - 1) / STEP * STEP + PADDING; }

HOST_AND_DEVICE inline int key_dim_of(const Attention &o) {
    return o.is_latent ? o.cache.value_dim + o.cache.key_dim : o.cache.key_dim;
}

// Shared memory: the rows' queries; a split's keys, later replaced by its values, a line for each column; its weights.
template <typename T>
struct Layout {
    int key_line, queries, keys, weights, num_bytes;

    HOST_AND_DEVICE Layout(int key_dim, int padded_value_dim) {
        key_line = lines_of(key_dim);
        int value_line = SPLIT + PADDING;
        int of_keys = SPLIT * key_line, of_values = padded_value_dim * value_line;
        queries = 0;
        keys = ROWS * key_line;
        weights = keys + (of_keys > of_values ? of_keys : of_values);
        num_bytes = (weights + ROWS * value_line) * static_cast<int>(sizeof(T));
    }
};

// State of a row: the largest score and the sum of its weights; the sums of values are in the warps' registers.
struct Seen {
    float largest, sum;
};

// Factors by which the sums of a and b are multiplied when joined.
struct Joined {
    Seen seen;
    float of_a, of_b;
};

DEVICE float weight_of(float score, float largest) { return score == -INF ? 0.0f : expf(score - largest); }

DEVICE Joined join(Seen a, Seen b) {
    float largest = fmaxf(a.largest, b.largest);
    float of_a = weight_of(a.largest, largest), of_b = weight_of(b.largest, largest);
    return {{largest, fmaf(a.sum, of_a, b.sum * of_b)}, of_a, of_b};
}

// What the threads of a block share about its rows and the current split.
struct SharedRows {
    Shared<float, ROWS *(SPLIT + 1)> scores;
    Shared<float, ROWS> factors, sums, largests;
    Shared<int, ROWS> row_ids, first_keys, last_keys;
    Shared<int, SPLIT> slots;
};

// Work of a block: 16 rows of one KV head; each thread has its own copy. A stage that reads what other threads wrote comes
// after `__syncthreads`; `attend_part` has them in order.
template <typename T, int VALUE_DIM>
struct AttendBlock {
    static constexpr int COLUMNS = VALUE_DIM / WARPS / 8;  // of a warp, in eights
    static constexpr int VALUE_LINE = SPLIT + PADDING;
    static constexpr int THREADS = WARPS * WARP;
    using Sums = float[COLUMNS][4];

    const Attention &o;
    SharedRows &shared;
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int group, tile, first_row, kv_head = blockIdx.y;
    int slot, context, key_dim, value_dim;
    Layout<T> layout;
    Buffer<T> queries, keys, weights;
    int first_key, last_key;  // that any row sees

    DEVICE AttendBlock(const Attention &operands, SharedRows &rows)
        : o(operands),
          shared(rows),
          group(o.heads / o.kv_heads),
          key_dim(key_dim_of(o)),
          value_dim(o.cache.value_dim),
          layout(key_dim, VALUE_DIM) {
        int chunks = (o.tile_rows * group + ROWS - 1) / ROWS;
        tile = blockIdx.x / chunks, first_row = blockIdx.x % chunks * ROWS;
        slot = o.tile_slots[tile], context = o.tile_contexts[tile];
        queries = dynamic_shared<T>(0, ROWS * layout.key_line);
        keys = dynamic_shared<T>(layout.keys * sizeof(T), layout.weights - layout.keys);
        weights = dynamic_shared<T>(layout.weights * sizeof(T), ROWS * VALUE_LINE);
    }

    DEVICE int head_of(int row) const { return kv_head * group + (first_row + row) % group; }

    // The row of one of the sums that a lane keeps.
    DEVICE int row_of(int number) const { return lane / 4 + number / 2 * 8; }

    // Finds the block's rows in the batch, and the keys that they see.
    DEVICE void take_rows() {
        if (thread < ROWS) {
            int row = first_row + thread, query = row / group, place = tile * o.tile_rows + query;
            bool is_row = query < o.tile_rows;
            int row_id = is_row ? o.tile_row_ids[place] : -1;
            if (is_row && (row_id >= o.num_rows || o.row_queries[row_id] != place))
                row_id = -1;  // this place repeats another one
            shared.row_ids[thread] = row_id;
            int position = row_id < 0 ? -1 : o.positions[row_id];
            bool has_bounds = row_id >= 0 && !o.first_keys.is_empty();
            int first = has_bounds ? o.first_keys[row_id] : 0, last = has_bounds ? o.last_keys[row_id] : position;
            if (o.window != 0) first = max(first, o.has_chunks ? position - position % o.window : position - o.window + 1);
            if (o.window != 0 && o.is_two_sided) last = min(last, position + o.window - 1);
            shared.first_keys[thread] = first;
            shared.last_keys[thread] = min(last, context - 1);
        }
        __syncthreads();
        first_key = context, last_key = -1;
        for (int row = 0; row < ROWS; ++row) {
            if (shared.row_ids[row] < 0) continue;
            first_key = min(first_key, shared.first_keys[row]), last_key = max(last_key, shared.last_keys[row]);
        }
    }

    DEVICE void take_queries() {
        Buffer<T> all_queries = o.queries.as<T>();
        for (int place = thread; place < ROWS * layout.key_line; place += THREADS) {
            int row = place / layout.key_line, i = place % layout.key_line, row_id = shared.row_ids[row];
            queries[place] = row_id < 0 || i >= key_dim
                                 ? from_float<T>(0.0f)
                                 : all_queries[(static_cast<long long>(row_id) * o.heads + head_of(row)) * key_dim + i];
        }
    }

    // Cache slots of a split's keys; -1 after the context and before the first key seen, where blocks may be freed.
    DEVICE void find_slots(int split) {
        long long table = static_cast<long long>(slot) * o.blocks_per_slot;
        int size = o.cache.block_size;
        for (int key = thread; key < SPLIT; key += THREADS) {
            int position = split + key;
            bool is_key = first_key <= position && position < context;
            shared.slots[key] = is_key ? o.block_tables[table + position / size] * size + position % size : -1;
        }
    }

    // Eight consecutive numbers of a latent key from `first` on: the latent, then the rotated key.
    DEVICE void load_latent_key(int cache_slot, int first, float (&values)[8]) const {
        if (first + 8 <= value_dim) return load_head(o.cache, true, cache_slot, 0, first, values);
        for (int i = 0; i < 8; ++i) {  // the latent ends and the rotated key begins here
            float of_eight[8];
            int at = first + i;
            bool is_key = at >= value_dim;
            if (is_key) at -= value_dim;
            if (first + i < key_dim) {
                load_head(o.cache, !is_key, cache_slot, 0, at / 8 * 8, of_eight);
                values[i] = of_eight[at % 8];
            }
        }
    }

    DEVICE void take_keys() {
        int pieces = (key_dim + STEP - 1) / STEP * (STEP / 8);
        for (int piece = thread; piece < SPLIT * pieces; piece += THREADS) {
            int key = piece / pieces, first = piece % pieces * 8, cache_slot = shared.slots[key];
            float values[8] = {};
            if (cache_slot >= 0 && first < key_dim) {
                if (o.is_latent) load_latent_key(cache_slot, first, values);
                else load_head(o.cache, false, cache_slot, o.first_kv + kv_head, first, values);
            }
            for (int i = 0; i < 8; ++i) keys[key * layout.key_line + first + i] = from_float<T>(values[i]);
        }
    }

    DEVICE void score(int split) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float products[4] = {};
            int first = warp * 16 + 8 * j;
            for (int i = 0; i < key_dim; i += STEP)
                multiply_step<T>(
                    products, lane, [&](int row, int at) { return load(queries, row * layout.key_line + i + at); },
                    [&](int column, int at) { return load(keys, (first + column) * layout.key_line + i + at); });
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = row_of(i), key = first + lane % 4 * 2 + i % 2, position = split + key;
                bool is_seen =
                    shared.row_ids[row] >= 0 && shared.first_keys[row] <= position && position <= shared.last_keys[row];
                float score = products[i] * o.scale;
                if (o.softcap != 0) score = o.softcap * tanhf(score / o.softcap);
                shared.scores[row * (SPLIT + 1) + key] = is_seen ? score : -INF;
            }
        }
    }

    // The sums before the first key: a sink is a score without a value.
    DEVICE Seen start() const {
        int row = thread / 8;
        if (o.sinks.is_empty()) return {-INF, 0.0f};
        return {o.sinks[head_of(row)], 1.0f};
    }

    // Turns scores into weights: eight threads per row, eight keys each.
    DEVICE void weigh(Seen &seen) {
        int row = thread / 8, first = thread % 8 * 8;
        float largest = -INF, added = 0.0f;
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, shared.scores[row * (SPLIT + 1) + first + i]);
        for (int mask = 4; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
        largest = fmaxf(largest, seen.largest);
        for (int i = 0; i < 8; ++i) {
            float weight = weight_of(shared.scores[row * (SPLIT + 1) + first + i], largest);
            added += weight;
            weights[row * VALUE_LINE + first + i] = from_float<T>(weight);
        }
        for (int mask = 4; mask > 0; mask /= 2) added += __shfl_xor_sync(ALL_LANES, added, mask);
        float factor = weight_of(seen.largest, largest);
        seen = {largest, fmaf(seen.sum, factor, added)};
        if (first == 0) shared.factors[row] = factor;
    }

    // Loads values in place of the keys.
    DEVICE void take_values() {
        for (int piece = thread; piece < SPLIT * (VALUE_DIM / 8); piece += THREADS) {
            int key = piece % SPLIT, first = piece / SPLIT * 8;
            float values[8] = {};
            if (shared.slots[key] >= 0 && first < value_dim)
                load_head(o.cache, true, shared.slots[key], o.is_latent ? 0 : o.first_kv + kv_head, first, values);
            for (int i = 0; i < 8; ++i) keys[(first + i) * VALUE_LINE + key] = from_float<T>(values[i]);
        }
    }

    DEVICE void add_values(Sums &sum) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][i] *= shared.factors[row_of(i)];
            for (int key = 0; key < SPLIT; key += STEP)
                multiply_step<T>(
                    sum[j], lane, [&](int row, int at) { return load(weights, row * VALUE_LINE + key + at); },
                    [&](int column, int at) {
                        return load(keys, ((warp * COLUMNS + j) * 8 + column) * VALUE_LINE + key + at);
                    });
        }
    }

    // Computes the softmax of one part, in `seen` of row `thread / 8` (the same in its eight threads) and in `sum`.
    DEVICE void attend_part(int part, Seen &seen, Sums &sum) {
        int begin = max(part * PART, first_key / SPLIT * SPLIT), end = min((part + 1) * PART, last_key + 1);
        for (int split = begin; split < end; split += SPLIT) {
            __syncthreads();  // the values of the last split are no longer read
            find_slots(split);
            __syncthreads();
            take_keys();
            __syncthreads();
            score(split);
            __syncthreads();
            weigh(seen);
            take_values();
            __syncthreads();
            add_values(sum);
        }
    }

    DEVICE void join_part(Seen &seen_in_all, Sums &total, const Seen &seen, const Sums &sum) {
        Joined joined = join(seen_in_all, seen);
        seen_in_all = joined.seen;
        __syncthreads();
        if (thread % 8 == 0) shared.factors[thread / 8] = joined.of_a, shared.sums[thread / 8] = joined.of_b;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < COLUMNS * 4; ++j) {
            int row = row_of(j % 4);
            total[j / 4][j % 4] = fmaf(total[j / 4][j % 4], shared.factors[row], sum[j / 4][j % 4] * shared.sums[row]);
        }
    }

    // Writes the rows' outputs or, if a block computes one part, that part's sums.
    DEVICE void write(const Seen &seen, const Sums &total, bool is_whole, int part) {
        Buffer<T> output = o.output.as<T>();
        __syncthreads();
        if (thread % 8 == 0) shared.sums[thread / 8] = seen.sum, shared.largests[thread / 8] = seen.largest;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < COLUMNS * 4; ++j) {
            int row = row_of(j % 4), column = (warp * COLUMNS + j / 4) * 8 + lane % 4 * 2 + j % 2;
            if (shared.row_ids[row] < 0 || column >= value_dim) continue;
            long long place = static_cast<long long>(shared.row_ids[row]) * o.heads + head_of(row);
            if (is_whole) output[place * value_dim + column] = from_float<T>(total[j / 4][j % 4] / shared.sums[row]);
            else o.parts[(place * o.num_parts + part) * (value_dim + 2) + column] = total[j / 4][j % 4];
        }
        if (!is_whole && thread < ROWS && shared.row_ids[thread] >= 0) {
            long long place = (static_cast<long long>(shared.row_ids[thread]) * o.heads + head_of(thread)) * o.num_parts + part;
            o.parts[place * (value_dim + 2) + value_dim] = shared.largests[thread];
            o.parts[place * (value_dim + 2) + value_dim + 1] = shared.sums[thread];
        }
    }
};

// One block per multiprocessor at a time is enough: without this bound the compiler spills registers to fit more.
template <typename T, int VALUE_DIM>
__global__ void __launch_bounds__(WARPS *WARP, 1) attend(Attention o) {
    SHARED SharedRows shared;
    AttendBlock<T, VALUE_DIM> block(o, shared);
    block.take_rows();
    block.take_queries();
    float total[AttendBlock<T, VALUE_DIM>::COLUMNS][4] = {};
    if (!o.parts.is_empty()) {
        Seen seen{-INF, 0.0f};
        int part = blockIdx.z;
        block.attend_part(part, seen, total);
        return block.write(seen, total, false, part);
    }
    Seen seen = block.start();
    for (int part = 0; part < o.num_parts; ++part) {
        Seen seen_in_part{-INF, 0.0f};
        float sum[AttendBlock<T, VALUE_DIM>::COLUMNS][4] = {};
        block.attend_part(part, seen_in_part, sum);
        block.join_part(seen, total, seen_in_part, sum);
    }
    block.write(seen, total, true, 0);
}

// Joins the parts of a row's heads in order, like a block that computes them all.
template <typename T>
__global__ void __launch_bounds__(WARPS *WARP) join_parts(Attention o) {
    Buffer<T> output = o.output.as<T>();
    int value_dim = o.cache.value_dim;
    for (int place = threadIdx.x; place < o.heads * value_dim; place += WARPS * WARP) {
        long long head = static_cast<long long>(blockIdx.x) * o.heads + place / value_dim;
        Seen seen{-INF, 0.0f};
        if (!o.sinks.is_empty()) seen = {o.sinks[place / value_dim], 1.0f};
        float total = 0.0f;
        for (int part = 0; part < o.num_parts; ++part) {
            long long of_part = (head * o.num_parts + part) * (value_dim + 2);
            Joined joined = join(seen, {o.parts[of_part + value_dim], o.parts[of_part + value_dim + 1]});
            seen = joined.seen;
            total = fmaf(total, joined.of_a, o.parts[of_part + place % value_dim] * joined.of_b);
        }
        output[head * value_dim + place % value_dim] = from_float<T>(total / seen.sum);
    }
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

template <typename T, int VALUE_DIM>
int run_with(const Attention &o, void *stream) {
    int chunks = (o.tile_rows * (o.heads / o.kv_heads) + ROWS - 1) / ROWS;
    dim3 grid(o.num_tiles * chunks, o.kv_heads, o.parts.is_empty() ? 1 : o.num_parts);
    int status = launch<attend<T, VALUE_DIM>>(o, grid, WARPS * WARP, Layout<T>(key_dim_of(o), VALUE_DIM).num_bytes, stream);
    if (status != 0 || o.parts.is_empty()) return status;
    return launch<join_parts<T>>(o, dim3(o.num_rows), WARPS * WARP, 0, stream);
}

template <typename T>
int run(const Attention &o, void *stream) {
    if (o.cache.value_dim <= 64) return run_with<T, 64>(o, stream);
    if (o.cache.value_dim <= 128) return run_with<T, 128>(o, stream);
    if (o.cache.value_dim <= 256) return run_with<T, 256>(o, stream);
    return run_with<T, 512>(o, stream);
}

}  // namespace

extern "C" int tokamak_Attention(const Attention *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}
#endif

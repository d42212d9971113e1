// Paged attention of a mixed batch: tiles of rows times kv heads, read through the block tables where the keys lie.
//
// A tile is some rows of one sequence with all query heads of one kv head. Its splits of keys are done one after another and
// joined in their order; where there are too few tiles for the threads (a few long contexts being decoded), each split is a
// task, and a second pass joins them in the same order with the same operations, so with the same bits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops.h"

namespace tokamak::cpu {
namespace {

constexpr i64 TILE_QUERIES = 32;

struct Tile {
    i64 sequence, row, num_rows, position;  // first row, its position
    i64 split_begin, split_end;
    i64 first_partial;  // where its splits' results are, in [tile, split, kv head] order
};

// One task's place to work, for all queries (rows x group heads) of a tile.
struct Workspace {
    float *queries, *scores, *largest, *sums, *outputs;  // of a split
    float *all_largest, *all_sums, *all_outputs;         // of the splits so far
    i32 begins[1024], ends[1024];
    const float *keys[KEY_SPLIT], *values[KEY_SPLIT];
};

class Attention {
public:
    Attention(Engine &engine, const Attend &op) : engine_(engine), op_(op) {
        const i64 lanes = engine.kernels().lanes;
        group_ = op.heads / op.kv_heads;
        padded_dim_ = (op.head_dim + lanes - 1) / lanes * lanes;
        tile_rows_ = std::max<i64>(1, TILE_QUERIES / group_);
        max_queries_ = tile_rows_ * group_;
        factor_ = 1.0f / std::sqrt(static_cast<float>(op.head_dim));
        make_tiles();
    }

    void run() {
        const i64 num_tasks = static_cast<i64>(tiles_.size()) * op_.kv_heads;
        const int threads = engine_.pool().num_threads();
        if (threads > 1 && num_tasks < 2 * threads && num_splits_ >= 4 * static_cast<i64>(tiles_.size())) {
            run_in_splits();
            return;
        }
        const auto task = [&](i64 index, int thread) { attend_tile(tiles_[index / op_.kv_heads], index % op_.kv_heads, thread); };
        if (num_rows_ * op_.heads * op_.head_dim * longest_ < (1 << 17)) {
            for (i64 index = 0; index < num_tasks; ++index) task(index, 0);
        } else {
            engine_.pool().run(num_tasks, task);
        }
    }

private:
    void make_tiles() {
        const i64 num_sequences = op_.sequences.get();
        for (i64 sequence = 0; sequence < num_sequences; ++sequence) {
            const i64 begin = op_.offsets[sequence], end = op_.offsets[sequence + 1];
            for (i64 row = begin; row < end; row += tile_rows_) {
                const i64 num_rows = std::min(tile_rows_, end - row), position = op_.starts[sequence] + row - begin;
                const i64 first_key = op_.window > 0 ? std::max<i64>(0, position - op_.window + 1) : 0;
                const i64 last_key = position + num_rows - 1;
                tiles_.push_back({sequence, row, num_rows, position, first_key / KEY_SPLIT, last_key / KEY_SPLIT + 1,
                                  num_splits_ * op_.kv_heads});
                num_splits_ += tiles_.back().split_end - tiles_.back().split_begin;
                num_rows_ += num_rows;
                longest_ = std::max(longest_, last_key + 1);
            }
        }
    }

    Workspace workspace(int thread) const {
        const i64 wide = max_queries_ * padded_dim_;
        float *at = engine_.scratch(thread, 3 * wide + max_queries_ * (KEY_SPLIT + 4));
        Workspace space;
        const auto take = [&](i64 count) {
            float *taken = at;
            at += count;
            return taken;
        };
        space.queries = take(wide);
        space.outputs = take(wide);
        space.all_outputs = take(wide);
        space.scores = take(max_queries_ * KEY_SPLIT);
        space.largest = take(max_queries_);
        space.sums = take(max_queries_);
        space.all_largest = take(max_queries_);
        space.all_sums = take(max_queries_);
        return space;
    }

    const float *query_row(const Tile &tile, i64 kv_head, i64 query) const {
        const i64 row = tile.row + query / group_, head = kv_head * group_ + query % group_;
        return op_.queries + (row * op_.heads + head) * op_.head_dim;
    }

    void take_queries(const Tile &tile, i64 kv_head, Workspace &space) const {
        for (i64 query = 0; query < tile.num_rows * group_; ++query) {
            float *to = space.queries + query * padded_dim_;
            engine_.kernels().scale(to, query_row(tile, kv_head, query), factor_, op_.head_dim);
            std::fill(to + op_.head_dim, to + padded_dim_, 0.0f);
        }
    }

    void attend_split(const Tile &tile, i64 kv_head, i64 split, Workspace &space, float *largest, float *sums,
                      float *outputs) const {
        const i64 first = split * KEY_SPLIT, num_keys = std::min(KEY_SPLIT, tile.position + tile.num_rows - first);
        const i32 *blocks = op_.block_tables + op_.slots[tile.sequence] * op_.table_width;
        const i64 width = op_.kv_heads * op_.head_dim;
        for (i64 key = 0; key < num_keys; ++key) {
            const i64 position = first + key;
            const i64 slot = blocks[position / op_.block_size] * op_.block_size + position % op_.block_size;
            space.keys[key] = op_.keys + slot * width + kv_head * op_.head_dim;
            space.values[key] = op_.values + slot * width + kv_head * op_.head_dim;
        }
        for (i64 query = 0; query < tile.num_rows * group_; ++query) {
            const i64 position = tile.position + query / group_;
            const i64 begin = op_.window > 0 ? position - op_.window + 1 : 0;
            space.begins[query] = static_cast<i32>(std::clamp<i64>(begin - first, 0, KEY_SPLIT));
            space.ends[query] = static_cast<i32>(std::clamp<i64>(position + 1 - first, 0, KEY_SPLIT));
        }
        engine_.kernels().attend({space.queries, space.keys, space.values, space.begins, space.ends, tile.num_rows * group_,
                                  op_.head_dim, padded_dim_, space.scores, largest, sums, outputs});
    }

    void start(Workspace &space, i64 num_queries) const {
        std::fill(space.all_largest, space.all_largest + num_queries, -std::numeric_limits<float>::infinity());
        std::fill(space.all_sums, space.all_sums + num_queries, 0.0f);
        std::fill(space.all_outputs, space.all_outputs + num_queries * padded_dim_, 0.0f);
    }

    bool sees(const Tile &tile, i64 query, i64 split) const {
        const i64 position = tile.position + query / group_;
        const bool is_before = split * KEY_SPLIT > position;
        return !is_before && (op_.window == 0 || position - op_.window + 1 < (split + 1) * KEY_SPLIT);
    }

    void join_split(const Tile &tile, i64 split, Workspace &space, const float *largest, const float *sums,
                    const float *outputs) const {
        for (i64 query = 0; query < tile.num_rows * group_; ++query) {
            if (!sees(tile, query, split)) continue;
            engine_.kernels().join(space.all_largest + query, space.all_sums + query, space.all_outputs + query * padded_dim_,
                                   largest[query], sums[query], outputs + query * padded_dim_, padded_dim_);
        }
    }

    void finish(const Tile &tile, i64 kv_head, const Workspace &space) const {
        for (i64 query = 0; query < tile.num_rows * group_; ++query) {
            float *to = op_.y + (query_row(tile, kv_head, query) - op_.queries);
            engine_.kernels().scale(to, space.all_outputs + query * padded_dim_, 1.0f / space.all_sums[query], op_.head_dim);
        }
    }

    void attend_tile(const Tile &tile, i64 kv_head, int thread) const {
        Workspace space = workspace(thread);
        take_queries(tile, kv_head, space);
        start(space, tile.num_rows * group_);
        for (i64 split = tile.split_begin; split < tile.split_end; ++split) {
            attend_split(tile, kv_head, split, space, space.largest, space.sums, space.outputs);
            join_split(tile, split, space, space.largest, space.sums, space.outputs);
        }
        finish(tile, kv_head, space);
    }

    void run_in_splits() {
        const i64 stride = max_queries_ * (padded_dim_ + 2);
        std::vector<float> &partial = engine_.partial;
        if (static_cast<i64>(partial.size()) < num_splits_ * op_.kv_heads * stride) {
            partial.resize(num_splits_ * op_.kv_heads * stride);
        }
        const auto partial_of = [&](const Tile &tile, i64 split, i64 kv_head) {
            return partial.data() + (tile.first_partial + (split - tile.split_begin) * op_.kv_heads + kv_head) * stride;
        };
        std::vector<std::pair<i32, i32>> splits;  // tile, split
        for (std::size_t tile = 0; tile < tiles_.size(); ++tile) {
            for (i64 split = tiles_[tile].split_begin; split < tiles_[tile].split_end; ++split) splits.emplace_back(tile, split);
        }
        engine_.pool().run(num_splits_ * op_.kv_heads, [&](i64 task, int thread) {
            const auto [tile_index, split] = splits[task / op_.kv_heads];
            const Tile &tile = tiles_[tile_index];
            const i64 kv_head = task % op_.kv_heads;
            Workspace space = workspace(thread);
            take_queries(tile, kv_head, space);
            float *result = partial_of(tile, split, kv_head);
            attend_split(tile, kv_head, split, space, result, result + max_queries_, result + 2 * max_queries_);
        });
        engine_.pool().run(static_cast<i64>(tiles_.size()) * op_.kv_heads, [&](i64 task, int thread) {
            const Tile &tile = tiles_[task / op_.kv_heads];
            const i64 kv_head = task % op_.kv_heads;
            Workspace space = workspace(thread);
            start(space, tile.num_rows * group_);
            for (i64 split = tile.split_begin; split < tile.split_end; ++split) {
                const float *result = partial_of(tile, split, kv_head);
                join_split(tile, split, space, result, result + max_queries_, result + 2 * max_queries_);
            }
            finish(tile, kv_head, space);
        });
    }

    Engine &engine_;
    const Attend &op_;
    i64 group_, padded_dim_, tile_rows_, max_queries_;
    float factor_;
    std::vector<Tile> tiles_;
    i64 num_splits_ = 0, num_rows_ = 0, longest_ = 0;
};

}  // namespace

void attend(Engine &engine, const Attend &op) { Attention(engine, op).run(); }

}  // namespace tokamak::cpu

// Paged attention of a mixed batch, read through the block tables where the keys lie.
//
// A tile is some rows of one sequence. Per kv head its queries are those rows times the query heads of the kv head. Splits of
// keys are done one after another and joined in their order; where there are too few tiles for the threads (a few long contexts
// being decoded), each split is a task, and a second pass joins them in the same order with the same operations, so with the
// same bits.
//
// Keys of one head lie a whole row of all heads apart. A tile with many queries copies its split together first, as otherwise
// all keys would fall into the same few cache sets; a tile with few does all heads of a split in turn, so that rows are read
// while their pages are at hand, and fetches the next head's part meanwhile.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops.h"

namespace tokamak::cpu {
namespace {

constexpr i64 TILE_QUERIES = 64;
constexpr i64 MANY_QUERIES = 8;  // from here on copying pays
constexpr i64 MAX_QUERIES = MAX_GROUP;  // of a tile and a kv head
static_assert(TILE_QUERIES <= MAX_QUERIES);
constexpr i64 SMALL_WORK = 1 << 17;  // multiply-adds that one thread does sooner than it wakes others

struct Tile {
    i64 sequence, row, num_rows, position;  // first row, its position
    i64 split_begin, split_end;
    i64 first_partial;  // its splits' number among all tiles' splits
};

// Largest score, sum of weights, weighted values: [queries], [queries], [queries, padded_dim].
struct Sums {
    float *largest, *sums, *outputs;
    Sums from(i64 query, i64 padded_dim) const { return {largest + query, sums + query, outputs + query * padded_dim}; }
};

// A thread's place to work.
struct Workspace {
    float *queries, *scores, *copied_keys, *copied_values;
    Sums split, all;
    i32 begins[MAX_QUERIES], ends[MAX_QUERIES];
    const float *keys[KEY_SPLIT], *values[KEY_SPLIT];
    i64 slots[KEY_SPLIT];
};

class Attention {
public:
    Attention(Engine &engine, const Attend &op) : engine_(engine), kernels_(engine.kernels()), op_(op) {
        group_ = op.heads / op.kv_heads;
        padded_dim_ = round_up(op.head_dim, kernels_.lanes);
        block_ = VALUE_BLOCK * kernels_.lanes;
        tile_rows_ = std::max<i64>(1, TILE_QUERIES / group_);
        // of one head with many queries, or of all heads with few
        max_queries_ = std::max(tile_rows_ * group_, MANY_QUERIES * op.kv_heads);
        factor_ = 1.0f / std::sqrt(static_cast<float>(op.head_dim));
        make_tiles();
    }

    void run() {
        const i64 num_tiles = static_cast<i64>(tiles_.size()), threads = engine_.pool().num_threads();
        if (num_rows_ * op_.heads * op_.head_dim * longest_ < SMALL_WORK || threads == 1) {
            for (const Tile &tile : tiles_) attend_tile(tile, 0, op_.kv_heads, 0);
        } else if (num_rows_ == num_tiles && num_tiles < 2 * threads && num_splits_ >= 2 * threads) {
            run_in_splits();
        } else {
            const i64 parts = std::clamp<i64>(4 * threads / std::max<i64>(num_tiles, 1), 1, op_.kv_heads);
            engine_.pool().run(num_tiles * parts, [&](i64 task, int thread) {
                const i64 part = task % parts;
                attend_tile(tiles_[task / parts], op_.kv_heads * part / parts, op_.kv_heads * (part + 1) / parts, thread);
            });
        }
    }

private:
    static i64 round_up(i64 a, i64 b) { return (a + b - 1) / b * b; }

    void make_tiles() {
        const i64 num_sequences = op_.sequences.get();
        for (i64 sequence = 0; sequence < num_sequences; ++sequence) {
            const i64 begin = op_.offsets[sequence], end = op_.offsets[sequence + 1];
            for (i64 row = begin; row < end; row += tile_rows_) {
                const i64 num_rows = std::min(tile_rows_, end - row), position = op_.starts[sequence] + row - begin;
                const i64 first_key = op_.window > 0 ? std::max<i64>(0, position - op_.window + 1) : 0;
                const i64 last_key = position + num_rows - 1;
                const i64 split_begin = first_key / KEY_SPLIT, split_end = last_key / KEY_SPLIT + 1;
                tiles_.push_back({sequence, row, num_rows, position, split_begin, split_end, num_splits_});
                num_splits_ += split_end - split_begin;
                num_rows_ += num_rows;
                longest_ = std::max(longest_, last_key + 1);
            }
        }
    }

    i64 num_queries(const Tile &tile) const { return tile.num_rows * group_; }
    bool has_many(const Tile &tile) const { return num_queries(tile) >= MANY_QUERIES; }

    void take_workspace(Workspace &space, int thread) const {
        const i64 wide = max_queries_ * padded_dim_, copied = KEY_SPLIT * round_up(padded_dim_, block_);
        float *at = engine_.scratch(thread, 3 * wide + max_queries_ * (KEY_SPLIT + 4) + 2 * copied);
        const auto take = [&](i64 count) {
            float *taken = at;
            at += count;
            return taken;
        };
        space.copied_keys = take(copied);
        space.copied_values = take(copied);
        space.queries = take(wide);
        space.scores = take(max_queries_ * KEY_SPLIT);
        space.split = {take(max_queries_), take(max_queries_), take(wide)};
        space.all = {take(max_queries_), take(max_queries_), take(wide)};
    }

    const float *query_row(const Tile &tile, i64 kv_head, i64 query) const {
        const i64 row = tile.row + query / group_, head = kv_head * group_ + query % group_;
        return op_.queries + (row * op_.heads + head) * op_.head_dim;
    }

    void take_queries(const Tile &tile, i64 kv_head, float *queries) const {
        for (i64 query = 0; query < num_queries(tile); ++query) {
            float *to = queries + query * padded_dim_;
            kernels_.scale(to, query_row(tile, kv_head, query), factor_, op_.head_dim);
            std::fill(to + op_.head_dim, to + padded_dim_, 0.0f);
        }
    }

    i64 num_keys(const Tile &tile, i64 split) const {
        return std::min(KEY_SPLIT, tile.position + tile.num_rows - split * KEY_SPLIT);
    }

    // Where the split's keys are, and which of them each query sees: the same for all heads.
    void take_split(const Tile &tile, i64 split, Workspace &space) const {
        const i64 first = split * KEY_SPLIT;
        const i32 *blocks = op_.block_tables + op_.slots[tile.sequence] * op_.table_width;
        for (i64 key = 0; key < num_keys(tile, split); ++key) {
            const i64 position = first + key;
            space.slots[key] = blocks[position / op_.block_size] * op_.block_size + position % op_.block_size;
        }
        for (i64 query = 0; query < num_queries(tile); ++query) {
            const i64 position = tile.position + query / group_;
            const i64 begin = op_.window > 0 ? position - op_.window + 1 : 0;
            space.begins[query] = static_cast<i32>(std::clamp<i64>(begin - first, 0, KEY_SPLIT));
            space.ends[query] = static_cast<i32>(std::clamp<i64>(position + 1 - first, 0, KEY_SPLIT));
        }
    }

    void attend_split(const Tile &tile, i64 kv_head, i64 split, Workspace &space, const float *queries, Sums result) const {
        const i64 width = op_.kv_heads * op_.head_dim, count = num_keys(tile, split);
        const float *keys = op_.keys + kv_head * op_.head_dim, *values = op_.values + kv_head * op_.head_dim;
        i64 value_stride = block_;
        if (has_many(tile)) {
            copy_split(space, keys, values, width, count);
            value_stride = KEY_SPLIT * block_;
        } else {
            const bool is_next_head = kv_head + 1 < op_.kv_heads;
            for (i64 key = 0; key < count; ++key) {
                space.keys[key] = keys + space.slots[key] * width;
                space.values[key] = values + space.slots[key] * width;
                if (is_next_head) fetch(space.keys[key] + op_.head_dim, space.values[key] + op_.head_dim);
            }
        }
        kernels_.attend({queries, space.keys, space.values, value_stride, space.begins, space.ends, num_queries(tile),
                         op_.head_dim, padded_dim_, space.scores, result.largest, result.sums, result.outputs});
    }

    void copy_split(Workspace &space, const float *keys, const float *values, i64 width, i64 count) const {
        for (i64 key = 0; key < count; ++key) {
            float *to = space.copied_keys + key * padded_dim_;
            const float *key_row = keys + space.slots[key] * width, *value_row = values + space.slots[key] * width;
            std::copy(key_row, key_row + op_.head_dim, to);
            space.keys[key] = to;
            space.values[key] = space.copied_values + key * block_;
            for (i64 start = 0; start < op_.head_dim; start += block_) {
                const i64 end = std::min(start + block_, op_.head_dim);
                std::copy(value_row + start, value_row + end, space.copied_values + start * KEY_SPLIT + key * block_);
            }
        }
    }

    void fetch(const float *keys, const float *values) const {
        for (i64 i = 0; i < op_.head_dim; i += 16) {
            __builtin_prefetch(keys + i, 0, 2);
            __builtin_prefetch(values + i, 0, 2);
        }
    }

    void start(Sums all, i64 count) const {
        std::fill(all.largest, all.largest + count, -std::numeric_limits<float>::infinity());
        std::fill(all.sums, all.sums + count, 0.0f);
        std::fill(all.outputs, all.outputs + count * padded_dim_, 0.0f);
    }

    bool sees(const Tile &tile, i64 query, i64 split) const {
        const i64 position = tile.position + query / group_;
        const bool is_before = split * KEY_SPLIT > position;
        return !is_before && (op_.window == 0 || position - op_.window + 1 < (split + 1) * KEY_SPLIT);
    }

    void join_split(const Tile &tile, i64 split, Sums all, Sums next) const {
        for (i64 query = 0; query < num_queries(tile); ++query) {
            if (!sees(tile, query, split)) continue;
            kernels_.join(all.largest + query, all.sums + query, all.outputs + query * padded_dim_, next.largest[query],
                          next.sums[query], next.outputs + query * padded_dim_, padded_dim_);
        }
    }

    void finish(const Tile &tile, i64 kv_head, Sums all) const {
        for (i64 query = 0; query < num_queries(tile); ++query) {
            float *to = op_.y + (query_row(tile, kv_head, query) - op_.queries);
            kernels_.scale(to, all.outputs + query * padded_dim_, 1.0f / all.sums[query], op_.head_dim);
        }
    }

    void attend_tile(const Tile &tile, i64 head_begin, i64 head_end, int thread) const {
        Workspace space;
        take_workspace(space, thread);
        const i64 step = has_many(tile) ? 1 : head_end - head_begin;  // heads that are done together
        for (i64 head = head_begin; head < head_end; head += step) attend_heads(tile, head, head + step, space);
    }

    void attend_heads(const Tile &tile, i64 head_begin, i64 head_end, Workspace &space) const {
        const i64 count = num_queries(tile);
        for (i64 head = head_begin; head < head_end; ++head) {
            take_queries(tile, head, space.queries + (head - head_begin) * count * padded_dim_);
        }
        start(space.all, (head_end - head_begin) * count);
        for (i64 split = tile.split_begin; split < tile.split_end; ++split) {
            take_split(tile, split, space);
            for (i64 head = head_begin; head < head_end; ++head) {
                const i64 first = (head - head_begin) * count;
                attend_split(tile, head, split, space, space.queries + first * padded_dim_, space.split);
                join_split(tile, split, space.all.from(first, padded_dim_), space.split);
            }
        }
        for (i64 head = head_begin; head < head_end; ++head) {
            finish(tile, head, space.all.from((head - head_begin) * count, padded_dim_));
        }
    }

    // Tiles of one row: every split by itself, all heads; then the splits of each tile and head joined in their order.
    void run_in_splits() {
        const i64 num_partials = num_splits_ * op_.heads;
        std::vector<float> &partial = engine_.partial;
        const i64 num_floats = num_partials * (padded_dim_ + 2);
        if (static_cast<i64>(partial.size()) < num_floats) partial.resize(num_floats);
        const Sums partials{partial.data(), partial.data() + num_partials, partial.data() + 2 * num_partials};
        const auto sums_of = [&](i64 split_number, i64 kv_head) {
            return partials.from(split_number * op_.heads + kv_head * group_, padded_dim_);
        };
        std::vector<std::pair<const Tile *, i64>> splits;
        for (const Tile &tile : tiles_) {
            for (i64 split = tile.split_begin; split < tile.split_end; ++split) splits.emplace_back(&tile, split);
        }
        engine_.pool().run(num_splits_, [&](i64 number, int thread) {
            const auto [tile, split] = splits[number];
            Workspace space;
            take_workspace(space, thread);
            take_split(*tile, split, space);
            for (i64 head = 0; head < op_.kv_heads; ++head) {
                take_queries(*tile, head, space.queries);
                attend_split(*tile, head, split, space, space.queries, sums_of(number, head));
            }
        });
        engine_.pool().run(static_cast<i64>(tiles_.size()) * op_.kv_heads, [&](i64 task, int thread) {
            const Tile &tile = tiles_[task / op_.kv_heads];
            const i64 head = task % op_.kv_heads;
            Workspace space;
            take_workspace(space, thread);
            start(space.all, num_queries(tile));
            for (i64 split = tile.split_begin; split < tile.split_end; ++split) {
                join_split(tile, split, space.all, sums_of(tile.first_partial + split - tile.split_begin, head));
            }
            finish(tile, head, space.all);
        });
    }

    Engine &engine_;
    const Kernels &kernels_;
    const Attend &op_;
    i64 group_, padded_dim_, block_, tile_rows_, max_queries_;
    float factor_;
    std::vector<Tile> tiles_;
    i64 num_splits_ = 0, num_rows_ = 0, longest_ = 0;
};

}  // namespace

void attend(Engine &engine, const Attend &op) { Attention(engine, op).run(); }

}  // namespace tokamak::cpu

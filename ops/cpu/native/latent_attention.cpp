// Multi-head latent attention over the paged cache: all heads read one latent and one rotated key of each position.
//
// A tile is some rows of one sequence times some heads. Queries are a head's rotary and absorbed parts side by side, keys
// likewise, and latents are also the values. Each split is copied for the micro-kernels of attention once per tile, which has
// many queries. Splits are joined in order, one after another or, for decode of a few long contexts, by a second pass with the
// same operations, so with the same bits. The division of rows and heads does not change any bits.
#include <algorithm>
#include <utility>

#include "splits.h"

namespace tokamak::cpu {
namespace {

constexpr i64 LATENT_TILE_QUERIES = 128,
              LEAST_LATENT_TILE_QUERIES = 32;  // with these, a split's numbers stay in the L2 cache

struct LatentTile {
    i64 sequence, row, num_rows, position, head, num_heads;
    i64 end_key;        // end of the keys visible to any of its rows
    i64 first_partial;  // index of its first (split, query) among those of all tiles
    i64 num_queries() const { return num_rows * num_heads; }
    i64 num_splits() const { return (end_key - 1) / KEY_SPLIT + 1; }
};

struct LatentWorkspace : SplitSpace {
    float *whole_queries = more;  // [queries, key_dim]
    using SplitSpace::SplitSpace;
};

class LatentAttention {
public:
    LatentAttention(Engine &engine, const AttendLatents &op) : engine_(engine), kernels_(engine.kernels()), op_(op) {
        rotary_dim_ = op.keys.head_dim;
        latent_dim_ = op.latents.head_dim;
        key_room_ = round_up(rotary_dim_, PRODUCT_PIECE);
        key_dim_ = key_room_ + round_up(latent_dim_, PRODUCT_PIECE);
        query_stride_ = key_dim_ + PANEL;  // not a power of two
        dim_ = round_up(latent_dim_, PANEL);
        stride_ = dim_ + PANEL;
        has_pairs_ = kernels_.has_paired_products && op.latents.type != KvType::FLOAT32;
        factor_ = LOG2_E * op.scale;
        is_bounded_ = *op.bounds.is_given != 0;
        const i64 num_sequences = op.sequences.get(), threads = engine.pool().num_threads();
        num_rows_ = num_sequences > 0 ? op.offsets[num_sequences] : 0;
        i64 num_splits = 0, longest = 0, num_filled = 0, most_rows = 0, num_partials = 0;
        for (i64 sequence = 0; sequence < num_sequences; ++sequence) {
            const i64 rows = op.offsets[sequence + 1] - op.offsets[sequence], context = op.starts[sequence] + rows;
            if (rows == 0) continue;
            const i64 splits = (context - 1) / KEY_SPLIT + 1;
            num_splits += splits;
            num_partials += splits * rows;
            longest = std::max(longest, context);
            most_rows = std::max(most_rows, rows);
            ++num_filled;
        }
        is_small_ = num_rows_ * op.heads * key_dim_ * longest < engine_.pool().small(SMALL_WORK);
        const bool has_help = !is_small_ && threads > 1;
        const bool is_room = most_rows <= 1 || num_partials * op.heads * stride_ <= MOST_PARTIALS;
        is_in_splits_ = has_help && most_rows <= FEW_ROWS && num_filled < 2 * threads && num_splits >= 2 * threads && is_room;
        const i64 wanted = has_help && !is_in_splits_ ? TASKS_PER_THREAD * threads : 1;
        i64 queries = LATENT_TILE_QUERIES;
        while (queries >= 2 * LEAST_LATENT_TILE_QUERIES && num_rows_ * op.heads < queries * wanted) queries /= 2;
        make_tiles(queries);
    }

    void run() {
        const i64 num_tiles = static_cast<i64>(tiles_.size());
        if (is_small_) {
            for (const LatentTile &tile : tiles_) attend_tile(tile, 0);
        } else if (is_in_splits_) {
            run_in_splits();
        } else {
            engine_.pool().run(num_tiles, [&](i64 task, int thread) { attend_tile(tiles_[num_tiles - 1 - task], thread); });
        }
    }

private:
    // Tiles of so many queries: several rows with all heads, or one row with some heads.
    void make_tiles(i64 queries) {
        const i64 rows = std::max<i64>(1, queries / op_.heads);
        const i64 parts = is_in_splits_ ? 1 : std::max<i64>(1, op_.heads / queries);
        for (i64 sequence = 0; sequence < op_.sequences.get(); ++sequence) {
            const i64 begin = op_.offsets[sequence], end = op_.offsets[sequence + 1];
            for (i64 row = begin; row < end; row += rows) {
                for (i64 part = 0; part < parts; ++part) {
                    const i64 head = op_.heads * part / parts, num_heads = op_.heads * (part + 1) / parts - head;
                    const i64 position = op_.starts[sequence] + row - begin;
                    const i64 num_rows = std::min(rows, end - row);
                    i64 end_key = position + num_rows;
                    for (i64 i = 0; is_bounded_ && i < num_rows; ++i) {
                        end_key = std::max<i64>(end_key, op_.bounds.last[row + i] + 1);
                    }
                    tiles_.push_back({sequence, row, num_rows, position, head, num_heads, end_key, num_partials_});
                    num_partials_ += tiles_.back().num_splits() * tiles_.back().num_queries();
                    max_queries_ = std::max(max_queries_, tiles_.back().num_queries());
                }
            }
        }
    }

    i64 element_bytes() const { return has_pairs_ ? 2 : 4; }
    i64 key_bytes() const { return KEY_PANEL * key_dim_ * element_bytes(); }                          // of a panel
    i64 value_row_bytes() const { return stride_ * static_cast<i64>(sizeof(float)); }                 // of a slot, or pair
    i64 value_bytes() const { return value_row_bytes() * (has_pairs_ ? KEY_PANEL / 2 : KEY_PANEL); }  // of a panel
    i64 query_bytes() const { return query_stride_ * static_cast<i64>(sizeof(float)); }

    LatentWorkspace take_workspace(int thread) const {
        const i64 most = round_up(max_queries_, PANEL);
        const SpaceSizes sizes{
            most * query_bytes(), SPLIT_PANELS * key_bytes(), SPLIT_PANELS * value_bytes(), max_queries_, stride_,
            most * key_dim_};
        LatentWorkspace space(engine_, thread, sizes);
        if (rotary_dim_ + latent_dim_ != key_dim_ || dim_ != latent_dim_) {  // so the padding is zero
            std::fill_n(space.keys, sizes.keys, char{0});
            std::fill_n(space.values, sizes.values, char{0});
        }
        return space;
    }

    // Index of a tile's query among the heads of all rows.
    i64 place_of(const LatentTile &tile, i64 query) const {
        return (tile.row + query / tile.num_heads) * op_.heads + tile.head + query % tile.num_heads;
    }

    // Rotary and absorbed part side by side, like keys.
    void take_queries(const LatentTile &tile, LatentWorkspace &space) const {
        for (i64 query = 0; query < tile.num_queries(); ++query) {
            const i64 place = place_of(tile, query), stride = op_.plain_dim + rotary_dim_;
            float *const whole = space.whole_queries + query * key_dim_, *const latent = whole + key_room_;
            std::fill(std::copy_n(op_.queries + place * stride + op_.plain_dim, rotary_dim_, whole), latent, 0.0f);
            std::fill(std::copy_n(op_.absorbed + place * latent_dim_, latent_dim_, latent), whole + key_dim_, 0.0f);
            kernels_.take_query(space.queries + query * query_bytes(), whole, factor_, key_dim_, op_.latents.type);
        }
    }

    // The panels of a split, and the keys visible to each query.
    void take_split(const LatentTile &tile, i64 split, LatentWorkspace &space, SplitShape &shape) const {
        const i64 first = split * KEY_SPLIT, end = std::min(tile.end_key - first, KEY_SPLIT);
        LatentPanel panel;
        panel.type = op_.latents.type;
        panel.rotary_dim = rotary_dim_;
        panel.latent_dim = latent_dim_;
        panel.key_room = key_room_;
        panel.value_bytes = value_row_bytes();
        const i32 *table = op_.block_tables + op_.slots[tile.sequence] * op_.table_width;
        for (i64 number = 0; number < SPLIT_PANELS; ++number) {
            panel.to_keys = space.keys + number * key_bytes();
            panel.to_values = space.values + number * value_bytes();
            shape.keys[number] = shape.next_keys[number] = panel.to_keys;
            shape.values[number] = shape.next_values[number] = panel.to_values;
            for (i64 slot = 0; slot < KEY_PANEL; ++slot) {
                const i64 key = number * KEY_PANEL + slot, position = first + key;
                const i64 block = key < end ? table[position / op_.keys.block_size] : 0;
                const i64 offset = position % op_.keys.block_size;
                const auto row = [&](const char *base, const CacheLayout &layout) {
                    return key < end ? base + block * layout.block_bytes + offset * layout.chunk_bytes : nullptr;
                };
                panel.keys[slot] = row(op_.key_cache, op_.keys);
                panel.latents[slot] = row(op_.latent_cache, op_.latents);
            }
            if (number * KEY_PANEL < end) kernels_.take_latents(panel);
        }
        for (i64 row = 0; row < tile.num_rows; ++row) {
            const i64 first_key = is_bounded_ ? op_.bounds.first[tile.row + row] : 0;
            const i64 end_key = (is_bounded_ ? op_.bounds.last[tile.row + row] : tile.position + row) + 1;
            const auto in_split = [&](i64 key) { return static_cast<i32>(std::clamp<i64>(key - first, 0, KEY_SPLIT)); };
            std::fill_n(space.begins + row * tile.num_heads, tile.num_heads, in_split(first_key));
            std::fill_n(space.ends + row * tile.num_heads, tile.num_heads, in_split(end_key));
        }
    }

    void attend_split(const LatentTile &tile, i64 split, LatentWorkspace &space, Sums sums, bool joins) const {
        SplitShape shape;
        take_split(tile, split, space, shape);
        shape.next_bytes = 0;
        shape.format = has_pairs_ ? KvType::BFLOAT16 : KvType::FLOAT32;
        shape.has_scales = false;
        shape.key_scales = shape.value_scales = nullptr;
        shape.value_bytes = value_row_bytes();
        shape.head_dim = key_dim_;
        shape.dim = dim_;
        space.describe(shape, tile.num_queries(), query_bytes(), sums, stride_, joins);
        kernels_.attend[static_cast<int>(shape.format)](shape);
    }

    void finish(const LatentTile &tile, Sums all) const {
        for (i64 query = 0; query < tile.num_queries(); ++query) {
            kernels_.finish(op_.y + place_of(tile, query) * latent_dim_, all.outputs + query * stride_, all.sums[query],
                            latent_dim_);
        }
    }

    void attend_tile(const LatentTile &tile, int thread) const {
        LatentWorkspace space = take_workspace(thread);
        take_queries(tile, space);
        if (is_bounded_) space.all.start(tile.num_queries(), stride_);
        for (i64 split = 0; split < tile.num_splits(); ++split) {
            attend_split(tile, split, space, space.all, is_bounded_ || split > 0);
        }
        finish(tile, space.all);
    }

    // Tiles of few rows and all heads: computes every split separately, then joins those of each tile that the query sees.
    void run_in_splits() {
        const Sums partials = take_partials(engine_, num_partials_, stride_);
        const auto sums_of = [&](const LatentTile &tile, i64 split) {
            return partials.from(tile.first_partial + split * tile.num_queries(), stride_);
        };
        std::vector<std::pair<const LatentTile *, i64>> splits;
        for (const LatentTile &tile : tiles_) {
            for (i64 split = 0; split < tile.num_splits(); ++split) splits.emplace_back(&tile, split);
        }
        engine_.pool().run(static_cast<i64>(splits.size()), [&](i64 number, int thread) {
            const auto [tile, split] = splits[number];
            LatentWorkspace space = take_workspace(thread);
            take_queries(*tile, space);
            if (is_bounded_) sums_of(*tile, split).start(tile->num_queries(), stride_);
            attend_split(*tile, split, space, sums_of(*tile, split), is_bounded_);
        });
        engine_.pool().run(static_cast<i64>(tiles_.size()), [&](i64 task, int) {
            const LatentTile &tile = tiles_[task];
            const Sums all = sums_of(tile, 0);
            const auto of_tile = [&](i64 split) { return sums_of(tile, split); };
            join_splits(kernels_, all, 1, tile.num_splits(), of_tile, tile.num_queries(), stride_, dim_);
            finish(tile, all);
        });
    }

    Engine &engine_;
    const Kernels &kernels_;
    const AttendLatents &op_;
    i64 rotary_dim_, latent_dim_, key_room_, key_dim_, query_stride_, dim_, stride_;
    bool has_pairs_, is_small_, is_in_splits_, is_bounded_;
    float factor_;
    std::vector<LatentTile> tiles_;
    i64 num_rows_ = 0, num_partials_ = 0, max_queries_ = 0;
};

}  // namespace

void attend_latents(Engine &engine, const AttendLatents &op) { LatentAttention(engine, op).run(); }

}  // namespace tokamak::cpu

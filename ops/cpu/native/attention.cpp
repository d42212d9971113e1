// Paged attention of a mixed batch; keys are read in place through the block tables.
//
// A tile is some rows of one sequence. For each KV head its queries are those rows times the head's query heads. Splits of keys
// are processed one after another and joined in order. If there are too few tiles for the threads (decode of a few long
// contexts), each split is a task, and a second pass joins them in the same order with the same operations, so with the same
// bits.
//
// A tile with few queries (decode) reads panels directly from the cache and is bound by memory, so the next data are
// prefetched. A tile with many queries widens a split once for all of them and copies values to rows in different cache sets.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "splits.h"

namespace tokamak::cpu {
namespace {

constexpr i64 TILE_QUERIES = 320, LEAST_TILE_QUERIES = 48;  // fewer if there would be too few tiles for the threads
constexpr i64 QUERIES_AHEAD = 16;  // queries prefetched before they are read or written: rows are far apart
static_assert(TILE_QUERIES <= MAX_TILE_QUERIES);

struct Tile {
    i64 sequence, row, num_rows, position;  // first row, its position
    i64 first_key, end_key;                 // keys visible to any row
    i64 all_first, all_end;                 // keys visible to all rows, if any
    i64 split_begin, split_end;
    i64 first_partial;  // index of its first (split, row) among those of all tiles
};

struct Workspace : SplitSpace {
    float *key_scales = more, *value_scales = more + KEY_SPLIT;  // [KEY_SPLIT]
    using SplitSpace::SplitSpace;
};

class Attention {
public:
    Attention(Engine &engine, const Attend &op) : engine_(engine), kernels_(engine.kernels()), op_(op), layout_(op.layout) {
        group_ = op.heads / op.kv_heads;
        dim_ = round_up(op.head_dim, PANEL);
        value_stride_ = dim_ + PANEL;  // not a power of two
        stride_ = std::max(value_stride_, NEAR_STRIDE);
        tile_rows_ = choose_tile_rows();
        max_queries_ = tile_rows_ * group_;
        factor_ = op.scale == 0.0f ? LOG2_E / std::sqrt(static_cast<float>(op.head_dim)) : LOG2_E * op.scale;
        has_pairs_ = kernels_.has_paired_products && layout_.type != KvType::FLOAT32;
        product_type_ = has_pairs_ ? KvType::BFLOAT16 : KvType::FLOAT32;
        has_tiles_ = has_pairs_ && kernels_.has_tiled_products;
        has_panels_ = layout_.chunk_slots == KEY_PANEL && op.head_dim % PANEL == 0;
        is_bounded_ = *op.bounds.is_given != 0;
        make_tiles();
    }

    void run() {
        const i64 num_tiles = static_cast<i64>(tiles_.size()), threads = engine_.pool().num_threads();
        if (num_rows_ * op_.heads * op_.head_dim * longest_ < engine_.pool().small(SMALL_WORK) || threads == 1) {
            for (const Tile &tile : tiles_) attend_tile(tile, 0, op_.kv_heads, 0);
        } else if (is_in_splits(num_tiles, threads)) {
            run_in_splits();
        } else {
            const i64 parts = std::clamp<i64>(TASKS_PER_THREAD * threads / std::max<i64>(num_tiles, 1), 1, op_.kv_heads);
            engine_.pool().run(num_tiles * parts, [&](i64 task, int thread) {
                const i64 part = task % parts;
                const Tile &tile = tiles_[num_tiles - 1 - task / parts];  // the longest of a prompt first
                attend_tile(tile, op_.kv_heads * part / parts, op_.kv_heads * (part + 1) / parts, thread);
            });
        }
    }

private:
    // Whether there are too few tiles and heads for the threads, but enough splits: rows in decode or verification.
    bool is_in_splits(i64 num_tiles, i64 threads) const {
        if (num_splits_ < 2 * threads) return false;
        if (num_rows_ == num_tiles) return num_tiles < 2 * threads;
        return most_rows_ <= FEW_ROWS && num_tiles * op_.kv_heads < 2 * threads &&
               num_partials_ * op_.heads * stride_ <= MOST_PARTIALS;
    }

    // Keys [begin, end), as positions.
    struct Range {
        i64 begin, end;
    };

    // Keys visible to a row.
    Range keys_of(i64 row, i64 position) const {
        i64 first = 0;
        if (op_.window > 0) first = op_.has_chunks ? position - position % op_.window : position - op_.window + 1;
        Range keys{std::max<i64>(0, first), position + 1};
        if (is_bounded_) keys = {std::max<i64>(keys.begin, op_.bounds.first[row]), op_.bounds.last[row] + i64{1}};
        if (op_.is_two_sided && op_.window > 0) keys.end = std::min(keys.end, position + op_.window);
        return keys;
    }

    // Keys visible to any row of a tile, which are contiguous since each row sees itself, and keys visible to all.
    void set_keys(Tile &tile) const {
        const i64 step = is_bounded_ ? 1 : std::max<i64>(1, tile.num_rows - 1);  // without bounds, ranges only advance
        tile.first_key = tile.all_end = std::numeric_limits<i64>::max();
        tile.end_key = tile.all_first = 0;
        for (i64 i = 0; i < tile.num_rows; i += step) {
            const Range keys = keys_of(tile.row + i, tile.position + i);
            tile.first_key = std::min(tile.first_key, keys.begin), tile.end_key = std::max(tile.end_key, keys.end);
            tile.all_first = std::max(tile.all_first, keys.begin), tile.all_end = std::min(tile.all_end, keys.end);
        }
    }

    // Sizes that divide splits or are multiples of them, so that a prompt's tile sees few splits partially.
    i64 choose_tile_rows() const {
        const i64 num_sequences = op_.sequences.get(), num_rows = num_sequences > 0 ? op_.offsets[num_sequences] : 0;
        const i64 num_queries = num_rows * op_.heads, wanted = TASKS_PER_THREAD * engine_.pool().num_threads();
        i64 queries = TILE_QUERIES;
        while (queries >= 2 * LEAST_TILE_QUERIES && num_queries < queries * wanted) queries /= 2;
        const i64 rows = std::max<i64>(1, queries / group_);
        if (rows >= KEY_SPLIT) return rows - rows % KEY_SPLIT;
        i64 power = 1;
        while (2 * power <= rows) power *= 2;
        return power;
    }

    void make_tiles() {
        const i64 num_sequences = op_.sequences.get();
        for (i64 sequence = 0; sequence < num_sequences; ++sequence) {
            const i64 begin = op_.offsets[sequence], end = op_.offsets[sequence + 1];
            for (i64 row = begin, num_rows; row < end; row += num_rows) {
                const i64 position = op_.starts[sequence] + row - begin;
                const i64 past = end - begin > tile_rows_ ? position % tile_rows_ : 0;  // tiles end at the ends of splits
                num_rows = std::min(tile_rows_ - past, end - row);
                Tile tile{sequence, row, num_rows, position};
                set_keys(tile);
                tile.split_begin = tile.first_key / KEY_SPLIT, tile.split_end = (tile.end_key - 1) / KEY_SPLIT + 1;
                tile.first_partial = num_partials_;
                tiles_.push_back(tile);
                num_splits_ += tile.split_end - tile.split_begin;
                num_partials_ += (tile.split_end - tile.split_begin) * num_rows;
                most_rows_ = std::max(most_rows_, end - begin);
                num_rows_ += num_rows;
                longest_ = std::max(longest_, tile.end_key);
            }
        }
    }

    i64 num_queries(const Tile &tile) const { return tile.num_rows * group_; }
    bool has_many(const Tile &tile) const { return num_queries(tile) >= MANY_QUERIES; }
    i64 key_dim() const { return has_tiles_ ? round_up(op_.head_dim, PRODUCT_PIECE) : op_.head_dim; }
    i64 key_bytes() const { return KEY_PANEL * key_dim() * (has_pairs_ ? 2 : 4); }  // of a panel written out
    i64 query_bytes() const { return stride_ * static_cast<i64>(sizeof(float)); }
    i64 value_row_bytes() const { return value_stride_ * static_cast<i64>(sizeof(float)); }           // likewise, of a row
    i64 value_bytes() const { return value_row_bytes() * (has_pairs_ ? KEY_PANEL / 2 : KEY_PANEL); }  // likewise, of a panel

    Workspace take_workspace(int thread) const {
        const i64 most = round_up(max_queries_, PANEL);
        const SpaceSizes sizes{
            most * query_bytes(), SPLIT_PANELS * round_up(key_bytes(), 64), SPLIT_PANELS * value_bytes(), max_queries_, stride_,
            2 * KEY_SPLIT};
        Workspace space(engine_, thread, sizes);
        if (key_dim() != op_.head_dim) std::fill_n(space.keys, sizes.keys, char{0});  // so the padding is zero
        if (dim_ != op_.head_dim) std::fill_n(space.values, sizes.values, char{0});
        return space;
    }

    // function(query of the tile, offsets of its numbers in op_.queries and op_.y, offsets of a query some rows later)
    template <class Function>
    void for_queries(const Tile &tile, i64 kv_head, const Function &function) const {
        const i64 row_floats = op_.heads * op_.head_dim, ahead = (QUERIES_AHEAD / group_ + 1) * row_floats;
        i64 row_start = tile.row * row_floats + kv_head * group_ * op_.head_dim, query = 0;
        const i64 last_start = row_start + (tile.num_rows - 1) * row_floats;
        for (; row_start <= last_start; row_start += row_floats) {
            i64 start = row_start, next_start = std::min(row_start + ahead, last_start);
            for (i64 i = 0; i < group_; ++i, start += op_.head_dim, next_start += op_.head_dim)
                function(query++, start, next_start);
        }
    }

    void take_queries(const Tile &tile, i64 kv_head, Workspace &space) const {
        for_queries(tile, kv_head, [&](i64 query, i64 start, i64 next_start) {
            for (i64 i = 0; i < op_.head_dim; i += PANEL) __builtin_prefetch(op_.queries + next_start + i);
            kernels_.take_query(space.queries + query * query_bytes(), op_.queries + start, factor_, op_.head_dim,
                                layout_.type);
        });
    }

    // Keys of the split visible to each query, the same for all heads.
    void take_ranges(const Tile &tile, i64 split, Workspace &space) const {
        const i64 first = split * KEY_SPLIT;
        const bool is_whole = tile.all_first <= first && tile.all_end >= first + KEY_SPLIT;
        if (is_whole && space.is_whole) return;
        space.is_whole = is_whole;
        for (i64 row = 0; row < tile.num_rows; ++row) {
            const Range keys = keys_of(tile.row + row, tile.position + row);
            const i64 begin = std::clamp<i64>(keys.begin - first, 0, KEY_SPLIT);
            const i64 end = std::clamp<i64>(keys.end - first, 0, KEY_SPLIT);
            std::fill_n(space.begins + row * group_, group_, static_cast<i32>(begin));
            std::fill_n(space.ends + row * group_, group_, static_cast<i32>(end));
        }
    }

    // Keys of a split visible to any query of the tile; at least one.
    Range range_of(const Tile &tile, i64 split) const {
        return {std::max(tile.first_key, split * KEY_SPLIT), std::min(tile.end_key, (split + 1) * KEY_SPLIT)};
    }

    // Offsets of a position's chunk in keys and values.
    i64 chunk_offset(const Tile &tile, i64 kv_head, i64 position) const {
        const i64 block = op_.block_tables[op_.slots[tile.sequence] * op_.table_width + position / layout_.block_size];
        return block * layout_.block_bytes + kv_head * layout_.head_bytes +
               position % layout_.block_size / layout_.chunk_slots * layout_.chunk_bytes;
    }

    // Calls function(panel, offset of the chunk in the panel, place of the chunk) for each chunk with keys visible to the tile.
    template <class Function>
    void for_chunks(const Tile &tile, i64 kv_head, i64 split, const Function &function) const {
        const Range range = range_of(tile, split);
        const i64 slots = layout_.chunk_slots;
        for (i64 position = range.begin / slots * slots; position < range.end; position += slots) {
            const i64 key = position % KEY_SPLIT;
            function(key / KEY_PANEL, key % KEY_PANEL, chunk_offset(tile, kv_head, position));
        }
    }

    void take_scales(const Tile &tile, i64 kv_head, i64 split, Workspace &space) const {
        std::fill(space.key_scales, space.key_scales + KEY_SPLIT, 0.0f);
        std::fill(space.value_scales, space.value_scales + KEY_SPLIT, 0.0f);
        const Range range = range_of(tile, split);
        const i64 at = layout_.chunk_slots * op_.head_dim;
        for_chunks(tile, kv_head, split, [&](i64 panel, i64 offset, i64 place) {
            const i64 key = panel * KEY_PANEL + offset, first = std::max<i64>(0, range.begin % KEY_SPLIT - key);
            const i64 count = std::min(layout_.chunk_slots, range.end - split * KEY_SPLIT - key) - first;
            const i64 start = at + first * static_cast<i64>(sizeof(float));
            std::memcpy(space.key_scales + key + first, op_.keys + place + start, count * sizeof(float));
            std::memcpy(space.value_scales + key + first, op_.values + place + start, count * sizeof(float));
        });
    }

    // The panels of a split: in place or, with many queries or smaller chunks, copied.
    void take_panels(const Tile &tile, i64 kv_head, i64 split, Workspace &space, SplitShape &shape) const {
        const bool is_ready = layout_.type == product_type_;  // for tiles: pieces of values are contiguous too, or few
        const bool keys_lie = has_panels_ && (has_tiles_ ? is_ready && key_dim() == op_.head_dim : is_ready || !has_many(tile));
        const bool values_lie =
            has_panels_ &&
            (has_tiles_ ? is_ready && (layout_.block_size >= PRODUCT_PIECE || !has_many(tile)) : !has_many(tile));
        shape.format = values_lie ? layout_.type : product_type_;
        shape.value_bytes = value_row_bytes();
        if (values_lie) shape.value_bytes = op_.head_dim * (layout_.type == KvType::INT8 ? 1 : 4);
        const char *seen_keys = nullptr, *seen_values = nullptr;
        bool is_seen[SPLIT_PANELS] = {};
        for_chunks(tile, kv_head, split, [&](i64 panel, i64 offset, i64 place) {
            char *keys = space.keys + panel * round_up(key_bytes(), 64), *values = space.values + panel * value_bytes();
            if (!keys_lie) kernels_.take_keys({op_.keys + place, keys, layout_, offset, 0});
            if (!values_lie) kernels_.take_values({op_.values + place, values, layout_, offset, value_row_bytes()});
            seen_keys = shape.keys[panel] = keys_lie ? op_.keys + place : keys;
            seen_values = shape.values[panel] = values_lie ? op_.values + place : values;
            is_seen[panel] = true;
        });
        for (i64 panel = 0; panel < SPLIT_PANELS; ++panel) {
            if (is_seen[panel]) continue;
            shape.keys[panel] = seen_keys;
            shape.values[panel] = seen_values;
        }
    }

    // Prefetches during the scores and during the values of a split. Values that are copied before use are fetched a split
    // ahead.
    void take_next(const Tile &tile, i64 kv_head, i64 split, SplitShape &shape) const {
        std::copy(shape.values, shape.values + SPLIT_PANELS, shape.next_values);
        std::copy(shape.values, shape.values + SPLIT_PANELS, shape.next_keys);
        const bool is_last = split + 1 == tile.split_end;
        if (is_last && kv_head + 1 == op_.kv_heads) return;
        for_chunks(tile, kv_head + is_last, is_last ? tile.split_begin : split + 1, [&](i64 panel, i64, i64 place) {
            shape.next_keys[panel] = op_.keys + place;
            if (has_many(tile)) shape.next_values[panel] = op_.values + place;
        });
    }

    // Also prefetched: the queries of the next head in the first half of a tile's splits, the memory of this head's outputs in
    // the second half. Rows are too far apart for hardware prefetchers. Only with products of pairs, which take half of the
    // time: with float32 it was no gain (Cascade Lake).
    void take_next_rows(const Tile &tile, i64 kv_head, i64 split, SplitShape &shape) const {
        const i64 floats = op_.heads * op_.head_dim, of_head = group_ * op_.head_dim, row_lines = of_head / PANEL;
        const i64 num_splits = tile.split_end - tile.split_begin, half = num_splits / 2, index = split - tile.split_begin;
        const bool are_outputs = index >= half;
        if (!has_pairs_ || !has_many(tile) || half == 0 || of_head % PANEL != 0 ||
            (!are_outputs && kv_head + 1 == op_.kv_heads))
            return;
        const float *rows = are_outputs ? op_.y + kv_head * of_head : op_.queries + (kv_head + 1) * of_head;
        const i64 turn = are_outputs ? index - half : index, turns = are_outputs ? num_splits - half : half;
        const i64 num_lines = tile.num_rows * row_lines, begin = num_lines * turn / turns;
        shape.next_rows = reinterpret_cast<const char *>(rows + tile.row * floats);
        shape.next_line = begin;
        shape.num_next_lines = num_lines * (turn + 1) / turns - begin;
        shape.lines_of_row = row_lines;
        shape.row_stride = floats * static_cast<i64>(sizeof(float));
    }

    void attend_split(const Tile &tile, i64 kv_head, i64 split, Workspace &space, Sums sums, bool joins) const {
        SplitShape shape;
        take_panels(tile, kv_head, split, space, shape);
        take_next(tile, kv_head, split, shape);
        shape.next_bytes = layout_.chunk_bytes;
        shape.softcap = op_.softcap * LOG2_E;
        shape.has_scales = layout_.type == KvType::INT8;
        if (shape.has_scales) take_scales(tile, kv_head, split, space);
        shape.key_scales = space.key_scales;
        shape.value_scales = space.value_scales;
        take_next_rows(tile, kv_head, split, shape);
        shape.head_dim = op_.head_dim;
        shape.dim = dim_;
        space.describe(shape, num_queries(tile), query_bytes(), sums, stride_, joins);
        kernels_.attend[static_cast<int>(shape.format)](shape);
    }

    // The sums before the first split: none, or those of the heads' sinks, with weight 1 and without a value.
    void start(const Tile &tile, i64 kv_head, Sums all) const {
        all.start(num_queries(tile), stride_);
        if (op_.sinks == nullptr) return;
        for (i64 query = 0; query < num_queries(tile); ++query) {
            all.largest[query] = op_.sinks[kv_head * group_ + query % group_] * LOG2_E;
            all.sums[query] = 1.0f;
        }
    }

    void finish(const Tile &tile, i64 kv_head, Sums all) const {
        for_queries(tile, kv_head, [&](i64 query, i64 start, i64 next_start) {
            for (i64 i = 0; i < op_.head_dim; i += PANEL) __builtin_prefetch(op_.y + next_start + i, 1);
            kernels_.finish(op_.y + start, all.outputs + query * stride_, all.sums[query], op_.head_dim);
        });
    }

    void attend_tile(const Tile &tile, i64 head_begin, i64 head_end, int thread) const {
        Workspace space = take_workspace(thread);
        for (i64 head = head_begin; head < head_end; ++head) {
            take_queries(tile, head, space);
            // if all queries see it, the first split joins nothing
            const bool is_started = tile.all_first >= (tile.split_begin + 1) * KEY_SPLIT || op_.sinks != nullptr;
            if (is_started) start(tile, head, space.all);
            for (i64 split = tile.split_begin; split < tile.split_end; ++split) {
                take_ranges(tile, split, space);
                attend_split(tile, head, split, space, space.all, is_started || split > tile.split_begin);
            }
            finish(tile, head, space.all);
        }
    }

    // Tiles of few rows: computes every split separately for all heads, then joins the splits of each tile and head in order. A
    // split that a row does not see, while later rows do, is not joined to its queries.
    void run_in_splits() {
        const Sums partials = take_partials(engine_, num_partials_ * op_.heads, stride_);
        const auto sums_of = [&](const Tile &tile, i64 split, i64 kv_head) {
            const i64 partial = tile.first_partial + (split - tile.split_begin) * tile.num_rows;
            return partials.from(partial * op_.heads + kv_head * num_queries(tile), stride_);
        };
        std::vector<std::pair<const Tile *, i64>> splits;
        for (const Tile &tile : tiles_) {
            for (i64 split = tile.split_begin; split < tile.split_end; ++split) splits.emplace_back(&tile, split);
        }
        engine_.pool().run(num_splits_, [&](i64 number, int thread) {
            const auto [tile, split] = splits[number];
            Workspace space = take_workspace(thread);
            take_ranges(*tile, split, space);
            for (i64 head = 0; head < op_.kv_heads; ++head) {
                take_queries(*tile, head, space);
                attend_split(*tile, head, split, space, sums_of(*tile, split, head), false);
            }
        });
        engine_.pool().run(static_cast<i64>(tiles_.size()) * op_.kv_heads, [&](i64 task, int thread) {
            const Tile &tile = tiles_[task / op_.kv_heads];
            const i64 head = task % op_.kv_heads;
            const Sums all = take_workspace(thread).all;
            start(tile, head, all);
            const auto of_head = [&](i64 split) { return sums_of(tile, split, head); };
            join_splits(kernels_, all, tile.split_begin, tile.split_end, of_head, num_queries(tile), stride_, dim_);
            finish(tile, head, all);
        });
    }

    Engine &engine_;
    const Kernels &kernels_;
    const Attend &op_;
    const CacheLayout &layout_;
    i64 group_, dim_, stride_, value_stride_, tile_rows_, max_queries_;
    float factor_;
    bool has_pairs_, has_tiles_, has_panels_, is_bounded_;
    KvType product_type_;
    std::vector<Tile> tiles_;
    i64 num_splits_ = 0, num_partials_ = 0, num_rows_ = 0, most_rows_ = 0, longest_ = 0;
};

}  // namespace

namespace {

i64 bytes_of_slot(KvType type, i64 head_dim) {
    return type == KvType::FLOAT32 ? 4 * head_dim : type == KvType::BFLOAT16 ? 2 * head_dim : head_dim + 4;
}

CacheLayout layout_of(KvType type, i64 block_size, i64 block_bytes, i64 head_dim, i64 chunk_slots) {
    const i64 slot_bytes = bytes_of_slot(type, head_dim);
    return {type, block_size, head_dim, chunk_slots, chunk_slots * slot_bytes, block_size * slot_bytes, block_bytes};
}

}  // namespace

CacheLayout make_layout(KvType type, i64 block_size, i64 block_bytes, i64 head_dim) {
    return layout_of(type, block_size, block_bytes, head_dim, std::min(block_size, KEY_PANEL));
}

CacheLayout make_slot_layout(KvType type, i64 block_size, i64 dim) {
    return layout_of(type, block_size, block_size * bytes_of_slot(type, dim), dim, 1);
}

void attend(Engine &engine, const Attend &op) { Attention(engine, op).run(); }

}  // namespace tokamak::cpu

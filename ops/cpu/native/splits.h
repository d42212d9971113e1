// Shared parts of attention over keys (attention.cpp) and over latents (latent_attention.cpp): the sums of a tile's queries,
// a thread's scratch memory for a split, and the pass that joins splits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops.h"

namespace tokamak::cpu {

constexpr i64 TASKS_PER_THREAD = 4;
constexpr i64 FEW_ROWS = 17;                    // of a sequence: a token and its drafts
constexpr i64 MOST_PARTIALS = 1 << 26;          // maximum numbers of splits waiting to be joined
constexpr i64 SMALL_WORK = 1 << 17;             // multiply-adds that one thread does alone rather than wake others
constexpr float LOG2_E = 1.44269504088896341f;  // scores are exponents of 2

inline i64 round_up(i64 a, i64 b) { return (a + b - 1) / b * b; }

// Largest score, sum of weights, weighted values: [queries], [queries], [queries, stride].
struct Sums {
    float *largest, *sums, *outputs;

    Sums from(i64 query, i64 stride) const { return {largest + query, sums + query, outputs + query * stride}; }

    // For queries that may not see the first split.
    void start(i64 count, i64 stride) const {
        std::fill_n(largest, count, -std::numeric_limits<float>::infinity());
        std::fill_n(sums, count, 0.0f);
        std::fill_n(outputs, count * stride, 0.0f);
    }
};

struct SpaceSizes {
    i64 queries, keys, values;  // bytes: of a tile; of a copied split
    i64 num_queries, stride;    // per tile, at most; distance of outputs
    i64 num_more;               // floats
};

// Scratch memory of a thread.
struct SplitSpace {
    char *queries, *keys, *values;
    float *scores, *factors, *next_factors, *more;
    Sums all;
    i32 *begins, *ends;
    bool is_whole = false;  // all queries see all keys

    SplitSpace(Engine &engine, int thread, const SpaceSizes &sizes) {
        const i64 floats = sizeof(float), most = round_up(sizes.num_queries, PANEL), line = 64;
        const i64 num_bytes = round_up(sizes.queries, line) + round_up(sizes.keys, line) + round_up(sizes.values, line) +
                              (most * (SCORE_STRIDE + sizes.stride + 6) + sizes.num_more) * floats;
        char *at = reinterpret_cast<char *>(engine.scratch(thread, (line + num_bytes) / floats));
        at += -reinterpret_cast<std::uintptr_t>(at) % line;
        const auto take = [&](i64 bytes) {
            char *taken = at;
            at += round_up(bytes, line);
            return taken;
        };
        const auto take_floats = [&](i64 count) { return reinterpret_cast<float *>(take(count * floats)); };
        queries = take(sizes.queries);
        keys = take(sizes.keys);
        values = take(sizes.values);
        scores = take_floats(most * SCORE_STRIDE);
        all.outputs = take_floats(most * sizes.stride);
        all.largest = take_floats(most);
        all.sums = take_floats(most);
        factors = take_floats(most);
        next_factors = take_floats(most);
        begins = reinterpret_cast<i32 *>(take_floats(most));
        ends = reinterpret_cast<i32 *>(take_floats(most));
        more = reinterpret_cast<float *>(at);
    }

    // Parts of the shape other than the split's own panels.
    void describe(SplitShape &shape, i64 num_queries, i64 query_bytes, Sums sums, i64 stride, bool joins) const {
        shape.queries = queries;
        shape.begins = begins;
        shape.ends = ends;
        shape.is_whole = is_whole;
        shape.num_queries = num_queries;
        shape.query_bytes = query_bytes;
        shape.scores = scores;
        shape.factors = factors;
        shape.next_factors = next_factors;
        shape.joins = joins;
        shape.largest = sums.largest;
        shape.sums = sums.sums;
        shape.outputs = sums.outputs;
        shape.output_stride = stride;
    }
};

// Sums of splits computed in parallel, for so many queries in total.
inline Sums take_partials(Engine &engine, i64 num_queries, i64 stride) {
    const i64 num_floats = num_queries * (stride + 2);
    if (static_cast<i64>(engine.partial.size()) < num_floats) engine.partial.resize(num_floats);
    float *const at = engine.partial.data();
    return {at, at + num_queries, at + 2 * num_queries};
}

// Joins sums_of(split) to `all`, one split after another.
template <class SumsOf>
void join_splits(const Kernels &kernels, Sums all, i64 begin, i64 end, const SumsOf &sums_of, i64 count, i64 stride, i64 dim) {
    for (i64 split = begin; split < end; ++split) {
        const Sums next = sums_of(split);
        kernels.join(all.largest, all.sums, all.outputs, next.largest, next.sums, next.outputs, count, stride, dim);
    }
}

}  // namespace tokamak::cpu

// What each row is given, and its name in C: `tokamak_<row>(const <Row> *, stream)`, 0 where it went well.
//
// `operands.py` reads this file, so that nobody writes it down a second time: members are a `Buffer` of int, float or bytes, an
// `Untyped` (its numbers are of the operand `type`), an int or a float, one a line, with what is in it. R: rows.
#pragma once

#include "platform.h"

// Numbers of the type that the operand `type` says; counted in numbers.
struct Untyped {
    void *data;
    long long count;

    template <typename T>
    HOST_AND_DEVICE Buffer<T> as() const {
        return {static_cast<T *>(data), count};
    }
};

// Where a position's keys and values are: blocks of [block_size, kv_heads, dim] numbers and, of int8, behind these their
// scales, float32 [block_size, kv_heads].
struct Cache {
    Buffer<unsigned char> keys;    // of all blocks
    Buffer<unsigned char> values;  // of all blocks
    int type;                      // float32, float16, bfloat16, int8 or float8
    int block_size;
    int kv_heads;  // in a block, those of all ranks
    int key_dim;
    int value_dim;
};

struct Begin {
    Buffer<int> block_tables;  // [slots, blocks_per_slot]
    Buffer<int> positions;     // [R]
    Buffer<int> row_slots;     // [R]
    Buffer<int> slot_mapping;  // out [R]
    int num_rows;
    int blocks_per_slot;
    int block_size;
};

// All of a step's metadata, of what the host sent; ops/paddle/metadata.py says what lies where.
struct Derive {
    Buffer<int> sent;     // header, five columns of num_slots, places and values
    Buffer<int> slots;    // in and out: tokens, block tables and lengths of all slots
    Buffer<int> derived;  // out: the fields of all rows, and those of rows that are kept
    int num_slots;
    int num_positions;  // of a slot's tokens
    int num_blocks;     // of a slot's table
    int max_rows;
    int max_tiles;
    int block_size;
    int num_rows;  // padding included
    int tile_rows;
    int num_kept;
    int kept_tile_rows;
};

struct RotateAndStore {
    int type;
    Untyped qkv;      // [R, (heads + 2 kv_heads) dim]
    Untyped queries;  // out [R, heads dim]
    Cache cache;
    Buffer<int> slot_mapping;   // [R]
    Buffer<int> angle_rows;     // [R] of cosines and sines
    Buffer<float> cosines;      // [positions, dim]
    Buffer<float> sines;        // [positions, dim]
    Buffer<int> partners;       // [dim]
    Buffer<float> norm_weight;  // [2, dim] of queries and of keys; empty: heads are not normalized
    float epsilon;
    int num_rows;
    int heads;     // of this rank
    int kv_heads;  // of this rank,
    int first_kv;  // from this one on
};

struct StoreLatent {
    int type;
    Untyped queries;     // [R, heads (plain_dim + rotary_dim)]
    Untyped compressed;  // [R, latent_dim + rotary_dim]
    Untyped rotated;     // out, as queries
    Cache cache;         // rotary_dim keys and latent_dim values of one head
    Buffer<int> slot_mapping;
    Buffer<int> angle_rows;
    Buffer<float> cosines;  // [positions, rotary_dim]
    Buffer<float> sines;
    Buffer<int> partners;
    Buffer<float> norm_weight;  // [latent_dim]
    float epsilon;
    int num_rows;
    int heads;
    int plain_dim;
};

// Paged attention: the rows of a tile are queries of one sequence. Keys of 64 are a split, splits of 512 a part, each counted
// from position 0 and added up in this order, whoever computes them.
struct Attention {
    int type;
    Untyped queries;  // [R, heads key_dim]; of latents [R, heads (latent_dim + rotary_dim)]
    Untyped output;   // out [R, heads value_dim]
    Cache cache;
    Buffer<int> block_tables;   // [slots, blocks_per_slot]
    Buffer<int> tile_slots;     // [tiles]
    Buffer<int> tile_contexts;  // [tiles]
    Buffer<int> tile_row_ids;   // [tiles, tile_rows]
    Buffer<int> row_queries;    // [R]
    Buffer<int> positions;      // [R]
    Buffer<int> first_keys;     // [R]; empty: all up to the row's own
    Buffer<int> last_keys;      // [R]
    Buffer<float> parts;        // scratch [R, heads, num_parts, value_dim + 2]; empty: a block computes all parts of its rows
    float scale;                // of scores
    int num_rows;
    int num_tiles;
    int tile_rows;
    int num_parts;
    int blocks_per_slot;
    int heads;     // of this rank
    int kv_heads;  // of this rank,
    int first_kv;  // from this one on
    int window;    // keys that a query sees, itself included; 0: all
    int is_latent;
};

// Those of a linear. Integers stand for scale * (q - zero) or, with offsets, scale * q - offset.
struct Weights {
    Buffer<unsigned char> values;  // [num_outputs, padded_inputs] of `type`; int4: two a byte, the first in the low bits
    Buffer<float> scales;          // [num_outputs, groups]; empty: not integers
    Buffer<float> offsets;         // [num_outputs, groups]; empty: none
    int type;                      // that of the row, int8 or int4
    int num_inputs;
    int padded_inputs;  // a multiple of 32; what is behind num_inputs is zero
    int num_outputs;
    int group_size;  // inputs of a scale: a multiple of 8, of which padded_inputs is one
};

// y = x W + b.
struct Linear {
    int type;
    Untyped x;  // [R, num_inputs]
    Untyped y;  // out [R, num_outputs]
    Weights weights;
    Buffer<float> bias;  // [num_outputs]; empty: none
    int num_rows;
};

// The best experts of each row, as `RoutingRule` in ops/modules.py says.
struct Route {
    Buffer<float> logits;      // [R, num_experts]
    Buffer<float> correction;  // [num_experts]; empty: none
    Buffer<int> expert_sets;   // [R]; empty: the router is for all rows
    Buffer<int> ids;           // out [R, num_chosen]
    Buffer<float> weights;     // out [R, num_chosen]
    float added_to_sum;
    float smallest_sum;
    float factor;
    int num_rows;
    int num_experts;
    int num_chosen;
    int num_groups;
    int num_chosen_groups;
    int has_sigmoid;
    int is_normalized;
    int set;
};

// The choices of each expert one after another, and which of its tiles of 16 is whose. A choice is row * num_chosen + number.
struct Dispatch {
    Buffer<int> ids;           // [R, num_chosen]; -1: none
    Buffer<int> offsets;       // out [num_experts + 1]: where each expert's choices begin
    Buffer<int> choices;       // out [R num_chosen]
    Buffer<int> tile_experts;  // out [max_tiles]; -1: none
    Buffer<int> tile_firsts;   // out [max_tiles]: of choices
    int num_choices;
    int num_experts;
    int max_tiles;  // at least num_choices / 16 + num_experts
};

// A linear of each expert over its choices: row `choice / x_divisor` of x becomes row `choice` of y.
struct ExpertLinear {
    int type;
    Untyped x;            // [R, num_inputs], or of each choice
    Untyped y;            // out [R num_chosen, num_outputs]
    Buffer<int> offsets;  // as Dispatch made them
    Buffer<int> choices;
    Buffer<int> tile_experts;
    Buffer<int> tile_firsts;
    Weights weights;  // of all experts, one after another; num_outputs are those of one
    int max_tiles;
    int x_divisor;
};

// The results of a row's choices, each times its weight, added up in their order, and then the shared ones.
struct Combine {
    int type;
    Untyped results;        // [R, num_chosen, width]
    Untyped shared;         // [R, width]; empty: none
    Untyped y;              // out [R, width]
    Buffer<int> ids;        // [R, num_chosen]; -1: none
    Buffer<float> weights;  // [R, num_chosen]
    int num_rows;
    int num_chosen;
    int width;
};

// The token of each row, and what is known of it.
struct Sample {
    Buffer<float> logits;          // [R, vocab]
    Buffer<int> logit_row_ids;     // [R]: which of the rows that are kept each is
    Buffer<int> row_ids;           // [kept]: which of the step's rows each of these is
    Buffer<int> row_slots;         // [rows]
    Buffer<int> positions;         // [kept]; the token's is the next
    Buffer<int> sequence_offsets;  // [num_slots + 1], of rows that are kept
    Buffer<int> sequence_slots;    // [num_slots]
    Buffer<int> context_lengths;   // [num_slots]
    Buffer<int> sent;              // as Derive has it
    Buffer<int> slots;             // as Derive; in: settings; out: the token behind a sequence with the flag DRAWN, its length
    Buffer<int> drawn;             // out [3, R]: token, bits of its log-probability, of the raw logits, and rank
    int num_rows;
    int vocab;
    int num_slots;
    int num_positions;  // of a slot's tokens
    int num_blocks;     // of a slot's table
};

// Arithmetic alone: 256 threads of each block make num_steps steps in each of 8 chains. A step is of 4 products of a thread in
// float32, else of one [16, 16] [16, 8] of a warp.
struct Peak {
    int type;
    Buffer<float> sums;  // out [num_blocks, 256]
    int num_blocks;
    int num_steps;
};

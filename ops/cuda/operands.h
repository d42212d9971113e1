// Operands of each row, and its name in C: `tokamak_<row>(const <Row> *, stream)`, which returns 0 on success.
//
// `operands.py` parses this file, so that operands are declared only once: members are a `Buffer` of int, float or bytes, an
// `Untyped` (elements of the operand `type`), an int, a long long or a float, one per line, with a description. The first
// brackets of a line are its shape, in Python, of the struct's numbers (`_`: any number): results (`out [`) that are not given
// are allocated with it, and memory with fewer elements is rejected before anything runs.
#pragma once

#include "platform.h"

// Numbers of the type given by the operand `type`; sizes are in numbers.
struct Untyped {
    void *data;
    long long count;

    HOST_AND_DEVICE bool is_empty() const { return count == 0; }
    template <typename T>
    HOST_AND_DEVICE Buffer<T> as() const {
        return {static_cast<T *>(data), count};
    }
};

// Keys and values: blocks of [block_size, kv_heads, dim] numbers, followed for int8 by their scales, float32 [block_size,
// kv_heads].
struct Cache {
    Buffer<unsigned char> keys;    // of all blocks
    Buffer<unsigned char> values;  // of all blocks
    int type;                      // float32, float16, bfloat16, int8 or float8
    int block_size;
    int kv_heads;  // in a block, those of all ranks
    int key_dim;
    int value_dim;
    int key_bytes;  // of a block
    int value_bytes;
};

// Memory that ranks lend each other, as mapped here. It begins with a line of 16 numbers: the first counts the rank's meetings,
// the second is the epoch in which it lends. When the epoch of the group is another one, a rank is gone: results are undefined.
struct Windows {
    Buffer<unsigned char> addresses;  // [8 * num_ranks]: each 8 bytes; 0: a rank that takes no part
    Buffer<int> epoch;                // [1] of the group, now
    int place;                        // of this rank
    int num_ranks;
};

// What ranks lend each other to share experts. The third number of the line counts the rows that a rank sends, the fourth is the
// first of them among those of its replica. The experts of each row follow, its adapter, the rows, and results for all choices
// of the replica's rows.
struct Offer {
    Windows windows;
    int adapters_at;  // bytes from the beginning, as the next two
    int rows_at;
    int results_at;
    int num_same;  // ranks of a replica, which have the same rows and each send a part of them
};

// The states of a step's sequences: slots of the state arena, and `SequenceState` of ops/table.py. Sequences without rows and
// slots are left alone.
struct States {
    Buffer<unsigned char> memory;  // [_, slot_bytes]
    Buffer<int> offsets;           // [num_sequences + 1]: first row of each
    Buffer<int> starts;            // [num_sequences]: position of the first row
    Buffer<int> sequences;         // [num_sequences, 6]
    int slot_bytes;
    int num_sequences;  // room for them
};

struct Begin {
    Buffer<int> block_tables;  // [_, blocks_per_slot]
    Buffer<int> positions;     // [num_rows]
    Buffer<int> row_slots;     // [num_rows]
    Buffer<int> slot_mapping;  // out [num_rows]
    int num_rows;
    int blocks_per_slot;
    int block_size;
};

// All metadata of a step, from the values sent by the host; ops/paddle/metadata.py defines the layout.
struct Derive {
    Buffer<int> sent;     // [1 + 5 * num_slots]: header, columns of the rows; then places and values
    Buffer<int> slots;    // [num_slots + 1, num_positions + num_blocks + 1], in and out: tokens, tables and lengths; settings
    Buffer<int> derived;  // out [8 * max_rows + 8 * num_slots + 36 * max_tiles + 2]: fields of all rows, and of those kept
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
    Untyped qkv;      // [num_rows, (heads + 2 * kv_heads) * cache.key_dim]
    Untyped queries;  // out [num_rows, heads * cache.key_dim]
    Cache cache;
    Buffer<int> slot_mapping;   // [num_rows]
    Buffer<int> angle_rows;     // [num_rows] of cosines and sines
    Buffer<float> cosines;      // [_, cache.key_dim]
    Buffer<float> sines;        // [_, cache.key_dim]
    Buffer<int> partners;       // [cache.key_dim]
    Buffer<float> norm_weight;  // [3, cache.key_dim] of queries, keys and values; empty: heads are not normalized
    float epsilon;
    int is_normalized_after;  // after the rotation, not before it
    int has_values;           // values are normalized too
    int num_rows;
    int heads;     // of this rank
    int kv_heads;  // of this rank,
    int first_kv;  // from this one on
};

struct StoreLatent {
    int type;
    Untyped queries;            // [num_rows, heads * (plain_dim + cache.key_dim)]
    Untyped compressed;         // [num_rows, cache.value_dim + cache.key_dim]: latent, and key that is to be rotated
    Untyped rotated;            // out [num_rows, heads * (plain_dim + cache.key_dim)]
    Cache cache;                // rotated keys and latents, as values, of one head
    Buffer<int> slot_mapping;   // [num_rows]
    Buffer<int> angle_rows;     // [num_rows]
    Buffer<float> cosines;      // [_, cache.key_dim]
    Buffer<float> sines;        // [_, cache.key_dim]
    Buffer<int> partners;       // [cache.key_dim]
    Buffer<float> norm_weight;  // [cache.value_dim]
    float epsilon;
    int num_rows;
    int heads;
    int plain_dim;
};

// Paged attention: the rows of a tile are queries of one sequence. A split is 64 keys, a part 512, both counted from position 0
// and added in this order by any block.
struct Attention {
    int type;
    Untyped queries;  // [num_rows, heads * (cache.key_dim + is_latent * cache.value_dim)]
    Untyped output;   // out [num_rows, heads * cache.value_dim]
    Cache cache;
    Buffer<int> block_tables;   // [_, blocks_per_slot]
    Buffer<int> tile_slots;     // [num_tiles]
    Buffer<int> tile_contexts;  // [num_tiles]
    Buffer<int> tile_row_ids;   // [num_tiles, tile_rows]
    Buffer<int> row_queries;    // [num_rows]
    Buffer<int> positions;      // [num_rows]
    Buffer<int> first_keys;     // [num_rows]; empty: all up to the row's own
    Buffer<int> last_keys;      // [num_rows]; empty: as first_keys
    Buffer<float> parts;        // [num_rows, heads, num_parts, cache.value_dim + 2]; empty: a block makes all parts of its rows
    Buffer<float> sinks;        // [heads] of this rank: scores without a value; empty: none
    float scale;                // of scores
    float softcap;              // scores become softcap * tanh(score / softcap); 0: they stay
    int num_rows;
    int num_tiles;
    int tile_rows;
    int num_parts;
    int blocks_per_slot;
    int heads;         // of this rank
    int kv_heads;      // of this rank,
    int first_kv;      // from this one on
    int window;        // keys that a query sees, itself included; 0: all
    int has_chunks;    // windows begin at multiples of their size
    int is_two_sided;  // windows have as many keys after the query as before it
    int is_latent;
};

// Weights of a linear. Integers represent scale * (q - zero) or, with offsets, scale * q - offset; codes of float4 (E2M1)
// represent scale * twice their value.
// `weights.h` says how they lie in memory; a unit's outputs are side by side in scales and offsets.
struct Weights {
    Buffer<unsigned char> values;  // units: num_outputs (and more, for whole units) of padded_inputs each, of `type`
    Buffer<float> scales;          // [num_outputs, padded_inputs // group_size]; empty: numbers of the row's type
    Buffer<float> offsets;         // [num_outputs, padded_inputs // group_size]; empty: none
    int type;                      // that of the row, int8, int4 or float4
    int num_inputs;
    int padded_inputs;  // a multiple of 32; zeros after num_inputs
    int num_outputs;
    int group_size;  // inputs of a scale: a multiple of 8, of which padded_inputs is one
    int num_parts;   // of the inputs, summed by themselves: a multiple of 8
};

// y = x W + b.
struct Linear {
    int type;
    Untyped x;             // [num_rows, weights.num_inputs]
    Untyped y;             // out [num_rows, weights.num_outputs]; empty: the results are `floats`
    Buffer<float> floats;  // [num_rows, weights.num_outputs]; empty: the results are `y`
    Weights weights;
    Buffer<float> bias;    // [weights.num_outputs]; empty: none
    Buffer<float> parts;   // [weights.num_parts * 16, weights.num_outputs] for at most 16 rows; empty: a block sums all parts
    Buffer<int> arrivals;  // [weights.num_outputs // 32 + 1], zeros, and zeros again afterwards; empty: as parts
    int num_rows;
};

// A linear of each head. A row of x has `stride` numbers for a head, of which the first are its inputs.
struct HeadLinear {
    int type;
    Untyped x;        // [num_rows, heads * stride]
    Untyped y;        // out [num_rows, heads * weights.num_outputs]
    Weights weights;  // of all heads, one after another; num_outputs are those of one
    int num_rows;
    int heads;
    int stride;
};

// Adds the term of each row's adapter to some outputs of a linear: (x A) B. In a slot, A is [num_inputs, room] (the rank, in whole
// lines of 16) from `first_a` on, and B [panels of 16 outputs, rank, 16] from `first_b` on. With `ids`, rows are those of choices
// (row * num_chosen + number), and the adapter is that of their expert: the module and the places are larger by steps.
struct Adapt {
    int type;
    Untyped x;                  // [_, num_inputs]: of each row, or of each choice
    Untyped y;                  // [num_rows, width], in and out
    Buffer<int> slots_of_rows;  // [_]; -1: none
    Buffer<int> ids;            // [num_rows] experts of choices, -1: none; empty: a linear that is not an expert's
    Buffer<float> slots;        // [num_slots, slot_numbers]
    Buffer<int> ranks;          // [num_slots, num_modules]
    int num_slots;
    long long slot_numbers;
    int num_modules;
    int num_rows;
    int num_inputs;
    int width;
    int first;         // of the columns of y
    int first_output;  // of the adapter's
    int num_outputs;
    int index;  // of the module
    long long first_a;
    long long first_b;
    int index_step;         // from one expert to the next
    long long number_step;  // of its places
    int num_chosen;         // rows of y for a row with a slot
    int x_divisor;          // rows of y for a row of x
};

// Rows of a table that has the weights of a linear: output i is row i.
struct Embed {
    int type;
    Buffer<int> ids;   // [num_rows]
    Buffer<int> same;  // [num_same, 2]: ids that have the row of another one, and that one; empty: none
    Untyped y;         // out [num_rows, weights.num_inputs]
    Weights weights;
    int num_rows;
    int num_same;
};

// Rows of x.
struct TakeRows {
    int type;
    Untyped x;        // [_, width]
    Buffer<int> ids;  // [num_rows]
    Untyped y;        // out [num_rows, width]
    int num_rows;
    int width;
};

// The columns [first, first + count) of x become the columns of y from `first_of_y` on.
struct CopyColumns {
    int type;
    Untyped x;  // [num_rows, width]
    Untyped y;  // [num_rows, width_of_y], out
    int num_rows;
    int width;
    int first;
    int count;
    int width_of_y;
    int first_of_y;
};

// Numbers of the row's type as float32, or the other way round.
struct Convert {
    int type;
    Untyped x;             // [count]
    Buffer<float> floats;  // [count]
    long long count;
    int is_to_float;
};

// For each group of consecutive columns of a row: RMSNorm, or LayerNorm if `is_centered`. Of x, or of the sum x + other, which
// is also written to `total`. Rows of x and y have `stride` numbers, of which those from `first` on are normalized.
struct Norm {
    int type;
    Untyped x;             // [num_rows, stride]
    Untyped other;         // [num_rows, stride]; empty: none
    Untyped total;         // [num_rows, stride], out; empty: if there is no other
    Untyped y;             // out [num_rows, stride]
    Buffer<float> weight;  // [groups * width]
    Buffer<float> bias;    // [groups * width]; empty: none
    float epsilon;
    int num_rows;
    int stride;
    int first;
    int groups;
    int width;  // of a group
    int is_centered;
};

// Norm of each group with a gate (ops/modules.py); without a weight, or without a gate, only the other.
struct GateAndNorm {
    int type;
    Untyped x;             // [num_rows, width]
    Untyped gate;          // [num_rows, gate_stride]; empty: none
    Untyped y;             // out [num_rows, width]
    Buffer<float> weight;  // [weight_width]: of one group, or of all; empty: no norm
    float epsilon;
    int num_rows;
    int width;
    int group;
    int weight_width;
    int gate_stride;
    int gate_first;
    int is_gated_first;
    int is_sigmoid;
};

// Causal convolution of each channel (ops/modules.py, Convolution). Places in a slot are in bytes.
struct Convolve {
    int type;
    States states;
    Untyped x;             // [num_rows, stride]
    Untyped y;             // out [num_rows, channels]
    Buffer<float> weight;  // [taps, channels]
    Buffer<float> bias;    // [channels]; empty: none
    int num_rows;
    int stride;
    int first;
    int channels;
    int taps;
    int is_activated;
    int is_gated;
    int window_at;
    int log_at;
};

// Gated delta rule, or state spaces if there are no betas (ops/modules.py, DeltaRule and StateSpaces).
struct Recur {
    int type;
    States states;
    Untyped x;             // [num_rows, x_stride]: queries | keys | values, or values | keys | queries
    Untyped decays;        // [num_rows, decay_stride]
    Untyped betas;         // [num_rows, beta_stride]; empty: state spaces
    Untyped y;             // out [num_rows, heads * value_dim]
    Buffer<float> rates;   // [heads]
    Buffer<float> biases;  // [heads * num_decays]
    Buffer<float> skips;   // [heads]; empty: delta rule
    float epsilon;
    float least;
    float most;
    int num_rows;
    int x_stride;
    int decay_stride;
    int beta_stride;
    int first;
    int decay_first;
    int beta_first;
    int heads;
    int key_heads;
    int key_dim;
    int value_dim;
    int num_decays;  // of a head
    int matrix_at;
    int log_at;
    int log_width;
};

// activation(x), or activation(gate) * up of rows gate | up.
struct Activate {
    int type;
    Untyped x;  // [num_rows, (1 + is_gated) * width]
    Untyped y;  // out [num_rows, width]
    int num_rows;
    int width;
    int is_gated;
    int activation;  // as ACTIVATIONS in ops/modules.py
    float alpha;     // of `GateClamp`
    float limit;     // of `GateClamp`; 0: none
};

// x * factor + other.
struct ScaleAndAdd {
    int type;
    Untyped x;      // [count]
    Untyped other;  // [count]; empty: none
    Untyped y;      // out [count]
    float factor;
    long long count;
};

// x times its factors.
struct Multiply {
    int type;
    Untyped x;        // [num_rows, width]
    Untyped factors;  // [_]: num_factors for each row, or one for all
    Untyped y;        // out [num_rows, width]
    int num_rows;
    int width;
    int num_factors;  // of a row: width, 1, or 0: one for all rows
};

// Mean of `group` consecutive rows.
struct MeanRows {
    int type;
    Untyped x;  // [num_rows * group, width]
    Untyped y;  // out [num_rows, width]
    int num_rows;
    int group;
    int width;
};

// x * factor + shift between the lowest and the highest value of each column: columns of y from `first` on.
struct AdjustColumns {
    int type;
    Untyped x;            // [num_rows, width]
    Untyped y;            // [num_rows, width_of_y], out
    Buffer<float> rules;  // [4, width_of_y]: factors, shifts, lowest and highest values
    int num_rows;
    int width;
    int first;
    int width_of_y;
};

// Features replace rows of x, or are added to them.
struct TakeFeatures {
    int type;
    Untyped x;                       // [num_rows, width], in and out
    Buffer<unsigned char> features;  // [num_features, row_bytes], float32 or bfloat16
    Buffer<int> feature_rows;        // [num_rows]: place of each row's features, -1: none
    int num_features;
    int row_bytes;
    int are_bfloat16;
    int first;  // column
    int num_rows;
    int width;
    int are_added;
};

// Writes values to places.
struct Scatter {
    Buffer<int> to;      // [_], out
    Buffer<int> places;  // [count]
    Buffer<int> values;  // [count]
    int count;
};

// The choice `index` of each row, with the weight 1; its own weight becomes a factor.
struct Choose {
    int type;
    Buffer<int> ids;        // [num_rows, num_chosen]
    Buffer<float> weights;  // [num_rows, num_chosen]
    Buffer<int> chosen;     // out [num_rows, 1]
    Buffer<float> ones;     // out [num_rows, 1]
    Untyped factors;        // out [num_rows, 1]
    int num_rows;
    int num_chosen;
    int index;
};

// The best experts of each row, as defined by `RoutingRule` in ops/modules.py.
struct Route {
    Buffer<float> logits;      // [num_rows, num_experts]
    Buffer<float> correction;  // [num_experts]; empty: none
    Buffer<float> scales;      // [num_experts], factors of the weights; empty: none
    Buffer<int> expert_sets;   // [num_rows]; empty: the router is for all rows
    Buffer<int> num_tokens;    // [1]: rows from this one on are padding; empty: there is none
    Buffer<int> ids;           // out [num_rows, num_chosen]
    Buffer<float> weights;     // out [num_rows, num_chosen]
    float added_to_sum;
    float smallest_sum;
    float factor;
    int num_rows;
    int num_experts;
    int num_chosen;
    int num_groups;
    int num_chosen_groups;
    int num_best;  // experts of a group that count for it: 1 or 2
    int has_sigmoid;
    int is_normalized;
    int set;
};

// Lists the choices of each expert one after another, and the expert of each tile of 16. A choice is row * num_chosen + number.
struct Dispatch {
    Buffer<int> ids;           // [num_choices]; -1: none
    Buffer<int> offsets;       // out [num_experts + 1]: where each expert's choices begin
    Buffer<int> choices;       // out [num_choices]
    Buffer<int> tile_experts;  // out [max_tiles]; -1: none
    Buffer<int> tile_firsts;   // out [max_tiles]: of choices
    int num_choices;
    int num_experts;
    int max_tiles;  // at least num_choices / 16 + num_experts
};

// A linear of each expert over its choices: row `choice / x_divisor` of x becomes row `choice` of y.
struct ExpertLinear {
    int type;
    Untyped x;                 // [_, weights.num_inputs]: of each row, or of each choice
    Untyped y;                 // [_, weights.num_outputs], out: of each choice
    Buffer<int> offsets;       // as Dispatch made them, and the next three
    Buffer<int> choices;       // [_]
    Buffer<int> tile_experts;  // [max_tiles]
    Buffer<int> tile_firsts;   // [max_tiles]
    Weights weights;           // of all experts, one after another; num_outputs are those of one
    Buffer<float> bias;        // [_, weights.num_outputs]: of all experts; empty: none
    int max_tiles;
    int x_divisor;
};

// Adds the results of a row's choices in order, each times its weight, and then the shared ones.
struct Combine {
    int type;
    Untyped results;        // [num_rows, num_chosen, width]
    Untyped shared;         // [num_rows, width]; empty: none
    Untyped y;              // out [num_rows, width]
    Buffer<int> ids;        // [num_rows, num_chosen]; -1: none
    Buffer<float> weights;  // [num_rows, num_chosen]
    int num_rows;
    int num_chosen;
    int width;
};

// Samples a token for each row, with its log-probability and rank. For sequences with the flag DRAWN, the token is written to
// their slots.
struct Sample {
    Buffer<float> logits;          // [num_rows, vocab]
    Buffer<int> logit_row_ids;     // [num_rows]: which of the rows that are kept each is
    Buffer<int> row_ids;           // [_] of rows that are kept: which of the step's each of these is
    Buffer<int> row_slots;         // [_] of the step's rows
    Buffer<int> positions;         // [_] of rows that are kept; the token's is the next
    Buffer<int> sequence_offsets;  // [num_slots + 1], of rows that are kept
    Buffer<int> sequence_slots;    // [num_slots]
    Buffer<int> context_lengths;   // [num_slots]
    Buffer<int> sent;              // [1 + 5 * num_slots], as Derive has it
    Buffer<int> slots;             // [num_slots + 1, num_positions + num_blocks + 11], as Derive; settings, tokens, lengths
    Buffer<int> drawn;             // out [3, num_rows]: token, bits of its log-probability, of the raw logits, and rank
    int num_rows;
    int vocab;
    int num_slots;
    int num_positions;  // of a slot's tokens
    int num_blocks;     // of a slot's table
};

// Writes the values that the host sent to the slots' memory, as Derive does.
struct WriteSent {
    Buffer<int> sent;   // [1 + 5 * num_slots], as Derive has it
    Buffer<int> slots;  // [_], in and out
    int num_slots;
};

// Rows that get draft tokens, as ops/layer_rows.py describes them.
struct Drafts {
    Buffer<int> columns;  // [5, max_drafted]: slots, positions of their last tokens, draft tokens, first keys, states
    Buffer<int> slots;    // [num_slots + 1, num_positions + num_blocks + 1], as Derive: tokens
    int max_drafted;
    int num_slots;
    int num_positions;  // of a slot's tokens
    int num_blocks;     // of a slot's table
};

// Inputs of the draft token `number` of each row; rows without it are those of the dummy slot.
struct DraftRows {
    Drafts drafts;
    Buffer<int> rows;  // out [5, num_rows]: tokens, positions, slots, first keys, positions after them
    int number;
    int num_rows;
};

// The likeliest token of each row becomes its draft token `number`.
struct PutDraft {
    Drafts drafts;
    Buffer<float> logits;  // [num_rows, vocab]
    int num_rows;
    int vocab;
    int first;  // of the rows that have these logits
    int number;
};

// Inputs of a step's kept rows, as entries, and the hidden state before each; rows without an entry are those of the dummy slot.
struct EntryRows {
    int type;
    Untyped hidden;                // [num_rows, width] of the kept rows
    Untyped states;                // [num_slots + 1, group, width]
    Buffer<int> columns;           // [2, num_slots]: first position that gets an entry, state
    Buffer<int> sequence_offsets;  // [num_slots + 1], of rows that are kept
    Buffer<int> row_ids;           // [num_rows] of rows that are kept: which of the step's each of these is
    Buffer<int> token_ids;         // [_] of the step's rows
    Buffer<int> positions;         // [_] of the step's rows
    Buffer<int> row_slots;         // [_] of the step's rows
    Buffer<int> rows;              // out [5, num_rows], as DraftRows
    Untyped before;                // out [num_rows, width]
    int num_rows;
    int width;
    int num_slots;
    int group;
};

// The hidden states of the last rows of each sequence become the states of its group.
struct KeepStates {
    int type;
    Untyped hidden;                // [num_rows, width] of the kept rows
    Untyped states;                // [num_slots + 1, group, width], out
    Buffer<int> columns;           // [2, num_slots]: first position that gets an entry, state
    Buffer<int> sequence_offsets;  // [num_slots + 1], of rows that are kept
    int num_rows;
    int width;
    int num_slots;
    int group;
};

// Sampled tokens, followed by those that their rows read.
struct ReadTokens {
    Buffer<int> drawn;         // [num_lines, num_rows]; empty: none
    Buffer<int> row_ids;       // [num_rows]: which of the rows that are kept each is
    Buffer<int> kept_row_ids;  // [_] of rows that are kept: which of the step's each of these is
    Buffer<int> token_ids;     // [_] of the step's rows
    Buffer<int> lines;         // out [num_lines + 1, num_rows]
    int num_rows;
    int num_lines;
};

// The first `count` draft tokens of each row.
struct DraftTokens {
    Drafts drafts;
    Buffer<int> tokens;  // out [num_rows, count]
    int num_rows;
    int count;
};

// Columns that ranks have of a matrix, side by side on each of them. The lent memory has two halves, each with a line (the first
// and last column of its rank) and the rank's columns.
struct Gather {
    int type;
    Untyped x;  // [num_rows, own]: this rank's columns, from `begin` on
    Untyped y;  // out [num_rows, width]
    Windows windows;
    int num_rows;
    int own;
    int begin;
    int width;
    int half_bytes;
};

// Sends a part of this rank's rows to all ranks, and takes from theirs those with an expert that this rank computes.
struct ShareRows {
    int type;
    Offer offer;
    Untyped x;                     // [num_rows, width]
    Buffer<int> ids;               // [num_rows, num_chosen]; -1: none
    Buffer<int> slots_of_rows;     // [num_rows]: adapters, -1: none; empty: the experts have none
    Buffer<int> owners;            // [num_experts, 1 + offer.windows.num_ranks]: as engine/parallel/placement.py makes them
    Buffer<unsigned char> counts;  // [8 * num_experts]: choices of each expert that this rank ever sent; empty: not counted
    Untyped rows;           // out [offer.windows.num_ranks * most_rows, width]; only those with such an expert are written
    Buffer<int> own_ids;    // out [offer.windows.num_ranks * most_rows, num_chosen]; -1: computed elsewhere
    Buffer<int> own_slots;  // out [offer.windows.num_ranks * most_rows]
    int num_rows;
    int width;
    int num_chosen;
    int num_experts;
    int first;  // of the rows that this rank sends
    int num_sent;
    int most_rows;  // that any rank sends
};

// Writes the results of choices that this rank computed to the ranks that have their rows.
struct ReturnResults {
    int type;
    Offer offer;
    Untyped results;      // [offer.windows.num_ranks * most_rows, num_chosen, width]
    Buffer<int> own_ids;  // [offer.windows.num_ranks * most_rows, num_chosen]; -1: computed elsewhere
    int width;
    int num_chosen;
    int most_rows;
};

// Arithmetic only: 256 threads of each block compute num_steps steps in each of 8 chains. A step is 4 products of a thread in
// float32, otherwise one [16, 16] [16, 8] of a warp.
struct Peak {
    int type;
    Buffer<float> sums;  // out [num_blocks, 256]
    int num_blocks;
    int num_steps;
};

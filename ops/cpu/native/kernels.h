// Kernels of one instruction set over a range of rows, without threads.
//
// Each variant is one translation unit (portable.cpp, avx2.cpp) that includes kernels.inc under its own compiler flags; some
// use kernels of another one (avx512bf16.cpp). `variants()` (variants.h) returns those that the processor supports
// (processor.h). A new variant is one more such unit, its flags in CMakeLists.txt and its line in processor.h.
//
// Every kernel computes the same bits for a row alone, in a batch and at any position in it: the order of each reduction
// depends only on the shape of the operands. Variants may differ from each other; `families` says which agree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokamak::cpu {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i64 PANEL = 16;  // outputs side by side in packed weights
constexpr i64 LINE =
    64;  // bytes of a panel's weights for one input (float32), two (bfloat16), four (int8) or eight (int4, float4)
constexpr i64 KEY_PANEL = 16;                               // slots side by side in the KV cache
constexpr i64 LEAST_FOLDED_GROUP = 32, FOLDED_BLOCK = 128;  // inputs of a multiplier, and of an integer sum
constexpr i64 MAX_TASK_ROWS = 192;  // rows of one call of most linears: a block of their inputs stays in the L2 cache
constexpr i64 KEY_SPLIT = 64;       // keys of a split, counted from position 0; as in ops/table.py

enum class Activation : i32 { SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, TANH, SIGMOID, COUNT };

// What becomes of gate | up, or of plain columns: activation(gate) * up, or activation(x). With a limit, gate is limited from
// above and up from both sides, and the result is (up + 1) * gate * sigmoid(alpha * gate).
struct Gate {
    Activation activation;
    bool is_gated;
    float alpha, limit;  // limit 0: none
};

enum class WeightKind : i32 { FLOAT32, BFLOAT16, INT8, INT4, FLOAT4, COUNT };  // like WEIGHT_KINDS in ops/cpu/packing.py

// Parts that can use another variant than the rest (`Engine::select_part`): the linears of each kind of weights, which come
// first, in the order of WeightKind, and attention.
enum class Part : i32 { ATTENTION = static_cast<i32>(WeightKind::COUNT), COUNT };
constexpr int NUM_PARTS = static_cast<int>(Part::COUNT);
inline constexpr const char *PART_NAMES[NUM_PARTS] = {"float32", "bfloat16", "int8", "int4", "float4", "attention"};

// Numbers in 16 bits are widened exactly: GGUF stores halves, weights that are quantized here have bfloat16, so that any scale
// fits.
enum class ScaleKind : i32 { FLOAT32, FLOAT16, BFLOAT16, COUNT };  // like SCALE_DTYPES in ops/cpu/int_packing.py

// Scales of groups, or their offsets.
struct Scales {
    const void *values;  // or null
    ScaleKind kind;

    explicit operator bool() const { return values != nullptr; }
    // From this place on.
    Scales from(i64 place) const {
        const i64 size = kind == ScaleKind::FLOAT32 ? 4 : 2;
        return {values == nullptr ? nullptr : static_cast<const char *>(values) + place * size, kind};
    }
};

using Activating = void (*)(float *y, const float *x, const Gate &gate, i64 width, i64 begin, i64 end);

struct LinearShape {
    float *y;                        // [rows, outputs]
    const float *x;                  // [rows, inputs]
    void *prepared;                  // rows * prepared_bytes: the result of `prepare` for x
    const void *weight;              // packed: panels of lines
    Scales scales;                   // of integers: [panels][groups][PANEL]; without groups, float32 [panels][PANEL]
    const std::int8_t *multipliers;  // of int4: [panels][groups][PANEL], -15 to 16 without 0, or null
    Scales offsets;                  // [panels][groups][PANEL] of integers, or none
    const float *bias;               // [outputs, padded to whole panels] or null
    i64 inputs, outputs;
    i64 group_size;  // inputs of a scale or multiplier, 0: all
    i64 rows;        // of the op
    // Of experts: the row of x for each row; null: the rows of x in order
    const i32 *row_ids = nullptr;
    void *quantized = nullptr;  // all rows of x as returned by `quantize`; null: `prepare` reads x
    // If given, outputs are gate | up of whole panels, y is [rows, outputs / 2] of `activate`, and panels are those of the gate
    const Gate *gate = nullptr;
    Activating activate = nullptr;

    i64 x_row(i64 row) const { return row_ids == nullptr ? row : row_ids[row]; }
    i64 y_width() const { return gate == nullptr ? outputs : outputs / 2; }
};

// y = x W + b for one kind of weights. Integers represent scale * (q - zero) - offset: the zero of stored int4 is 8 without
// offsets and 0 with them; that of int8 is 128. Multipliers fold the groups' scales into the integers, scale * (multiplier * (q
// - 8)), where multiplier * (q - 8) is an int8: sums are integers over FOLDED_BLOCK inputs, and activations are quantized in
// such blocks for any groups. FLOAT4 has codes of E2M1 in lines like those of int4, with the scales of their doubled values.
struct LinearKernels {
    // bytes of a prepared row; 0: `linear` reads x itself, and `prepare` is not called
    i64 (*prepared_bytes)(const LinearShape &shape);
    void (*prepare)(const LinearShape &shape, i64 row_begin, i64 row_end);
    void (*linear)(const LinearShape &shape, i64 row_begin, i64 row_end, i64 panel_begin, i64 panel_end);
    // Rows are divided into n tiles of at most this size, as even as possible: tile i begins at rows * i / n.
    i64 tile_rows = 1;
    // For integer activations: the work of `prepare` that ops on the same row share. Bytes of a row; null: there is none
    i64 (*quantized_bytes)(const LinearShape &shape) = nullptr;
    void (*quantize)(const LinearShape &shape, i64 row_begin, i64 row_end) = nullptr;  // rows of x
    i64 task_rows = MAX_TASK_ROWS;                                                     // rows of one call of `linear`, at most
    bool has_gate = false;  // `linear` can activate its results; it reads x only in `prepare`
};

// Outputs [first, first + outputs) of a linear that adapters may change, with computed panels [panel_begin, panel_end); its
// column in the table of ranks, and the offsets of its matrices in a slot.
struct AdaptedPart {
    i64 first, outputs, index, a, b, panel_begin, panel_end;
};

constexpr i64 MAX_ADAPTER_RANK = 512;

// y += (x A^T) B^T by the row's adapter: engine/checkpoint/adapters/layout.py defines the layout.
struct AdaptShape {
    float *y;                  // [rows, outputs]
    const float *x;            // [rows, inputs]
    const i32 *row_ids;        // [rows]: rows of x; null: those of y
    const i32 *adapter_slots;  // [rows], -1: none
    const float *slots;        // of `slot_floats` each
    const i32 *ranks;          // [slots][modules]
    i64 slot_floats, modules, inputs, outputs;
    const AdaptedPart *parts;
    i64 num_parts;
};

// Numbers in a checkpoint: [rows, columns] with any strides, in numbers.
struct Matrix {
    const void *values;  // float32, or bfloat16
    bool is_bfloat16;
    i64 row_stride, column_stride, rows, columns;
};

// Conversion of a panel of weights to integers: int8, or int4 with multipliers.
struct PanelRounding {
    const float *weights;      // [inputs, padded to whole lines][PANEL]
    const float *importances;  // as in PackedIntegers, 0 up to whole lines
    i64 inputs, group_size;
    WeightKind kind;
    std::uint8_t *lines;
    float *scales;             // int8: [groups][PANEL], int4: [PANEL]
    bool has_narrow_scales;    // int8: they are numbers of bfloat16
    std::int8_t *multipliers;  // int4: [groups][PANEL]
    float *group_scales;       // int4: scratch, [2][groups][PANEL]
};

// Layout of the keys and values of one layer, each as [blocks][kv_heads][chunks]. A chunk is min(block_size, KEY_PANEL) slots:
//
//             keys [..]                 values [..]
//   FLOAT32   [dim][slots]              [slots][dim]
//   BFLOAT16  [dim / 2][slots][2]       [slots / 2][dim][2], of a single slot [dim]
//   INT8      [dim][slots]              [slots][dim], then the float32 scales of the slots
enum class KvType : i32 { FLOAT32, BFLOAT16, INT8, COUNT };

struct CacheLayout {
    KvType type;
    i64 block_size, head_dim, chunk_slots, chunk_bytes, head_bytes, block_bytes;
};

struct RotationShape {
    float *queries;                          // [rows, heads * head_dim]
    const float *qkv;                        // the first of `heads` queries of each row, with rows of `row_floats`
    i64 row_floats, keys_at, values_at;      // floats from row to row; offsets of its `kv_heads` keys and values
    char *keys, *values;                     // of the layer, from the first of `kv_heads` on
    const i32 *positions, *slots;            // of each row
    const float *cosines, *sines;            // [positions, head_dim]
    const i32 *partners;                     // [head_dim]
    const float *query_weight, *key_weight;  // [head_dim] or null: heads are not normalized
    const float *value_weight;               // likewise for values
    float epsilon;
    bool is_normalized_after;  // after the rotation, not before it
    i64 heads, kv_heads, head_dim;
    CacheLayout layout;
};

constexpr i64 SPLIT_PANELS = KEY_SPLIT / KEY_PANEL;

// A chunk of the cache, copied for the kernels to slots [offset, offset + layout.chunk_slots) of a panel.
struct ChunkShape {
    const char *from;  // keys or values
    char *to;          // the panel: like a chunk of KEY_PANEL slots in the type of products
    CacheLayout layout;
    i64 offset, row_bytes;  // of values: distance of slots, or pairs of slots
};

// Multi-head latent attention (DeepSeek-V2, 2024): the cache has a latent and one rotated key of each position for all heads,
// in layouts with chunks of a single slot, like values. `latents.head_dim` and `keys.head_dim` are their sizes.
struct LatentShape {
    float *y;              // [rows, heads * (plain_dim + keys.head_dim)]: queries, the rotary part of each head rotated
    const float *queries;  // the first of `heads` of each row, with rows of `row_floats`: the same before rotation
    i64 row_floats;
    const float *compressed;  // [rows, latents.head_dim + keys.head_dim]
    char *key_cache, *latent_cache;
    const i32 *positions, *slots;  // of each row
    const float *cosines, *sines;  // [positions, keys.head_dim]
    const i32 *partners;           // [keys.head_dim]
    const float *weight;           // [latents.head_dim]: latents are normalized
    float epsilon;
    i64 heads, plain_dim;
    CacheLayout keys, latents;
};

// KEY_PANEL slots, copied for `attend`: keys are the rotated key, padded to `key_room` numbers, then the latent; values are the
// latent.
struct LatentPanel {
    const char *keys[KEY_PANEL], *latents[KEY_PANEL];  // row of each slot; null: not visible to any query, zeros are written
    KvType type;
    i64 rotary_dim, latent_dim, key_room;
    char *to_keys, *to_values;  // panels in the type of products; padding is not written
    i64 value_bytes;            // distance of slots, or pairs of slots
};

// One split of keys for a tile of queries that share a KV head. `dim` is head_dim padded to whole panels.
struct SplitShape {
    const char *queries;                                    // [num_queries] rows of `query_bytes` bytes, written by take_query
    const char *keys[SPLIT_PANELS], *values[SPLIT_PANELS];  // panels of KEY_PANEL slots; any memory if not visible to any query
    const char *next_values[SPLIT_PANELS], *next_keys[SPLIT_PANELS];  // prefetched after the keys, and after the values
    i64 next_bytes;                                                   // of each of them, in the cache
    // With many queries also prefetched: lines of distant rows, [next_line, next_line + num_next_lines)
    const char *next_rows = nullptr;
    i64 next_line = 0, num_next_lines = 0, lines_of_row = 1, row_stride = 0;  // bytes from one row to the next
    KvType format;                                                            // of the panels
    bool has_scales;                                                          // of keys and values, below
    const float *key_scales, *value_scales;                                   // [KEY_SPLIT], finite where keys are seen
    i64 value_bytes;                                                          // distance of slots, or pairs of slots
    const i32 *begins, *ends;  // [num_queries] visible keys of each query in the split; may be empty
    bool is_whole;             // all are visible to each
    i64 num_queries, query_bytes, head_dim, dim;
    float softcap = 0;                // times log2(e), as scores are; 0: none
    float *scores;                    // [num_queries, SCORE_STRIDE] scratch
    float *factors, *next_factors;    // [num_queries, padded to whole panels] scratch
    bool joins;                       // adds to the sums of earlier splits; otherwise overwrites
    float *largest, *sums, *outputs;  // [num_queries], [num_queries], [num_queries, output_stride]
    i64 output_stride;
};

constexpr i64 PRODUCT_PIECE = 32;  // elements of a head, or keys, that tiles multiply at a time
constexpr i64 MANY_QUERIES = 13;   // of a tile, from which copying a split for the kernels pays
constexpr i64 MAX_HEAD_DIM = 512;
// Distance of queries, and of outputs, in floats: fixed for heads of up to NEAR_DIM elements, so that a micro-kernel addresses
// all its queries from one register. Not a power of two.
constexpr i64 NEAR_DIM = 128, NEAR_STRIDE = NEAR_DIM + PANEL;
constexpr i64 MAX_GROUP = 1024;         // query heads per KV head
constexpr i64 MAX_TILE_QUERIES = 1024;  // of one call of `attend`
static_assert(MAX_GROUP <= MAX_TILE_QUERIES);
constexpr i64 SCORE_STRIDE = KEY_SPLIT + PANEL;  // rows at a power of two would be in the same cache sets

// Recurrent layers. A slot of the state arena holds what a layer carries from token to token of a sequence: the last inputs of a
// causal convolution, and a matrix float32 [heads, key_dim, value_dim]. A step reads one slot and writes others, never in place.

// Rows [first, first + count) of one sequence, of which those from `certain` on are drafts. Times count the rows applied to the
// state in `read`: first `replayed` rows of its log, then the sequence's own.
struct StateRun {
    i64 first, count, certain, replayed;
    i64 kept;            // time at which the state goes to `keep`; -1: never
    const char *read;    // slots
    char *write, *keep;  // or null: not written

    i64 written() const { return replayed + certain; }  // time at which it goes to `write`; drafts go to the log of `write`
};

constexpr i64 MAX_TAPS = 16;  // of a convolution

// Convolution of each channel with its own weights: y = the sum of weight * input over the last `taps` rows.
struct ConvolutionShape {
    float *y;  // [rows, channels]
    i64 channels, taps;
    const float *weight, *bias;  // [taps, channels], the oldest row first; [channels] or null
    bool is_activated;           // by silu
    const float *factors;        // results are multiplied by these, `factor_floats` from one row to the next; or null
    i64 factor_floats;
};

// The state of a head becomes decay * state + key delta^T, and its result is state^T query.
//   delta rule: delta = beta * (value - (decay * state)^T key), with normalized keys and queries, beta = sigmoid(betas) and
//               decay = e^(rate * softplus(decays + bias))
//   state space: delta = dt * value, with dt = softplus(decays + bias) within limits and decay = e^(rate * dt); the result
//                has skip * value in addition
// A row of the log has keys [key_heads, key_dim], deltas [heads, value_dim], and decays [heads] or [heads, key_dim].
struct RecurrenceShape {
    bool is_delta_rule, is_by_key;    // each key has its own decay
    float *y;                         // [rows, y_floats], from `first_head` on
    const float *x, *decays, *betas;  // distances of rows:
    i64 y_floats, x_floats, decay_floats, beta_floats;
    i64 queries_at, keys_at, values_at;   // of the first head in a row of x
    const float *rates, *biases, *skips;  // [heads]; biases by key [heads, key_dim]
    float epsilon, least, most;           // of norms; limits of dt
    i64 heads, key_heads, key_dim, value_dim, first_head;
    i64 matrix_at, log_at, log_bytes;  // in a slot; size of a row of the log

    i64 deltas_at() const { return key_heads * key_dim; }  // floats in a row of the log
    i64 decays_at() const { return deltas_at() + heads * value_dim; }
};

constexpr i64 STATE_ROWS = 32;                              // prepared together
constexpr i64 STATE_COLUMNS = 64, MAX_STATE_COLUMNS = 256;  // unit of division of a head among tasks; most of one task

// Floats of scratch memory for a task with `columns` of a head.
inline i64 recurrence_floats(const RecurrenceShape &shape, i64 columns) {
    const i64 room = (columns + STATE_COLUMNS - 1) / STATE_COLUMNS * STATE_COLUMNS, keys = (shape.key_dim + 15) / 16 * 16;
    return room * (shape.key_dim + 1) + 5 * STATE_ROWS * keys;
}

// norm(x) * activation(gate), or norm(x * activation(gate)), for each `group` numbers of a row. Without a weight there is no
// norm; the gate may be null, too.
struct GatedNormShape {
    float *y;
    const float *x, *gate, *weight;
    i64 y_floats, x_floats, gate_floats;  // distances of rows
    i64 groups, group, weight_step;       // of the weights, from one group to the next
    float epsilon;
    bool is_gated_first, is_sigmoid;  // otherwise silu
};

constexpr i64 SAMPLING_BLOCK = 1024;  // logits that are reduced together, counted from the start of their row

// A row of logits, and the results for each of its blocks. NaN is larger than any number. With a mask, logits without a bit
// count as -infinity; they are not stored.
struct LogitScan {
    const float *logits;        // [count]
    const std::uint32_t *mask;  // a bit each, for structured output; null: all
    i64 count;
    float scale;          // of the weights e^((logit - block's largest) * scale); 0: no sums
    float *lane_largest;  // [blocks, lanes]
    float *largest;       // [blocks]
    float *sums;          // [blocks] of weights; 0 where the largest is not finite
};

struct SamplingKernels {
    void (*scan)(const LogitScan &scan, i64 block_begin, i64 block_end);
    // weights[i] = e^((logits[i] - largest) * scale)
    void (*weigh)(float *weights, const float *logits, float largest, float scale, i64 count);
    // distances[i] = largest - logits[i], which are at least 0; and weights as above; the widest distance
    float (*measure)(float *distances, float *weights, const float *logits, float largest, float scale, i64 count);
    // token ids, ascending, and logits of those not less than `bound` (so NaN too); the number of them. After
    // `scan`. There must be room for `lanes` more.
    i64 (*gather)(i32 *token_ids, float *values, const LogitScan &scan, float bound);
    i64 (*count_above)(const LogitScan &scan, float bound);  // logits larger than `bound`. After `scan`.
    // left[i] = logits[i] if bit i of `mask` is set, otherwise -infinity; returns whether any is larger than that
    bool (*leave)(float *left, const float *logits, const std::uint32_t *mask, i64 count);
};

// Arithmetic units. For profiles: each turn of one is a number of operations (a multiply-add is two) in registers only.
enum class Unit : i32 { FLOAT32_FMA, BFLOAT16_DOT, INT8_DOT, INT4_DOT, BFLOAT16_TILES, INT8_TILES, COUNT };
constexpr int NUM_UNITS = static_cast<int>(Unit::COUNT);
inline constexpr const char *UNIT_NAMES[NUM_UNITS] = {"float32 FMA", "bfloat16 dot",   "int8 dot",
                                                      "int4 dot",    "bfloat16 tiles", "int8 tiles"};

struct Kernels {
    const char *name;
    const char *families[NUM_PARTS];     // per part: variants with the same text give the same bits
    i64 (*units[NUM_UNITS])(i64 turns);  // units of this variant: runs one and returns the number of operations
    i64 lanes;                           // floats of a vector
    bool has_paired_products;            // products are in bfloat16 if the cache is narrower than float32
    bool has_tiled_products;             // in pieces of PRODUCT_PIECE, of bfloat16 keys and values, zero beyond the head
    LinearKernels linears[static_cast<int>(WeightKind::COUNT)];
    // total = x + residual (where there is one), y = norm(total); `total` may be null where `residual` is
    void (*rms_norm)(float *y, float *total, const float *x, const float *residual, const float *weight, float epsilon,
                     i64 width, i64 row_begin, i64 row_end);
    // the same of LayerNorm
    void (*layer_norm)(float *y, float *total, const float *x, const float *residual, const float *weight, const float *bias,
                       float epsilon, i64 width, i64 row_begin, i64 row_end);
    void (*rotate_and_store)(const RotationShape &shape, i64 row_begin, i64 row_end);
    void (*store_latent)(const LatentShape &shape, i64 row_begin, i64 row_end);
    // queries for `attend`: times factor, in the type of products with a cache of this type
    void (*take_query)(char *to, const float *x, float factor, i64 head_dim, KvType type);
    // a chunk of keys or of values into a panel of type `product_type`
    void (*take_keys)(const ChunkShape &chunk);
    void (*take_values)(const ChunkShape &chunk);
    void (*attend[static_cast<int>(KvType::COUNT)])(const SplitShape &shape);  // by the format of panels
    void (*take_latents)(const LatentPanel &panel);
    // joins the next split to (largest, sum, output) of `count` queries; -infinity: none of it is visible
    void (*join)(float *largest, float *sums, float *outputs, const float *next_largest, const float *next_sums,
                 const float *next_outputs, i64 count, i64 stride, i64 dim);
    void (*finish)(float *y, const float *output, float sum, i64 head_dim);
    // x [rows, 2 * width] if gated, or [rows, width] -> columns [begin, end) of one row
    Activating activate;
    // logits of one row's experts -> their softmax, or the sigmoid of each
    void (*score)(float *scores, const float *logits, bool is_softmax, i64 count);
    // y = the sum of `count` results in order, each times its weight, and then `shared` if there is one
    void (*combine)(float *y, const float *const *results, const float *weights, i64 count, const float *shared, i64 width);
    void (*adapt)(const AdaptShape &shape, i64 row_begin, i64 row_end);
    // channels [begin, end) of one row of y from the inputs of its taps
    void (*convolve)(const ConvolutionShape &shape, const float *const *inputs, i64 row, i64 begin, i64 end);
    // columns [begin, end) of one head over a sequence's rows; `scratch` has recurrence_floats, at a cache line
    void (*recur)(const RecurrenceShape &shape, const StateRun &run, i64 head, i64 begin, i64 end, float *scratch);
    void (*gated_norm)(const GatedNormShape &shape, i64 row_begin, i64 row_end);
    SamplingKernels sampling;
    void (*quantize_panel)(const PanelRounding &panel);
};

// Whether float additions, also of denormal numbers, run in parallel to 16-bit multiplications.
bool adds_floats_apart();

// Each in its own unit, if it is built. Called only if the processor supports it: `variants()` (variants.h).
Kernels portable_kernels();
Kernels wide_kernels();
Kernels amxemulated_kernels();
Kernels avx2_kernels();
Kernels avxvnni_kernels();
Kernels avx512_kernels();
Kernels avx512bf16_kernels();
Kernels amx_kernels();

}  // namespace tokamak::cpu

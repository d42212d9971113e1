// The ops of a step: kernels over all rows, on the rank's threads. An op is a value with the addresses that it reads and
// writes, fixed at its creation; its number of rows may be read from memory at each run. `run` runs one; a tape is a list.
#pragma once

#include <map>
#include <variant>
#include <vector>

#include "comm.h"
#include "kernels.h"
#include "pool.h"

namespace tokamak::cpu {

// Number of rows: read at `address` if given, so that a recorded op follows the step's inputs.
struct Rows {
    const i32 *address;
    i64 count;
    i64 get() const { return address == nullptr ? count : *address; }
};

// Columns of features [num_rows, feature_bytes] from `at` on, float32 or bfloat16, replace rows of y or are added to them. Row
// id -1: no features; a too large id is an error before anything is read.
struct TakeFeatures {
    float *y;
    const char *features;
    const i32 *feature_rows;
    i64 num_rows, feature_bytes, at, width;
    bool is_bfloat16, is_added;
    Rows rows;
};

// Rows of a matrix [num_rows, width], as float32.
struct Embed {
    float *y;
    const void *weight;
    Scales scales;  // for integers, which are in panels; as in LinearShape
    const std::int8_t *multipliers;
    Scales offsets;
    const i32 *token_ids;
    i64 num_rows, width, group_size;  // of the table; a too large token id is an error before anything is read
    WeightKind kind;
    bool is_in_panels;  // like the weight of a linear with the rows as outputs
    Rows rows;
};

// Of the panels [begin, end) of the outputs.
struct PanelRange {
    i64 begin, end;
};

struct LinearOp {
    WeightKind kind;
    LinearShape shape;
    std::vector<PanelRange> panels;  // computed by this rank; other columns of y are unchanged
    Rows rows;
};

// Adds the terms of the rows' adapters to y, the result of a linear of x.
struct Adapt {
    AdaptShape shape;  // except `parts`
    std::vector<AdaptedPart> parts;
    i64 num_slots;  // a too large slot is an error before anything is written
    Rows rows;
};

struct RmsNorm {
    float *y, *total;
    const float *x, *residual;  // residual and total may both be null
    const float *weight;
    float epsilon;
    i64 width;
    Rows rows;
};

// Like RmsNorm of x - mean(x), with a bias (Ba et al. 2016).
struct LayerNorm {
    float *y, *total;
    const float *x, *residual;
    const float *weight, *bias;
    float epsilon;
    i64 width;
    Rows rows;
};

struct MapSlots {
    i32 *slots;
    const i32 *positions, *row_slots, *block_tables;
    i64 table_width, block_size;
    Rows rows;
};

struct RotateAndStore {
    RotationShape shape;
    Rows rows;
};

// Visible keys of each row, if not just those up to itself: first[row] to last[row], inclusive.
struct KeyBounds {
    const i32 *is_given;  // for this step, read when the op runs
    const i32 *first, *last;
};

// Sequence i has the rows [offsets[i], offsets[i + 1]) at positions [starts[i], ...), and the block table slots[i].
struct Attend {
    float *y;  // [rows, heads * head_dim]
    const float *queries;
    const char *keys, *values;  // of the layer
    const i32 *slots, *offsets, *starts, *block_tables;
    i64 table_width, heads, kv_heads, head_dim, window;
    bool has_chunks;     // windows begin at multiples of their size
    bool is_two_sided;   // windows have as many keys after the query as before it
    float scale;         // of scores; 0: head_dim^-0.5
    float softcap;       // scores become softcap * tanh(score / softcap); 0: they stay
    const float *sinks;  // [heads]: scores without a value, after scale and cap; or null
    CacheLayout layout;
    KeyBounds bounds;
    Rows sequences;
};

struct StoreLatent {
    LatentShape shape;
    Rows rows;
};

// Absorbed queries against latents, and their rotary parts against the rotated keys. Sequences as in Attend.
struct AttendLatents {
    float *y;               // [rows, heads * latents.head_dim]
    const float *absorbed;  // likewise
    const float *queries;   // [rows, heads * (plain_dim + keys.head_dim)]
    const char *key_cache, *latent_cache;
    const i32 *slots, *offsets, *starts, *block_tables;
    i64 table_width, heads, plain_dim;
    float scale;  // of scores
    CacheLayout keys, latents;
    KeyBounds bounds;
    Rows sequences;
};

// x [rows, heads, stride] -> y [rows, heads, outputs]: the first `inputs` numbers of a head times the head's weights.
struct HeadLinear {
    WeightKind kind;    // floats
    LinearShape shape;  // of one head; `weight` is that of the first
    i64 heads, stride, weight_bytes;
    Rows rows;
};

// Rows [queries | keys | values]: queries and keys normalized, each as one vector; with a head_dim, each head minus its mean.
struct NormalizeWide {
    float *y;
    const float *x, *query_weight, *key_weight;
    float epsilon;
    i64 head_dim;
    i64 queries, keys, values;
    Rows rows;
};

// y = x * factor + other, or without the other.
struct ScaleAndAdd {
    float *y;
    const float *x, *other;
    float factor;
    i64 width;
    Rows rows;
};

// y [rows, width]: the means of `count` consecutive rows of x each.
struct MeanRows {
    float *y;
    const float *x;
    i64 count, width;
    Rows rows;
};

// Columns [at, at + width) of y [rows, y_width]: those of x [rows, width], x * factor + shift between low and high. `rules`
// [4, y_width]: factors, shifts, lows and highs of columns of y.
struct AdjustColumns {
    float *y;
    const float *x, *rules;
    i64 width, at, y_width;
    Rows rows;
};

// y = x * factor of the row: columns [begin, end).
struct Multiply {
    float *y;
    const float *x, *factors;
    i64 row_factors;  // of each row: one for each column, or 1; 0: one for all rows
    i64 first;        // the factor of column 0
    i64 width, begin, end;
    Rows rows;
};

struct Activate {
    float *y;
    const float *x;
    Gate gate;
    i64 width;
    i64 begin, end;  // the columns that this rank computes
    Rows rows;
};

// The state arena, and what each sequence of a step does with it: int32 [sequences, 6], as in ops/table.py. Sequence i has the
// rows [offsets[i], offsets[i + 1]) from position starts[i] on. A wrong slot or position is an error before anything is written.
struct States {
    char *memory;
    i64 num_slots, slot_bytes, num_logged;
    const i32 *offsets, *starts, *sequences;
    Rows num_sequences;
};

// y = the convolution of x, of a gated layer C * convolution(B * x) of its rows B | C | x.
struct Convolve {
    ConvolutionShape shape;  // without factors
    const float *x;          // [rows, x_floats] from the first channel on
    i64 x_floats;
    bool is_gated;
    i64 window_at, log_at;           // in a slot: inputs [taps - 1, channels] before the state's position, and rows after it
    std::vector<PanelRange> ranges;  // channels that this rank computes
    States states;
};

struct Recur {
    RecurrenceShape shape;
    i64 own_heads;  // heads that this rank computes
    States states;
};

struct GatedNorm {
    GatedNormShape shape;
    Rows rows;
};

// Writes columns [begin, begin + count) of y from those of x from `from` on; other ranks write theirs. All ranks share y, which
// is complete when the op ends.
struct Gather {
    Comm *comm;
    float *y;  // [rows, y_width]
    const float *x;
    i64 y_width, x_width, begin, from, count;
    Rows rows;
};

// Other collective ops: `kind` of x, `row_bytes` of each row, to y. No wait without rows.
struct Collective {
    Comm *comm;
    CommKind kind;
    void *y;
    const void *x;
    i64 row_bytes;  // for all_to_all: room of y
    int root;       // for a broadcast
    i64 *received;  // for all_to_all: written with the bytes of each rank
    const i64 *sent;
    Rows rows;
};

// Routing: the `chosen` best experts of each row, the best first, and the weights of their results.
struct Route {
    i32 *ids;                          // [rows, chosen]
    float *weights;                    // likewise
    const float *logits;               // [rows, experts]
    const float *correction;           // [experts], added to scores for selection only, or null
    const float *scales;               // [experts], factors of the weights, or null
    i64 experts, chosen;               // `chosen` of the experts in the
    i64 groups, chosen_groups;         // best of equal groups of neighbours, by the sum of
    i64 num_best;                      // one or two best experts of each
    bool is_softmax, is_normalized;    // scores are the softmax, or sigmoids; weights are divided by
    float added_to_sum, smallest_sum;  // max(their sum + added, smallest)
    float factor;                      // and multiplied by this
    const i32 *sets;                   // [rows]: set of experts of each row, or null: this one for all.
    i32 set;                           // Rows of another set have the experts -1 and weights 0,
    const i32 *num_tokens;             // and so have padded rows from here on; null: none
    Rows rows;
};

// One of the choices of each row, alone: its expert with the weight 1, and the weight that it had.
struct Choose {
    i32 *ids;  // [rows]
    float *weights, *factors;
    const i32 *all_ids;  // [rows, chosen]
    const float *all_weights;
    i64 chosen, index;
    Rows rows;
};

// One matrix of each expert, packed one after another.
struct ExpertMatrices {
    WeightKind kind;
    LinearShape first;  // of slot 0, without rows
};

// Memory in which the ranks of a rank group exchange rows and results: for each a line with its number of rows, then for all
// the rows [max_rows, hidden], the results [max_rows, chosen, hidden], the experts [max_rows, chosen] and adapters [max_rows].
struct ExpertWindows {
    Comm *comm;  // of the whole rank group; null: this rank has all experts
    char *memory;
    i64 max_rows;               // of a rank
    int first_rank, num_ranks;  // ranks with the same rows as this one, which divide them
    const i32 *owners;          // [experts, 1 + ranks]: engine/parallel/placement.py
    std::uint64_t *counts;      // [experts]: total rows of this rank sent to each; or null
};

// A rank's part of each expert if several share its matrices, like those of other linears: the activated columns [begin, end),
// the columns [y_begin, y_end) of y, and the panels of these.
struct ExpertShare {
    Comm *comm;        // null: all of it
    float *activated;  // [rows * chosen, inner], mapped by all ranks: each writes its own columns
    std::vector<PanelRange> gate_up, down;
    i64 begin, end, y_begin, y_end;
};

// Terms of adapters for the matrices of experts. Index and offsets of the parts of an expert follow from those of the first.
struct ExpertAdapters {
    const i32 *adapter_slots;  // [rows] of x, -1: none; null: the experts have no adapters
    const float *slots;
    const i32 *ranks;  // [slots][modules]
    i64 num_slots, slot_floats, modules;
    i64 index_step, float_step;              // from one expert to the next
    std::vector<AdaptedPart> gate_up, down;  // of the first expert
};

// y = the sum of down(activation(gate) * up) of each row's experts, each times its weight, and `shared`. Expert -1: none.
struct ApplyExperts {
    float *y;        // [rows, hidden]
    float *results;  // [rows * chosen, hidden], sorted by expert
    const float *x;  // [rows, hidden]
    const i32 *ids;  // [rows, chosen]
    const float *weights;
    const float *shared;  // [rows, hidden] or null
    const i32 *slots;     // [experts]: slot of each one's packed matrices
    ExpertMatrices gate_up, down;
    Gate gate;
    i64 experts, chosen;
    ExpertWindows windows;
    ExpertShare share;
    ExpertAdapters adapters;
    Rows rows;
};

using Op = std::variant<Embed, LinearOp, RmsNorm, LayerNorm, MapSlots, RotateAndStore, Attend, NormalizeWide, ScaleAndAdd,
                        MeanRows, AdjustColumns, Multiply, Activate, Gather, Collective, Route, Choose, ApplyExperts,
                        StoreLatent, AttendLatents, HeadLinear, TakeFeatures, Adapt, Convolve, Recur, GatedNorm>;

// Memory that grows on demand and then loses its contents.
class Memory {
public:
    void *get(i64 num_bytes);  // aligned to a cache line

private:
    std::vector<char> bytes_;
};

// Temporary data of experts.
struct ExpertsMemory {
    Memory quantized, prepared, inner, activated, gathered, results;
    std::vector<i64> begins;                   // [experts + 1]: begin of each one's rows among all
    std::vector<i32> row_ids, places;          // rows of x in the order of the experts; place of each (row, choice) among these
    std::vector<i32> pair_experts, pair_rows;  // of the (row, choice) pairs computed by this rank
    std::vector<i64> row_places, pair_places;  // of those rows and pairs among all of the rank group's
    std::vector<i32> adapter_slots;            // of the sorted pairs; empty: no row has an adapter
};

// Executor of ops, one per process.
class Engine {
public:
    static Engine &get();

    Pool &pool() { return *pool_; }
    const Kernels &kernels() const { return kernels_; }
    const char *variant_of(Part part) const { return parts_[static_cast<int>(part)]; }
    void set_num_threads(int num_threads, const std::vector<int> &cores = {});  // as Pool
    bool select(const char *variant);                  // all from this one; false: this processor has no such variant
    bool select_part(Part part, const char *variant);  // likewise for one part; the rest stays
    float *scratch(int thread, i64 num_floats);        // contents are lost after a task
    void *prepared(i64 num_bytes) { return prepared_.get(num_bytes); }  // contents are lost after an op

    std::vector<float> partial;  // sums of attention splits computed in parallel
    ExpertsMemory experts;

private:
    Engine();
    std::unique_ptr<Pool> pool_;
    Kernels kernels_;               // of the variant `name`, except for parts taken from others
    const char *parts_[NUM_PARTS];  // variant of each part
    std::vector<std::vector<float>> scratch_;
    Memory prepared_;
};

void run(Engine &engine, const Op &op);
void attend(Engine &engine, const Attend &op);
void route(Engine &engine, const Route &op);
void apply_experts(Engine &engine, const ApplyExperts &op);
void attend_latents(Engine &engine, const AttendLatents &op);
void multiply_heads(Engine &engine, const HeadLinear &op);
void adapt(Engine &engine, const Adapt &op);
void convolve(Engine &engine, const Convolve &op);
void recur(Engine &engine, const Recur &op);
void look_up(const Embed &op, i64 row);
void take_features(const TakeFeatures &op, i64 row);
CacheLayout make_layout(KvType type, i64 block_size, i64 block_bytes, i64 head_dim);
CacheLayout make_slot_layout(KvType type, i64 block_size, i64 dim);  // one head, chunks of a single slot

class Tape {
public:
    // `pairs`: indices of linears with results that only the next op, an activation, reads. Where a kernel can, both are one
    // op, which leaves those results unwritten; its bits are the same.
    Tape(std::vector<Op> ops, const std::vector<i64> &pairs);
    void replay();
    void replay_range(i64 begin, i64 end);  // of the ops
    void replay_timed();                    // and measures the time of each op; that of a pair counts for the first
    // Divides each op for so many threads, but runs it on the caller only; its last job is the work outside tasks.
    std::vector<Jobs> replay_alone(int num_threads);
    const std::vector<i64> &times_ns() const { return times_ns_; }

private:
    struct GatedLinear {
        LinearOp linear;
        Gate gate;
    };
    i64 run_at(Engine &engine, i64 index, i64 end);  // returns the index of the next op
    std::vector<Op> ops_;
    std::map<i64, GatedLinear> gated_;  // by the index of the linear
    std::vector<i64> times_ns_;
};

}  // namespace tokamak::cpu

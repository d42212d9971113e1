// The ops of a step: kernels over all rows, on the rank's threads. An op is a value with the addresses that it reads and
// writes, fixed when it is made; how many rows it has it may read from memory each time. `run` runs one; a tape is a list.
#pragma once

#include <variant>
#include <vector>

#include "comm.h"
#include "kernels.h"
#include "pool.h"

namespace tokamak::cpu {

// A number of rows: read at `address` where there is one, so that a recorded op follows the step's inputs.
struct Rows {
    const i32 *address;
    i64 count;
    i64 get() const { return address == nullptr ? count : *address; }
};

// Columns of features [num_rows, feature_bytes] from `at` on, float32 or bfloat16, to the rows of y that have some: in their
// place, or added to them. A row id of -1: the row has none; one beyond them is an error before anything is read.
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
    const float *scales;  // of integers, which are in panels; as in LinearShape
    const std::int8_t *multipliers;
    const float *offsets;
    const i32 *token_ids;
    i64 num_rows, width, group_size;  // of the table; a token id beyond it is an error before anything is read
    WeightKind kind;
    bool is_in_panels;  // as a linear has its weight, whose outputs are the rows
    Rows rows;
};

// Of the panels [begin, end) of the outputs.
struct PanelRange {
    i64 begin, end;
};

struct LinearOp {
    WeightKind kind;
    LinearShape shape;
    std::vector<PanelRange> panels;  // those that this rank computes; the other columns of y stay as they are
    Rows rows;
};

// What the rows' adapters add to y, which a linear made of x.
struct Adapt {
    AdaptShape shape;  // but for `parts`
    std::vector<AdaptedPart> parts;
    i64 num_slots;  // a row with a slot beyond them is an error before anything is written
    Rows rows;
};

struct RmsNorm {
    float *y, *total;
    const float *x, *residual;  // residual and total may be null, both
    const float *weight;
    float epsilon;
    i64 width;
    Rows rows;
};

// As RmsNorm, of what is left of x when its mean is taken off, and with a bias (Ba et al. 2016).
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

// Which keys each row sees, where some row sees others than those up to itself: first[row] to last[row], both included.
struct KeyBounds {
    const i32 *is_given;  // of this step, read when the op runs
    const i32 *first, *last;
};

// Sequence i has the rows [offsets[i], offsets[i + 1]) at positions [starts[i], ...), and the block table slots[i].
struct Attend {
    float *y;  // [rows, heads * head_dim]
    const float *queries;
    const char *keys, *values;  // of the layer
    const i32 *slots, *offsets, *starts, *block_tables;
    i64 table_width, heads, kv_heads, head_dim, window;
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

// x [rows, heads, stride] -> y [rows, heads, outputs]: the first `inputs` of a head's numbers times its own weights.
struct HeadLinear {
    WeightKind kind;    // floats
    LinearShape shape;  // of one head; `weight` is the first one's
    i64 heads, stride, weight_bytes;
    Rows rows;
};

struct Activate {
    float *y;
    const float *x;
    Activation activation;
    bool is_gated;  // x is gate | up; else it is what is activated
    i64 width;
    i64 begin, end;  // the columns that this rank computes
    Rows rows;
};

// Columns [begin, begin + count) of y are this rank's: those of x from `from` on; the other ranks write theirs. y is theirs as
// well: when the op ends it is whole.
struct Gather {
    Comm *comm;
    float *y;  // [rows, y_width]
    const float *x;
    i64 y_width, x_width, begin, from, count;
    Rows rows;
};

// What ranks do together besides: `kind` of x, `row_bytes` of each row, to y. Nobody waits where there are no rows.
struct Collective {
    Comm *comm;
    CommKind kind;
    void *y;
    const void *x;
    i64 row_bytes;  // of an all_to_all: what y has room for
    int root;       // of a broadcast
    i64 *received;  // of an all_to_all: bytes of each rank, written
    const i64 *sent;
    Rows rows;
};

// Scores of the experts for each row: `chosen` of them, the best first, and what their results weigh.
struct Route {
    i32 *ids;                          // [rows, chosen]
    float *weights;                    // likewise
    const float *logits;               // [rows, experts]
    const float *correction;           // [experts], added to scores to choose by, or null
    i64 experts, chosen;               // `chosen` of the experts in the
    i64 groups, chosen_groups;         // best of equal groups of neighbours
    bool is_softmax, is_normalized;    // scores are the softmax, or sigmoids; weights are divided by
    float added_to_sum, smallest_sum;  // max(their sum + added, smallest)
    float factor;                      // and multiplied by this
    const i32 *sets;                   // [rows]: which set of experts is for each, or null: this one is for all.
    i32 set;                           // Rows of another set have the experts -1 and weights 0,
    const i32 *num_tokens;             // and so have those from here on, which are padding; null: there are none
    Rows rows;
};

// One matrix of each expert, packed one after another.
struct ExpertMatrices {
    WeightKind kind;
    LinearShape first;  // that of slot 0, without rows
};

// Where the ranks of a rank group give each other rows and results: of each of them a line with the number of its rows, then of
// all the rows [max_rows, hidden], their experts [max_rows, chosen], and the results [max_rows, chosen, hidden].
struct ExpertWindows {
    Comm *comm;  // of the whole rank group; null: this rank has all experts
    char *memory;
    i64 max_rows;               // of a rank
    int first_rank, num_ranks;  // who have the same rows as this one, and share them out
    const i32 *owners;          // [experts, 1 + ranks]: engine/parallel/placement.py
    std::uint64_t *counts;      // [experts]: rows of this rank that asked for each, in all; or null
};

// What a rank computes of each expert where several share its matrices out, as those of other linears: the activated columns
// [begin, end), the columns [y_begin, y_end) of y, and the panels of these.
struct ExpertShare {
    Comm *comm;        // null: all of it
    float *activated;  // [rows * chosen, inner], which all of the ranks have mapped: each writes its own columns
    std::vector<PanelRange> gate_up, down;
    i64 begin, end, y_begin, y_end;
};

// y = the sum of down(activation(gate) * up) of each row's experts, each times its weight, and `shared`. A row with the experts
// -1 has none.
struct ApplyExperts {
    float *y;        // [rows, hidden]
    float *results;  // [rows * chosen, hidden], of each expert's rows one after another
    const float *x;  // [rows, hidden]
    const i32 *ids;  // [rows, chosen]
    const float *weights;
    const float *shared;  // [rows, hidden] or null
    const i32 *slots;     // [experts]: where each one's matrices are among those that are packed
    ExpertMatrices gate_up, down;
    Activation activation;
    i64 experts, chosen;
    ExpertWindows windows;
    ExpertShare share;
    Rows rows;
};

using Op = std::variant<Embed, LinearOp, RmsNorm, LayerNorm, MapSlots, RotateAndStore, Attend, Activate, Gather, Collective,
                        Route, ApplyExperts, StoreLatent, AttendLatents, HeadLinear, TakeFeatures, Adapt>;

// Memory that grows as it is asked for more; what was in it is then lost.
class Memory {
public:
    void *get(i64 num_bytes);  // at a cache line

private:
    std::vector<char> bytes_;
};

// What applying experts keeps meanwhile.
struct ExpertsMemory {
    Memory quantized, prepared, inner, activated, gathered, results;
    std::vector<i64> begins;                   // [experts + 1]: of each one's rows among all
    std::vector<i32> row_ids, places;          // of x, in the order of the experts; where each (row, choice) is among these
    std::vector<i32> pair_experts, pair_rows;  // of the (row, choice) pairs that this rank computes
    std::vector<i64> row_places, pair_places;  // of those rows and pairs among all of the rank group's
};

// What ops run on, one for the process.
class Engine {
public:
    static Engine &get();

    Pool &pool() { return *pool_; }
    const Kernels &kernels() const { return kernels_; }
    const char *variant_of(Part part) const { return parts_[static_cast<int>(part)]; }
    void set_num_threads(int num_threads, const std::vector<int> &cores = {});  // as Pool
    bool select(const char *variant);                  // all from this one; false: this processor has no such variant
    bool select_part(Part part, const char *variant);  // likewise one part, the rest stays
    float *scratch(int thread, i64 num_floats);        // contents do not outlast a task
    void *prepared(i64 num_bytes) { return prepared_.get(num_bytes); }  // contents do not outlast an op

    std::vector<float> partial;  // what attention keeps of splits that are done in parallel
    ExpertsMemory experts;

private:
    Engine();
    std::unique_ptr<Pool> pool_;
    Kernels kernels_;               // of the variant `name`, but for the parts that were taken from others
    const char *parts_[NUM_PARTS];  // whose each is
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
void look_up(const Embed &op, i64 row);
void take_features(const TakeFeatures &op, i64 row);
CacheLayout make_layout(KvType type, i64 block_size, i64 kv_heads, i64 head_dim);
CacheLayout make_slot_layout(KvType type, i64 block_size, i64 dim);  // one head, chunks of a single slot

class Tape {
public:
    explicit Tape(std::vector<Op> ops) : ops_(std::move(ops)), times_ns_(ops_.size()) {}
    void replay();
    void replay_range(i64 begin, i64 end);  // of the ops
    void replay_timed();                    // and keeps the time of each op
    // Each op cut up for so many threads, but done by the caller alone; its last job is what is not in tasks.
    std::vector<Jobs> replay_alone(int num_threads);
    const std::vector<i64> &times_ns() const { return times_ns_; }

private:
    std::vector<Op> ops_;
    std::vector<i64> times_ns_;
};

}  // namespace tokamak::cpu

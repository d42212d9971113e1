// The ops of a step: kernels over all rows, on the rank's threads. An op is a value with the addresses that it reads and
// writes, fixed when it is made; how many rows it has it may read from memory each time. `run` runs one; a tape is a list.
#pragma once

#include <variant>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace tokamak::cpu {

// A number of rows: read at `address` where there is one, so that a recorded op follows the step's inputs.
struct Rows {
    const i32 *address;
    i64 count;
    i64 get() const { return address == nullptr ? count : *address; }
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

struct LinearOp {
    WeightKind kind;
    LinearShape shape;
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

// Sequence i has the rows [offsets[i], offsets[i + 1]) at positions [starts[i], ...), and the block table slots[i].
struct Attend {
    float *y;  // [rows, heads * head_dim]
    const float *queries;
    const char *keys, *values;  // of the layer
    const i32 *slots, *offsets, *starts, *block_tables;
    i64 table_width, heads, kv_heads, head_dim, window;
    CacheLayout layout;
    Rows sequences;
};

struct Activate {
    float *y;
    const float *x;
    Activation activation;
    i64 width;
    Rows rows;
};

using Op = std::variant<Embed, LinearOp, RmsNorm, MapSlots, RotateAndStore, Attend, Activate>;

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
    void *prepared(i64 num_bytes);                     // contents do not outlast an op

    std::vector<float> partial;  // what attention keeps of splits that are done in parallel

private:
    Engine();
    std::unique_ptr<Pool> pool_;
    Kernels kernels_;               // of the variant `name`, but for the parts that were taken from others
    const char *parts_[NUM_PARTS];  // whose each is
    std::vector<std::vector<float>> scratch_;
    std::vector<char> prepared_;
};

std::vector<const Kernels *> built_variants();  // in the order of `VARIANTS` (processor.h)
std::vector<const Kernels *> variants();        // those that this processor runs, the best last
const Kernels *find_variant(const char *name);  // of these; null: there is none
void run(Engine &engine, const Op &op);
void attend(Engine &engine, const Attend &op);
void look_up(const Embed &op, i64 row);
CacheLayout make_layout(KvType type, i64 block_size, i64 kv_heads, i64 head_dim);

class Tape {
public:
    explicit Tape(std::vector<Op> ops) : ops_(std::move(ops)), times_ns_(ops_.size()) {}
    void replay();
    void replay_timed();  // and keeps the time of each op
    // Each op cut up for so many threads, but done by the caller alone; its last job is what is not in tasks.
    std::vector<Jobs> replay_alone(int num_threads);
    const std::vector<i64> &times_ns() const { return times_ns_; }

private:
    std::vector<Op> ops_;
    std::vector<i64> times_ns_;
};

}  // namespace tokamak::cpu

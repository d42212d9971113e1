#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

#include "clock.h"
#include "progress.h"
#include "tasks.h"
#include "variants.h"

namespace tokamak::cpu {
namespace {

void run_op(Engine &engine, const Embed &op) {
    const i32 *end = op.token_ids + op.rows.get();
    const i32 *outside = std::find_if(op.token_ids, end, [&](i32 row) { return row < 0 || row >= op.num_rows; });
    if (outside != end) {
        throw std::out_of_range("row " + std::to_string(*outside) + " of a table of " + std::to_string(op.num_rows) + " rows");
    }
    for_rows(engine, op.rows.get(), op.width, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) look_up(op, row);
    });
}

void run_op(Engine &engine, const TakeFeatures &op) {
    const i32 *end = op.feature_rows + op.rows.get();
    const i32 *outside = std::find_if(op.feature_rows, end, [&](i32 row) { return row < -1 || row >= op.num_rows; });
    if (outside != end) {
        throw std::out_of_range("row " + std::to_string(*outside) + " of " + std::to_string(op.num_rows) + " features");
    }
    if (std::all_of(op.feature_rows, end, [](i32 row) { return row < 0; })) return;
    for_rows(engine, op.rows.get(), op.width, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) take_features(op, row);
    });
}

// Prepared rows, if `linear` reads these instead of x.
LinearShape prepared(Engine &engine, const LinearOp &op, const LinearKernels &kernels, i64 rows) {
    LinearShape shape = op.shape;
    shape.rows = rows;
    const i64 bytes = kernels.prepared_bytes(shape);
    if (bytes == 0) return shape;
    shape.prepared = engine.prepared(rows * bytes);
    const i64 tiles = divide_up(rows, kernels.tile_rows);
    for_rows(engine, tiles, rows * shape.inputs / tiles,
             [&](i64 begin, i64 end) { kernels.prepare(shape, rows * begin / tiles, rows * end / tiles); });
    return shape;
}

// Division of a linear's panels: groups of panels, in parts. Each part is row_parts tasks.
struct PanelSplit {
    i64 group, groups, parts;
};

// At least `least` parts of groups of panels, if there are enough groups: of the numbers up to twice `least` that give each
// thread the same number of tasks, the one that ends first. `panels_each` is the load of the last thread.
PanelSplit split_groups(i64 panels, i64 group, i64 row_parts, i64 least, i64 threads, i64 &panels_each) {
    const i64 groups = divide_up(panels, group), step = threads / std::gcd(threads, row_parts);
    const auto given = [&](i64 parts) { return divide_up(row_parts * parts, threads) * divide_up(groups, parts) * group; };
    i64 best = std::min(groups, least);
    for (i64 parts = divide_up(least, step) * step; parts <= std::min(groups, 2 * least); parts += step) {
        if (given(parts) < given(best)) best = parts;
    }
    panels_each = given(best);
    return {group, groups, best};
}

// Smaller groups are slower, so only if there are fewer groups than threads.
PanelSplit split_panels(i64 panels, i64 row_parts, i64 least, i64 threads) {
    i64 panels_each, fewer_each;
    PanelSplit best = split_groups(panels, PANEL_GROUP, row_parts, least, threads, panels_each);
    for (i64 group = PANEL_GROUP / 2; group > 0; group /= 2) {
        const PanelSplit split = split_groups(panels, group, row_parts, least, threads, fewer_each);
        if (3 * fewer_each > 2 * panels_each) continue;
        best = split;
        panels_each = fewer_each;
    }
    return best;
}

constexpr i64 MEMORY_ROWS = 4;  // up to so many rows are bound by memory

struct GroupRange {
    i64 begin, end;
};

// The groups of a task. Each thread gets consecutive groups, so the panels that it prefetches last are those it computes next.
// If bound by memory, later tasks are smaller, so that no thread reads alone at the end.
GroupRange groups_of(i64 task, const PanelSplit &split, i64 threads, bool shrinks) {
    const i64 steps = split.parts / threads, step = task / threads, thread = task % threads;
    if (split.parts % threads != 0) return {split.groups * task / split.parts, split.groups * (task + 1) / split.parts};
    const i64 part = thread * steps + step;
    if (!shrinks) return {split.groups * part / split.parts, split.groups * (part + 1) / split.parts};
    const i64 first = split.groups * thread / threads, count = split.groups * (thread + 1) / threads - first;
    const auto place = [&](i64 left) { return first + count * (steps * steps - left * left) / (steps * steps); };
    return {place(steps - step), place(steps - step - 1)};
}

// Calls function(begin, end) for each part of the op's panels [begin, end), counted from the first.
template <class Function>
void for_panels(const LinearOp &op, i64 begin, i64 end, const Function &function) {
    for (const PanelRange &range : op.panels) {
        const i64 count = range.end - range.begin, first = std::max<i64>(begin, 0), last = std::min(end, count);
        if (first < last) function(range.begin + first, range.begin + last);
        begin -= count;
        end -= count;
    }
}

void run_op(Engine &engine, const LinearOp &op) {
    const i64 rows = op.rows.get();
    i64 panels = 0;
    for (const PanelRange &range : op.panels) panels += range.end - range.begin;
    if (rows == 0) return;
    const LinearKernels &kernels = engine.kernels().linears[static_cast<int>(op.kind)];
    const LinearShape shape = prepared(engine, op, kernels, rows);
    const int threads = engine.pool().num_threads();
    const i64 products = rows * shape.inputs * panels * PANEL * (shape.gate == nullptr ? 1 : 2);
    const i64 small =
        shape.inputs * panels * PANEL <= FEW_WEIGHTS ? Pool::WAKING * SMALL_PRODUCT : engine.pool().small(SMALL_PRODUCT);
    const i64 most_products = threads == 1 ? MANY_PRODUCTS : small;  // too few for tasks
    const auto run = [&](i64 row_begin, i64 row_end, i64 panel_begin, i64 panel_end) {
        for_panels(op, panel_begin, panel_end,
                   [&](i64 begin, i64 end) { kernels.linear(shape, row_begin, row_end, begin, end); });
    };
    if (rows <= kernels.task_rows && products <= most_products) return run(0, rows, 0, panels);
    const i64 tiles = divide_up(rows, kernels.tile_rows), row_parts = divide_up(tiles * kernels.tile_rows, kernels.task_rows);
    const i64 for_threads = divide_up(threads * TASKS_PER_THREAD, row_parts);
    const i64 least = std::max(for_threads, divide_up(products / row_parts, MANY_PRODUCTS));
    const PanelSplit split = split_panels(panels, row_parts, least, threads);
    engine.pool().run(row_parts * split.parts, [&](i64 task, int) {
        // Consecutive tasks share weights.
        const i64 row_part = task % row_parts, part = task / row_parts;
        const GroupRange range = row_parts == 1
                                     ? groups_of(task, split, threads, rows <= MEMORY_ROWS)
                                     : GroupRange{split.groups * part / split.parts, split.groups * (part + 1) / split.parts};
        const i64 begin = range.begin * split.group, end = std::min(panels, range.end * split.group);
        run(first_row(rows, tiles, row_part, row_parts), first_row(rows, tiles, row_part + 1, row_parts), begin, end);
    });
}

void run_op(Engine &engine, const Adapt &op) { adapt(engine, op); }

void run_op(Engine &engine, const RmsNorm &op) {
    for_rows(engine, op.rows.get(), op.width, [&](i64 begin, i64 end) {
        engine.kernels().rms_norm(op.y, op.total, op.x, op.residual, op.weight, op.epsilon, op.width, begin, end);
    });
}

void run_op(Engine &engine, const LayerNorm &op) {
    for_rows(engine, op.rows.get(), op.width, [&](i64 begin, i64 end) {
        engine.kernels().layer_norm(op.y, op.total, op.x, op.residual, op.weight, op.bias, op.epsilon, op.width, begin, end);
    });
}

void run_op(Engine &, const MapSlots &op) {
    const i64 rows = op.rows.get();
    for (i64 row = 0; row < rows; ++row) {
        const i64 position = op.positions[row];
        const i32 block = op.block_tables[op.row_slots[row] * op.table_width + position / op.block_size];
        op.slots[row] = static_cast<i32>(block * op.block_size + position % op.block_size);
    }
}

void run_op(Engine &engine, const RotateAndStore &op) {
    const i64 width = (op.shape.heads + 2 * op.shape.kv_heads) * op.shape.head_dim;
    for_rows(engine, op.rows.get(), width,
             [&](i64 begin, i64 end) { engine.kernels().rotate_and_store(op.shape, begin, end); });
}

void run_op(Engine &engine, const Attend &op) { attend(engine, op); }

void run_op(Engine &engine, const Route &op) { route(engine, op); }

void run_op(Engine &engine, const Choose &op) {
    for_rows(engine, op.rows.get(), 3, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            const i64 place = row * op.chosen + op.index;
            op.ids[row] = op.all_ids[place];
            op.weights[row] = 1.0f;
            op.factors[row] = op.all_weights[place];
        }
    });
}

void run_op(Engine &engine, const ApplyExperts &op) { apply_experts(engine, op); }

void run_op(Engine &engine, const StoreLatent &op) {
    const i64 rotary_dim = op.shape.keys.head_dim, latent_dim = op.shape.latents.head_dim;
    for_rows(engine, op.rows.get(), op.shape.heads * (op.shape.plain_dim + rotary_dim) + latent_dim + rotary_dim,
             [&](i64 begin, i64 end) { engine.kernels().store_latent(op.shape, begin, end); });
}

void run_op(Engine &engine, const AttendLatents &op) { attend_latents(engine, op); }

void run_op(Engine &engine, const HeadLinear &op) { multiply_heads(engine, op); }

void run_op(Engine &engine, const NormalizeWide &op) {
    const i64 width = op.queries + op.keys + op.values;
    static const float no_bias[MAX_HEAD_DIM] = {};
    const auto norm = [&](i64 start, const float *weight, i64 count) {
        float *y = op.y + start;
        const float *x = op.x + start;
        if (op.head_dim == 0) engine.kernels().rms_norm(y, nullptr, x, nullptr, weight, op.epsilon, count, 0, 1);
        for (i64 i = 0; op.head_dim != 0 && i < count; i += op.head_dim)
            engine.kernels().layer_norm(y + i, nullptr, x + i, nullptr, weight + i, no_bias, op.epsilon, op.head_dim, 0, 1);
    };
    for_rows(engine, op.rows.get(), width, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            const i64 keys = row * width + op.queries, values = keys + op.keys;
            norm(row * width, op.query_weight, op.queries);
            norm(keys, op.key_weight, op.keys);
            std::copy_n(op.x + values, op.values, op.y + values);
        }
    });
}

void run_op(Engine &engine, const ScaleAndAdd &op) {
    for_rows(engine, op.rows.get(), op.width, [&](i64 begin, i64 end) {
        for (i64 i = begin * op.width; i < end * op.width; ++i) {
            const float scaled = op.x[i] * op.factor;
            op.y[i] = op.other == nullptr ? scaled : scaled + op.other[i];
        }
    });
}

void run_op(Engine &engine, const MeanRows &op) {
    const float factor = 1.0f / static_cast<float>(op.count);
    for_rows(engine, op.rows.get(), op.count * op.width, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            float *sums = op.y + row * op.width;
            const float *x = op.x + row * op.count * op.width;
            std::copy_n(x, op.width, sums);
            for (i64 other = 1; other < op.count; ++other) {
                for (i64 i = 0; i < op.width; ++i) sums[i] += x[other * op.width + i];
            }
            for (i64 i = 0; i < op.width; ++i) sums[i] *= factor;
        }
    });
}

void run_op(Engine &engine, const AdjustColumns &op) {
    const float *factors = op.rules + op.at, *shifts = factors + op.y_width, *lows = shifts + op.y_width;
    const float *highs = lows + op.y_width;
    for_rows(engine, op.rows.get(), op.width, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            const float *x = op.x + row * op.width;
            float *y = op.y + row * op.y_width + op.at;
            for (i64 i = 0; i < op.width; ++i) y[i] = std::min(std::max(x[i] * factors[i] + shifts[i], lows[i]), highs[i]);
        }
    });
}

void run_op(Engine &engine, const Multiply &op) {
    for_rows(engine, op.rows.get(), op.end - op.begin, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            const float *x = op.x + row * op.width, *factors = op.factors + row * op.row_factors + op.first;
            float *y = op.y + row * op.width;
            if (op.row_factors > 1) {
                for (i64 i = op.begin; i < op.end; ++i) y[i] = x[i] * factors[i];
            } else {
                const float factor = *factors;
                for (i64 i = op.begin; i < op.end; ++i) y[i] = x[i] * factor;
            }
        }
    });
}

void run_op(Engine &engine, const Activate &op) {
    const i64 columns = op.end - op.begin, parts = divide_up(columns, SMALL_COUNT / 4), rows = op.rows.get();
    for_rows(engine, rows * parts, divide_up(columns, parts), [&](i64 begin, i64 end) {
        for (i64 index = begin; index < end; ++index) {
            const i64 row = index / parts, part = index % parts;
            engine.kernels().activate(op.y + row * op.width, op.x + (op.gate.is_gated ? 2 : 1) * row * op.width, op.gate,
                                      op.width, op.begin + columns * part / parts, op.begin + columns * (part + 1) / parts);
        }
    });
}

void run_op(Engine &engine, const Convolve &op) { convolve(engine, op); }

void run_op(Engine &engine, const Recur &op) { recur(engine, op); }

void run_op(Engine &engine, const GatedNorm &op) {
    for_rows(engine, op.rows.get(), op.shape.groups * op.shape.group,
             [&](i64 begin, i64 end) { engine.kernels().gated_norm(op.shape, begin, end); });
}

void run_op(Engine &engine, const Gather &op) {
    const i64 rows = op.rows.get();
    if (rows == 0) return;
    for_rows(engine, rows, op.count, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            std::copy_n(op.x + row * op.x_width + op.from, op.count, op.y + row * op.y_width + op.begin);
        }
    });
    op.comm->meet(CommKind::GATHER, rows * op.y_width * static_cast<i64>(sizeof(float)));
}

void run_op(Engine &, const Collective &op) {
    const i64 bytes = op.rows.get() * op.row_bytes, count = bytes / static_cast<i64>(sizeof(float));
    if (op.rows.get() == 0) return;
    switch (op.kind) {
        case CommKind::BARRIER: return op.comm->meet(CommKind::BARRIER, 0);
        case CommKind::ALL_GATHER: return op.comm->all_gather(op.y, op.x, bytes);
        case CommKind::ALL_REDUCE:
            return op.comm->all_reduce(static_cast<float *>(op.y), static_cast<const float *>(op.x), count);
        case CommKind::REDUCE_SCATTER:
            return op.comm->reduce_scatter(static_cast<float *>(op.y), static_cast<const float *>(op.x), count);
        case CommKind::BROADCAST: return op.comm->broadcast(op.y, bytes, op.root);
        case CommKind::ALL_TO_ALL: return op.comm->all_to_all(op.y, bytes, op.received, op.x, op.sent);
        default:
            throw std::invalid_argument("comm: kind " + std::to_string(static_cast<int>(op.kind)) + " is no op of its own");
    }
}

#if defined(__x86_64__)
// Family of an AMD processor.
unsigned amd_family() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d) == 0 || b != signature_AMD_ebx) return 0;
    __get_cpuid(1, &a, &b, &c, &d);
    return (a >> 8 & 15) + (a >> 20 & 255);
}
#endif

}  // namespace

bool adds_floats_apart() {
#if defined(__x86_64__)
    static const bool value = amd_family() >= 0x19;  // Zen 3 and later
    return value;
#else
    return false;
#endif
}

namespace {

const char *best_variant() {
    if (!variants().empty()) return variants().back().name;
    std::string names;
    for (const char *name : built_variants()) names += std::string(names.empty() ? "" : ", ") + name;
    throw std::runtime_error("ops: the native modules were built for another processor: they have kernels for " + names +
                             ", none of which this one runs; tools/serve builds them again, as does pip install");
}

}  // namespace

Engine::Engine() {
    select(best_variant());
    set_num_threads(1);
}

Engine &Engine::get() {
    static Engine *engine = new Engine();  // never destroyed: its threads may sleep when the process ends
    return *engine;
}

void Engine::set_num_threads(int num_threads, const std::vector<int> &cores) {
    pool_.reset();
    pool_ = std::make_unique<Pool>(num_threads, cores);
    scratch_.resize(num_threads);
}

bool Engine::select(const char *variant) {
    const Kernels *found = find_variant(variant);
    if (found == nullptr) return false;
    kernels_ = *found;
    for (const char *&part : parts_) part = found->name;
    return true;
}

bool Engine::select_part(Part part, const char *variant) {
    const Kernels *found = find_variant(variant);
    if (found == nullptr) return false;
    const int index = static_cast<int>(part);
    if (part == Part::ATTENTION) {
        kernels_.has_paired_products = found->has_paired_products;
        kernels_.has_tiled_products = found->has_tiled_products;
        kernels_.take_query = found->take_query;
        kernels_.take_keys = found->take_keys;
        kernels_.take_values = found->take_values;
        std::copy(std::begin(found->attend), std::end(found->attend), kernels_.attend);
        kernels_.take_latents = found->take_latents;
        kernels_.join = found->join;
        kernels_.finish = found->finish;
    } else {
        kernels_.linears[index] = found->linears[index];
    }
    kernels_.families[index] = found->families[index];
    parts_[index] = found->name;
    return true;
}

float *Engine::scratch(int thread, i64 num_floats) {
    std::vector<float> &floats = scratch_[thread];
    if (static_cast<i64>(floats.size()) < num_floats) floats.resize(num_floats);
    return floats.data();
}

void *Memory::get(i64 num_bytes) {
    constexpr std::uintptr_t alignment = 64;
    if (bytes_.size() < num_bytes + alignment) {
        bytes_.clear();
        bytes_.resize(num_bytes + alignment);
    }
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return reinterpret_cast<void *>((address + alignment - 1) / alignment * alignment);
}

namespace {

// The panels of the gate, if gate | up are whole panels and `activate` reads exactly those that the linear computes.
std::optional<PanelRange> gate_panels(const LinearOp &linear, const Activate &activate) {
    const i64 panels = activate.width / PANEL;
    if (!activate.gate.is_gated || activate.x != linear.shape.y || activate.width % PANEL != 0 ||
        linear.shape.outputs != 2 * activate.width || activate.begin % PANEL != 0 || activate.end % PANEL != 0)
        return std::nullopt;
    const PanelRange gate{activate.begin / PANEL, activate.end / PANEL};
    i64 next = gate.begin;  // in order, the gate's panels and then the others
    for (const PanelRange &range : linear.panels) {
        if (range.begin != next && !(next == gate.end && range.begin == gate.begin + panels)) return std::nullopt;
        next = range.end;
    }
    return next == gate.end + panels ? std::optional(gate) : std::nullopt;
}

}  // namespace

Tape::Tape(std::vector<Op> ops, const std::vector<i64> &pairs) : ops_(std::move(ops)), times_ns_(ops_.size()) {
    for (const i64 index : pairs) {
        const auto *linear = std::get_if<LinearOp>(&ops_.at(index));
        const auto *activate = std::get_if<Activate>(&ops_.at(index + 1));
        if (linear == nullptr || activate == nullptr) throw std::invalid_argument("tape: no pair at " + std::to_string(index));
        const std::optional<PanelRange> gate = gate_panels(*linear, *activate);
        if (!gate) continue;
        GatedLinear &gated = gated_[index] = {*linear, activate->gate};
        gated.linear.shape.y = activate->y;
        gated.linear.panels = {*gate};
    }
}

i64 Tape::run_at(Engine &engine, i64 index, i64 end) {
    const auto found = index + 1 < end ? gated_.find(index) : gated_.end();
    if (found == gated_.end() || !engine.kernels().linears[static_cast<int>(found->second.linear.kind)].has_gate) {
        run(engine, ops_[index]);
        return index + 1;
    }
    LinearOp &linear = found->second.linear;
    linear.shape.gate = &found->second.gate;
    linear.shape.activate = engine.kernels().activate;
    run_op(engine, linear);
    beat();
    return index + 2;
}

void run(Engine &engine, const Op &op) {
    std::visit([&](const auto &typed) { run_op(engine, typed); }, op);
    beat();
}

void Tape::replay() { replay_range(0, static_cast<i64>(ops_.size())); }

void Tape::replay_range(i64 begin, i64 end) {
    Engine &engine = Engine::get();
    for (i64 index = begin; index < end;) index = run_at(engine, index, end);
}

void Tape::replay_timed() {
    Engine &engine = Engine::get();
    i64 last = monotonic_ns();
    const i64 end = static_cast<i64>(ops_.size());
    for (i64 index = 0, next; index < end; index = next) {
        next = run_at(engine, index, end);
        const i64 now = monotonic_ns();
        std::fill(times_ns_.begin() + index, times_ns_.begin() + next, 0);
        times_ns_[index] = now - last;
        last = now;
    }
}

std::vector<Jobs> Tape::replay_alone(int num_threads) {
    Engine &engine = Engine::get();
    std::vector<Jobs> times;
    for (const Op &op : ops_) {
        engine.pool().begin_alone(num_threads);
        const i64 begin = monotonic_ns();
        run(engine, op);
        i64 left = monotonic_ns() - begin;
        Jobs jobs = engine.pool().end_alone();
        for (const auto &tasks : jobs) left -= std::accumulate(tasks.begin(), tasks.end(), i64{0});
        jobs.push_back({left});
        times.push_back(std::move(jobs));
    }
    return times;
}

}  // namespace tokamak::cpu

// Mixtures of experts: routing of rows and application of the experts.
//
// Rows are sorted by expert, stably. Then all experts are processed in the same few phases, each divided into tasks of (expert,
// some panels), so a step with many experts of one or two rows waits for its threads a few times per layer, not per expert. An
// expert's weights are read once, those of an expert without rows never.
//
// An expert's rows are rows of a linear over its matrix, computed by the kernels of linears, so their bits do not depend on
// other rows. A row's results are added in the order of its choices.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "tasks.h"

namespace tokamak::cpu {
namespace {

// Experts are processed in waves of about so many rows per thread, so that data between phases stay in the cache. An expert is
// never split between waves.
constexpr i64 WAVE_ROWS = 256;
constexpr i64 READING = 6;  // rows for which products take about as long as reading the weights: for even tasks

// Index of the largest of `count` values, ties to the first; NaN is ignored.
i64 largest_of(const float *values, i64 count) {
    i64 best = 0;
    for (i64 i = 1; i < count; ++i) {
        if (values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
    }
    return best;
}

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Sets experts outside the best groups to NEVER. The score of a group is the sum of its one or two best
// experts.
void keep_groups(float *scores, float *groups, const Route &op) {
    const i64 size = op.experts / op.groups;
    for (i64 group = 0; group < op.groups; ++group) {
        float first = NEVER, second = NEVER;
        for (i64 i = group * size; i < (group + 1) * size; ++i) {
            second = scores[i] > first ? first : std::max(second, scores[i]);
            first = std::max(first, scores[i]);
        }
        groups[group] = size == 1 || op.num_best == 1 ? first : first + second;
    }
    for (i64 kept = 0; kept < op.chosen_groups; ++kept) groups[largest_of(groups, op.groups)] = NEVER;
    for (i64 group = 0; group < op.groups; ++group) {
        if (groups[group] != NEVER) std::fill(scores + group * size, scores + (group + 1) * size, NEVER);
    }
}

// `scratch`: three floats per expert.
void route_row(const Kernels &kernels, const Route &op, i64 row, float *scratch) {
    float *scores = scratch, *left = scratch + op.experts, *weights = op.weights + row * op.chosen;
    if ((op.sets != nullptr && op.sets[row] != op.set) || (op.num_tokens != nullptr && row >= *op.num_tokens)) {
        std::fill_n(op.ids + row * op.chosen, op.chosen, -1);
        std::fill_n(weights, op.chosen, 0.0f);
        return;
    }
    kernels.score(scores, op.logits + row * op.experts, op.is_softmax, op.experts);
    for (i64 i = 0; i < op.experts; ++i) left[i] = op.correction == nullptr ? scores[i] : scores[i] + op.correction[i];
    if (op.groups > 1) keep_groups(left, scratch + 2 * op.experts, op);
    float sum = 0.0f;
    for (i64 choice = 0; choice < op.chosen; ++choice) {
        const i64 best = largest_of(left, op.experts);
        left[best] = NEVER;
        op.ids[row * op.chosen + choice] = static_cast<i32>(best);
        weights[choice] = scores[best];
        sum += scores[best];
    }
    const float divisor = op.is_normalized ? std::max(sum + op.added_to_sum, op.smallest_sum) : 1.0f;
    for (i64 choice = 0; choice < op.chosen; ++choice) {
        weights[choice] = weights[choice] / divisor * op.factor;
        if (op.scales != nullptr) weights[choice] *= op.scales[op.ids[row * op.chosen + choice]];
    }
}

// Sorts the pairs of expert ids[i] and row row_of(i) of x: begin of each expert, row of each sorted pair, and place of each
// pair. Expert -1: none.
template <class RowOf>
void sort_rows(ExpertsMemory &memory, const i32 *ids, i64 count, i64 experts, const RowOf &row_of) {
    memory.begins.assign(experts + 1, 0);
    memory.row_ids.resize(count);
    memory.places.resize(count);
    for (i64 i = 0; i < count; ++i) memory.begins[ids[i] + 1] += ids[i] >= 0;
    std::partial_sum(memory.begins.begin(), memory.begins.end(), memory.begins.begin());
    for (i64 i = 0; i < count; ++i) {
        if (ids[i] < 0) continue;
        const i64 place = memory.begins[ids[i]]++;
        memory.row_ids[place] = static_cast<i32>(row_of(i));
        memory.places[i] = static_cast<i32>(place);
    }
    for (i64 expert = experts; expert > 0; --expert) memory.begins[expert] = memory.begins[expert - 1];
    memory.begins[0] = 0;
}

i64 inputs_per_line(WeightKind kind) {
    switch (kind) {
        case WeightKind::FLOAT32: return 1;
        case WeightKind::BFLOAT16: return 2;
        case WeightKind::INT8: return 4;
        default: return 8;
    }
}

template <class T>
const T *moved(const T *values, i64 count) {
    return values == nullptr ? nullptr : values + count;
}

// The linear of one expert, with the matrices packed at `slot`.
LinearShape shape_of(const ExpertMatrices &matrices, i64 slot) {
    LinearShape shape = matrices.first;
    const i64 panels = divide_up(shape.outputs, PANEL) * slot, lines = divide_up(shape.inputs, inputs_per_line(matrices.kind));
    const i64 groups = shape.group_size == 0 ? 1 : divide_up(shape.inputs, shape.group_size);
    shape.weight = static_cast<const char *>(shape.weight) + panels * lines * LINE;
    shape.scales = shape.scales.from(panels * PANEL * (shape.multipliers == nullptr ? groups : 1));
    shape.multipliers = moved(shape.multipliers, panels * PANEL * groups);
    shape.offsets = shape.offsets.from(panels * PANEL * groups);
    shape.bias = moved(shape.bias, panels * PANEL);
    return shape;
}

// Rows and panels of one of a wave's linears.
struct Task {
    i32 linear;
    i64 row_begin, row_end, panel_begin, panel_end;
};

// Division of a linear with so many rows. Computed once for all experts of a wave with as many, because it takes many
// divisions.
struct Cut {
    i64 rows;
    i64 prepared_bytes;
    i64 tiles, row_parts, parts;  // tiles of the rows; parts of rows and panels as tasks
};

// The same linear of all experts of a wave.
class Wave {
public:
    Wave(Engine &engine, const ExpertMatrices &matrices, const std::vector<PanelRange> &panels)
        : engine_(engine), kernels_(engine.kernels().linears[static_cast<int>(matrices.kind)]), panels_(panels) {
        for (const PanelRange &range : panels_) num_panels_ += range.end - range.begin;
    }

    void add(const LinearShape &shape) {
        linears_.push_back(shape);
        cost_ += shape.rows + READING;
    }

    // Prepared rows, if the kernels read these.
    void prepare() {
        place_prepared();
        tasks_.clear();
        i64 num_elements = 0;
        for (std::size_t i = 0; i < linears_.size(); ++i) {
            const Cut &cut = cut_of(linears_[i]);
            const i64 rows = cut.rows, elements = rows * linears_[i].inputs;
            if (cut.prepared_bytes == 0) continue;
            num_elements += elements;
            const i64 parts = std::min(cut.tiles, divide_up(elements, SMALL_COUNT));
            for (i64 part = 0, begin = 0, end; part < parts; ++part, begin = end) {
                end = first_row(rows, cut.tiles, part + 1, parts);
                tasks_.push_back({static_cast<i32>(i), begin, end, 0, 0});
            }
        }
        run(num_elements <= engine_.pool().small(SMALL_COUNT),
            [&](const Task &task) { kernels_.prepare(linears_[task.linear], task.row_begin, task.row_end); });
    }

    // Tasks take about equally long. The last experts are divided more finely, so that threads end together.
    void multiply() {
        tasks_.clear();
        i64 num_rows = 0;
        const i64 threads = engine_.pool().num_threads(), count = static_cast<i64>(linears_.size());
        for (i64 i = 0; i < count; ++i) {
            num_rows += linears_[i].rows;
            add_tasks(i, count - i <= threads);
        }
        run(num_rows * linears_[0].inputs * num_panels_ * PANEL <= engine_.pool().small(SMALL_PRODUCT), [&](const Task &task) {
            kernels_.linear(linears_[task.linear], task.row_begin, task.row_end, task.panel_begin, task.panel_end);
        });
    }

private:
    const Cut &cut_of(const LinearShape &shape) {
        Cut &cut = cuts_[shape.rows % NUM_CUTS];
        if (cut.rows == shape.rows) return cut;
        const i64 rows = shape.rows, threads = engine_.pool().num_threads();
        cut.rows = rows;
        cut.prepared_bytes = divide_up(rows * kernels_.prepared_bytes(shape), LINE) * LINE;
        cut.tiles = divide_up(rows, kernels_.tile_rows);
        cut.row_parts = divide_up(cut.tiles * kernels_.tile_rows, kernels_.task_rows);
        cut.parts = divide_up((rows + READING) * threads * TASKS_PER_THREAD, cost_ * cut.row_parts);
        cut.parts = std::max(cut.parts, divide_up(rows * shape.inputs * num_panels_ * PANEL, cut.row_parts * MANY_PRODUCTS));
        return cut;
    }

    void place_prepared() {
        i64 num_bytes = 0;
        for (const LinearShape &shape : linears_) num_bytes += cut_of(shape).prepared_bytes;
        char *memory = static_cast<char *>(engine_.experts.prepared.get(num_bytes));
        for (LinearShape &shape : linears_) {
            shape.prepared = memory;
            memory += cut_of(shape).prepared_bytes;
        }
    }

    void add_tasks(i64 index, bool is_last) {
        const Cut &cut = cut_of(linears_[index]);
        const i64 wanted = is_last ? std::max(cut.parts, TASKS_PER_THREAD) : cut.parts;
        for (const PanelRange &range : panels_) add_range(index, cut, range, wanted);
    }

    // The share of these panels in `wanted` parts of all.
    void add_range(i64 index, const Cut &cut, const PanelRange &range, i64 wanted) {
        const i64 count = range.end - range.begin, groups = divide_up(count, PANEL_GROUP);
        const i64 parts = std::min(groups, divide_up(wanted * count, num_panels_));
        for (i64 part = 0, begin = range.begin, end; part < parts; ++part, begin = end) {
            end = part + 1 == parts ? range.end : range.begin + groups * (part + 1) / parts * PANEL_GROUP;
            for (i64 row_part = 0, row = 0, row_end; row_part < cut.row_parts; ++row_part, row = row_end) {  // share weights
                row_end = first_row(cut.rows, cut.tiles, row_part + 1, cut.row_parts);
                tasks_.push_back({static_cast<i32>(index), row, row_end, begin, end});
            }
        }
    }

    template <class Function>
    void run(bool is_little, const Function &function) {
        if (is_little) {
            for (const Task &task : tasks_) function(task);
        } else {
            engine_.pool().run(static_cast<i64>(tasks_.size()), [&](i64 task, int) { function(tasks_[task]); });
        }
    }

    static constexpr i64 NUM_CUTS = 64;
    Engine &engine_;
    const LinearKernels &kernels_;
    const std::vector<PanelRange> &panels_;  // those that this rank computes
    i64 num_panels_ = 0, cost_ = 0;
    std::vector<LinearShape> linears_;
    std::vector<Task> tasks_;
    Cut cuts_[NUM_CUTS] = {};
};

// Sets the adapter of each sorted pair: slot_of(i) of pair i. Leaves none if no row has an adapter.
template <class SlotOf>
void sort_slots(ExpertsMemory &memory, const ApplyExperts &op, const i32 *ids, i64 count, const SlotOf &slot_of) {
    memory.adapter_slots.clear();
    if (op.adapters.adapter_slots == nullptr) return;
    bool is_adapted = false;
    memory.adapter_slots.resize(count);
    for (i64 i = 0; i < count; ++i) {
        if (ids[i] < 0) continue;
        const i32 slot = slot_of(i);
        if (slot < -1 || slot >= op.adapters.num_slots) {
            throw std::out_of_range("adapter slot " + std::to_string(slot) + " of " + std::to_string(op.adapters.num_slots));
        }
        memory.adapter_slots[memory.places[i]] = slot;
        is_adapted |= slot >= 0;
    }
    if (!is_adapted) memory.adapter_slots.clear();
}

// Adds the adapters' terms to the results y of one linear of experts [begin, end), from their first row on. `shape`: has x,
// inputs, outputs and y; `is_gathered`: x are the rows of the op, otherwise those of y.
void adapt_experts(Engine &engine, const ApplyExperts &op, const std::vector<AdaptedPart> &parts, AdaptShape shape,
                   bool is_gathered, i64 begin, i64 end) {
    const ExpertsMemory &memory = engine.experts;
    const ExpertAdapters &adapters = op.adapters;
    if (memory.adapter_slots.empty()) return;
    const i64 first = memory.begins[begin];
    shape.row_ids = is_gathered ? memory.row_ids.data() + first : nullptr;
    shape.adapter_slots = memory.adapter_slots.data() + first;
    shape.slots = adapters.slots;
    shape.ranks = adapters.ranks;
    shape.slot_floats = adapters.slot_floats;
    shape.modules = adapters.modules;
    shape.num_parts = static_cast<i64>(parts.size());
    for_rows(engine, memory.begins[end] - first, shape.inputs + shape.outputs, [&](i64 row, i64 row_end) {
        std::vector<AdaptedPart> own(parts.size());
        i64 expert = std::upper_bound(memory.begins.begin() + begin, memory.begins.begin() + end, first + row) -
                     memory.begins.begin() - 1;
        for (; row < row_end; ++expert) {
            const i64 until = std::min(row_end, memory.begins[expert + 1] - first);
            if (until <= row) continue;
            for (std::size_t i = 0; i < parts.size(); ++i) {
                own[i] = parts[i];
                own[i].index += expert * adapters.index_step;
                own[i].a += expert * adapters.float_step;
                own[i].b += expert * adapters.float_step;
            }
            AdaptShape of_expert = shape;
            of_expert.parts = own.data();
            engine.kernels().adapt(of_expert, row, until);
            row = until;
        }
    });
}

// Writes the rank's columns of the activations of experts [begin, end) to `activated`, from their first row on.
void run_up(Engine &engine, const ApplyExperts &op, const LinearShape &given, float *activated, i64 begin, i64 end) {
    ExpertsMemory &memory = engine.experts;
    const i64 inner = op.down.first.inputs, first_row = memory.begins[begin], rows = memory.begins[end] - first_row;
    const i64 width = op.gate_up.first.outputs;
    float *gate_up = static_cast<float *>(memory.inner.get(rows * width * sizeof(float)));
    Wave up(engine, op.gate_up, op.share.gate_up);
    for (i64 expert = begin; expert < end; ++expert) {
        const i64 place = memory.begins[expert], count = memory.begins[expert + 1] - place;
        if (count == 0) continue;
        LinearShape shape = shape_of(op.gate_up, op.slots[expert]);
        shape.rows = count;
        shape.x = op.x;
        shape.row_ids = memory.row_ids.data() + place;
        shape.quantized = given.quantized;
        shape.y = gate_up + (place - first_row) * width;
        up.add(shape);
    }
    up.prepare();
    up.multiply();
    AdaptShape adapted{};
    adapted.x = op.x;
    adapted.y = gate_up;
    adapted.inputs = op.gate_up.first.inputs;
    adapted.outputs = width;
    adapt_experts(engine, op, op.adapters.gate_up, adapted, true, begin, end);
    for_rows(engine, rows, op.share.end - op.share.begin, [&](i64 row_begin, i64 row_end) {
        for (i64 row = row_begin; row < row_end; ++row) {
            engine.kernels().activate(activated + row * inner, gate_up + row * width, op.gate, inner, op.share.begin,
                                      op.share.end);
        }
    });
}

// Writes the rank's columns of their results.
void run_down(Engine &engine, const ApplyExperts &op, const float *activated, i64 begin, i64 end) {
    const ExpertsMemory &memory = engine.experts;
    Wave down(engine, op.down, op.share.down);
    for (i64 expert = begin; expert < end; ++expert) {
        const i64 place = memory.begins[expert], count = memory.begins[expert + 1] - place;
        if (count == 0) continue;
        LinearShape shape = shape_of(op.down, op.slots[expert]);
        shape.rows = count;
        shape.x = activated + (place - memory.begins[begin]) * shape.inputs;
        shape.y = op.results + place * shape.outputs;
        down.add(shape);
    }
    down.prepare();
    down.multiply();
    AdaptShape adapted{};
    adapted.x = activated;
    adapted.y = op.results + memory.begins[begin] * op.down.first.outputs;
    adapted.inputs = op.down.first.inputs;
    adapted.outputs = op.down.first.outputs;
    adapt_experts(engine, op, op.adapters.down, adapted, false, begin, end);
}

// Quantizes every row of x, if the experts' kernels need it.
LinearShape quantized(Engine &engine, const ApplyExperts &op, i64 rows) {
    const LinearKernels &kernels = engine.kernels().linears[static_cast<int>(op.gate_up.kind)];
    LinearShape shape = op.gate_up.first;
    if (kernels.quantized_bytes == nullptr) return shape;
    shape.x = op.x;
    shape.rows = rows;
    shape.quantized = engine.experts.quantized.get(rows * kernels.quantized_bytes(shape));
    for_rows(engine, rows, shape.inputs, [&](i64 begin, i64 end) { kernels.quantize(shape, begin, end); });
    return shape;
}

// Calls function(begin, end) for the experts of each wave.
template <class Function>
void for_waves(Engine &engine, const ApplyExperts &op, const Function &function) {
    const std::vector<i64> &begins = engine.experts.begins;
    const i64 wave = WAVE_ROWS * engine.pool().num_threads();
    for (i64 begin = 0, end; begin < op.experts; begin = end) {
        for (end = begin + 1; end < op.experts && begins[end + 1] - begins[begin] <= wave;) ++end;
        if (begins[end] > begins[begin]) function(begin, end);
    }
}

// Results of all sorted pairs of `rows` rows of op.x. If ranks share matrices, activations are gathered once for all waves: a
// wait for each would cost more than the caches save.
void compute(Engine &engine, const ApplyExperts &op, i64 rows) {
    ExpertsMemory &memory = engine.experts;
    if (memory.begins[op.experts] == 0 && op.share.comm == nullptr) return;
    const LinearShape given = quantized(engine, op, rows);
    const i64 inner = op.down.first.inputs, floats = sizeof(float);
    if (op.share.comm == nullptr) {
        for_waves(engine, op, [&](i64 begin, i64 end) {
            const i64 num_bytes = (memory.begins[end] - memory.begins[begin]) * inner * floats;
            float *activated = static_cast<float *>(memory.activated.get(num_bytes));
            run_up(engine, op, given, activated, begin, end);
            run_down(engine, op, activated, begin, end);
        });
        return;
    }
    const auto activated_of = [&](i64 expert) { return op.share.activated + memory.begins[expert] * inner; };
    for_waves(engine, op, [&](i64 begin, i64 end) { run_up(engine, op, given, activated_of(begin), begin, end); });
    op.share.comm->meet(CommKind::GATHER, memory.begins[op.experts] * inner * floats);
    for_waves(engine, op, [&](i64 begin, i64 end) { run_down(engine, op, activated_of(begin), begin, end); });
}

// The rank's columns of y for each row: the sum of result_at(row, choice) in the order of its choices.
template <class ResultAt>
void combine(Engine &engine, const ApplyExperts &op, i64 rows, const ResultAt &result_at) {
    const i64 hidden = op.down.first.outputs, first = op.share.y_begin, width = op.share.y_end - first;
    for_rows(engine, rows, op.chosen * width, [&](i64 begin, i64 end) {
        std::vector<const float *> results(op.chosen);
        for (i64 row = begin; row < end; ++row) {
            const i64 at = row * hidden + first;
            const float *shared = op.shared == nullptr ? nullptr : op.shared + at;
            if (op.ids[row * op.chosen] < 0) {
                if (shared == nullptr) std::fill_n(op.y + at, width, 0.0f);
                else std::copy_n(shared, width, op.y + at);
                continue;
            }
            for (i64 choice = 0; choice < op.chosen; ++choice) results[choice] = result_at(row, choice) + first;
            engine.kernels().combine(op.y + at, results.data(), op.weights + row * op.chosen, op.chosen, shared, width);
        }
    });
}

// Arrays of ExpertWindows; `place` counts the rows of all ranks one after another, max_rows each.
struct Windows {
    explicit Windows(const ApplyExperts &op)
        : most(op.windows.max_rows), chosen(op.chosen), hidden(op.down.first.outputs), lines(op.windows.memory) {
        const i64 ranks = op.windows.comm->first() + op.windows.comm->count(), places = ranks * most;
        x = reinterpret_cast<float *>(lines + ranks * COMM_LINE);
        results = x + places * hidden;
        ids = reinterpret_cast<i32 *>(results + places * chosen * hidden);
        adapter_slots = ids + places * chosen;
    }

    i64 &rows(int rank) const { return *reinterpret_cast<i64 *>(lines + rank * COMM_LINE); }
    float *result(i64 place, i64 choice) const { return results + (place * chosen + choice) * hidden; }

    i64 most, chosen, hidden;
    char *lines;
    float *x, *results;
    i32 *ids, *adapter_slots;
};

// The first row published by rank number `part` of those with the same rows.
i64 shown_from(const ExpertWindows &windows, i64 rows, i64 part) { return rows * part / windows.num_ranks; }

// Publishes this rank's rows and their experts.
void dispatch(Engine &engine, const ApplyExperts &op, const Windows &windows, i64 rows) {
    const int rank = op.windows.comm->rank(), part = rank - op.windows.first_rank;
    const i64 begin = shown_from(op.windows, rows, part), count = shown_from(op.windows, rows, part + 1) - begin;
    if (count > windows.most) throw std::invalid_argument("experts: more rows than a window holds");
    const i64 first = rank * windows.most;
    for_rows(engine, count, windows.hidden, [&](i64 from, i64 to) {
        std::copy(op.x + (begin + from) * windows.hidden, op.x + (begin + to) * windows.hidden,
                  windows.x + (first + from) * windows.hidden);
    });
    const i32 *ids = op.ids + begin * op.chosen;
    std::copy_n(ids, count * op.chosen, windows.ids + first * op.chosen);
    if (const i32 *slots = op.adapters.adapter_slots) std::copy_n(slots + begin, count, windows.adapter_slots + first);
    windows.rows(rank) = count;
    if (op.windows.counts != nullptr) {
        // one writer; readers may be slightly behind
        for (i64 i = 0; i < count * op.chosen; ++i) {
            if (ids[i] < 0) continue;
            std::uint64_t &seen = op.windows.counts[ids[i]];
            __atomic_store_n(&seen, seen + 1, __ATOMIC_RELAXED);
        }
    }
    op.windows.comm->meet(CommKind::DISPATCH, windows.hidden * static_cast<i64>(sizeof(float)));
}

// Selects this rank's pairs: `owner` in engine/parallel/placement.py.
void collect(ExpertsMemory &memory, const ApplyExperts &op, const Windows &windows) {
    const Comm &comm = *op.windows.comm;
    const i64 stride = 1 + comm.first() + comm.count();
    memory.pair_experts.clear();
    memory.pair_rows.clear();
    memory.row_places.clear();
    memory.pair_places.clear();
    for (int home = comm.first(); home < comm.first() + comm.count(); ++home) {
        if (!comm.is_member(home)) continue;
        for (i64 row = 0; row < windows.rows(home); ++row) {
            const i64 place = home * windows.most + row;
            bool is_here = false;
            for (i64 choice = 0; choice < op.chosen; ++choice) {
                const i32 expert = windows.ids[place * op.chosen + choice];
                if (expert < 0) continue;
                const i32 *owners = op.windows.owners + expert * stride;
                if (owners[1 + (home + row) % owners[0]] != comm.rank()) continue;
                if (!is_here) memory.row_places.push_back(place);
                is_here = true;
                memory.pair_experts.push_back(expert);
                memory.pair_rows.push_back(static_cast<i32>(memory.row_places.size() - 1));
                memory.pair_places.push_back(place * op.chosen + choice);
            }
        }
    }
}

// Computes this rank's pairs and writes each result to the rank that published the row.
void serve(Engine &engine, const ApplyExperts &op, const Windows &windows) {
    ExpertsMemory &memory = engine.experts;
    collect(memory, op, windows);
    const i64 rows = memory.row_places.size(), count = memory.pair_places.size(), hidden = windows.hidden;
    if (count > 0) {
        float *x = static_cast<float *>(memory.gathered.get(rows * hidden * sizeof(float)));
        for_rows(engine, rows, hidden, [&](i64 begin, i64 end) {
            for (i64 row = begin; row < end; ++row) {
                std::copy_n(windows.x + memory.row_places[row] * hidden, hidden, x + row * hidden);
            }
        });
        sort_rows(memory, memory.pair_experts.data(), count, op.experts, [&](i64 i) { return memory.pair_rows[i]; });
        sort_slots(memory, op, memory.pair_experts.data(), count,
                   [&](i64 i) { return windows.adapter_slots[memory.row_places[memory.pair_rows[i]]]; });
        ApplyExperts own = op;
        own.x = x;
        own.results = static_cast<float *>(memory.results.get(count * hidden * sizeof(float)));
        compute(engine, own, rows);
        for_rows(engine, count, hidden, [&](i64 begin, i64 end) {
            for (i64 i = begin; i < end; ++i) {
                std::copy_n(own.results + memory.places[i] * hidden, hidden, windows.results + memory.pair_places[i] * hidden);
            }
        });
    }
    op.windows.comm->meet(CommKind::COMBINE, hidden * static_cast<i64>(sizeof(float)));
}

// All ranks of the rank group call this, with or without rows, and compute for each other. Results of rows that several ranks
// have are written to the rank that published the row, where all of them can read until the next dispatch.
void exchange(Engine &engine, const ApplyExperts &op, i64 rows) {
    const Windows windows(op);
    dispatch(engine, op, windows, rows);
    serve(engine, op, windows);
    const ExpertWindows &own = op.windows;
    std::vector<i64> places(rows);
    for (i64 part = 0; part < own.num_ranks; ++part) {
        const i64 begin = shown_from(own, rows, part);
        for (i64 row = begin; row < shown_from(own, rows, part + 1); ++row) {
            places[row] = (own.first_rank + part) * windows.most + row - begin;
        }
    }
    combine(engine, op, rows, [&](i64 row, i64 choice) { return windows.result(places[row], choice); });
}

}  // namespace

void route(Engine &engine, const Route &op) {
    for_rows(engine, op.rows.get(), op.experts * op.chosen, [&](i64 begin, i64 end) {
        std::vector<float> scratch(3 * op.experts);
        for (i64 row = begin; row < end; ++row) route_row(engine.kernels(), op, row, scratch.data());
    });
}

void apply_experts(Engine &engine, const ApplyExperts &op) {
    const i64 rows = op.rows.get(), hidden = op.down.first.outputs;
    if (op.windows.comm != nullptr) return exchange(engine, op, rows);
    if (rows == 0) return;
    ExpertsMemory &memory = engine.experts;
    sort_rows(memory, op.ids, rows * op.chosen, op.experts, [&](i64 i) { return i / op.chosen; });
    sort_slots(memory, op, op.ids, rows * op.chosen, [&](i64 i) { return op.adapters.adapter_slots[i / op.chosen]; });
    compute(engine, op, rows);
    combine(engine, op, rows,
            [&](i64 row, i64 choice) { return op.results + memory.places[row * op.chosen + choice] * hidden; });
}

}  // namespace tokamak::cpu

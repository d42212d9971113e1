#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>

#include "candidates.h"
#include "logit_edits.h"
#include "philox.h"

namespace tokamak::cpu {
namespace {

constexpr double LOWEST_EXPONENT = -87.33;  // e^x of the kernels is 0 below
constexpr i64 BLOCKS_PER_TASK = 8;
constexpr i64 TASKS_PER_THREAD = 6;

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// Memory of one thread.
struct Workspace {
    Candidates candidates;
    std::vector<float> lane_largest;
    std::vector<i64> best;          // candidates
    std::vector<i32> token_counts;  // [vocab], zero between two rows
    float block[SAMPLING_BLOCK];    // logits after the mask
};

// State of a row.
struct Row {
    const float *logits;
    const SlotSampling *sampling;  // null: the token is known
    History history;
    const std::uint32_t *mask;  // if nothing else changes the logits
    float *edited;              // edited copy of the logits; null: unchanged
    i64 choice, raw;            // scans; -1: none
    i64 num_top;
};

class Batch {
public:
    Batch(Engine &engine, const SampledRows &shape)
        : engine_(engine),
          kernels_(engine.kernels().sampling),
          shape_(shape),
          lanes_(engine.kernels().lanes),
          blocks_(divide_up(shape.vocab, SAMPLING_BLOCK)) {
        spaces_.resize(engine.pool().num_threads());
        rows_.reserve(shape.rows);
    }

    void add_drawn(i64 index, const SlotTable &table, i64 slot, i64 position) {
        const SlotSampling &sampling = table.samplings[slot];
        const History history{table.token_ids + slot * table.width, position, table.num_prompt_tokens[slot]};
        Row row{logits_of(index), &sampling, history, nullptr, nullptr, -1, -1, 0};
        row.num_top = std::min<i64>({std::max(sampling.num_logprobs, 0), shape_.num_top, shape_.vocab});
        is_edited_.push_back(changes_logits(sampling, history));
        if (!is_edited_.back()) row.mask = mask_of(shape_.vocab, sampling, history);
        rows_.push_back(row);
    }

    void add_given(i64 index) {
        const i64 num_top = std::min(shape_.num_top, shape_.vocab);
        is_edited_.push_back(false);
        rows_.push_back({logits_of(index), nullptr, {}, nullptr, nullptr, -1, -1, num_top});
    }

    void run() {
        edit();
        for (Row &row : rows_) plan_scans(row);
        scan();
        for (const Row &row : rows_) {
            if (row.mask != nullptr && !(largest_of(scans_[row.choice]) > NEGATIVE_INFINITY)) scan_edited(row);
        }
        finish();
    }

private:
    const float *logits_of(i64 index) const { return shape_.logits + index * shape_.vocab; }

    template <class Function>
    void for_each(i64 count, bool is_small, const Function &function) {
        if (!is_small) return engine_.pool().run(count, function);
        for (i64 index = 0; index < count; ++index) function(index, 0);
    }

    // --- edits of the logits

    void edit() {
        std::vector<i64> edited;
        for (i64 index = 0; index < static_cast<i64>(rows_.size()); ++index) {
            if (is_edited_[index]) edited.push_back(index);
        }
        if (edited.empty()) return;
        const i64 num_floats = static_cast<i64>(edited.size()) * shape_.vocab;
        if (static_cast<i64>(edits_.size()) < num_floats) edits_.resize(num_floats);
        for_each(static_cast<i64>(edited.size()), num_floats <= BLOCKS_PER_TASK * SAMPLING_BLOCK, [&](i64 index, int thread) {
            Row &row = rows_[edited[index]];
            row.edited = edits_.data() + index * shape_.vocab;
            edit_logits(row.edited, row.logits, shape_.vocab, *row.sampling, row.history, spaces_[thread].token_counts,
                        kernels_);
        });
    }

    // --- scans

    bool is_truncated(const SlotSampling &sampling) const {
        return is_bounded(sampling) || sampling.top_p < 1 || sampling.typical_p < 1 || sampling.xtc_probability > 0;
    }

    // Whether the candidates are known before all weights.
    bool is_bounded(const SlotSampling &sampling) const {
        return has_top_k(sampling) || sampling.min_p > 0 || sampling.top_n_sigma > 0;
    }

    bool has_top_k(const SlotSampling &sampling) const { return sampling.top_k > 0 && sampling.top_k < shape_.vocab; }

    static float scale_of(const SlotSampling &sampling) {
        return static_cast<float>(1 / std::max(sampling.temperature, 1e-30));
    }

    void plan_scans(Row &row) {
        float choice_scale = 0;
        if (row.sampling != nullptr) {
            const SlotSampling &sampling = *row.sampling;
            // weights are then summed over the candidates only
            if (sampling.temperature > 0 && !is_bounded(sampling)) choice_scale = scale_of(sampling);
            const bool wants_raw = sampling.num_logprobs >= 0;
            if (wants_raw && row.edited == nullptr && row.mask == nullptr && (choice_scale == 0 || choice_scale == 1)) {
                row.choice = row.raw = add_scan(row.logits, nullptr, 1);
                return;
            }
            row.choice = add_scan(row.edited != nullptr ? row.edited : row.logits, row.mask, choice_scale);
            if (!wants_raw) return;
        }
        row.raw = add_scan(row.logits, nullptr, 1);
    }

    i64 add_scan(const float *logits, const std::uint32_t *mask, float scale) {
        scans_.push_back({logits, mask, shape_.vocab, scale, nullptr, nullptr, nullptr});
        return static_cast<i64>(scans_.size()) - 1;
    }

    // If the logits leave no token of the mask, or are invalid.
    void scan_edited(const Row &row) {
        LogitScan &scan = scans_[row.choice];
        std::vector<float> &edited = rescued_.emplace_back(shape_.vocab);
        edit_logits(edited.data(), row.logits, shape_.vocab, *row.sampling, row.history, spaces_[0].token_counts, kernels_);
        scan.logits = edited.data();
        scan.mask = nullptr;
        kernels_.scan(scan, 0, blocks_);
    }

    void scan() {
        const i64 num_scans = static_cast<i64>(scans_.size()), stride = blocks_ * (lanes_ + 2);
        if (static_cast<i64>(found_.size()) < num_scans * stride) found_.resize(num_scans * stride);
        for (i64 index = 0; index < num_scans; ++index) {
            LogitScan &scan = scans_[index];
            scan.lane_largest = found_.data() + index * stride;
            scan.largest = scan.lane_largest + blocks_ * lanes_;
            scan.sums = scan.largest + blocks_;
        }
        const i64 total = num_scans * blocks_;  // tasks are ranges of blocks over all scans
        const i64 num_tasks = std::min(divide_up(total, BLOCKS_PER_TASK), engine_.pool().num_threads() * TASKS_PER_THREAD);
        engine_.pool().run(num_tasks, [&](i64 task, int) {
            for (i64 begin = total * task / num_tasks, end = total * (task + 1) / num_tasks; begin < end;) {
                const i64 index = begin / blocks_, block = begin % blocks_;
                const i64 count = std::min(end - begin, blocks_ - block);
                kernels_.scan(scans_[index], block, block + count);
                begin += count;
            }
        });
    }

    // --- from scans to tokens and log-probabilities

    void finish() {
        bool is_small = shape_.rows * shape_.vocab <= BLOCKS_PER_TASK * SAMPLING_BLOCK;
        is_small |= std::all_of(rows_.begin(), rows_.end(), [](const Row &row) {
            return row.raw < 0 && !(row.sampling->temperature > 0);  // only one block of each is read
        });
        for_each(shape_.rows, is_small, [&](i64 index, int thread) { finish_row(index, spaces_[thread]); });
    }

    void finish_row(i64 index, Workspace &space) const {
        const Row &row = rows_[index];
        if (row.sampling != nullptr) shape_.token_ids[index] = choose(row, space);
        if (row.raw < 0) return;
        const LogitScan &scan = scans_[row.raw];
        const double normalizer = normalizer_of(scan);
        const float logit = row.logits[shape_.token_ids[index]];
        shape_.logprobs[index] = static_cast<float>(logit - normalizer);
        shape_.ranks[index] = static_cast<i32>(1 + kernels_.count_above(scan, logit));
        if (row.num_top == 0) return;
        i32 *token_ids = shape_.top_token_ids + index * shape_.num_top;
        float *logprobs = shape_.top_logprobs + index * shape_.num_top;
        find_best(scan, row.num_top, space);
        for (i64 i = 0; i < row.num_top; ++i) {
            const i64 candidate = space.best[i];
            token_ids[i] = space.candidates.token_ids[candidate];
            logprobs[i] = static_cast<float>(space.candidates.logits[candidate] - normalizer);
        }
    }

    // NaN if there is one.
    float largest_of(const LogitScan &scan) const {
        float largest = scan.largest[0];
        for (i64 block = 1; block < blocks_; ++block) {
            const float next = scan.largest[block];
            if (next > largest || next != next) largest = next;
        }
        return largest;
    }

    // The sum of a block's weights relative to the row's largest logit.
    static double block_weight(const LogitScan &scan, i64 block, float largest) {
        const double sum = scan.sums[block];
        return sum == 0 ? 0 : sum * std::exp((static_cast<double>(scan.largest[block]) - largest) * scan.scale);
    }

    double total_weight(const LogitScan &scan, float largest) const {
        double total = 0;
        for (i64 block = 0; block < blocks_; ++block) total += block_weight(scan, block, largest);
        return total;
    }

    double normalizer_of(const LogitScan &scan) const {
        const float largest = largest_of(scan);
        if (!std::isfinite(largest)) return std::numeric_limits<double>::quiet_NaN();
        return largest + std::log(total_weight(scan, largest));
    }

    // The first of the largest; the first NaN if there is one.
    i32 first_of(const LogitScan &scan, float largest, Workspace &space) const {
        const auto is_it = [&](float x) { return largest != largest ? x != x : x == largest; };
        const i64 block = std::find_if(scan.largest, scan.largest + blocks_, is_it) - scan.largest;
        const float *begin = block_of(scan, block, space), *end = begin + count_of(scan, block);
        return static_cast<i32>(block * SAMPLING_BLOCK + (std::find_if(begin, end, is_it) - begin));
    }

    static i64 count_of(const LogitScan &scan, i64 block) {
        return std::min(SAMPLING_BLOCK, scan.count - block * SAMPLING_BLOCK);
    }

    // The row's logits after the mask.
    const float *block_of(const LogitScan &scan, i64 block, Workspace &space) const {
        const float *logits = scan.logits + block * SAMPLING_BLOCK;
        if (scan.mask == nullptr) return logits;
        kernels_.leave(space.block, logits, scan.mask + block * (SAMPLING_BLOCK / 32), count_of(scan, block));
        return space.block;
    }

    i32 choose(const Row &row, Workspace &space) const {
        const SlotSampling &sampling = *row.sampling;
        const LogitScan &scan = scans_[row.choice];
        const float largest = largest_of(scan);
        // if everything is masked, or the logits are invalid, there is no distribution
        if (!(sampling.temperature > 0) || !std::isfinite(largest)) return first_of(scan, largest, space);
        const double number = uniform(sampling.seed, static_cast<std::uint32_t>(row.history.count),
                                      static_cast<std::uint32_t>(sampling.sample_index));
        if (!is_truncated(sampling)) return draw(scan, largest, number, space);
        const double chance = uniform(sampling.seed, static_cast<std::uint32_t>(row.history.count),
                                      static_cast<std::uint32_t>(sampling.sample_index), 1);
        truncate(sampling, scan, largest, chance, space);
        const Candidates &candidates = space.candidates;
        const double total = candidates.total_weight();
        return candidates.token_ids[position_of(candidates.weights.data(), candidates.count, number * total)];
    }

    // The first place where the cumulative weight exceeds `target`; otherwise that of the last weight.
    static i64 position_of(const float *weights, i64 count, double target) {
        double sum = 0;
        i64 last = 0;
        for (i64 i = 0; i < count; ++i) {
            if (weights[i] == 0) continue;
            sum += weights[i];
            if (sum > target) return i;
            last = i;
        }
        return last;
    }

    // From the whole vocabulary.
    i32 draw(const LogitScan &scan, float largest, double number, Workspace &space) const {
        const double target = number * total_weight(scan, largest);
        double before = 0, weight = 0;  // of the earlier blocks, of the block
        i64 block = 0;
        for (i64 next = 0; next < blocks_; ++next) {
            const double next_weight = block_weight(scan, next, largest);
            if (next_weight == 0) continue;
            before += weight;
            weight = next_weight;
            block = next;
            if (before + weight > target) break;
        }
        const i64 count = count_of(scan, block);
        space.candidates.reserve(count);
        float *weights = space.candidates.weights.data();
        kernels_.weigh(weights, block_of(scan, block, space), scan.largest[block], scan.scale, count);
        const double unit = weight / scan.sums[block];
        return static_cast<i32>(block * SAMPLING_BLOCK + position_of(weights, count, (target - before) / unit));
    }

    // The standard deviation of the finite logits after the mask.
    static double deviation_of(const LogitScan &scan) {
        const auto counts = [&](i64 i) {
            return std::isfinite(scan.logits[i]) && (scan.mask == nullptr || (scan.mask[i / 32] >> i % 32 & 1) != 0);
        };
        double sum = 0, squares = 0;
        i64 count = 0;
        for (i64 i = 0; i < scan.count; ++i) {
            if (counts(i)) sum += scan.logits[i], ++count;
        }
        const double mean = sum / static_cast<double>(count);
        for (i64 i = 0; i < scan.count; ++i) {
            const double distance = scan.logits[i] - mean;
            if (counts(i)) squares += distance * distance;
        }
        return std::sqrt(squares / static_cast<double>(count));
    }

    // Applies top_n_sigma, min_p, top_k, top_p, typical_p and xtc, in this order, to the candidates. `chance`: that of xtc.
    void truncate(const SlotSampling &sampling, const LogitScan &scan, float largest, double chance, Workspace &space) const {
        const bool is_of_all = !is_bounded(sampling);
        const double temperature = std::max(sampling.temperature, 1e-30), total = is_of_all ? total_weight(scan, largest) : 0;
        double exponent = LOWEST_EXPONENT;  // of the smallest weight that can be sampled
        if (sampling.min_p > 0) exponent = std::max(exponent, std::log(sampling.min_p));
        if (is_of_all) {
            // all tokens below this bound have at most half of the weight that top_p may exclude
            exponent = std::max(exponent, std::log((1 - sampling.top_p) * total / (2.0 * static_cast<double>(scan.count))));
        }
        float bound = static_cast<float>(largest + std::min(exponent, 0.0) * temperature);
        if (sampling.top_n_sigma > 0) {
            bound = std::max(bound, static_cast<float>(largest - sampling.top_n_sigma * deviation_of(scan)));
        }
        if (has_top_k(sampling)) bound = std::max(bound, bound_of_best(scan, sampling.top_k, space));
        Candidates &candidates = gather(scan, bound, space);
        candidates.widest = kernels_.measure(candidates.distances.data(), candidates.weights.data(), candidates.logits.data(),
                                             largest, scale_of(sampling), candidates.count);
        if (has_top_k(sampling)) candidates.keep_count(sampling.top_k);
        if (sampling.top_p < 1) candidates.keep_weight(sampling.top_p * (is_of_all ? total : candidates.total_weight()));
        if (sampling.typical_p < 1) candidates.keep_typical(sampling.typical_p);
        if (chance < sampling.xtc_probability) candidates.drop_likely(sampling.xtc_threshold);
    }

    Candidates &gather(const LogitScan &scan, float bound, Workspace &space) const {
        Candidates &candidates = space.candidates;
        candidates.reserve(scan.count + lanes_);
        candidates.count = kernels_.gather(candidates.token_ids.data(), candidates.logits.data(), scan, bound);
        return candidates;
    }

    // A bound reached by at least `count` logits: so many lanes of blocks have one.
    float bound_of_best(const LogitScan &scan, i64 count, Workspace &space) const {
        const i64 num_lanes = blocks_ * lanes_;
        if (count > num_lanes) return NEGATIVE_INFINITY;
        std::vector<float> &lanes = space.lane_largest;
        lanes.assign(scan.lane_largest, scan.lane_largest + num_lanes);
        for (float &lane : lanes) lane = lane != lane ? NEGATIVE_INFINITY : lane;
        std::nth_element(lanes.begin(), lanes.begin() + count - 1, lanes.end(), std::greater<float>());
        return lanes[count - 1];
    }

    // The `count` largest logits are candidates `space.best`, best first.
    void find_best(const LogitScan &scan, i64 count, Workspace &space) const {
        const Candidates &candidates = gather(scan, bound_of_best(scan, count, space), space);
        space.best.resize(candidates.count);
        for (i64 i = 0; i < candidates.count; ++i) space.best[i] = i;
        std::partial_sort(space.best.begin(), space.best.begin() + count, space.best.end(), [&](i64 a, i64 b) {
            const float first = candidates.logits[a], second = candidates.logits[b];
            const bool is_first_nan = first != first, is_second_nan = second != second;  // NaN is the smallest here
            if (is_first_nan != is_second_nan) return is_second_nan;
            return first > second || (!(first < second) && a < b);
        });
    }

    Engine &engine_;
    const SamplingKernels &kernels_;
    const SampledRows &shape_;
    const i64 lanes_, blocks_;
    std::vector<Row> rows_;
    std::vector<bool> is_edited_;
    std::vector<LogitScan> scans_;
    std::deque<std::vector<float>> rescued_;

    // memory kept between batches, one per process like the engine
    static std::vector<Workspace> spaces_;
    static std::vector<float> edits_, found_;
};

std::vector<Workspace> Batch::spaces_;
std::vector<float> Batch::edits_, Batch::found_;

}  // namespace

void sample(Engine &engine, const SampledRows &rows, const SlotTable &table, const i32 *slots, const i32 *positions) {
    Batch batch(engine, rows);
    for (i64 index = 0; index < rows.rows; ++index) batch.add_drawn(index, table, slots[index], positions[index]);
    batch.run();
}

void score(Engine &engine, const SampledRows &rows) {
    Batch batch(engine, rows);
    for (i64 index = 0; index < rows.rows; ++index) batch.add_given(index);
    batch.run();
}

}  // namespace tokamak::cpu

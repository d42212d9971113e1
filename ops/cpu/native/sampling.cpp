#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace tokamak::cpu {
namespace {

constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();
constexpr double LOWEST_EXPONENT = -87.33;  // the kernels' e^x is 0 below
constexpr int BIN_BITS = 9, NUM_BINS = 1 << BIN_BITS;
constexpr i64 CHAINS = 4;  // of sums, so that one addition need not wait for another
constexpr i64 BLOCKS_PER_TASK = 8;
constexpr i64 TASKS_PER_THREAD = 6;

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Numbers in their order as unsigned integers; both zeros are one, NaN is the least.
std::uint32_t order_of(float x) {
    if (x != x) return 0;
    const std::uint32_t bits = bits_of(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Some tokens of a row by ascending id, with what is chosen by.
struct Candidates {
    std::vector<i32> token_ids;
    std::vector<float> logits, weights;
    std::vector<float> distances;  // from the row's largest logit: what the weights are a function of
    i64 count = 0;

    void reserve(i64 capacity) {
        if (static_cast<i64>(token_ids.size()) >= capacity) return;
        token_ids.resize(capacity);
        logits.resize(capacity);
        weights.resize(capacity);
        distances.resize(capacity);
    }
};

// What one thread works in.
struct Workspace {
    Candidates candidates;
    std::vector<double> bins = std::vector<double>(CHAINS * NUM_BINS);
    std::vector<float> lane_largest;
    std::vector<i64> best;  // candidates
    std::vector<i32> token_counts;  // [vocab], zero between two rows
};

double sum_of(const float *values, i64 count) {
    double sums[CHAINS] = {};
    i64 i = 0;
    for (; i + CHAINS <= count; i += CHAINS) {
        for (i64 chain = 0; chain < CHAINS; ++chain) sums[chain] += values[i + chain];
    }
    for (; i < count; ++i) sums[i % CHAINS] += values[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The bin in which the sum of the bins first reaches `limit`, `before` being the sum of those before it; NUM_BINS: none.
int find_bin(const double *bins, double limit, double &before) {
    int bin = 0;
    for (; bin < NUM_BINS && before + bins[bin] < limit; ++bin) before += bins[bin];
    return bin;
}

// Keeps the closest candidates, of equals those of the lower ids, as long as those before them weigh less than `limit` in sum;
// at least one. None is farther than `widest`. A search for the distance where the sum is reached: over bins of distances, then
// over the bits of those in its bin.
template <class Weight>
void keep_best(Candidates &candidates, Workspace &space, double limit, float widest, const Weight &weight_of) {
    limit = std::max(limit, std::numeric_limits<double>::min());
    double *bins = space.bins.data(), before = 0;
    const float *distances = candidates.distances.data();
    const float factor = widest > std::numeric_limits<float>::min() * NUM_BINS ? (NUM_BINS - 1) / widest : 0;
    const auto bin_of = [&](i64 i) { return static_cast<int>(std::min(distances[i] * factor, NUM_BINS - 1.0f)); };
    std::fill_n(bins, CHAINS * NUM_BINS, 0.0);
    for (i64 i = 0; i < candidates.count; ++i) bins[i % CHAINS * NUM_BINS + bin_of(i)] += weight_of(i);
    for (int bin = 0; bin < NUM_BINS; ++bin) {
        bins[bin] = (bins[bin] + bins[NUM_BINS + bin]) + (bins[2 * NUM_BINS + bin] + bins[3 * NUM_BINS + bin]);
    }
    const int edge_bin = find_bin(bins, limit, before);
    if (edge_bin == NUM_BINS) return;
    std::vector<i64> &edge = space.best;
    edge.clear();
    for (i64 i = 0; i < candidates.count; ++i) {
        if (bin_of(i) == edge_bin) edge.push_back(i);
    }
    std::uint32_t base = 0;  // bits of a distance; all closer ones are kept
    for (int shift = 32 - BIN_BITS; true; shift = std::max(shift - BIN_BITS, 0)) {
        std::fill_n(bins, NUM_BINS, 0.0);
        for (const i64 i : edge) {
            const std::uint32_t offset = (bits_of(distances[i]) - base) >> shift;  // wraps where it is closer
            if (offset < NUM_BINS) bins[offset] += weight_of(i);
        }
        const int bin = find_bin(bins, limit, before);
        // sums in another order may be less by a rounding: then the limit is at the last of them
        base += static_cast<std::uint32_t>(std::min(bin, NUM_BINS - 1)) << shift;
        if (shift == 0) break;
    }
    float last;  // of the distances that are kept
    std::memcpy(&last, &base, sizeof last);
    i64 num_kept = 0;
    for (i64 i = 0; i < candidates.count; ++i) {
        bool is_kept = distances[i] < last;
        if (distances[i] == last && before < limit) {
            is_kept = true;
            before += weight_of(i);
        }
        candidates.token_ids[num_kept] = candidates.token_ids[i];
        candidates.weights[num_kept] = candidates.weights[i];
        candidates.distances[num_kept] = candidates.distances[i];
        num_kept += is_kept;
    }
    candidates.count = num_kept;
}

// A row on its way.
struct Row {
    const float *logits;
    const SlotSampling *sampling;  // null: the token is given
    const i32 *history;            // of the slot
    i64 position, num_prompt;
    float *edited;  // a copy for what changes the logits; null where nothing does
    i64 choice, raw;  // scans; -1: none
    i64 num_top;

    i64 num_outputs() const { return position - num_prompt; }

    bool changes_logits() const {
        const SlotSampling &s = *sampling;
        return s.num_biases > 0 || s.num_allowed >= 0 || s.num_words > 0 || num_outputs() < s.min_tokens ||
               s.repetition_penalty != 1 || (num_outputs() > 0 && (s.presence_penalty != 0 || s.frequency_penalty != 0));
    }
};

class Batch {
public:
    Batch(Engine &engine, const SampledRows &shape)
        : engine_(engine), kernels_(engine.kernels().sampling), shape_(shape), lanes_(engine.kernels().lanes),
          blocks_(divide_up(shape.vocab, SAMPLING_BLOCK)) {
        spaces_.resize(engine.pool().num_threads());
        rows_.reserve(shape.rows);
    }

    void add_drawn(i64 index, const SlotTable &table, i64 slot, i64 position) {
        const SlotSampling &sampling = table.samplings[slot];
        Row row{logits_of(index), &sampling, table.token_ids + slot * table.width, position,
                table.num_prompt_tokens[slot], nullptr, -1, -1, 0};
        row.num_top = std::min<i64>({std::max(sampling.num_logprobs, 0), shape_.num_top, shape_.vocab});
        is_edited_.push_back(row.changes_logits());
        rows_.push_back(row);
    }

    void add_given(i64 index) {
        const i64 num_top = std::min(shape_.num_top, shape_.vocab);
        is_edited_.push_back(false);
        rows_.push_back({logits_of(index), nullptr, nullptr, 0, 0, nullptr, -1, -1, num_top});
    }

    void run() {
        edit();
        for (Row &row : rows_) plan_scans(row);
        scan();
        finish();
    }

private:
    const float *logits_of(i64 index) const { return shape_.logits + index * shape_.vocab; }

    template <class Function>
    void for_each(i64 count, bool is_small, const Function &function) {
        if (!is_small) return engine_.pool().run(count, function);
        for (i64 index = 0; index < count; ++index) function(index, 0);
    }

    // --- what changes the logits

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
            edit_row(row, spaces_[thread]);
        });
    }

    void edit_row(Row &row, Workspace &space) const {
        const SlotSampling &sampling = *row.sampling;
        float *logits = row.edited;
        const i32 *bias_ids = sampling.lists, *biases = bias_ids + sampling.num_biases;
        const i32 *allowed = biases + sampling.num_biases, *stops = allowed + std::max(sampling.num_allowed, 0);
        const i32 *offsets = stops + sampling.num_stops, *words = offsets + sampling.num_words + 1;
        if (sampling.num_allowed < 0) {
            std::memcpy(logits, row.logits, shape_.vocab * sizeof(float));
        } else {
            std::fill_n(logits, shape_.vocab, NEGATIVE_INFINITY);
            for (i64 i = 0; i < sampling.num_allowed; ++i) logits[allowed[i]] = row.logits[allowed[i]];
        }
        for (i64 i = 0; i < sampling.num_biases; ++i) {
            float bias;
            std::memcpy(&bias, biases + i, sizeof bias);
            logits[bias_ids[i]] += bias;
        }
        const i64 num_outputs = row.num_outputs();
        const i32 *end = row.history + row.position;
        for (i64 i = 0; i < sampling.num_words; ++i) {
            const i32 *word = words + offsets[i];
            const i64 length = offsets[i + 1] - offsets[i] - 1;  // of what must precede its last token
            if (length <= num_outputs && std::equal(word, word + length, end - length)) logits[word[length]] = NEGATIVE_INFINITY;
        }
        if (num_outputs < sampling.min_tokens) {
            for (i64 i = 0; i < sampling.num_stops; ++i) logits[stops[i]] = NEGATIVE_INFINITY;
        }
        penalize(row, space);
    }

    // Repetition over prompt and outputs (Keskar et al. 2019), presence and frequency over the outputs (OpenAI's).
    void penalize(const Row &row, Workspace &space) const {
        const SlotSampling &sampling = *row.sampling;
        if (sampling.repetition_penalty != 1) {
            const float penalty = sampling.repetition_penalty;
            for_counts(row.history, row.history + row.position, space, [&](i32 token_id, i32) {
                float &logit = row.edited[token_id];
                logit = logit > 0 ? logit / penalty : logit * penalty;
            });
        }
        if (sampling.presence_penalty != 0 || sampling.frequency_penalty != 0) {
            for_counts(row.history + row.num_prompt, row.history + row.position, space, [&](i32 token_id, i32 count) {
                row.edited[token_id] -= sampling.frequency_penalty * static_cast<float>(count) + sampling.presence_penalty;
            });
        }
    }

    // function(token id, how often it occurs) for each token in [begin, end).
    template <class Function>
    void for_counts(const i32 *begin, const i32 *end, Workspace &space, const Function &function) const {
        if (static_cast<i64>(space.token_counts.size()) < shape_.vocab) space.token_counts.resize(shape_.vocab);
        i32 *counts = space.token_counts.data();
        const auto vocab = static_cast<std::uint32_t>(shape_.vocab);
        for (const i32 *token_id = begin; token_id < end; ++token_id) {
            if (static_cast<std::uint32_t>(*token_id) < vocab) ++counts[*token_id];
        }
        for (const i32 *token_id = begin; token_id < end; ++token_id) {
            if (static_cast<std::uint32_t>(*token_id) >= vocab || counts[*token_id] == 0) continue;
            function(*token_id, counts[*token_id]);
            counts[*token_id] = 0;
        }
    }

    // --- scans

    bool is_truncated(const SlotSampling &sampling) const {
        return has_top_k(sampling) || sampling.min_p > 0 || sampling.top_p < 1;
    }

    bool has_top_k(const SlotSampling &sampling) const { return sampling.top_k > 0 && sampling.top_k < shape_.vocab; }

    static float scale_of(const SlotSampling &sampling) { return static_cast<float>(1 / std::max(sampling.temperature, 1e-30)); }

    void plan_scans(Row &row) {
        float choice_scale = 0;
        if (row.sampling != nullptr) {
            const SlotSampling &sampling = *row.sampling;
            // where top_k or min_p choose, weights are summed up over what they leave alone
            if (sampling.temperature > 0 && !has_top_k(sampling) && !(sampling.min_p > 0)) choice_scale = scale_of(sampling);
            const bool wants_raw = sampling.num_logprobs >= 0;
            if (wants_raw && row.edited == nullptr && (choice_scale == 0 || choice_scale == 1)) {
                row.choice = row.raw = add_scan(row.logits, 1);
                return;
            }
            row.choice = add_scan(row.edited != nullptr ? row.edited : row.logits, choice_scale);
            if (!wants_raw) return;
        }
        row.raw = add_scan(row.logits, 1);
    }

    i64 add_scan(const float *logits, float scale) {
        scans_.push_back({logits, shape_.vocab, scale, nullptr, nullptr, nullptr});
        return static_cast<i64>(scans_.size()) - 1;
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
        const i64 total = num_scans * blocks_;  // tasks are runs of blocks, whichever scans they belong to
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
            return row.raw < 0 && !(row.sampling->temperature > 0);  // one block of each is looked at
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

    // NaN where there is one.
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

    // The first of the largest; the first NaN where there is one.
    i32 first_of(const LogitScan &scan, float largest) const {
        const auto is_it = [&](float x) { return largest != largest ? x != x : x == largest; };
        const i64 block = std::find_if(scan.largest, scan.largest + blocks_, is_it) - scan.largest;
        const float *begin = scan.logits + block * SAMPLING_BLOCK;
        const float *end = std::min(begin + SAMPLING_BLOCK, scan.logits + scan.count);
        return static_cast<i32>(std::find_if(begin, end, is_it) - scan.logits);
    }

    i32 choose(const Row &row, Workspace &space) const {
        const SlotSampling &sampling = *row.sampling;
        const LogitScan &scan = scans_[row.choice];
        const float largest = largest_of(scan);
        // where everything is masked, or the logits are broken, there is no distribution
        if (!(sampling.temperature > 0) || !std::isfinite(largest)) return first_of(scan, largest);
        const double number = uniform(sampling.seed, static_cast<std::uint32_t>(row.position),
                                      static_cast<std::uint32_t>(sampling.sample_index));
        if (!is_truncated(sampling)) return draw(scan, largest, number, space);
        truncate(sampling, scan, largest, space);
        const Candidates &candidates = space.candidates;
        const double total = sum_of(candidates.weights.data(), candidates.count);
        return candidates.token_ids[position_of(candidates.weights.data(), candidates.count, number * total)];
    }

    // The first place where the sum of the weights is more than `target`; of the last weight where it never is.
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
        double before = 0, weight = 0;  // of the blocks before, of the block
        i64 block = 0;
        for (i64 next = 0; next < blocks_; ++next) {
            const double next_weight = block_weight(scan, next, largest);
            if (next_weight == 0) continue;
            before += weight;
            weight = next_weight;
            block = next;
            if (before + weight > target) break;
        }
        const i64 begin = block * SAMPLING_BLOCK, count = std::min(SAMPLING_BLOCK, scan.count - begin);
        space.candidates.reserve(count);
        float *weights = space.candidates.weights.data();
        kernels_.weigh(weights, scan.logits + begin, scan.largest[block], scan.scale, count);
        const double unit = weight / scan.sums[block];
        return static_cast<i32>(begin + position_of(weights, count, (target - before) / unit));
    }

    // Leaves what min_p, top_k and top_p leave, in this order, in the candidates.
    void truncate(const SlotSampling &sampling, const LogitScan &scan, float largest, Workspace &space) const {
        const bool is_of_all = !has_top_k(sampling) && !(sampling.min_p > 0);
        const double temperature = std::max(sampling.temperature, 1e-30), total = is_of_all ? total_weight(scan, largest) : 0;
        double exponent = LOWEST_EXPONENT;  // of the least weight that can be chosen
        if (sampling.min_p > 0) exponent = std::max(exponent, std::log(sampling.min_p));
        if (is_of_all) {
            // all tokens below this bound weigh half of what top_p may leave out, at most
            exponent = std::max(exponent, std::log((1 - sampling.top_p) * total / (2.0 * static_cast<double>(scan.count))));
        }
        float bound = static_cast<float>(largest + std::min(exponent, 0.0) * temperature);
        if (has_top_k(sampling)) bound = std::max(bound, bound_of_best(scan, sampling.top_k, space));
        Candidates &candidates = gather(scan, bound, space);
        const float widest = kernels_.measure(candidates.distances.data(), candidates.weights.data(), candidates.logits.data(),
                                              largest, scale_of(sampling), candidates.count);
        if (has_top_k(sampling) && candidates.count > sampling.top_k) {
            keep_best(candidates, space, sampling.top_k, widest, [](i64) { return 1.0; });
        }
        if (sampling.top_p < 1) {
            const float *weights = candidates.weights.data();
            const double sum = is_of_all ? total : sum_of(weights, candidates.count);
            keep_best(candidates, space, sampling.top_p * sum, widest, [&](i64 i) { return static_cast<double>(weights[i]); });
        }
    }

    Candidates &gather(const LogitScan &scan, float bound, Workspace &space) const {
        Candidates &candidates = space.candidates;
        candidates.reserve(scan.count + lanes_);
        candidates.count = kernels_.gather(candidates.token_ids.data(), candidates.logits.data(), scan, bound);
        return candidates;
    }

    // A bound that at least `count` logits reach: so many lanes of blocks have one that does.
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
            const std::uint32_t first = order_of(candidates.logits[a]), second = order_of(candidates.logits[b]);
            return first != second ? first > second : a < b;
        });
    }

    Engine &engine_;
    const SamplingKernels &kernels_;
    const SampledRows &shape_;
    const i64 lanes_, blocks_;
    std::vector<Row> rows_;
    std::vector<bool> is_edited_;
    std::vector<LogitScan> scans_;

    // memory that outlives a batch, one for the process as the engine is
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

void philox4x32(std::uint32_t counter[4], std::uint32_t key[2]) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t first = std::uint64_t{0xD2511F53} * counter[0], second = std::uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<std::uint32_t>(second >> 32) ^ counter[1] ^ key[0];
        counter[1] = static_cast<std::uint32_t>(second);
        counter[2] = static_cast<std::uint32_t>(first >> 32) ^ counter[3] ^ key[1];
        counter[3] = static_cast<std::uint32_t>(first);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
}

double uniform(std::uint64_t seed, std::uint32_t position, std::uint32_t sample_index) {
    std::uint32_t counter[4] = {position, sample_index, 0, 0};
    std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    philox4x32(counter, key);
    return static_cast<double>((std::uint64_t{counter[0]} << 32 | counter[1]) >> 11) * 0x1p-53;
}

}  // namespace tokamak::cpu

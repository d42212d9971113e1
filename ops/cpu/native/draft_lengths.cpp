#include "draft_lengths.h"

#include <algorithm>
#include <cmath>

namespace tokamak::cpu {

namespace {

constexpr i32 FIRST_PAUSE = 16, LONGEST_PAUSE = 256;    // tokens without drafts before one is tried
constexpr double PROBE_SHARE = 0.005, MOST_CREDIT = 1;  // cost of tries: share of each step, and maximum saved up, in steps
// Of layers: what makes ready for a draft token, in the steps before, takes twice as much again as the one that verifies it.
constexpr double LAYERS_COST = 3;
constexpr double PRIOR_WEIGHT = 3;            // weight of a class's prior, in drafts
constexpr double CLASS_DECAY = 0.98;          // per further draft of the class
constexpr double LOWEST = 0.02, BEST = 0.98;  // limits of a class's chance: nothing is certain, and failures are tried again
constexpr double BY_LUCK = 0.005;             // chance of a draft of a sequence that does not continue as expected
constexpr double LEAST_TRUST = 0.01, FIRST_TRUST = 0.5, SURE_TRUST = 0.9, MOST_TRUST = 0.98;
constexpr double LEAST_TOLD = 0.1;    // minimum chance of a class for an accepted draft to raise the trust in a sequence
constexpr double RECENT_GAIN = 0.35;  // per row with drafts: one bad sequence should not decide for all later ones
// Steps without worthwhile drafts after which the evidence against drafts is doubted; doubled each time that the doubt was
// wrong.
constexpr i64 DOUBTED = 1024, MOST_DOUBTED = 16384;
constexpr double DOUBT_TRUST = 0.25, DOUBT_WEIGHT = 1;  // during a doubt: a few sequences should settle it
constexpr double LEAST = 0.05;                          // minimum chance of a draft for a try
constexpr i32 LINGER = 8;            // tokens without drafts after which no more are requested, unless promising
constexpr i64 PLAIN_INTERVAL = 256;  // steps between steps without drafts, to measure their time
// A try is requested with two results: after the first one, layers store a hidden state in that step, and draft in the next.
// Without an outcome it is requested again.
constexpr i64 ASKS = 2, ASK_INTERVAL = 4;

constexpr double LEVEL_GAIN = 0.1, MOST_WEIGHT = 40;  // number of steps in the mean of a share
constexpr double ROW_SHARE = 1.0 / 48;                // cost of one more row as a share of a step, before any measurement
constexpr double MOST_OVER = 2,
                 MOST_OVER_FIRST = 3;      // steps that take so many times the expected time were delayed by other load
constexpr double MOST_OVER_DRAFTED = 1.5;  // for steps with drafts, which are not tried again while they seem that slow
constexpr i64 REMEMBERED = 2048, FORGET_INTERVAL = 64;  // steps
constexpr i64 NEVER = -(i64{1} << 40);
constexpr double ALIKE_ROWS = 1.2;  // numbers of rows within this factor take about as long

}  // namespace

StepTimes::StepTimes() {
    for (i64 rows = 1; rows <= 64; ++rows) least_rows_.push_back(rows);
    for (double rows = 70; rows < 65536; rows *= 1.09) least_rows_.push_back(static_cast<i64>(rows));
    for (Shares &shares : shares_) {
        for (std::vector<double> *each : {&shares.met, &shares.weights, &shares.fitted}) each->assign(least_rows_.size(), 0);
        shares.met_at.assign(least_rows_.size(), NEVER);
    }
}

i64 StepTimes::cell_of(i64 num_rows) const {
    const i64 above = std::upper_bound(least_rows_.begin(), least_rows_.end(), num_rows) - least_rows_.begin();
    return std::max<i64>(above - 1, 0);
}

void StepTimes::learn(StepKind kind, i64 num_rows, double step_ns) {
    Shares &shares = shares_[static_cast<int>(kind)];
    const i64 cell = cell_of(num_rows);
    ++num_steps_;
    double &share = shares.met[cell], &weight = shares.weights[cell];
    if (!level_) level_ = step_ns;
    // The first of its kind too: a delay of it would count against the kind until it is forgotten.
    const double most = kind == StepKind::DRAFTED ? MOST_OVER_DRAFTED : weight ? MOST_OVER : MOST_OVER_FIRST;
    step_ns = std::min(step_ns, most * of(kind, num_rows));
    // steps with as many prompt rows differ by contexts and number of prompts
    if (weight && kind != StepKind::MIXED) level_ += LEVEL_GAIN * (step_ns / shares.fitted[cell] - level_);
    if (!weight) shares.cells.insert(std::lower_bound(shares.cells.begin(), shares.cells.end(), cell), cell);
    weight = std::min(weight + 1, MOST_WEIGHT);
    share += (step_ns / level_ - share) / weight;
    shares.met_at[cell] = num_steps_;
    fit(shares);
    if (num_steps_ % FORGET_INTERVAL == 0) {
        for (Shares &each : shares_) fit(each);
    }
}

// Shares that increase with the rows and are closest to the measured ones.
void StepTimes::fit(Shares &shares) const {
    struct Block {
        double sum, weight;
        std::size_t begin;
    };
    std::vector<i64> &cells = shares.cells;
    const auto is_forgotten = [&](i64 cell) { return shares.met_at[cell] < num_steps_ - REMEMBERED; };
    for (const i64 cell : cells) {
        if (is_forgotten(cell)) shares.weights[cell] = shares.met[cell] = shares.fitted[cell] = 0;
    }
    cells.erase(std::remove_if(cells.begin(), cells.end(), is_forgotten), cells.end());
    std::vector<Block> blocks;
    blocks.reserve(cells.size());
    for (std::size_t place = 0; place < cells.size(); ++place) {
        const double weight = shares.weights[cells[place]];
        blocks.push_back({weight * shares.met[cells[place]], weight, place});
        while (blocks.size() > 1) {
            Block &before = blocks[blocks.size() - 2], &last = blocks.back();
            if (before.sum * last.weight <= last.sum * before.weight) break;
            before.sum += last.sum, before.weight += last.weight;
            blocks.pop_back();
        }
    }
    std::size_t end = cells.size();
    for (; !blocks.empty(); blocks.pop_back()) {
        const Block &block = blocks.back();
        for (std::size_t place = block.begin; place < end; ++place) shares.fitted[cells[place]] = block.sum / block.weight;
        end = block.begin;
    }
}

void StepTimes::forget(StepKind kind) {
    Shares &shares = shares_[static_cast<int>(kind)];
    for (std::vector<double> *each : {&shares.met, &shares.weights, &shares.fitted}) each->assign(least_rows_.size(), 0);
    shares.cells.clear();
}

// Shares of the kind, or of another one while it has no measurements.
const StepTimes::Shares &StepTimes::known(StepKind kind) const {
    for (const StepKind each : {kind, StepKind::PLAIN, StepKind::DRAFTED, StepKind::MIXED}) {
        if (!shares_[static_cast<int>(each)].cells.empty()) return shares_[static_cast<int>(each)];
    }
    return shares_[0];
}

double StepTimes::of(StepKind kind, i64 num_rows) const { return (level_ ? level_ : 1) * share_of(known(kind), num_rows); }

double StepTimes::share_of(const Shares &shares, i64 num_rows) const {
    const std::vector<double> &fitted = shares.fitted;
    i64 below = cell_of(num_rows), above = below;
    const i64 num_cells = static_cast<i64>(fitted.size());
    while (below >= 0 && !fitted[below]) --below;
    while (above < num_cells && !fitted[above]) ++above;
    const double rows = static_cast<double>(num_rows);
    if (below < 0 && above == num_cells) return 1 + ROW_SHARE * rows;
    if (below < 0) return fitted[above] / (1 + ROW_SHARE * (static_cast<double>(least_rows_[above]) - rows));
    const double least = static_cast<double>(least_rows_[below]);
    if (above == num_cells) return fitted[below] * (1 + ROW_SHARE * (rows - least) / std::max(1.0, least * ROW_SHARE));
    if (above == below) return fitted[below];
    const double part = (rows - least) / (static_cast<double>(least_rows_[above]) - least);
    return fitted[below] + part * (fitted[above] - fitted[below]);
}

i64 StepTimes::num_plain_since(i64 num_rows) const {
    const std::vector<i64> &met_at = shares_[static_cast<int>(StepKind::PLAIN)].met_at;
    const i64 last = cell_of(static_cast<i64>(static_cast<double>(num_rows) * ALIKE_ROWS));
    i64 met = NEVER;
    for (i64 cell = cell_of(static_cast<i64>(std::ceil(static_cast<double>(num_rows) / ALIKE_ROWS))); cell <= last; ++cell)
        met = std::max(met, met_at[cell]);
    return num_steps_ - met;
}

DraftLengths::DraftLengths(std::vector<double> priors, std::vector<i64> first_classes, std::vector<i64> are_layers,
                           LengthSlots slots, bool is_adaptive)
    : first_classes_(std::move(first_classes)),
      are_layers_(std::move(are_layers)),
      num_verified_(2 * first_classes_.size(), 0),
      slots_(slots),
      is_adaptive_(is_adaptive),
      priors_(std::move(priors)),
      tried_(priors_.size(), PRIOR_WEIGHT),
      stood_(priors_),
      are_first_(priors_.size(), 0),
      recent_(first_classes_.size(), FIRST_TRUST),
      probe_credit_(MOST_CREDIT),
      doubted_after_(DOUBTED) {
    for (double &stood : stood_) stood *= PRIOR_WEIGHT;
}

double DraftLengths::chance_of(i32 which) const { return std::clamp(stood_[which] / tried_[which], LOWEST, BEST); }

i64 DraftLengths::method_of(i32 which) const {
    return std::upper_bound(first_classes_.begin(), first_classes_.end(), which) - first_classes_.begin() - 1;
}

double DraftLengths::trust_of(i32 slot, i64 method) const {
    const double trust = slots_.trusts[slot * slots_.num_methods + method];
    return trust ? trust : recent_[method];
}

// Chance of a first draft of the method for a sequence with this trust: if no class of first drafts is accepted, the sequence
// does not matter.
double DraftLengths::promise_of(i64 method, double trust) const {
    const std::size_t next = static_cast<std::size_t>(method) + 1;
    const std::size_t end = next < first_classes_.size() ? static_cast<std::size_t>(first_classes_[next]) : priors_.size();
    double best = 0;
    for (std::size_t which = static_cast<std::size_t>(first_classes_[method]); which < end; ++which)
        if (are_first_[which]) best = std::max(best, chance_of(static_cast<i32>(which)));
    return best ? trust * best : trust;
}

bool DraftLengths::is_worth(double chance) const { return chance > std::max(least_chance_, LEAST); }

void DraftLengths::clear(const i32 *slots, i64 num_slots) {
    for (i64 row = 0; row < num_slots; ++row) {
        slots_.num_drafts[slots[row]] = 0;
        std::fill_n(slots_.chances + slots[row] * slots_.k, slots_.k, 0.0);
    }
}

void DraftLengths::offer(const DraftCall &found, i64 first_class) {
    const i64 k = slots_.k;
    std::vector<double> chances(k);
    for (i64 row = 0; row < found.num_rows; ++row) {
        const i64 slot = found.slots[row], count = found.counts[row];
        if (!count) continue;
        are_first_[first_class + found.classes[row * k]] = 1;
        double chance = trust_of(static_cast<i32>(slot), method_of(static_cast<i32>(first_class))), promised = 0, before = 0;
        std::fill(chances.begin(), chances.end(), 0);
        for (i64 place = 0; place < count; ++place) {
            const i32 which = static_cast<i32>(first_class) + found.classes[row * k + place];
            promised += chances[place] = chance *= chance_of(which);
        }
        for (i64 place = 0; place < k; ++place) before += slots_.chances[slot * k + place];
        if (promised <= before) continue;
        slots_.num_drafts[slot] = static_cast<i32>(count);
        for (i64 place = 0; place < k; ++place) {
            slots_.drafts[slot * k + place] = found.drafts[row * k + place];
            slots_.classes[slot * k + place] = static_cast<i32>(first_class) + found.classes[row * k + place];
            slots_.chances[slot * k + place] = chances[place];
        }
    }
    tell_layers(found.slots, found.num_rows);
}

void DraftLengths::tell_layers(const i32 *slots, i64 num_slots) {
    for (i64 row = 0; row < num_slots; ++row)
        slots_.is_drafted_by_layers[slots[row]] = are_layers_[method_of(slots_.classes[slots[row] * slots_.k])] != 0;
}

void DraftLengths::choose(const i32 *slots, i64 num_slots, const i32 *granted, i64 num_rows, i64 num_sampled, i32 *chosen) {
    struct Draft {
        double chance;
        i64 row;
    };
    std::vector<Draft> drafts;
    for (i64 row = 0; row < num_slots; ++row) {
        const i32 most = std::min(granted[row], slots_.num_drafts[slots[row]]);
        chosen[row] = is_adaptive_ ? 0 : most;
        for (i64 place = 0; is_adaptive_ && place < most; ++place)
            drafts.push_back({slots_.chances[slots[row] * slots_.k + place], row});
    }
    if (drafts.empty()) return;
    std::stable_sort(drafts.begin(), drafts.end(),
                     [](const Draft &one, const Draft &other) { return one.chance > other.chance; });
    // Tokens per time of the step. If it contains prompts of others, drafts must bring more tokens per added time than a step
    // without prompts.
    const double tokens = static_cast<double>(num_sampled);
    const bool is_alone = num_rows == num_sampled;
    const StepKind without = is_alone ? StepKind::PLAIN : StepKind::MIXED, with = is_alone ? StepKind::DRAFTED : without;
    const double plain = times_.of(without, num_rows);
    const double rate = tokens / (is_alone ? plain : times_.of(StepKind::PLAIN, num_sampled));
    double time = plain, promised = 0, best = is_alone ? rate : 0;
    i64 num_best = 0;
    least_chance_ = 1;  // the drafts that would pay if all had this chance
    for (std::size_t count = 1; count <= drafts.size(); ++count) {
        time = std::max(time, times_.of(with, num_rows + static_cast<i64>(count)));  // never less time for more rows
        least_chance_ = std::min(least_chance_, rate * (time - plain) / static_cast<double>(count));
        if (drafts[count - 1].chance < LEAST) continue;
        promised += drafts[count - 1].chance;
        const double gain = is_alone ? (tokens + promised) / time : promised - rate * (time - plain);
        if (gain > best) best = gain, num_best = static_cast<i64>(count);
    }
    // No slot is prepared for drafts that would not be verified.
    if (is_alone && !num_best) least_chance_ = std::max(least_chance_, drafts[0].chance);
    if (is_alone && times_.num_plain_since(num_rows) > PLAIN_INTERVAL) return;
    for (i64 count = 0; count < num_best; ++count) ++chosen[drafts[count].row];
    if (num_best) num_doubted_ = 0;
    probe(slots, num_slots, granted, num_best ? with : without, num_rows + num_best, chosen);
}

// Tokens of a slot without drafts after which it is tried; 0 if no slot has had drafts for long, since short sequences would
// never be tried.
i32 DraftLengths::pause_of(i32 slot) const {
    return num_without_ >= LONGEST_PAUSE ? 0 : std::max(slots_.pauses[slot], FIRST_PAUSE);
}

// Tries a draft of the sequence that has waited longest, if that does not cost too much.
void DraftLengths::probe(const i32 *slots, i64 num_slots, const i32 *granted, StepKind kind, i64 num_rows, i32 *chosen) {
    i64 longest = -1;
    for (i64 row = 0; row < num_slots; ++row) {
        const i64 slot = slots[row];
        if (slots_.num_rested[slot] < pause_of(static_cast<i32>(slot))) continue;
        if (chosen[row] || std::min(granted[row], slots_.num_drafts[slot]) < 1) continue;
        if (longest < 0 || slots_.num_rested[slot] > slots_.num_rested[slots[longest]]) longest = row;
    }
    if (longest < 0) return;
    const StepKind with = kind == StepKind::PLAIN ? StepKind::DRAFTED : kind;
    probe_cost_ = std::clamp(times_.of(with, num_rows + 1) / times_.of(kind, num_rows) - 1, 0.0, MOST_CREDIT);
    if (slots_.is_drafted_by_layers[slots[longest]]) probe_cost_ *= LAYERS_COST;
    if (probe_cost_ > probe_credit_) return;
    probe_credit_ -= probe_cost_;
    num_asked_ = 0;
    chosen[longest] = 1;
}

i64 DraftLengths::num_idle(const i32 *slots, i64 num_slots) const {
    i64 until_due = LONGEST_PAUSE;
    for (i64 row = 0; row < num_slots; ++row)
        until_due = std::min<i64>(until_due, pause_of(slots[row]) - slots_.num_rested[slots[row]] - ASKS);
    const auto until_paid = static_cast<i64>((probe_cost_ - probe_credit_) / PROBE_SHARE);
    return std::min(std::max(until_due, until_paid), doubted_after_ - num_doubted_);
}

void DraftLengths::took(StepKind kind, i64 num_rows, double step_ns, i64 num_steps) {
    times_.learn(kind, num_rows, step_ns);
    const double most = std::max(MOST_CREDIT, 1.5 * probe_cost_);  // the next one may cost more than the last
    probe_credit_ = std::min(probe_credit_ + PROBE_SHARE * static_cast<double>(num_steps), most);
    num_doubted_ += num_steps;
}

// Otherwise a few delayed steps, or a few unsuitable sequences, would stop drafts for as long as no slot has any. Judged
// sequences keep their judgement; new sequences decide.
void DraftLengths::doubt(const i32 *slots, i64 num_slots) {
    for (i64 row = 0; row < num_slots; ++row) {
        double *trusts = slots_.trusts + slots[row] * slots_.num_methods;
        for (std::size_t method = 0; slots_.num_rested[slots[row]] && method < recent_.size(); ++method)
            if (!trusts[method]) trusts[method] = recent_[method];
    }
    num_doubted_ = 0;
    doubted_after_ = std::min(2 * doubted_after_, MOST_DOUBTED);
    times_.forget(StepKind::DRAFTED);
    for (double &trust : recent_) trust = std::max(trust, DOUBT_TRUST);
    for (std::size_t which = 0; which < priors_.size(); ++which) {
        if (stood_[which] >= priors_[which] * tried_[which]) continue;
        tried_[which] = DOUBT_WEIGHT;
        stood_[which] = DOUBT_WEIGHT * priors_[which];
    }
}

void DraftLengths::learn(const i32 *slots, i64 num_slots, const i32 *num_drafts, const i32 *counts) {
    if (num_doubted_ >= doubted_after_) doubt(slots, num_slots);
    std::vector<double> tried(tried_.size()), stood(tried_.size());
    for (i64 row = 0; row < num_slots; ++row) {
        const i64 slot = slots[row];
        if (!num_drafts[row]) {
            slots_.num_rested[slot] += counts[row];
            num_without_ += counts[row];
            continue;
        }
        num_without_ = 0;
        const i64 method = method_of(slots_.classes[slot * slots_.k]), num_methods = static_cast<i64>(first_classes_.size());
        num_verified_[method] += num_drafts[row];
        num_verified_[num_methods + method] += std::max(counts[row] - 1, 0);
        if (slots_.is_ended[slot]) continue;
        const double before = trust_of(static_cast<i32>(slot), method);
        const i64 num_judged = std::min(num_drafts[row], counts[row]);
        double odds = before / (1 - before);
        for (i64 place = 0; place < num_judged; ++place) {
            const double chance = std::max(chance_of(slots_.classes[slot * slots_.k + place]), LEAST_TOLD);
            odds *= place < counts[row] - 1 ? chance / BY_LUCK : (1 - chance) / (1 - BY_LUCK);
        }
        const double trust = std::clamp(odds / (1 + odds), LEAST_TRUST, MOST_TRUST);
        for (i64 place = 0; place < num_judged; ++place) {
            const i32 which = slots_.classes[slot * slots_.k + place];
            tried[which] += trust;
            stood[which] += trust * (place < counts[row] - 1);
        }
        slots_.trusts[slot * slots_.num_methods + method] = trust;
        recent_[method] += RECENT_GAIN * (trust - recent_[method]);
        if (trust > SURE_TRUST) doubted_after_ = DOUBTED;
        slots_.num_rested[slot] = 0;
        slots_.pauses[slot] = counts[row] > 1 ? FIRST_PAUSE : std::clamp(2 * slots_.pauses[slot], FIRST_PAUSE, LONGEST_PAUSE);
    }
    for (std::size_t which = 0; which < tried.size(); ++which) {
        if (!tried[which]) continue;
        const double decay = std::pow(CLASS_DECAY, tried[which]);
        tried_[which] = tried_[which] * decay + tried[which];
        stood_[which] = stood_[which] * decay + stood[which];
    }
}

void DraftLengths::wanted(const i32 *slots, i64 num_slots, i32 *wanted) {
    i64 due = -1;  // the next row to try; draft layers work for all rows that want drafts
    for (i64 row = 0; row < num_slots; ++row) {
        const i32 slot = slots[row], num_rested = slots_.num_rested[slot];
        double promised = 0;
        for (i64 method = 0; method < static_cast<i64>(recent_.size()); ++method)
            promised = std::max(promised, promise_of(method, trust_of(slot, method)));
        const bool promises = is_worth(slots_.chances[slot * slots_.k]) || (num_rested < LINGER && is_worth(promised));
        wanted[row] = promises || !is_adaptive_ ? static_cast<i32>(slots_.k) : 0;
        const bool is_due = num_rested + ASKS >= pause_of(slot);
        if (is_due && (due < 0 || num_rested > slots_.num_rested[slots[due]])) due = row;
    }
    if (due < 0 || probe_cost_ > probe_credit_) return;
    if (num_asked_ < ASKS) wanted[due] = static_cast<i32>(slots_.k);
    num_asked_ = (num_asked_ + 1) % ASK_INTERVAL;
}

i64 DraftLengths::wanted_by_new_requests() const {
    double promised = 0;
    for (i64 method = 0; method < static_cast<i64>(recent_.size()); ++method)
        promised = std::max(promised, promise_of(method, recent_[method]));
    return !is_adaptive_ || is_worth(promised) ? slots_.k : 0;
}

}  // namespace tokamak::cpu

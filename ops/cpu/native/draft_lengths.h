// Number of drafts per row, by learned acceptance and step times (workers/extensions/drafts/draft_length_policy.py explains
// it).
#pragma once

#include <vector>

#include "drafts.h"

namespace tokamak::cpu {

// Kinds of steps with separate times: decode without drafts; with drafts, which layers may have made in them; and with rows of
// prompts.
enum class StepKind { PLAIN, DRAFTED, MIXED };

inline StepKind kind_of(bool has_prompts, bool has_drafts) {
    return has_prompts ? StepKind::MIXED : has_drafts ? StepKind::DRAFTED : StepKind::PLAIN;
}

// Nanoseconds of steps by kind and number of rows. Long contexts and other programs slow down all steps alike, so the times are
// a level that moves with each step, and for each number of rows a share of it, the mean of the last ones. More rows never take
// less time: neighbours that contradict this are merged, which removes most errors. Numbers without measurements are
// interpolated; beyond the largest, a further row is assumed to be cheap, which is soon corrected. Old measurements are
// forgotten, so that a wrong share does not exclude a number of rows for ever.
class StepTimes {
public:
    StepTimes();
    void learn(StepKind kind, i64 num_rows, double step_ns);
    // Expected time of a step with so many rows.
    double of(StepKind kind, i64 num_rows) const;
    void forget(StepKind kind);
    // Steps since the last one without drafts with about so many rows.
    i64 num_plain_since(i64 num_rows) const;

private:
    // Per cell of numbers of rows.
    struct Shares {
        std::vector<double> met, weights, fitted;  // weight 0: not measured
        std::vector<i64> met_at, cells;            // cells: the measured ones, in order
    };
    i64 cell_of(i64 num_rows) const;
    void fit(Shares &shares) const;
    const Shares &known(StepKind kind) const;
    double share_of(const Shares &shares, i64 num_rows) const;

    std::vector<i64> least_rows_;  // of each cell
    Shares shares_[3];             // by kind
    double level_ = 0;
    i64 num_steps_ = 0;
};

// Arrays of the runner's slots at fixed addresses (workers/engine/batch_slots.py), with k drafts each.
struct LengthSlots {
    i64 k;
    i32 *drafts, *classes;  // [slots, k]
    double *chances;        // [slots, k]: chance that a draft and all before it are accepted
    i32 *num_drafts;
    double *trusts;  // [slots, methods]: chance that drafts of the sequence are accepted; 0: unknown
    i64 num_methods;
    i32 *num_rested, *pauses;  // tokens
    bool *is_drafted_by_layers;
    const bool *is_ended;  // by a stop token: drafts after it are accepted by chance, which means nothing
};

// A sequence either continues as a method expects or not: in the first case its drafts are accepted as often as those of their
// class, in the second hardly ever. The case is inferred from each of its drafts and soon certain. A new sequence is assumed to
// be like the last ones. Classes learn only from sequences of the first case, so that unpredictable text does not distort them.
class DraftLengths {
public:
    // `first_classes` and `are_layers`: for each method.
    DraftLengths(std::vector<double> priors, std::vector<i64> first_classes, std::vector<i64> are_layers, LengthSlots slots,
                 bool is_adaptive);

    // Clears the drafts of the slots.
    void clear(const i32 *slots, i64 num_slots);
    // Offers drafts to slots, which take them if they promise more than the present ones; classes count from `first_class`.
    void offer(const DraftCall &found, i64 first_class);
    // Chooses how many of the granted drafts each slot gets, in a step with so many rows that brings so many tokens without
    // drafts.
    void choose(const i32 *slots, i64 num_slots, const i32 *granted, i64 num_rows, i64 num_sampled, i32 *chosen);
    // Learns from a result: the number of verified drafts, and of tokens.
    void learn(const i32 *slots, i64 num_slots, const i32 *num_drafts, const i32 *counts);
    // For each method so far: verified drafts, then accepted drafts.
    const std::vector<i64> &num_verified() const { return num_verified_; }
    // The method of each slot's drafts; layers make theirs when the step begins.
    void tell_layers(const i32 *slots, i64 num_slots);
    // The number of drafts that would pay in the next step.
    void wanted(const i32 *slots, i64 num_slots, i32 *wanted);
    // Counts steps in which these slots have no drafts and no method finds any; they say nothing about drafts.
    i64 num_idle(const i32 *slots, i64 num_slots) const;
    // The same for a new sequence.
    i64 wanted_by_new_requests() const;
    // Minimum chance at which one more draft paid in the last chosen step; 0: all pay, or unknown.
    double least_chance() const { return is_adaptive_ ? least_chance_ : 0; }
    // Records a step, which represents so many of its kind.
    void took(StepKind kind, i64 num_rows, double step_ns, i64 num_steps);

private:
    double chance_of(i32 which) const;
    double trust_of(i32 slot, i64 method) const;
    double promise_of(i64 method, double trust) const;
    void doubt(const i32 *slots, i64 num_slots);
    i64 method_of(i32 which) const;
    bool is_worth(double chance) const;
    i32 pause_of(i32 slot) const;
    void probe(const i32 *slots, i64 num_slots, const i32 *granted, StepKind kind, i64 num_rows, i32 *chosen);

    std::vector<i64> first_classes_, are_layers_;
    std::vector<i64> num_verified_;
    LengthSlots slots_;
    bool is_adaptive_;
    std::vector<double> priors_, tried_, stood_;  // per class; the latter two decay
    std::vector<char> are_first_;                 // whether first drafts of sequences have this class
    std::vector<double> recent_;                  // per method: trust in the last sequences with drafts
    StepTimes times_;
    double least_chance_ = 0;  // for one more row to pay
    double probe_credit_ = 0;  // in steps: available for unpromising drafts
    double probe_cost_ = 0;    // in steps: cost of the last of them
    i64 num_asked_ = 0;        // results since one of them was first requested
    i64 num_doubted_ = 0;      // steps since the last with worthwhile drafts
    i64 doubted_after_;        // number of these after which the evidence is doubted
    i64 num_without_ = 0;      // tokens since any sequence had drafts, in total: short answers alone have too few
};

}  // namespace tokamak::cpu

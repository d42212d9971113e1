// Number of drafts per row, by learned acceptance and step times (workers/extensions/drafts/draft_length_policy.py explains
// it).
#pragma once

#include <vector>

#include "drafts.h"

namespace tokamak::cpu {

// Steps whose times are known apart: those of decoding rows without drafts; those with some, which layers may have made in
// them; and those with rows of prompts, which others started in.
enum class StepKind { PLAIN, DRAFTED, MIXED };

inline StepKind kind_of(bool has_prompts, bool has_drafts) {
    return has_prompts ? StepKind::MIXED : has_drafts ? StepKind::DRAFTED : StepKind::PLAIN;
}

// Nanoseconds of steps by their kind and number of rows. Long contexts and other programs slow down all steps alike, so what is
// kept is a level that moves with each step, and of each number of rows a share of it, the mean of the last ones. More rows
// never take less: neighbours that say so are taken together, which is what most errors come to. Numbers that were not met lie
// between their neighbours; beyond them a further row is taken to be cheap, which is soon found out where it is not. What was
// not met for long is forgotten, so that a wrong share which speaks against so many rows does not do so for ever.
class StepTimes {
public:
    StepTimes();
    void learn(StepKind kind, i64 num_rows, double step_ns);
    // What a step of so many rows is expected to take.
    double of(StepKind kind, i64 num_rows) const;
    void forget(StepKind kind);
    // Steps since one without drafts of about so many rows.
    i64 num_plain_since(i64 num_rows) const;

private:
    // Of the cells in which numbers of rows lie.
    struct Shares {
        std::vector<double> met, weights, fitted;  // weight 0: not met
        std::vector<i64> met_at, cells;            // cells: those that were met, in order
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

// Arrays of the runner's slots, which stay where they are (workers/engine/batch_slots.py); k drafts each.
struct LengthSlots {
    i64 k;
    i32 *drafts, *classes;  // [slots, k]
    double *chances;        // [slots, k]: that a draft is accepted and all before it
    i32 *num_drafts;
    double *
        trusts;  // [slots, methods]: chance that the sample is one of those whose drafts are accepted; 0: nothing is known of it
    i64 num_methods;
    i32 *num_rested, *pauses;  // tokens
    bool *is_drafted_by_layers;
    const bool *is_ended;  // by a stop token: what was drafted behind it stood by luck alone, and says nothing
};

// A sample goes on as a method expects, or it does not: drafts of the one kind are accepted as often as those of their class
// do, of the other hardly ever. Which kind it is, is inferred from each of its drafts, and soon sure. One of which nothing is
// known yet is taken for what the last ones were. Classes learn from samples of the first kind alone, so that text which cannot
// be drafted does not spoil them.
class DraftLengths {
public:
    // `first_classes` and `are_layers`: of each method.
    DraftLengths(std::vector<double> priors, std::vector<i64> first_classes, std::vector<i64> are_layers, LengthSlots slots,
                 bool is_adaptive);

    // The slots have no drafts any more.
    void clear(const i32 *slots, i64 num_slots);
    // These drafts are the slots', where they promise more than what they have; classes count from `first_class`.
    void offer(const DraftCall &found, i64 first_class);
    // How many drafts each slot gets, of those that are granted, in a step of so many rows that brings so many tokens besides.
    void choose(const i32 *slots, i64 num_slots, const i32 *granted, i64 num_rows, i64 num_sampled, i32 *chosen);
    // So many drafts were verified, and so many tokens came of it.
    void learn(const i32 *slots, i64 num_slots, const i32 *num_drafts, const i32 *counts);
    // Of each method so far: drafts that were verified, then those that stood.
    const std::vector<i64> &num_verified() const { return num_verified_; }
    // Who made the drafts of these slots: layers make theirs when the step begins.
    void tell_layers(const i32 *slots, i64 num_slots);
    // How many drafts would pay in the next step.
    void wanted(const i32 *slots, i64 num_slots, i32 *wanted);
    // So many steps more in which these slots have none, and what draft tokens by itself finds none, say nothing of drafts.
    i64 num_idle(const i32 *slots, i64 num_slots) const;
    // The same of a sample that comes.
    i64 wanted_by_new_requests() const;
    // From which chance on a draft more paid in the step that was chosen for last; 0: all do, or nobody knows.
    double least_chance() const { return is_adaptive_ ? least_chance_ : 0; }
    // A step, which stands for so many of its kind.
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
    std::vector<double> priors_, tried_, stood_;  // of each class; the latter decayed
    std::vector<char> are_first_;                 // whether a sample's first draft was one of these
    std::vector<double> recent_;                  // trust in the samples that were drafted for last, of each method
    StepTimes times_;
    double least_chance_ = 0;  // that may pay for a row more
    double probe_credit_ = 0;  // steps: what may be spent on drafts that promise nothing
    double probe_cost_ = 0;    // steps: what one of them took last
    i64 num_asked_ = 0;        // results since one of them was asked for first
    i64 num_doubted_ = 0;      // steps since one whose drafts were thought to pay
    i64 doubted_after_;        // so many of these what speaks against drafts is doubted
    i64 num_without_ = 0;      // tokens since any sample had drafts, together: those of short answers come to nothing alone
};

}  // namespace tokamak::cpu

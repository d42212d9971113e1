// Draft tokens of draft layers, their probabilities, and how often such tokens are accepted
// (workers/extensions/drafts/mtp.py).
#pragma once

#include <vector>

#include "ops.h"

namespace tokamak::cpu {

struct DraftToken {
    i32 token_id;
    float probability;  // that the layer gives it; 0: nobody asked, or no number is there
};

// The likeliest token of each row of logits [rows, vocab], the first of the largest, by the sampler's pass over them.
void choose_draft_tokens(Engine &engine, const float *logits, i64 num_rows, i64 vocab, bool has_probabilities,
                         DraftToken *draft_tokens);

// Of each place in a chain and each class of probabilities: the chance that such a draft token is accepted where all before it
// are. In memory of the runner, since of several ranks all have the first one's (workers/extensions/drafts/drafting.py).
//
// What was met is forgotten with the draft tokens that come after it, wherever these are: chances of a place that chains do not
// reach any more become those of the place before, and those of the first place are always met.
class DraftChances {
public:
    static constexpr i64 CLASSES = 8;

    // `chances`: [places, CLASSES]
    DraftChances(i64 num_places, double *chances);
    static i64 class_of(float probability);
    double of(i64 place, i64 which) const { return chances_[place * CLASSES + which]; }
    // A draft token was verified, and all before it stood. Believed after `tell`.
    void learn(i64 place, i64 which, bool stood);
    void tell();

private:
    i64 num_places_;
    double *chances_;
    std::vector<double> tried_, stood_;  // decayed
    i64 num_learned_ = 0;                // rows since `tell`
};

}  // namespace tokamak::cpu

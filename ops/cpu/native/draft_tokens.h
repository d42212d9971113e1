// Draft tokens of draft layers, their probabilities, and their acceptance rates (workers/extensions/drafts/mtp.py).
#pragma once

#include <vector>

#include "ops.h"

namespace tokamak::cpu {

struct DraftToken {
    i32 token_id;
    float probability;  // according to the layer; 0: not requested, or not finite
};

// The likeliest token of each row of logits [rows, vocab], ties to the first, by the sampler's scan.
void choose_draft_tokens(Engine &engine, const float *logits, i64 num_rows, i64 vocab, bool has_probabilities,
                         DraftToken *draft_tokens);

// For each place in a chain and each class of probabilities: the chance that such a draft token is accepted if all before it
// are. In memory of the runner, because all ranks use those of the first (workers/extensions/drafts/drafting.py).
//
// Later draft tokens at any place make earlier ones decay: the chances of a place that chains no longer reach approach those of
// the place before it, and the first place is always reached.
class DraftChances {
public:
    static constexpr i64 CLASSES = 8;

    // `chances`: [places, CLASSES]
    DraftChances(i64 num_places, double *chances);
    static i64 class_of(float probability);
    double of(i64 place, i64 which) const { return chances_[place * CLASSES + which]; }
    // Records a verified draft token; all before it were accepted. Takes effect with `tell`.
    void learn(i64 place, i64 which, bool stood);
    void tell();

private:
    i64 num_places_;
    double *chances_;
    std::vector<double> tried_, stood_;  // decayed
    i64 num_learned_ = 0;                // rows since `tell`
};

}  // namespace tokamak::cpu

// The best tokens of a row, by ascending id, and the choice among them by top_k and top_p: by searching the smallest
// distance that is left out, without a sort.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokamak::cpu {

struct Candidates {
    std::vector<i32> token_ids;
    std::vector<float> logits;  // as gathered; `keep_` functions move the others alone
    std::vector<float> weights;
    std::vector<float> distances;  // from the row's largest logit: what the weights are a function of
    float widest = 0;              // no distance is larger
    i64 count = 0;

    void reserve(i64 capacity);
    double total_weight() const;

    // Keep the closest, of equals those of the lower ids.
    void keep_count(i64 most);
    void keep_weight(double limit);  // as long as those before weigh less in sum; one at least

    // Keep those whose surprise is the closest to the mean of it, up to a share `most` of the weight (Meister et al. 2022,
    // "Locally typical sampling").
    void keep_typical(double most);
    // Of those that have a share `least` of the weight, keep the least likely alone (XTC; p-e-w, text-generation-webui 6335).
    void drop_likely(double least);

private:
    template <class Weight>
    void keep(double limit, const Weight &weight_of);
    template <class Filter>
    void keep_if(const Filter &is_kept);
    std::vector<double> bins_;
    std::vector<i64> edge_;  // candidates in the bin where the limit is reached
};

}  // namespace tokamak::cpu

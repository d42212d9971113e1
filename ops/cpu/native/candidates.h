// The best tokens of a row, by ascending id, and their selection by top_k and top_p: finds the smallest excluded distance
// without sorting.
#pragma once

#include <vector>

#include "kernels.h"

namespace tokamak::cpu {

struct Candidates {
    std::vector<i32> token_ids;
    std::vector<float> logits;  // as gathered; `keep_` functions do not change it
    std::vector<float> weights;
    std::vector<float> distances;  // from the row's largest logit; the weights are a function of it
    float widest = 0;              // no distance is larger
    i64 count = 0;

    void reserve(i64 capacity);
    double total_weight() const;

    // Keep the closest; of ties, the lower ids.
    void keep_count(i64 most);
    void keep_weight(double limit);  // keep while the sum of earlier weights is less; at least one

    // Keep those with a surprise closest to the mean surprise, up to a share `most` of the weight (Meister et al. 2022,
    // "Locally typical sampling").
    void keep_typical(double most);
    // Of those with at least a share `least` of the weight, keep only the least likely (XTC; p-e-w, text-generation-webui
    // 6335).
    void drop_likely(double least);

private:
    template <class Weight>
    void keep(double limit, const Weight &weight_of);
    template <class Filter>
    void keep_if(const Filter &is_kept);
    std::vector<double> bins_;
    std::vector<i64> edge_;  // candidates in the bin that reaches the limit
};

}  // namespace tokamak::cpu

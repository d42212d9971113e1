// Changes of a row's logits before sampling: biases, bans, penalties, and the mask of structured output.
#pragma once

#include <limits>
#include <vector>

#include "kernels.h"
#include "sampling.h"

namespace tokamak::cpu {

constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

// A slot's tokens before the sampled one.
struct History {
    const i32 *token_ids;
    i64 count, num_prompt;
    i64 num_outputs() const { return count - num_prompt; }
};

// Whether anything but the mask changes the logits.
bool changes_logits(const SlotSampling &sampling, const History &history);

// Mask of the sampled token; null: none.
const std::uint32_t *mask_of(i64 vocab, const SlotSampling &sampling, const History &history);

// `token_counts` is scratch: zero before and after, as long as a vocabulary.
void edit_logits(float *edited, const float *logits, i64 vocab, const SlotSampling &sampling, const History &history,
                 std::vector<i32> &token_counts, const SamplingKernels &kernels);

// Sets is_ended[slot] if a token at these positions ends the sequence, by the rules of the scheduler
// (engine/scheduler/results.py). With structured output, the grammar decides.
void find_ends(const i32 *slots, const i64 *positions, const i32 *token_ids, i64 count, const SlotSampling *samplings,
               const i32 *num_prompt_tokens, bool *is_ended);

}  // namespace tokamak::cpu

// Changes of a row's logits before sampling: biases, bans, penalties, and the mask of structured output.
#pragma once

#include <limits>
#include <vector>

#include "kernels.h"
#include "sampling.h"

namespace tokamak::cpu {

constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

// A slot's tokens before the one that is drawn.
struct History {
    const i32 *token_ids;
    i64 count, num_prompt;
    i64 num_outputs() const { return count - num_prompt; }
};

// Whether anything but the mask does.
bool changes_logits(const SlotSampling &sampling, const History &history);

// Of the token that is drawn; null: none.
const std::uint32_t *mask_of(i64 vocab, const SlotSampling &sampling, const History &history);

// `token_counts` is scratch: zero before and after, as long as a vocabulary.
void edit_logits(float *edited, const float *logits, i64 vocab, const SlotSampling &sampling, const History &history,
                 std::vector<i32> &token_counts, const SamplingKernels &kernels);

// Of the tokens that slots got, at these positions: is_ended[slot] where one ends its sequence, as the scheduler will see it
// (engine/scheduler/results.py). Of an answer that has a form it is left to that.
void find_ends(const i32 *slots, const i64 *positions, const i32 *token_ids, i64 count, const SlotSampling *samplings,
               const i32 *num_prompt_tokens, bool *is_ended);

}  // namespace tokamak::cpu

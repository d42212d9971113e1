#include "logit_edits.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tokamak::cpu {
namespace {

// Calls function(token id, number of occurrences) for each token in [begin, end).
template <class Function>
void for_counts(const i32 *begin, const i32 *end, i64 vocab, std::vector<i32> &token_counts, const Function &function) {
    if (static_cast<i64>(token_counts.size()) < vocab) token_counts.resize(vocab);
    const auto limit = static_cast<std::uint32_t>(vocab);
    for (const i32 *token_id = begin; token_id < end; ++token_id) {
        if (static_cast<std::uint32_t>(*token_id) < limit) ++token_counts[*token_id];
    }
    for (const i32 *token_id = begin; token_id < end; ++token_id) {
        if (static_cast<std::uint32_t>(*token_id) >= limit || token_counts[*token_id] == 0) continue;
        function(*token_id, token_counts[*token_id]);
        token_counts[*token_id] = 0;
    }
}

// Repetition over prompt and outputs (Keskar et al. 2019), presence and frequency over the outputs (OpenAI's).
void penalize(float *logits, i64 vocab, const SlotSampling &sampling, const History &history, std::vector<i32> &token_counts) {
    const i32 *begin = history.token_ids, *end = begin + history.count;
    if (sampling.repetition_penalty != 1) {
        for_counts(begin, end, vocab, token_counts, [&](i32 token_id, i32) {
            float &logit = logits[token_id];
            logit = logit > 0 ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
        });
    }
    if (sampling.presence_penalty != 0 || sampling.frequency_penalty != 0) {
        for_counts(begin + history.num_prompt, end, vocab, token_counts, [&](i32 token_id, i32 count) {
            logits[token_id] -= sampling.frequency_penalty * static_cast<float>(count) + sampling.presence_penalty;
        });
    }
}

// If biases and penalties leave no token of the mask, the mask alone decides.
void constrain(float *edited, const float *logits, i64 vocab, const std::uint32_t *mask, const SamplingKernels &kernels) {
    if (kernels.leave(edited, edited, mask, vocab) || kernels.leave(edited, logits, mask, vocab)) return;
    for (i64 token_id = 0; token_id < vocab; ++token_id) {
        if (mask[token_id / 32] >> token_id % 32 & 1) edited[token_id] = 0;
    }
}

// A token that would continue a repetition loses `multiplier * base ^ (length - allowed)`, where length is the number of
// repeated last tokens (DRY; p-e-w, text-generation-webui 5677). Repetitions do not cross breakers, and breakers are not
// penalized.
void discourage(float *logits, i64 vocab, const SlotSampling &sampling, const i32 *breakers, const History &history,
                std::vector<i32> &longest) {
    const i64 count = sampling.dry_last_n < 0 ? history.count : std::min<i64>(history.count, sampling.dry_last_n);
    const i32 *newest = history.token_ids + history.count - 1;
    const auto token = [&](i64 age) { return newest[-age]; };
    const auto is_breaker = [&](i32 id) { return std::binary_search(breakers, breakers + sampling.num_breakers, id); };
    i64 most = 0;  // last tokens, after the last breaker
    while (most < count && !is_breaker(token(most))) ++most;
    if (most < sampling.dry_allowed_length || most == 0) return;
    std::vector<i64> match(count);  // how many tokens before `age` equal the last ones (Gusfield's Z)
    const auto limit = static_cast<std::uint32_t>(vocab);
    if (static_cast<i64>(longest.size()) < vocab) longest.resize(vocab);
    for (i64 age = 1, begin = 0, end = 0; age < count; ++age) {
        i64 length = age < end ? std::min(match[age - begin], end - age) : 0;
        while (age + length < count && token(length) == token(age + length)) ++length;
        match[age] = length;
        if (age + length > end) begin = age, end = age + length;
        const i32 next = token(age - 1);
        if (static_cast<std::uint32_t>(next) < limit)
            longest[next] = std::max(longest[next], static_cast<i32>(std::min(length, most)));
    }
    for (i64 age = 0; age + 1 < count; ++age) {
        const i32 next = token(age);
        if (static_cast<std::uint32_t>(next) >= limit || longest[next] == 0) continue;
        const i32 excess = longest[next] - sampling.dry_allowed_length;
        longest[next] = 0;
        if (excess < 0 || is_breaker(next)) continue;
        const double penalty = sampling.dry_multiplier * std::pow(static_cast<double>(sampling.dry_base), excess);
        logits[next] -= static_cast<float>(std::min(penalty, 1e30));
    }
}

}  // namespace

bool changes_logits(const SlotSampling &sampling, const History &history) {
    const bool has_output_penalty = sampling.presence_penalty != 0 || sampling.frequency_penalty != 0;
    return sampling.num_biases > 0 || sampling.num_allowed >= 0 || sampling.num_words > 0 ||
           history.num_outputs() < sampling.min_tokens || sampling.repetition_penalty != 1 ||
           (history.num_outputs() > 0 && has_output_penalty) || (sampling.dry_multiplier > 0 && history.count > 1);
}

const std::uint32_t *mask_of(i64 vocab, const SlotSampling &sampling, const History &history) {
    const i64 index = history.count - sampling.first_masked;
    return index >= 0 && index < sampling.num_masks ? sampling.masks + index * ((vocab + 31) / 32) : nullptr;
}

void edit_logits(float *edited, const float *logits, i64 vocab, const SlotSampling &sampling, const History &history,
                 std::vector<i32> &token_counts, const SamplingKernels &kernels) {
    const std::uint32_t *mask = mask_of(vocab, sampling, history);
    const i32 *bias_ids = sampling.lists, *biases = bias_ids + sampling.num_biases;
    const i32 *allowed = biases + sampling.num_biases, *stops = allowed + std::max(sampling.num_allowed, 0);
    const i32 *offsets = stops + sampling.num_stops, *words = offsets + sampling.num_words + 1;
    if (sampling.num_allowed < 0) {
        std::memcpy(edited, logits, vocab * sizeof(float));
    } else {
        std::fill_n(edited, vocab, NEGATIVE_INFINITY);
        for (i64 i = 0; i < sampling.num_allowed; ++i) edited[allowed[i]] = logits[allowed[i]];
    }
    for (i64 i = 0; i < sampling.num_biases; ++i) {
        float bias;
        std::memcpy(&bias, biases + i, sizeof bias);
        edited[bias_ids[i]] += bias;
    }
    const i32 *end = history.token_ids + history.count;
    for (i64 i = 0; i < sampling.num_words; ++i) {
        const i32 *word = words + offsets[i];
        const i64 length = offsets[i + 1] - offsets[i] - 1;  // of the tokens that must precede its last one
        if (length <= history.num_outputs() && std::equal(word, word + length, end - length)) {
            edited[word[length]] = NEGATIVE_INFINITY;
        }
    }
    if (history.num_outputs() < sampling.min_tokens) {
        for (i64 i = 0; i < sampling.num_stops; ++i) edited[stops[i]] = NEGATIVE_INFINITY;
    }
    penalize(edited, vocab, sampling, history, token_counts);
    const i32 *breakers = words + offsets[sampling.num_words];
    if (sampling.dry_multiplier > 0) discourage(edited, vocab, sampling, breakers, history, token_counts);
    if (mask != nullptr) constrain(edited, logits, vocab, mask, kernels);
}

void find_ends(const i32 *slots, const i64 *positions, const i32 *token_ids, i64 count, const SlotSampling *samplings,
               const i32 *num_prompt_tokens, bool *is_ended) {
    for (i64 index = 0; index < count; ++index) {
        const i32 slot = slots[index];
        const SlotSampling &sampling = samplings[slot];
        if (sampling.masks != nullptr || positions[index] + 1 - num_prompt_tokens[slot] <= sampling.min_tokens) continue;
        const i32 *stops = sampling.lists + 2 * sampling.num_biases + std::max(sampling.num_allowed, 0);
        const i32 *end = stops + sampling.num_stops;
        if (std::find(stops, end, token_ids[index]) != end) is_ended[slot] = true;
    }
}

}  // namespace tokamak::cpu

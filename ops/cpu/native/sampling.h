// Logits to tokens and log-probabilities (workers/sampling/sampler.py defines the computation), for all rows of a step at once,
// on the rank's threads. The result of a row depends only on its logits, tokens and parameters: sums are computed within blocks
// of the vocabulary, then block after block.
#pragma once

#include "ops.h"

namespace tokamak::cpu {

// Sampling parameters of a sequence, in the layout of workers/sampling/slot_sampling.py (SAMPLING):
//
//      0 seed u64            8 lists                16 temperature f64       24 top_p f64         32 min_p f64
//     40 repetition f32     44 presence f32         48 frequency f32         52 sample_index
//     56 top_k              60 min_tokens           64 num_logprobs          68 num_prompt_logprobs
//     72 num_biases         76 num_allowed (-1: all) 80 num_stops            84 num_words          88 first_masked
//     92 num_masks          96 masks               104 top_n_sigma f64      112 typical_p f64     120 xtc_probability f64
//    128 xtc_threshold f64 136 dry_multiplier f32  140 dry_base f32         144 dry_allowed_length
//    148 dry_last_n (-1: all) 152 num_breakers     156 unused              160
//
// `lists` is the address of int32: bias token ids | biases (float32 bits) | allowed | stops | offsets of words [num_words + 1],
// counted from the end of these | token ids of words | breakers. All ids but those of a word's first tokens are within the
// vocabulary.
struct SlotSampling {
    std::uint64_t seed;
    const i32 *lists;
    double temperature, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    i32 sample_index;
    i32 top_k, min_tokens, num_logprobs, num_prompt_logprobs;
    i32 num_biases, num_allowed, num_stops, num_words;
    i32 first_masked, num_masks;  // positions [first_masked, first_masked + num_masks) have a mask
    const std::uint32_t *masks;   // [num_masks, (vocab + 31) / 32]: a bit for each allowed token
    double top_n_sigma, typical_p, xtc_probability, xtc_threshold;
    float dry_multiplier, dry_base;
    i32 dry_allowed_length, dry_last_n, num_breakers, unused;
};
static_assert(sizeof(SlotSampling) == 160 && offsetof(SlotSampling, masks) == 96 && offsetof(SlotSampling, num_breakers) == 152,
              "as in workers/sampling/slot_sampling.py");

struct SlotTable {
    const SlotSampling *samplings;  // [slots]
    const i32 *token_ids;           // [slots, width]: prompt, then outputs
    i64 width;
    const i32 *num_prompt_tokens;  // [slots]
};

struct SampledRows {
    const float *logits;  // [rows, vocab]
    i64 vocab, rows;
    i32 *token_ids;       // [rows]: sampled, or given if there are no slots
    float *logprobs;      // [rows], of these tokens
    i32 *ranks;           // [rows]: 1 + the number of larger logits
    i64 num_top;          // per row; for a slot at most the requested number
    i32 *top_token_ids;   // [rows, num_top], best first
    float *top_logprobs;  // likewise
};

// Samples the token at positions[row] of slots[row]. Log-probabilities, ranks and best tokens are written if a slot requests
// them.
void sample(Engine &engine, const SampledRows &rows, const SlotTable &table, const i32 *slots, const i32 *positions);

// Log-probabilities, ranks and best tokens for given tokens.
void score(Engine &engine, const SampledRows &rows);

}  // namespace tokamak::cpu

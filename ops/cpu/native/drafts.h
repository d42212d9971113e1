// N-gram drafts (workers/extensions/drafts/ngram.py): the tokens that followed an earlier occurrence of a sequence's last
// tokens.
#pragma once

#include <vector>

#include "ops.h"

namespace tokamak::cpu {

constexpr i64 TOKENS_PER_STEP = 32;  // tokens of a slot per step, at most

// Arrays of the runner's slots at fixed addresses (workers/engine/batch_slots.py).
struct DraftSlots {
    const i32 *token_ids;  // [slots, width]
    i64 width;
    const i32 *num_tokens;  // [slots]
    const i32 *states;      // [slots]: the slot's index among a drafter's states

    const i32 *tokens(i64 slot) const { return token_ids + slot * width; }
};

// Request to a drafter, and its result: row i is for slots[i]; k columns.
struct DraftCall {
    const i32 *slots;
    i64 num_rows;
    const i32 *limits;  // [rows]: maximum drafts, at most k
    i64 k;
    i32 *drafts;   // [rows, k]
    i32 *counts;   // [rows]
    i32 *classes;  // [rows, k]
};

// Rows of a step before they get drafts (workers/engine/rows.py). A row that follows drafts begins at its slot's last token,
// and is dropped if the slot is full or that token was never sampled. `granted` is limited to the slot's room.
struct FollowingRows {
    const i32 *slots;
    i64 num_rows;
    const bool *are_following;  // null: none
    i32 *starts, *counts, *num_sampled, *granted;
};
void follow(const FollowingRows &rows, const i32 *num_tokens, const i32 *max_total_tokens);

// Appends the first num_drafts[i] of the drafts [slots, k] of slots[i] to its tokens [slots, width] and updates its row.
void put_drafts(const i32 *slots, i64 num_rows, const i32 *num_drafts, i32 *counts, i32 *num_sampled, const i32 *num_tokens,
                const i32 *drafts, i64 k, i32 *token_ids, i64 width);

// Accepts sampled tokens: row i has num_drafts[i] + 1, the last at ends[i]. Accepted are the tokens up to and including the
// first that differs from the draft at its place. Returns their indices and the number for each row.
void accept(const i32 *slots, i64 num_rows, const i32 *num_sampled, const i32 *num_drafts, const i32 *ends, const i32 *drawn,
            const i32 *token_ids, i64 width, bool *accepted, i32 *counts);

// Index of a text's n-grams. `places` is open-addressed by a hash of n tokens, min <= n <= max, and has the position after
// their last occurrence. Found tokens are compared with the searched ones.
struct NgramText {
    std::vector<i32> places;
    i64 num_indexed = 0;  // n-grams that end before this position are indexed
};

// State of a slot: its own text, and a prediction of its answer that came with the request, which is searched first.
//
// A match survives a token that it did not predict: the text continues after the replaced token (`behind`), or at it (`at`: one
// was inserted), depending on the next token.
struct NgramState {
    NgramText own, predicted;
    std::vector<i32> prediction;
    i64 num_tokens = 0;          // tokens compared with the match
    bool is_prediction = false;  // the match is in the prediction
    i64 behind = -1, at = -1;    // position of the expected next token; -1: none
    i64 num_agreed = 0, num_missed = 0;
};

class NgramDrafts {
public:
    static constexpr i64 CLASSES = 16;  // class of a draft: number of equal tokens before it
    static constexpr i64 TOKENS_PER_CALL =
        512;  // tokens of long texts indexed per call, for all slots together: at most a millisecond

    NgramDrafts(i64 num_states, i64 min_tokens, i64 max_tokens, DraftSlots slots);

    // Resets the state for another sequence.
    void start(i64 state, i64 num_prompt_tokens, const i32 *prediction, i64 num_predicted);

    // Reads the new tokens of `slots`.
    void known(const i32 *slots, i64 num_slots);

    // Drafts the expected next tokens of slots.
    void propose(const DraftCall &call);

    i64 num_bytes() const;

private:
    void index(NgramText &text, const i32 *tokens, i64 num_tokens, i64 &room) const;
    void follow(NgramState &state, const i32 *tokens, i64 num_tokens) const;
    i64 find(const NgramText &text, std::uint64_t hash, const i32 *tokens, const i32 *end, i64 n) const;
    i64 longest(const NgramText &text, const i32 *tokens, const i32 *sought, i64 num_tokens, i64 &num_matched) const;

    i64 min_tokens_, max_tokens_;
    DraftSlots slots_;
    std::vector<NgramState> states_;
};

}  // namespace tokamak::cpu

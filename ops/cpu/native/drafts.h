// N-gram drafts (workers/extensions/drafts/ngram.py): the tokens that followed an earlier occurrence of a sequence's last
// tokens.
#pragma once

#include <vector>

#include "ops.h"

namespace tokamak::cpu {

constexpr i64 TOKENS_PER_STEP = 32;  // that a step brings a slot at most: a draft for each of 16, and one

// Arrays of the runner's slots, which stay where they are (workers/engine/batch_slots.py).
struct DraftSlots {
    const i32 *token_ids;  // [slots, width]
    i64 width;
    const i32 *num_tokens;  // [slots]
    const i32 *states;      // [slots]: which of a drafter's states is the slot's

    const i32 *tokens(i64 slot) const { return token_ids + slot * width; }
};

// What is asked of a drafter, and where its answer goes: row i is of slots[i]; k columns.
struct DraftCall {
    const i32 *slots;
    i64 num_rows;
    const i32 *limits;  // [rows]: most drafts, k at most
    i64 k;
    i32 *drafts;   // [rows, k]
    i32 *counts;   // [rows]
    i32 *classes;  // [rows, k]
};

// Rows of a step before they get drafts (workers/engine/rows.py): a row that follows drafts begins at its slot's last token,
// and is none where the slot is full or that was never drawn. `granted` becomes what the slot has room for.
struct FollowingRows {
    const i32 *slots;
    i64 num_rows;
    const bool *are_following;  // or null: none is
    i32 *starts, *counts, *num_sampled, *granted;
};
void follow(const FollowingRows &rows, const i32 *num_tokens, const i32 *max_total_tokens);

// The first num_drafts[i] of the drafts [slots, k] of slots[i] behind its tokens [slots, width], and in its row's numbers.
void put_drafts(const i32 *slots, i64 num_rows, const i32 *num_drafts, i32 *counts, i32 *num_sampled, const i32 *num_tokens,
                const i32 *drafts, i64 k, i32 *token_ids, i64 width);

// Tokens that were drawn, num_drafts[i] + 1 of each row i that samples, whose last one is of ends[i]: which are accepted, and
// how many of each row: those before the first that is not the draft in its place, and that one.
void accept(const i32 *slots, i64 num_rows, const i32 *num_sampled, const i32 *num_drafts, const i32 *ends, const i32 *drawn,
            const i32 *token_ids, i64 width, bool *accepted, i32 *counts);

// A text, and where its n-grams end. `places` is open-addressed by a hash of n tokens, min <= n <= max: the position behind the
// last place where they stood. What is found is compared with what was looked for.
struct NgramText {
    std::vector<i32> places;
    i64 num_indexed = 0;  // n-grams that end before it are there
};

// Of one slot: its own text, and a draft token at its answer that came with the request, where it is looked first.
//
// A match outlives a token that it did not foresee: the text goes on behind the replaced one (`behind`), or where it was (`at`:
// one was put in); whichever the next token agrees with.
struct NgramState {
    NgramText own, predicted;
    std::vector<i32> prediction;
    i64 num_tokens = 0;          // that were compared with the match
    bool is_prediction = false;  // the match is there
    i64 behind = -1, at = -1;    // where the next token is expected to be said again; -1: nowhere
    i64 num_agreed = 0, num_missed = 0;
};

class NgramDrafts {
public:
    static constexpr i64 CLASSES = 16;  // a draft's: how many tokens agreed before it
    static constexpr i64 TOKENS_PER_CALL =
        512;  // of long texts that are indexed, for all slots together: a millisecond at most

    NgramDrafts(i64 num_states, i64 min_tokens, i64 max_tokens, DraftSlots slots);

    // Another sequence takes the state.
    void start(i64 state, i64 num_prompt_tokens, const i32 *prediction, i64 num_predicted);

    // Takes what is new of the tokens of `slots`.
    void known(const i32 *slots, i64 num_slots);

    // The tokens that slots are expected to go on with.
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

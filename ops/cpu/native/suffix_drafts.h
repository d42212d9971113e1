// Suffix drafts (workers/extensions/drafts/suffix.py; arXiv 2411.04975): continuations of earlier texts that ended like the
// sequence does now. Suffix trees count all parts of texts: one tree for the sequence itself, and a shared one for complete
// answers.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "drafts.h"

namespace tokamak::cpu {

// End of a part of a text in a tree: after `offset` tokens of the edge to `node`. Never at the root.
struct SuffixPlace {
    i32 node, offset;
    i32 length;  // of the part
};

// All parts of texts of up to `depth` tokens; common beginnings share a path. An edge is a range of the texts' tokens; that of
// a leaf grows with its text:
//
//     texts    5 6 7 -1 5 6 8 -1          root --5 6--> a --7 -1--> leaf
//                                                       a --8 -1--> leaf      root --6--> b --7..>, --8..>; root --7..>, ...
//
// A part that occurs nowhere else has its own leaf, which grows by itself. `places` of a text are its parts that also occur
// elsewhere, the longest first: they advance with each token until they differ from the tree and get a leaf.
class SuffixTree {
public:
    explicit SuffixTree(i64 depth = 2);

    // Adds a token to the current text; END ends it.
    static constexpr i32 END = -1;
    void append(std::vector<SuffixPlace> &places, i32 token);

    // Advances read-only places; those without this continuation are dropped.
    void follow(std::vector<SuffixPlace> &places, i32 token) const;

    // The most frequent next token, or END. Moves `place` there. It followed `count` of `total` times.
    i32 likeliest(SuffixPlace &place, i64 &count, i64 &total) const;

    SuffixPlace root() const { return {0, 0, 0}; }
    i64 num_bytes() const;

private:
    struct Node {
        i32 first;   // of its edge, in tokens_
        i32 length;  // of its edge; that of a leaf reaches to the tree's depth, or the end of the texts
        i32 parent;
        i32 count = 1;       // number of occurrences
        i32 total = 0;       // number of continuations
        i32 likeliest = -1;  // the most frequent child; of ties, the latest
    };
    struct Child {
        i32 node = -1, token = 0, child = -1;
    };

    i64 slot_of(i32 node, i32 token) const;
    i32 child_of(i32 node, i32 token) const { return children_[slot_of(node, token)].child; }
    void set_child(i32 node, i32 token, i32 child);
    void met(i32 child);
    void add_leaf(i32 parent, i64 length);
    i32 split(std::vector<SuffixPlace> &places, i32 node, i32 offset);

    i64 depth_;
    std::vector<i32> tokens_;
    std::vector<Node> nodes_;
    std::vector<Child> children_;  // open-addressed by node and first token
    i64 num_children_ = 0;
};

// Of one slot.
struct SuffixState {
    SuffixTree own;
    std::vector<SuffixPlace> places;  // in `own`
    i64 num_tokens = 0, num_prompt_tokens = 0;
    bool is_complete = false;
    std::array<std::vector<SuffixPlace>, 2> shared_places;
    i64 version = -1, num_followed = 0;  // of the shared trees, and the number of tokens followed in them
};

struct SuffixLimits {
    i64 depth, max_texts, max_bytes;  // of the shared trees together
    double max_factor;                // maximum drafts per token of a match
    double min_chance;                // minimum chance of all drafts together, by their counts
};

class SuffixDrafts {
public:
    static constexpr i64 LENGTHS = 5, CHANCES = 4, CLASSES = LENGTHS * CHANCES;  // class of a draft: by its match and its count
    static constexpr i64 MOVES_PER_CALL =
        8192;  // moves of places per call, for long texts and answers together: about a millisecond

    SuffixDrafts(i64 num_states, SuffixLimits limits, DraftSlots slots);

    // Resets the state for another sequence.
    void start(i64 state, i64 num_prompt_tokens);

    // Completes the state's sequence with these tokens: its answer is added to the shared tree, some of it in each call of
    // `known`. Dropped if more than a quarter of the maximum is waiting.
    void stop(i64 state, const i32 *tokens, i64 num_tokens);

    // Reads the new tokens of `slots`.
    void known(const i32 *slots, i64 num_slots);

    // Drafts the expected next tokens of slots.
    void propose(const DraftCall &call);

    // Forgets the shared answers.
    void forget();

    i64 num_bytes() const;
    i64 num_texts() const { return num_texts_[0] + num_texts_[1]; }

private:
    void take_answers(i64 room);
    void follow_shared(SuffixState &state, const i32 *tokens, i64 num_tokens) const;
    void try_places(const SuffixTree &tree, const std::vector<SuffixPlace> &places, const DraftCall &call, i64 row,
                    double &best) const;

    SuffixLimits limits_;
    DraftSlots slots_;
    std::vector<SuffixState> states_;
    // The younger one grows. When it has half of the maximum, it replaces the older one, which is forgotten.
    std::array<SuffixTree, 2> shared_;
    std::array<i64, 2> num_texts_ = {0, 0};
    std::deque<std::vector<i32>> answers_;  // waiting answers, each with END
    i64 num_waiting_ = 0;                   // tokens of these
    std::size_t num_taken_ = 0;             // of the first one
    std::vector<SuffixPlace> places_;       // of that
    i64 version_ = 0;                       // of the shared trees: places are searched again after a change
};

}  // namespace tokamak::cpu

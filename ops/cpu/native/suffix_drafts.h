// Suffix drafts (workers/extensions/drafts/suffix.py; arXiv 2411.04975): continuations of texts that ended as a sequence
// does now. Suffix trees count all parts of texts: one tree of the sequence itself, and a shared one of complete answers.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "drafts.h"

namespace tokamak::cpu {

// Where a part of a text ends in a tree: behind `offset` tokens of the edge that leads to `node`. Never at the root.
struct SuffixPlace {
    i32 node, offset;
    i32 length;  // of the part
};

// All parts of texts of up to `depth` tokens, those with a common beginning on one path. An edge is a range of the texts'
// tokens, and a leaf's reaches on as its text does:
//
//     texts    5 6 7 -1 5 6 8 -1          root --5 6--> a --7 -1--> leaf
//                                                       a --8 -1--> leaf      root --6--> b --7..>, --8..>; root --7..>, ...
//
// A part that is met nowhere else has a leaf of its own, which takes care of itself; `places` of a text are those that are met
// elsewhere, the longest first: they move on with each token, until they differ from what is there and get a leaf.
class SuffixTree {
public:
    explicit SuffixTree(i64 depth = 2);

    // One token more of the text at hand; END ends it.
    static constexpr i32 END = -1;
    void append(std::vector<SuffixPlace> &places, i32 token);

    // The same of places that look on: those whose text does not go on like that here are dropped.
    void follow(std::vector<SuffixPlace> &places, i32 token) const;

    // The token that follows most often, or END. `place` moves there. `count` of the `total` times that something followed.
    i32 likeliest(SuffixPlace &place, i64 &count, i64 &total) const;

    SuffixPlace root() const { return {0, 0, 0}; }
    i64 num_bytes() const;

private:
    struct Node {
        i32 first;   // of its edge, in tokens_
        i32 length;  // of its edge; a leaf's reaches to the depth of the tree, or the end of the texts
        i32 parent;
        i32 count = 1;       // how often it was met
        i32 total = 0;       // how often something followed it
        i32 likeliest = -1;  // the child that was met most often, of several the one that was met last
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
    i64 version = -1, num_followed = 0;  // of the shared trees, and how many tokens they were followed for
};

struct SuffixLimits {
    i64 depth, max_texts, max_bytes;  // of the shared trees together
    double max_factor;                // drafts for each token of a match
    double min_chance;                // of all drafts so far, by their counts
};

class SuffixDrafts {
public:
    static constexpr i64 LENGTHS = 5, CHANCES = 4, CLASSES = LENGTHS * CHANCES;  // a draft's: of its match, its count
    static constexpr i64 MOVES_PER_CALL = 8192;  // of places, for long texts and answers together: about a millisecond

    SuffixDrafts(i64 num_states, SuffixLimits limits, DraftSlots slots);

    // Another sequence takes the state.
    void start(i64 state, i64 num_prompt_tokens);

    // The state's sequence is complete, with these tokens: its answer will join the shared tree, some of it with each call of
    // `known`. Where more wait than a quarter of what may be remembered, it is not.
    void stop(i64 state, const i32 *tokens, i64 num_tokens);

    // Takes what is new of the tokens of `slots`.
    void known(const i32 *slots, i64 num_slots);

    // The tokens that slots are expected to go on with.
    void propose(const DraftCall &call);

    // Forgets the answers of others.
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
    // The younger one grows. When it has half of what may be, it takes the place of the older one, which is forgotten.
    std::array<SuffixTree, 2> shared_;
    std::array<i64, 2> num_texts_ = {0, 0};
    std::deque<std::vector<i32>> answers_;  // that wait, each with END
    i64 num_waiting_ = 0;                   // tokens of these
    std::size_t num_taken_ = 0;             // of the first one
    std::vector<SuffixPlace> places_;       // of that
    i64 version_ = 0;                       // of the shared trees: places in them are sought anew when they have changed
};

}  // namespace tokamak::cpu

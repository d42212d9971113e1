#include "suffix_drafts.h"

#include <algorithm>

namespace tokamak::cpu {

namespace {

constexpr i64 FIRST_CHILDREN = 256;

// Class of a draft, by the length of the match and how often it continued this way.
i32 class_of(i64 length, i64 count, i64 total, bool is_own) {
    const i64 longest[] = {1, 2, 4, 8};
    const i64 by_length = std::upper_bound(longest, longest + 4, length - 1) - longest;
    const i64 by_chance = 2 * count < total ? 0 : 10 * count < 9 * total ? 1 : total - is_own < 2 ? 2 : 3;
    return static_cast<i32>(by_length * SuffixDrafts::CHANCES + by_chance);
}

template <typename T>
i64 bytes_of(const std::vector<T> &items) {
    return static_cast<i64>(items.capacity() * sizeof(T));
}

}  // namespace

SuffixTree::SuffixTree(i64 depth) : depth_(depth), nodes_(1, Node{0, 0, -1}) {}

i64 SuffixTree::num_bytes() const { return bytes_of(tokens_) + bytes_of(nodes_) + bytes_of(children_); }

// Slot in which the child is or would be.
i64 SuffixTree::slot_of(i32 node, i32 token) const {
    std::uint64_t hash = (static_cast<std::uint64_t>(node) << 32 | static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15;
    const i64 mask = static_cast<i64>(children_.size()) - 1;
    i64 at = static_cast<i64>(hash >> 32) & mask;
    while (children_[at].node >= 0 && (children_[at].node != node || children_[at].token != token)) at = (at + 1) & mask;
    return at;
}

void SuffixTree::set_child(i32 node, i32 token, i32 child) {
    if (2 * (num_children_ + 1) > static_cast<i64>(children_.size())) {
        std::vector<Child> before(std::max<i64>(FIRST_CHILDREN, 2 * children_.size()));
        before.swap(children_);
        for (const Child &each : before)
            if (each.node >= 0) children_[slot_of(each.node, each.token)] = each;
    }
    Child &place = children_[slot_of(node, token)];
    num_children_ += place.node < 0;
    place = {node, token, child};
}

// Counts a text that continued into `child`.
void SuffixTree::met(i32 child) {
    if (tokens_[nodes_[child].first] == END) return;
    Node &parent = nodes_[nodes_[child].parent];
    ++parent.total;
    if (parent.likeliest < 0 || nodes_[child].count >= nodes_[parent.likeliest].count) parent.likeliest = child;
}

// Adds a leaf: from here on the current text, with its new last token, differs.
void SuffixTree::add_leaf(i32 parent, i64 length) {
    const i32 leaf = static_cast<i32>(nodes_.size()), first = static_cast<i32>(tokens_.size()) - 1;
    nodes_.push_back({first, static_cast<i32>(depth_ - length), parent});
    set_child(parent, tokens_[first], leaf);
    met(leaf);
}

// Splits an edge after its first `offset` tokens. Places of the text that are not beyond stay before the new node.
i32 SuffixTree::split(std::vector<SuffixPlace> &places, i32 node, i32 offset) {
    const i32 upper = static_cast<i32>(nodes_.size());
    nodes_.push_back({nodes_[node].first, offset, nodes_[node].parent, nodes_[node].count});
    Node &lower = nodes_[node], &above = nodes_[lower.parent];
    if (above.likeliest == node) above.likeliest = upper;
    set_child(lower.parent, tokens_[lower.first], upper);
    lower.first += offset;
    lower.length -= offset;
    lower.parent = upper;
    for (SuffixPlace &place : places) {
        if (place.node != node) continue;
        if (place.offset > offset) {
            place.offset -= offset;
        } else {
            place.node = upper;
            --lower.count;
        }
    }
    set_child(upper, tokens_[lower.first], node);
    if (tokens_[lower.first] != END) nodes_[upper].total = lower.count, nodes_[upper].likeliest = node;
    return upper;
}

void SuffixTree::append(std::vector<SuffixPlace> &places, i32 token) {
    tokens_.push_back(token);
    if (children_.empty()) children_.resize(FIRST_CHILDREN);
    if (token != END) places.push_back(root());
    for (std::size_t index = 0; index < places.size(); ++index) {
        const SuffixPlace place = places[index];
        if (place.offset < nodes_[place.node].length) {
            if (tokens_[nodes_[place.node].first + place.offset] == token) {
                places[index] = {place.node, place.offset + 1, place.length + 1};
                continue;
            }
            add_leaf(split(places, place.node, place.offset), place.length);
        } else if (const i32 child = child_of(place.node, token); child >= 0) {
            ++nodes_[child].count;
            met(child);
            places[index] = {child, 1, place.length + 1};
            continue;
        } else {
            add_leaf(place.node, place.length);
        }
        places[index].node = -1;
    }
    const auto is_over = [&](const SuffixPlace &place) { return token == END || place.node < 0 || place.length == depth_; };
    places.erase(std::remove_if(places.begin(), places.end(), is_over), places.end());
}

void SuffixTree::follow(std::vector<SuffixPlace> &places, i32 token) const {
    if (children_.empty()) return;
    places.push_back(root());
    for (SuffixPlace &place : places) {
        const Node &node = nodes_[place.node];
        ++place.length;
        if (place.offset < node.length) {
            if (tokens_[node.first + place.offset++] != token) place.node = -1;
        } else {
            place.node = child_of(place.node, token);
            place.offset = 1;
        }
    }
    const auto is_over = [&](const SuffixPlace &place) { return place.node < 0 || place.length == depth_; };
    places.erase(std::remove_if(places.begin(), places.end(), is_over), places.end());
}

i32 SuffixTree::likeliest(SuffixPlace &place, i64 &count, i64 &total) const {
    const Node *node = &nodes_[place.node];
    count = total = node->count;
    if (place.offset == node->length) {
        if (node->likeliest < 0) return END;
        total = node->total;
        place = {node->likeliest, 0, place.length};
        node = &nodes_[place.node];
        count = node->count;
    }
    const i64 at = node->first + place.offset;
    if (at >= static_cast<i64>(tokens_.size())) return END;
    ++place.offset, ++place.length;
    return tokens_[at];
}

SuffixDrafts::SuffixDrafts(i64 num_states, SuffixLimits limits, DraftSlots slots)
    : limits_(limits), slots_(slots), states_(num_states) {
    forget();
}

void SuffixDrafts::start(i64 which, i64 num_prompt_tokens) {
    SuffixState &state = states_.at(which) = SuffixState();
    state.own = SuffixTree(limits_.depth);
    state.num_prompt_tokens = num_prompt_tokens;
}

void SuffixDrafts::stop(i64 which, const i32 *tokens, i64 num_tokens) {
    SuffixState &state = states_.at(which);
    if (state.is_complete || limits_.max_texts < 1 || num_tokens - state.num_prompt_tokens < 2) return;
    state.is_complete = true;
    const i64 num_answered = num_tokens - state.num_prompt_tokens + 1;
    if (4 * (num_waiting_ + num_answered) * static_cast<i64>(sizeof(i32)) > limits_.max_bytes) return;
    answers_.emplace_back(tokens + state.num_prompt_tokens, tokens + num_tokens).push_back(SuffixTree::END);
    num_waiting_ += num_answered;
}

// Adds waiting answers as far as there is room.
void SuffixDrafts::take_answers(i64 room) {
    for (; !answers_.empty() && room > 0; ++version_) {
        SuffixTree &young = shared_[0];
        const std::vector<i32> &answer = answers_.front();
        for (; num_taken_ < answer.size() && room > 0; room -= 1 + static_cast<i64>(places_.size()))
            young.append(places_, answer[num_taken_++]);
        if (num_taken_ < answer.size()) continue;
        num_waiting_ -= static_cast<i64>(answer.size());
        num_taken_ = 0;
        answers_.pop_front();
        ++num_texts_[0];
        // a growing vector may take twice its contents
        if (2 * (num_texts_[0] + 1) <= limits_.max_texts && 4 * young.num_bytes() <= limits_.max_bytes) continue;
        shared_[1] = std::move(shared_[0]);
        shared_[0] = SuffixTree(limits_.depth);
        num_texts_ = {0, num_texts_[0]};
    }
}

void SuffixDrafts::known(const i32 *slots, i64 num_slots) {
    take_answers(MOVES_PER_CALL / 2);
    i64 room = MOVES_PER_CALL / 2;
    for (i64 row = 0; row < num_slots; ++row) {
        const i64 slot = slots[row], count = slots_.num_tokens[slot];
        if (count < 1) continue;
        const i32 *tokens = slots_.tokens(slot);
        SuffixState &state = states_.at(slots_.states[slot]);
        i64 of_step = MOVES_PER_CALL;  // the tokens of one step are taken at once: no slot waits for earlier ones
        i64 &left = count - state.num_tokens <= TOKENS_PER_STEP ? of_step : room;
        for (; state.num_tokens < count && left > 0; left -= 1 + static_cast<i64>(state.places.size()))
            state.own.append(state.places, tokens[state.num_tokens++]);
        if (state.num_tokens == count) follow_shared(state, tokens, count);
    }
}

void SuffixDrafts::follow_shared(SuffixState &state, const i32 *tokens, i64 num_tokens) const {
    const i64 most = num_tokens - limits_.depth + 1;  // longer matches have no continuation
    if (state.version != version_ || state.num_followed < most) {
        for (auto &places : state.shared_places) places.clear();
        state.num_followed = std::max<i64>(most, 0);
        state.version = version_;
    }
    for (; state.num_followed < num_tokens; ++state.num_followed)
        for (std::size_t each = 0; each < shared_.size(); ++each)
            shared_[each].follow(state.shared_places[each], tokens[state.num_followed]);
}

void SuffixDrafts::propose(const DraftCall &call) {
    for (i64 row = 0; row < call.num_rows; ++row) {
        call.counts[row] = 0;
        const i64 slot = call.slots[row];
        if (slots_.num_tokens[slot] < 1) continue;
        const SuffixState &state = states_.at(slots_.states[slot]);
        if (state.num_tokens != slots_.num_tokens[slot]) continue;
        double best = 0;
        try_places(state.own, state.places, call, row, best);
        if (state.version != version_) continue;
        for (std::size_t each = 0; each < shared_.size(); ++each)
            try_places(shared_[each], state.shared_places[each], call, row, best);
    }
}

// Writes the drafts of the most promising place to the row, if they promise more than `best`.
void SuffixDrafts::try_places(const SuffixTree &tree, const std::vector<SuffixPlace> &places, const DraftCall &call, i64 row,
                              double &best) const {
    constexpr i64 MOST = 64;
    std::array<i32, MOST> drafts, classes;
    for (const SuffixPlace &match : places) {
        const i64 by_match = static_cast<i64>(limits_.max_factor * match.length);
        const i64 most = std::min(std::min<i64>(call.limits[row], MOST), by_match);
        if (static_cast<double>(most) <= best) return;  // shorter ones cannot promise more
        double chance = 1, promised = 0;
        SuffixPlace place = match;
        i64 num_drafts = 0;
        while (num_drafts < most) {
            i64 count, total;
            const i32 token = tree.likeliest(place, count, total);
            if (token == SuffixTree::END) break;
            chance *= static_cast<double>(count) / static_cast<double>(total);
            if (chance < limits_.min_chance) break;
            drafts[num_drafts] = token;
            classes[num_drafts++] = class_of(place.length - 1, count, total, &tree != &shared_[0] && &tree != &shared_[1]);
            promised += chance;
        }
        if (promised <= best) continue;
        best = promised;
        std::copy_n(drafts.begin(), num_drafts, call.drafts + row * call.k);
        std::copy_n(classes.begin(), num_drafts, call.classes + row * call.k);
        call.counts[row] = static_cast<i32>(num_drafts);
    }
}

void SuffixDrafts::forget() {
    answers_.clear();
    places_.clear();
    num_taken_ = num_waiting_ = 0;
    shared_.fill(SuffixTree(limits_.depth));
    num_texts_.fill(0);
    ++version_;
}

i64 SuffixDrafts::num_bytes() const {
    i64 num_bytes = num_waiting_ * static_cast<i64>(sizeof(i32));
    for (const SuffixTree &tree : shared_) num_bytes += tree.num_bytes();
    for (const SuffixState &state : states_) num_bytes += state.own.num_bytes();
    return num_bytes;
}

}  // namespace tokamak::cpu

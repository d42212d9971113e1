#include "drafts.h"

#include <algorithm>

namespace tokamak::cpu {

namespace {

constexpr std::uint64_t FACTOR = 0x9E3779B97F4A7C15;
constexpr i64 MAX_PROBES = 16;
constexpr i64 MAX_MISSED = 3;  // consecutive tokens that a match did not predict; then it ends

// Number of equal tokens before a place, extended one by one.
struct Hash {
    std::uint64_t value = 0;

    void add(i32 token) { value = (value ^ static_cast<std::uint32_t>(token)) * FACTOR, value ^= value >> 29; }
};

}  // namespace

NgramDrafts::NgramDrafts(i64 num_states, i64 min_tokens, i64 max_tokens, DraftSlots slots)
    : min_tokens_(min_tokens), max_tokens_(max_tokens), slots_(slots), states_(num_states) {}

void NgramDrafts::start(i64 which, i64 num_prompt_tokens, const i32 *prediction, i64 num_predicted) {
    NgramState &state = states_.at(which) = NgramState();
    state.num_tokens = num_prompt_tokens;
    state.prediction.assign(prediction, prediction + num_predicted);
    if (!num_predicted) return;
    state.is_prediction = true;  // the answer is expected to begin with it
    state.behind = 0;
}

void NgramDrafts::known(const i32 *slots, i64 num_slots) {
    i64 room = TOKENS_PER_CALL;
    for (i64 row = 0; row < num_slots; ++row) {
        const i64 slot = slots[row], count = slots_.num_tokens[slot];
        if (count < 1) continue;
        NgramState &state = states_.at(slots_.states[slot]);
        index(state.predicted, state.prediction.data(), static_cast<i64>(state.prediction.size()), room);
        index(state.own, slots_.tokens(slot), count, room);
        follow(state, slots_.tokens(slot), count);
    }
}

void NgramDrafts::propose(const DraftCall &call) {
    for (i64 row = 0; row < call.num_rows; ++row) {
        call.counts[row] = 0;
        const i64 slot = call.slots[row], count = slots_.num_tokens[slot];
        if (count < 1) continue;
        const i32 *tokens = slots_.tokens(slot);
        NgramState &state = states_.at(slots_.states[slot]);
        i64 num_matched = 0;
        const i32 *predicted = state.prediction.data();
        i64 found = longest(state.predicted, predicted, tokens, count, num_matched);
        const bool is_prediction = found >= 0;
        if (!is_prediction && state.own.num_indexed >= count) found = longest(state.own, tokens, tokens, count, num_matched);
        if (found >= 0 && num_matched > (is_prediction && !state.is_prediction ? 0 : state.num_agreed)) {
            state.is_prediction = is_prediction;
            state.behind = found;
            state.at = -1;
            state.num_agreed = num_matched;
            state.num_missed = 0;
        }
        const i32 *source = state.is_prediction ? predicted : tokens;
        const i64 end = state.is_prediction ? static_cast<i64>(state.prediction.size()) : count;
        if (state.behind < 0 || state.behind >= end) continue;
        i32 *draft_tokens = call.drafts + row * call.k;
        i64 num_draft_tokens = call.limits[row];
        if (state.is_prediction) num_draft_tokens = std::min(num_draft_tokens, end - state.behind);
        for (i64 place = 0; place < num_draft_tokens; ++place) {
            const i64 at = state.behind + place;  // if the text repeats its own end, drafts are its own continuation
            draft_tokens[place] = at < end ? source[at] : draft_tokens[at - end];
            call.classes[row * call.k + place] = static_cast<i32>(std::min(state.num_agreed + place, CLASSES - 1));
        }
        call.counts[row] = static_cast<i32>(num_draft_tokens);
    }
}

i64 NgramDrafts::num_bytes() const {
    i64 num_places = 0;
    for (const NgramState &state : states_)
        num_places += static_cast<i64>(state.own.places.size() + state.predicted.places.size() + state.prediction.size());
    return num_places * static_cast<i64>(sizeof(i32));
}

// Indexes the n-grams that end before each place up to the last token; if a text has more than one step brings, at most `room`
// of them.
void NgramDrafts::index(NgramText &text, const i32 *tokens, i64 num_tokens, i64 &room) const {
    if (text.num_indexed >= num_tokens || num_tokens < 2) {
        text.num_indexed = std::max(text.num_indexed, num_tokens);
        return;
    }
    const i64 num_places = num_tokens * (max_tokens_ - min_tokens_ + 1);
    if (static_cast<i64>(text.places.size()) < num_places) {
        i64 size = 1024;
        while (size < 2 * num_places) size *= 2;
        text.places.assign(size, -1);
        text.num_indexed = 0;
    }
    i64 end = std::max<i64>(text.num_indexed, 1);
    i64 of_step = TOKENS_PER_STEP;  // the tokens of one step are taken at once: no slot waits for earlier ones
    i64 &left = num_tokens - end <= of_step ? of_step : room;
    for (; end < num_tokens && left > 0; ++end, --left) {
        Hash hash;
        for (i64 n = 1; n <= std::min(max_tokens_, end); ++n) {
            hash.add(tokens[end - n]);
            if (n >= min_tokens_) text.places[find(text, hash.value, tokens, tokens + end, n)] = static_cast<i32>(end);
        }
    }
    text.num_indexed = end;
}

// Continues the match or ends it.
void NgramDrafts::follow(NgramState &state, const i32 *tokens, i64 num_tokens) const {
    const i32 *source = state.is_prediction ? state.prediction.data() : tokens;
    for (; state.num_tokens < num_tokens; ++state.num_tokens) {
        const i64 next = state.num_tokens, end = state.is_prediction ? static_cast<i64>(state.prediction.size()) : next;
        if (state.behind < 0) continue;
        if (state.behind < end && source[state.behind] == tokens[next]) {
            ++state.behind, ++state.num_agreed;
            state.num_missed = 0, state.at = -1;
        } else if (state.at >= 0 && source[state.at] == tokens[next]) {
            state.behind = state.at + 1;
            state.at = -1;
            state.num_agreed = 1, state.num_missed = 0;
        } else {
            state.at = state.behind < end ? state.behind : -1;
            ++state.behind;
            state.num_agreed = 0;
            if (++state.num_missed > MAX_MISSED) state.behind = state.at = -1;
        }
    }
}

// The slot for the n tokens before `end` of `tokens`: that in which they are, or a free one.
i64 NgramDrafts::find(const NgramText &text, std::uint64_t hash, const i32 *tokens, const i32 *end, i64 n) const {
    const i64 mask = static_cast<i64>(text.places.size()) - 1;
    i64 at = static_cast<i64>(hash) & mask;
    for (i64 probe = 1; probe < MAX_PROBES && text.places[at] >= 0; ++probe) {
        const i64 place = text.places[at];
        if (place >= n && std::equal(tokens + place - n, tokens + place, end - n)) break;
        at = (at + 1) & mask;
    }
    return at;
}

// Where the longest of the last n-grams of `sought` occurred in `tokens`, or -1.
i64 NgramDrafts::longest(const NgramText &text, const i32 *tokens, const i32 *sought, i64 num_tokens, i64 &num_matched) const {
    Hash hash;
    i64 found = -1;
    if (text.places.empty()) return found;
    for (i64 n = 1; n <= std::min(max_tokens_, num_tokens); ++n) {
        hash.add(sought[num_tokens - n]);
        if (n < min_tokens_) continue;
        const i64 place = text.places[find(text, hash.value, tokens, sought + num_tokens, n)];
        if (place < n || !std::equal(tokens + place - n, tokens + place, sought + num_tokens - n)) continue;
        found = place;
        num_matched = n;
    }
    return found;
}

void follow(const FollowingRows &rows, const i32 *num_tokens, const i32 *max_total_tokens) {
    for (i64 row = 0; row < rows.num_rows; ++row) {
        const i32 slot = rows.slots[row], room = max_total_tokens[slot] - num_tokens[slot];
        if (rows.are_following != nullptr && rows.are_following[row]) {
            const i32 last = num_tokens[slot] - 1;
            if (room <= 0 || last < rows.starts[row]) rows.counts[row] = rows.num_sampled[row] = 0;
            rows.starts[row] = last;
        }
        rows.granted[row] = rows.num_sampled[row] > 0 ? std::max(std::min(rows.granted[row], room - 1), 0) : 0;
    }
}

void put_drafts(const i32 *slots, i64 num_rows, const i32 *num_drafts, i32 *counts, i32 *num_sampled, const i32 *num_tokens,
                const i32 *drafts, i64 k, i32 *token_ids, i64 width) {
    for (i64 row = 0; row < num_rows; ++row) {
        const i64 slot = slots[row];
        std::copy_n(drafts + slot * k, num_drafts[row], token_ids + slot * width + num_tokens[slot]);
        counts[row] += num_drafts[row];
        num_sampled[row] += num_drafts[row];
    }
}

void accept(const i32 *slots, i64 num_rows, const i32 *num_sampled, const i32 *num_drafts, const i32 *ends, const i32 *drawn,
            const i32 *token_ids, i64 width, bool *accepted, i32 *counts) {
    for (i64 row = 0; row < num_rows; ++row) {
        const i32 *drafts = token_ids + slots[row] * width + ends[row] - num_drafts[row];
        bool still = true;
        counts[row] = 0;
        for (i32 place = 0; place < num_sampled[row]; ++place, ++drawn, ++accepted) {
            *accepted = still;
            counts[row] += still;
            still = still && place < num_drafts[row] && *drawn == drafts[place];
        }
    }
}

}  // namespace tokamak::cpu

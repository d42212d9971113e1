#include "layer_drafts.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace tokamak::cpu {

namespace {

constexpr i32 NOWHERE = -1;
constexpr i32 FEW_ENTRIES = 32;  // after a hole: draft tokens with so few visible entries are accepted less often
// Counts of a step's inputs (ops/table.py).
constexpr int NUM_ROWS = 0, NUM_SEQUENCES = 1, NUM_LOGIT_ROWS = 2, HAS_BOUNDS = 3, NUM_TOKENS = 4;

}  // namespace

void LayerRows::clear() {
    for (std::vector<i32> *each : {&slots, &starts, &counts, &first_keys}) each->clear();
}

void LayerRows::add(i32 slot, i32 start, i32 count, i32 first_key) {
    slots.push_back(slot);
    starts.push_back(start);
    counts.push_back(count);
    first_keys.push_back(first_key);
}

void LayerDrafts::set_tapes(Tape *store, std::vector<LayerTapes> modules) {
    store_ = store;
    modules_ = std::move(modules);
}

bool &LayerDrafts::mark_of(i32 slot, i32 position) const {
    const i64 block = slots_.block_tables[slot * slots_.table_width + position / slots_.block_size];
    return slots_.marks[block * slots_.block_size + position % slots_.block_size];
}

void LayerDrafts::begin(const LayerStep &step) {
    for (i64 row = 0; row < step.num_rows; ++row) {
        const i32 slot = step.slots[row], start = step.starts[row], count = step.counts[row];
        if (slots_.entry_ends[slot] == NOWHERE && count > 0) {
            i32 first = start;
            while (first > 0 && mark_of(slot, first)) --first;
            slots_.first_entries[slot] = first + 1;
            slots_.entry_ends[slot] = start + 1;
        }
    }
}

void LayerDrafts::empty(const i32 *slots, const i32 *blocks, i64 count) {
    const auto block_size = static_cast<i32>(slots_.block_size);
    for (i64 index = 0; index < count; ++index) {
        const i32 slot = slots[index], begin = blocks[index] * block_size;
        for (i32 position = std::max(begin, slots_.entry_ends[slot]); position < begin + block_size; ++position)
            mark_of(slot, position) = false;
    }
}

void LayerDrafts::choose(const LayerStep &step, const bool *is_wanted, bool *is_drafting) const {
    for (i64 row = 0; row < step.num_rows; ++row) {
        const i32 slot = step.slots[row];
        const i32 reached = std::max(slots_.num_prompt_tokens[slot], step.starts[row] + step.counts[row]);
        const bool is_asked = is_wanted != nullptr && is_wanted[row] && slots_.max_total_tokens[slot] - reached > 1;
        is_drafting[row] = step.num_drafts[row] > 0 || is_asked;
    }
}

bool LayerDrafts::has_few_entries(i32 slot) const {
    const i32 first = slots_.first_entries[slot];
    return first > 1 && slots_.entry_ends[slot] - first < FEW_ENTRIES;
}

void LayerDrafts::propose(const i32 *slots, i64 num_slots, const i32 *limits, i64 k, i32 *counts, i32 *classes) const {
    for (i64 row = 0; row < num_slots; ++row) {
        const i32 slot = slots[row], position = slots_.hidden_positions[slot];
        counts[row] = position >= 0 && position == slots_.num_tokens[slot] - 2 ? limits[row] : 0;
        std::iota(classes + row * k, classes + (row + 1) * k, static_cast<i32>(has_few_entries(slot) ? k : 0));
    }
}

i32 LayerDrafts::enter(i32 slot, i32 begin, i32 end) {
    if (begin > slots_.entry_ends[slot]) slots_.first_entries[slot] = begin;  // behind a hole
    slots_.entry_ends[slot] = end;
    return slots_.first_entries[slot];
}

void LayerDrafts::enter(const i32 *slots, i64 num_slots, const i32 *begins, const i32 *ends, i32 *first_entries) {
    for (i64 row = 0; row < num_slots; ++row) first_entries[row] = enter(slots[row], begins[row], ends[row]);
}

void LayerDrafts::mark(const i32 *slots, i64 num_slots, const i32 *begins, const i32 *ends) {
    for (i64 row = 0; row < num_slots; ++row) {
        for (i32 position = begins[row]; position < ends[row]; ++position) mark_of(slots[row], position) = true;
    }
}

void LayerDrafts::set_rows(const LayerInputs &inputs, const LayerRows &rows) const {
    const auto num_sequences = static_cast<i32>(rows.size());
    i32 row = 0;
    for (i32 sequence = 0; sequence < num_sequences; ++sequence) {
        const i32 slot = rows.slots[sequence], start = rows.starts[sequence], end = start + rows.counts[sequence];
        inputs.sequence_slots[sequence] = slot;
        inputs.sequence_offsets[sequence] = row;
        inputs.sequence_starts[sequence] = start;
        for (i32 position = start; position < end; ++position, ++row) {
            inputs.token_ids[row] = slots_.token_ids[slot * slots_.width + position];
            inputs.row_slots[row] = slot;
            inputs.positions[row] = inputs.last_keys[row] = position;
            inputs.first_keys[row] = rows.first_keys[sequence];
        }
    }
    inputs.sequence_offsets[num_sequences] = row;
    inputs.counts[NUM_ROWS] = inputs.counts[NUM_TOKENS] = row;
    inputs.counts[NUM_SEQUENCES] = num_sequences;
    inputs.counts[HAS_BOUNDS] = 1;
}

// Of the first rows; their previous tokens are `place` after their starts.
void LayerDrafts::draft(const LayerTapes &tapes, i64 num_rows, i32 place) {
    const bool has_probabilities = *least_chance_ > 0;
    draft_tokens_.resize(num_rows);
    for (i64 begin = 0; begin < num_rows; begin += single_.max_logit_rows) {
        const i64 count = std::min(num_rows - begin, single_.max_logit_rows);
        single_.counts[NUM_LOGIT_ROWS] = static_cast<i32>(count);
        std::iota(single_.logit_row_ids, single_.logit_row_ids + count, static_cast<i32>(begin));
        tapes.head->replay();
        choose_draft_tokens(Engine::get(), tapes.logits, count, tapes.vocab_size, has_probabilities,
                            draft_tokens_.data() + begin);
    }
    for (i64 row = 0; row < num_rows; ++row) {
        const i32 slot = rows_.slots[row];
        slots_.token_ids[slot * slots_.width + rows_.starts[row] + place + 1] = draft_tokens_[row].token_id;
        if (!has_probabilities) continue;
        const i64 which = DraftChances::class_of(draft_tokens_[row].probability);
        // a layer with few entries is certain of tokens that are not accepted, which says nothing about others
        if (!has_few_entries(slot)) slots_.draft_certainties[slot * slots_.k + place] = static_cast<i32>(which);
        chances_of_rows_[row] *= chances_.of(place, which);
    }
}

// Whether a row with so many intended drafts gets another one after that at `place`; otherwise how many it keeps. Half of the
// cost of a draft token is spent when it is known, and without any, acceptance could not be learned.
bool LayerDrafts::goes_on(i64 row, i32 place, i32 num_drafts, i32 &num_kept) {
    num_kept = num_drafts;
    if (*least_chance_ > 0 && chances_of_rows_[row] < *least_chance_) {
        num_kept = place == 0 || 2 * chances_of_rows_[row] >= *least_chance_ ? place + 1 : place;
        return false;
    }
    return place + 1 < num_drafts;
}

void LayerDrafts::draft(const LayerStep &step) {
    std::vector<i64> order;  // for each row of the chain, its row in the step
    rows_.clear();
    for (i64 row = 0; row < step.num_rows; ++row) {
        const i32 slot = step.slots[row], start = step.starts[row];
        if (step.num_drafts[row] <= 0 || !slots_.is_drafted_by_layers[slot]) continue;
        order.push_back(row);
        rows_.add(slot, start, 1, enter(slot, start, start + 1));
    }
    if (order.empty()) return;
    set_rows(single_, rows_);
    const i64 hidden_size = slots_.hidden_size;
    for (i64 row = 0; row < rows_.size(); ++row) {
        std::copy_n(slots_.hidden + rows_.slots[row] * hidden_size, hidden_size, single_.hidden + row * hidden_size);
    }
    i64 num_rows = rows_.size();
    chances_of_rows_.assign(num_rows, 1);
    for (i32 place = 0; num_rows > 0; ++place) {
        const LayerTapes &tapes = modules_[place % modules_.size()];
        single_.counts[NUM_ROWS] = single_.counts[NUM_TOKENS] = single_.counts[NUM_SEQUENCES] = static_cast<i32>(num_rows);
        tapes.forward->replay();
        if (place == 0) {
            for (i64 row = 0; row < num_rows; ++row) mark_of(rows_.slots[row], rows_.starts[row]) = true;
        }
        draft(tapes, num_rows, place);
        i64 num_left = 0;  // continuing rows move up
        for (i64 row = 0; row < num_rows; ++row) {
            const i64 of_step = order[row];
            i32 num_kept = 0;
            if (goes_on(row, place, step.num_drafts[of_step], num_kept)) {
                order[num_left] = of_step;
                chances_of_rows_[num_left] = chances_of_rows_[row];
                for (std::vector<i32> *each : {&rows_.slots, &rows_.starts}) (*each)[num_left] = (*each)[row];
                for (i32 *each : {single_.row_slots, single_.sequence_slots, single_.first_keys}) each[num_left] = each[row];
                single_.token_ids[num_left] = draft_tokens_[row].token_id;
                single_.positions[num_left] = single_.positions[row] + 1;
                single_.sequence_starts[num_left] = single_.sequence_starts[row] + 1;
                single_.last_keys[num_left] = single_.last_keys[row] + 1;
                std::copy_n(tapes.fed + row * hidden_size, hidden_size, single_.hidden + num_left * hidden_size);
                ++num_left;
                continue;
            }
            const i32 num_fewer = step.num_drafts[of_step] - num_kept;
            for (i32 *each : {step.counts, step.num_sampled, step.num_drafts}) each[of_step] -= num_fewer;
        }
        num_rows = num_left;
    }
}

// Learns from results of draft tokens with the layers' certainties.
void LayerDrafts::learn(const LayerStep &step, const i32 *counts) {
    for (i64 row = 0; row < step.num_rows; ++row) {
        const i64 slot = step.slots[row];
        if (!step.num_drafts[row] || !slots_.is_drafted_by_layers[slot]) continue;
        i32 *classes = slots_.draft_certainties + slot * slots_.k;
        const i32 num_judged = slots_.is_ended[slot] ? 0 : std::min(step.num_drafts[row], counts[row]);
        for (i32 place = 0; place < num_judged; ++place) {
            if (classes[place] >= 0) chances_.learn(place, classes[place], place < counts[row] - 1);
        }
        std::fill_n(classes, slots_.k, -1);
    }
    chances_.tell();
}

const LayerRows &LayerDrafts::keep(const LayerStep &step, const i32 *counts, const bool *is_drafting, const i64 *kept_ends,
                                   const float *hidden) {
    learn(step, counts);
    rows_.clear();
    const i64 hidden_size = slots_.hidden_size;
    float *before = standing_.hidden;  // the state before each entry's token
    for (i64 row = 0; row < step.num_rows; ++row) {
        const i32 slot = step.slots[row], start = step.starts[row], row_end = start + step.counts[row];
        const i32 end = row_end - step.num_drafts[row] + std::max(counts[row] - 1, 0);
        if (end <= start) continue;
        float *own = slots_.hidden + slot * hidden_size;
        const auto state_of = [&](i32 position) { return hidden + (kept_ends[row] - row_end + position) * hidden_size; };
        if (is_drafting[row]) {
            // the entry of the row's first token: made by `draft`, or now, if the state before it is available
            const bool is_made = step.num_drafts[row] > 0 && slots_.is_drafted_by_layers[slot];
            const bool has_first = !is_made && start > 0 && slots_.hidden_positions[slot] == start - 1;
            const i32 first = start + !has_first;
            if (end > first) {
                rows_.add(slot, first, end - first, enter(slot, first, end));
                if (has_first) before = std::copy_n(own, hidden_size, before);
                before = std::copy(state_of(start), state_of(end - 1), before);
            }
        }
        const i32 num_kept = is_drafting[row] ? step.counts[row] : step.num_sampled[row], last = end - 1;
        const bool is_known = last >= row_end - num_kept;
        slots_.hidden_positions[slot] = is_known ? last : NOWHERE;
        if (is_known) std::copy_n(state_of(last), hidden_size, own);
    }
    if (store_ == nullptr || rows_.size() == 0) return rows_;
    set_rows(standing_, rows_);
    store_->replay();
    for (i64 sequence = 0; sequence < rows_.size(); ++sequence) {
        const i32 end = rows_.starts[sequence] + rows_.counts[sequence];
        mark(&rows_.slots[sequence], 1, &rows_.starts[sequence], &end);
    }
    return none_;
}

}  // namespace tokamak::cpu

// State of draft layers for each slot, and the chain of their draft tokens (workers/extensions/drafts/mtp.py explains
// entries).
//
// If the plan is a tape, the rows of a chain or of accepted tokens are set and replayed here, without Python in between; other
// plans get these rows.
#pragma once

#include <vector>

#include "draft_tokens.h"
#include "ops.h"

namespace tokamak::cpu {

// Arrays of the runner's slots and of the arena, at fixed addresses (workers/engine/batch_slots.py,
// workers/engine/kv_cache.py).
struct LayerSlots {
    i32 *token_ids;  // [slots, width]
    i64 width;
    const i32 *num_tokens, *max_total_tokens, *num_prompt_tokens;  // [slots]
    const i32 *block_tables;                                       // [slots, table_width]
    i64 table_width, block_size;
    bool *marks;    // [blocks, block_size]: whether a position has its entry
    float *hidden;  // [slots, hidden_size]
    i64 hidden_size;
    i32 *hidden_positions, *first_entries, *entry_ends;  // [slots]
    const bool *is_drafted_by_layers, *is_ended;         // [slots]
    i32 *draft_certainties;                              // [slots, k]: of draft tokens in verification; -1: none
    i64 k;
};

// Rows of a step, at most one per slot: workers/engine/rows.py.
struct LayerStep {
    const i32 *slots, *starts;
    i32 *counts, *num_sampled, *num_drafts;  // reduced if there are fewer draft tokens than planned
    i64 num_rows;
};

// Inputs of a tape of these layers: the host's arrays of workers/extensions/drafts/draft_inputs.py.
struct LayerInputs {
    i32 *token_ids, *row_slots, *positions, *sequence_slots, *sequence_offsets, *sequence_starts, *first_keys, *last_keys;
    i32 *logit_row_ids, *counts;
    float *hidden;  // [rows, hidden_size]
    i64 max_logit_rows;
};

// Tapes of one module's draft token, and their results.
struct LayerTapes {
    Tape *forward, *head;
    const float *fed, *logits;
    i64 vocab_size;
};

// Rows of sequences: those of i are at positions [starts[i], starts[i] + counts[i]) of slots[i] and see keys from first_keys[i]
// on.
struct LayerRows {
    std::vector<i32> slots, starts, counts, first_keys;
    void clear();
    void add(i32 slot, i32 start, i32 count, i32 first_key);
    i64 size() const { return static_cast<i64>(slots.size()); }
};

class LayerDrafts {
public:
    // `chances`: [k, DraftChances::CLASSES]; `least_chance`: minimum chance of a draft token, with those before it, to pay; 0:
    // all pay.
    LayerDrafts(LayerSlots slots, LayerInputs standing, LayerInputs single, double *chances, const double *least_chance)
        : slots_(slots), standing_(standing), single_(single), chances_(slots.k, chances), least_chance_(least_chance) {}

    // Sets the tapes that `keep` and `draft` replay; null: the plan is not a tape.
    void set_tapes(Tape *store, std::vector<LayerTapes> modules);

    // Called first in a step in which slots have their first rows.
    void begin(const LayerStep &step);
    // New blocks of slots, by their places in the tables: they have no entries, except blocks of prefix hits.
    void empty(const i32 *slots, const i32 *blocks, i64 count);
    // Selects rows with tokens that get entries.
    void choose(const LayerStep &step, const bool *is_wanted, bool *is_drafting) const;
    // Number of draft tokens that each slot can get, and their classes [num_slots, k]: by place, from k on if entries are few.
    void propose(const i32 *slots, i64 num_slots, const i32 *limits, i64 k, i32 *counts, i32 *classes) const;
    // Announces entries [begins[i], ends[i]); returns the first entry that each slot will have.
    void enter(const i32 *slots, i64 num_slots, const i32 *begins, const i32 *ends, i32 *first_entries);
    // The announced entries have been written.
    void mark(const i32 *slots, i64 num_slots, const i32 *begins, const i32 *ends);
    // Draft tokens after the last tokens of the rows with drafts of these layers. A chain ends at a token that is too unlikely
    // to be accepted, by its layer's certainty; the row then has fewer, but at least one.
    void draft(const LayerStep &step);
    // For the accepted tokens after a step, counts[i] of row i: stores the hidden states before new entries in the standing
    // rows' memory, and the last one of each slot. With a tape, the entries are made here; otherwise the caller runs the
    // returned rows. `hidden`: of the step's kept rows; row i has those before kept_ends[i].
    const LayerRows &keep(const LayerStep &step, const i32 *counts, const bool *is_drafting, const i64 *kept_ends,
                          const float *hidden);

private:
    bool &mark_of(i32 slot, i32 position) const;
    i32 enter(i32 slot, i32 begin, i32 end);
    void set_rows(const LayerInputs &inputs, const LayerRows &rows) const;
    bool has_few_entries(i32 slot) const;
    void draft(const LayerTapes &tapes, i64 num_rows, i32 place);
    bool goes_on(i64 row, i32 place, i32 num_drafts, i32 &num_kept);
    void learn(const LayerStep &step, const i32 *counts);

    LayerSlots slots_;
    LayerInputs standing_, single_;
    Tape *store_ = nullptr;
    std::vector<LayerTapes> modules_;
    LayerRows rows_, none_;
    std::vector<DraftToken> draft_tokens_;  // of the chain's rows
    std::vector<double> chances_of_rows_;   // chance that all draft tokens of a row are accepted
    DraftChances chances_;
    const double *least_chance_;
};

}  // namespace tokamak::cpu

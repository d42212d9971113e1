// Rows of layers that draft, and draft tokens, which stay on the card: the same as the ops of ops/paddle/layer_rows.py.
// ops/layer_rows.py describes the columns, the states, and both kinds of rows.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int THREADS = 128, HEADER = 1, NUM_COLUMNS = 5;  // the last two as in ops/step_layout.py

DEVICE int thread_of_grid() { return static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x); }

__global__ void __launch_bounds__(THREADS) write_sent(WriteSent o) {
    int begin = HEADER + NUM_COLUMNS * o.num_slots;
    for (int i = threadIdx.x; i < o.sent[0]; i += THREADS) o.slots[o.sent[begin + 2 * i]] = o.sent[begin + 2 * i + 1];
}

DEVICE int column(const Drafts &o, int number, int row) { return o.columns[number * o.max_drafted + row]; }

// Place of a row's token after its last one.
DEVICE long long place_of(const Drafts &o, int row, int number) {
    return static_cast<long long>(column(o, 0, row)) * o.num_positions + column(o, 1, row) + number;
}

// One thread per row.
__global__ void __launch_bounds__(THREADS) draft_rows(DraftRows o) {
    int row = thread_of_grid(), count = o.num_rows;
    if (row >= count) return;
    bool is_drafted = column(o.drafts, 2, row) > o.number;
    int slot = is_drafted ? column(o.drafts, 0, row) : o.drafts.num_slots;
    int position = is_drafted ? column(o.drafts, 1, row) + o.number : 0;
    o.rows[row] = o.drafts.slots[static_cast<long long>(slot) * o.drafts.num_positions + position];
    o.rows[count + row] = position;
    o.rows[2 * count + row] = slot;
    o.rows[3 * count + row] = is_drafted ? column(o.drafts, 3, row) : 0;
    o.rows[4 * count + row] = position + 1;
}

// Whether a token is likelier than the present one: a NaN is the likeliest, and of equal ones the first.
DEVICE bool is_better(float logit, int token, float best, int best_token) {
    bool is_nan = logit != logit, is_best_nan = best != best;
    if (is_nan != is_best_nan) return is_nan;
    return logit > best || ((is_nan || logit == best) && token < best_token);
}

// One block per row.
__global__ void __launch_bounds__(THREADS) put_draft(PutDraft o) {
    SHARED Shared<float, THREADS> logits;
    SHARED Shared<int, THREADS> tokens;
    int row = o.first + static_cast<int>(blockIdx.x), thread = threadIdx.x, token = o.vocab;
    Buffer<float> own{o.logits.data + static_cast<long long>(blockIdx.x) * o.vocab, o.vocab};
    float best = -INF;
    for (int id = thread; id < o.vocab; id += THREADS)
        if (is_better(own[id], id, best, token)) best = own[id], token = id;
    logits[thread] = best;
    tokens[thread] = token;
    __syncthreads();
    if (thread != 0 || column(o.drafts, 2, row) <= o.number) return;
    for (int other = 1; other < THREADS; ++other)
        if (is_better(logits[other], tokens[other], best, token)) best = logits[other], token = tokens[other];
    o.drafts.slots[place_of(o.drafts, row, o.number + 1)] = token;
}

// The sequence that has the kept row; num_slots: none.
DEVICE int sequence_of(const Buffer<int> &offsets, int num_slots, int row) {
    int low = 0, high = num_slots;
    while (low < high) {
        int middle = (low + high) / 2;
        if (offsets[middle + 1] <= row) low = middle + 1;
        else high = middle;
    }
    return low;
}

// One block per row.
template <typename T>
__global__ void __launch_bounds__(THREADS) entry_rows(EntryRows o) {
    Buffer<T> hidden = o.hidden.as<T>(), states = o.states.as<T>(), before = o.before.as<T>();
    int row = blockIdx.x, count = o.num_rows, sequence = sequence_of(o.sequence_offsets, o.num_slots, row);
    int from = o.row_ids[row], position = o.positions[from];
    bool is_row = sequence < o.num_slots;
    if (threadIdx.x == 0) {
        bool is_entry = is_row && o.columns[sequence] <= position;
        o.rows[row] = o.token_ids[from];
        o.rows[count + row] = o.rows[3 * count + row] = position;
        o.rows[2 * count + row] = is_entry ? o.row_slots[from] : o.num_slots;
        o.rows[4 * count + row] = position + 1;
    }
    bool is_first = is_row && row == o.sequence_offsets[sequence];
    long long width = o.width, to = row * width;
    long long at = is_first ? o.columns[o.num_slots + sequence] * width : max(row - 1, 0) * width;
    for (int i = threadIdx.x; i < o.width; i += THREADS) before[to + i] = is_first ? states[at + i] : hidden[at + i];
}

// One block per row: the last rows of a sequence become its group's states.
template <typename T>
__global__ void __launch_bounds__(THREADS) keep_states(KeepStates o) {
    Buffer<T> hidden = o.hidden.as<T>(), states = o.states.as<T>();
    int row = blockIdx.x, sequence = sequence_of(o.sequence_offsets, o.num_slots, row);
    if (sequence >= o.num_slots) return;
    int place = row - o.sequence_offsets[sequence + 1] + o.group, state = o.columns[o.num_slots + sequence];
    if (place < 0) return;
    long long width = o.width, from = row * width, to = (state - state % o.group + place) * width;
    for (int i = threadIdx.x; i < o.width; i += THREADS) states[to + i] = hidden[from + i];
}

__global__ void __launch_bounds__(THREADS) read_tokens(ReadTokens o) {
    int i = thread_of_grid(), num_drawn = o.num_lines * o.num_rows;
    if (i >= num_drawn + o.num_rows) return;
    o.lines[i] = i < num_drawn ? o.drawn[i] : o.token_ids[o.kept_row_ids[o.row_ids[i - num_drawn]]];
}

__global__ void __launch_bounds__(THREADS) draft_tokens(DraftTokens o) {
    int i = thread_of_grid();
    if (i < o.num_rows * o.count) o.tokens[i] = o.drafts.slots[place_of(o.drafts, i / o.count, i % o.count + 1)];
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

dim3 blocks_of(int count) { return dim3((count + THREADS - 1) / THREADS); }

}  // namespace

extern "C" int tokamak_WriteSent(const WriteSent *o, void *stream) {
    return launch<write_sent>(*o, dim3(1), THREADS, 0, stream);
}

extern "C" int tokamak_DraftRows(const DraftRows *o, void *stream) {
    return launch<draft_rows>(*o, blocks_of(o->num_rows), THREADS, 0, stream);
}

extern "C" int tokamak_PutDraft(const PutDraft *o, void *stream) {
    return launch<put_draft>(*o, dim3(o->num_rows), THREADS, 0, stream);
}

extern "C" int tokamak_EntryRows(const EntryRows *o, void *stream) {
    return with_type(o->type,
                     [&](auto x) { return launch<entry_rows<decltype(x)>>(*o, dim3(o->num_rows), THREADS, 0, stream); });
}

extern "C" int tokamak_KeepStates(const KeepStates *o, void *stream) {
    return with_type(o->type,
                     [&](auto x) { return launch<keep_states<decltype(x)>>(*o, dim3(o->num_rows), THREADS, 0, stream); });
}

extern "C" int tokamak_ReadTokens(const ReadTokens *o, void *stream) {
    return launch<read_tokens>(*o, blocks_of((o->num_lines + 1) * o->num_rows), THREADS, 0, stream);
}

extern "C" int tokamak_DraftTokens(const DraftTokens *o, void *stream) {
    return launch<draft_tokens>(*o, blocks_of(o->num_rows * o->count), THREADS, 0, stream);
}
#endif

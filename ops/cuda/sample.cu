// Samples a row's token from its logits, as defined in ops/cpu/native/sampling.h: temperature, min_p, top_k, top_p, and the
// inverse of the cumulative distribution in token id order, with the number of (seed, position, sample index).
//
// One block per row; each thread has a range of ids. The cut is found without sorting: the key of the last remaining logit is
// found bit by bit, by counting or weighing those not below it; of equal logits the lowest ids remain. Weights are float32,
// sums float64, over a thread's range in id order and then over the threads in order, so nothing depends on other rows.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int THREADS = 128;
constexpr int HEADER = 1, DRAWN = 2, NUM_SETTINGS = 10;  // as in ops/paddle/metadata.py

// Philox4x32-10 (Salmon et al. 2011), as ops/cpu/native/philox.cpp: in [0, 1), with 53 bits.
DEVICE double uniform(uint32_t seed_low, uint32_t seed_high, uint32_t position, uint32_t sample_index) {
    uint32_t c[4] = {position, sample_index, 0, 0}, key[2] = {seed_low, seed_high};
    for (int round = 0; round < 10; ++round) {
        uint64_t first = uint64_t{0xD2511F53} * c[0], second = uint64_t{0xCD9E8D57} * c[2];
        c[0] = static_cast<uint32_t>(second >> 32) ^ c[1] ^ key[0];
        c[1] = static_cast<uint32_t>(second);
        c[2] = static_cast<uint32_t>(first >> 32) ^ c[3] ^ key[1];
        c[3] = static_cast<uint32_t>(first);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return static_cast<double>((uint64_t{c[0]} << 32 | c[1]) >> 11) * 1.1102230246251565e-16;  // 2^-53
}

// Key in the order of the logits; both zeros have the same.
DEVICE uint32_t key_of(float x) {
    uint32_t bits = bits_of(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What remains: keys above `key`, and the first `num_equal` of those equal to it.
struct Cut {
    uint32_t key;
    int num_equal;
};

struct Block {
    Shared<double, THREADS> &parts;
    Shared<double, 1> &all;

    // The sum of all threads' values in thread order; each thread gets it.
    DEVICE double sum(double value) const {
        __syncthreads();
        parts[threadIdx.x] = value;
        __syncthreads();
        if (threadIdx.x == 0) {
            double total = 0;
            for (int thread = 0; thread < THREADS; ++thread) total += parts[thread];
            all[0] = total;
        }
        __syncthreads();
        return all[0];
    }

    // The sum over the threads before this one.
    DEVICE double sum_before(double value) const {
        sum(value);
        double before = 0;
        for (int thread = 0; thread < static_cast<int>(threadIdx.x); ++thread) before += parts[thread];
        return before;
    }

    // The minimum over all threads.
    DEVICE int least(int value) const {
        __syncthreads();
        parts[threadIdx.x] = value;
        __syncthreads();
        double found = parts[0];
        for (int thread = 1; thread < THREADS; ++thread)
            if (parts[thread] < found) found = parts[thread];
        return static_cast<int>(found);
    }
};

// Offsets in the slots' memory.
struct Slots {
    Buffer<int> memory;
    long long tables_at, lengths_at, settings_at;

    DEVICE explicit Slots(const Sample &o) : memory(o.slots) {
        long long count = o.num_slots + 1;
        tables_at = count * o.num_positions;
        lengths_at = tables_at + count * o.num_blocks;
        settings_at = lengths_at + count;
    }
    DEVICE int setting(int slot, int word) const {
        return memory[settings_at + static_cast<long long>(slot) * NUM_SETTINGS + word];
    }
    DEVICE double real(int slot, int word) const {
        return double_of(static_cast<uint32_t>(setting(slot, word)), static_cast<uint32_t>(setting(slot, word + 1)));
    }
};

__global__ void __launch_bounds__(THREADS) sample(Sample o) {
    SHARED Shared<double, THREADS> parts;
    SHARED Shared<double, 1> all;
    Block block{parts, all};
    int row = blockIdx.x, vocab = o.vocab, run = (vocab + THREADS - 1) / THREADS;
    int begin = min(static_cast<int>(threadIdx.x) * run, vocab), end = min(begin + run, vocab);
    Buffer<float> logits{o.logits.data + static_cast<long long>(row) * vocab, vocab};
    int kept = o.logit_row_ids[row], slot = o.row_slots[o.row_ids[kept]], position = o.positions[kept] + 1;
    Slots slots(o);

    // The largest logit and its first token; the first NaN, if there is one.
    float largest = -INF;
    bool is_nan = false;
    for (int id = begin; id < end; ++id) {
        is_nan |= logits[id] != logits[id];
        largest = fmaxf(largest, logits[id]);
    }
    bool has_nan = block.sum(is_nan ? 1 : 0) > 0;
    __syncthreads();
    parts[threadIdx.x] = largest;
    __syncthreads();
    for (int thread = 0; thread < THREADS; ++thread) largest = fmaxf(largest, static_cast<float>(parts[thread]));
    int first = vocab;
    for (int id = end - 1; id >= begin; --id)
        if (has_nan ? logits[id] != logits[id] : logits[id] == largest) first = id;
    int token = block.least(first);

    double temperature = slots.real(slot, 2), top_p = slots.real(slot, 4), min_p = slots.real(slot, 6);
    bool is_finite = !has_nan && largest - largest == 0.0f;
    if (temperature > 0 && is_finite) {
        float scale = static_cast<float>(1.0 / fmax(temperature, 1e-30));
        auto weight_of = [&](float x) { return static_cast<double>(expf((x - largest) * scale)); };
        Cut cut{0, vocab};
        if (min_p > 0) cut.key = key_of(static_cast<float>(largest + log(fmin(min_p, 1.0)) * temperature));
        auto count_of = [&](uint32_t least) {
            int count = 0;
            for (int id = begin; id < end; ++id) count += key_of(logits[id]) >= least;
            return block.sum(count);
        };
        int top_k = slots.setting(slot, 8);
        if (top_k > 0 && top_k < vocab) {
            uint32_t key = 0;
            for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1)
                if (count_of(key | bit) >= top_k) key |= bit;
            if (key >= cut.key) cut = {key, key == 0xffffffffu ? top_k : top_k - static_cast<int>(count_of(key + 1))};
        }
        // Weighs logits above the cut, and the remaining number of those equal to it.
        auto weight_from = [&](uint32_t least) {
            double sum = 0, of_equal = 0;
            int num_equal = 0;
            for (int id = begin; id < end; ++id) {
                uint32_t key = key_of(logits[id]);
                if (key > cut.key && key >= least) sum += weight_of(logits[id]);
                if (key == cut.key && key >= least) ++num_equal, of_equal = weight_of(logits[id]);
            }
            int before = static_cast<int>(block.sum_before(num_equal));
            return block.sum(sum + of_equal * max(0, min(num_equal, cut.num_equal - before)));
        };
        double total = weight_from(0);
        if (top_p < 1) {
            double target = top_p * total;
            uint32_t key = 0;
            for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1)
                if (weight_from(key | bit) >= target) key |= bit;
            key = max(key, max(cut.key, uint32_t{1}));
            key = min(key, key_of(largest));
            double above = weight_from(key + 1), own = (weight_from(key) - above);
            int num_equal = 0;
            for (int id = begin; id < end; ++id) num_equal += key_of(logits[id]) == key;
            int count = static_cast<int>(block.sum(num_equal));
            if (key == cut.key) count = min(count, cut.num_equal);
            double of_one = count > 0 ? own / count : 0;
            int wanted = of_one > 0 ? static_cast<int>(ceil((target - above) / of_one)) : count;
            cut = {key, max(1, min(count, wanted))};
            total = weight_from(0);
        }
        double target =
            total * uniform(static_cast<uint32_t>(slots.setting(slot, 0)), static_cast<uint32_t>(slots.setting(slot, 1)),
                            static_cast<uint32_t>(position), static_cast<uint32_t>(slots.setting(slot, 9)));
        int num_equal = 0;
        for (int id = begin; id < end; ++id) num_equal += key_of(logits[id]) == cut.key;
        int left = cut.num_equal - static_cast<int>(block.sum_before(num_equal));
        // 0: not kept. Called for logits in their order, of which `num_before` are equal to the cut.
        auto weight_if_kept = [&](int id, int &num_before) {
            uint32_t key = key_of(logits[id]);
            bool is_kept = key > cut.key || (key == cut.key && num_before++ < left);
            return is_kept ? weight_of(logits[id]) : 0.0;
        };
        double own = 0;
        int num_before = 0;
        int last = -1;  // last id with a weight: taken if no sum reaches the target
        for (int id = begin; id < end; ++id) {
            double weight = weight_if_kept(id, num_before);
            own += weight;
            if (weight > 0) last = id;
        }
        double sum = block.sum_before(own);
        int found = vocab;
        num_before = 0;
        for (int id = begin; id < end && found == vocab; ++id) {
            double weight = weight_if_kept(id, num_before);
            sum += weight;
            if (weight > 0 && sum > target) found = id;
        }
        token = block.least(found);
        int fallback = -block.least(-last);
        if (token == vocab) token = fallback;
    }

    double normalizer = 0;
    int above = 0;
    for (int id = begin; id < end; ++id) {
        normalizer += static_cast<double>(expf(logits[id] - largest));
        above += logits[id] > logits[token];
    }
    normalizer = block.sum(normalizer);
    int rank = 1 + static_cast<int>(block.sum(above));
    for (int sequence = threadIdx.x; sequence < o.num_slots; sequence += THREADS) {
        int end = o.sequence_offsets[sequence + 1];
        bool is_last = end == kept + 1 && end > o.sequence_offsets[sequence];
        if (!is_last || o.sent[HEADER + 4 * o.num_slots + sequence] != DRAWN) continue;
        long long of = o.sequence_slots[sequence];
        o.slots[of * o.num_positions + o.context_lengths[sequence]] = token;
        o.slots[slots.lengths_at + of] = o.context_lengths[sequence] + 1;
    }
    if (threadIdx.x != 0) return;
    float logprob = is_finite ? static_cast<float>(logits[token] - (largest + log(normalizer))) : float_of(0x7fc00000u);
    o.drawn[row] = token;
    o.drawn[o.num_rows + row] = static_cast<int>(bits_of(logprob));
    o.drawn[2 * o.num_rows + row] = rank;
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Sample(const Sample *o, void *stream) {
    return launch<sample>(*o, dim3(o->num_rows), THREADS, 0, stream);
}
#endif

#include "candidates.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tokamak::cpu {
namespace {

constexpr int BIN_BITS = 9, NUM_BINS = 1 << BIN_BITS;
constexpr i64 CHAINS = 4;  // independent sums, so that additions do not wait for each other

// Bits of a distance; both zeros have the same.
std::uint32_t bits_of(float x) {
    x += 0.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The bin in which the cumulative sum first reaches `limit`; `before` is the sum of earlier bins; NUM_BINS: none.
int find_bin(const double *bins, double limit, double &before) {
    int bin = 0;
    for (; bin < NUM_BINS && before + bins[bin] < limit; ++bin) before += bins[bin];
    return bin;
}

}  // namespace

void Candidates::reserve(i64 capacity) {
    if (static_cast<i64>(token_ids.size()) >= capacity) return;
    token_ids.resize(capacity);
    logits.resize(capacity);
    weights.resize(capacity);
    distances.resize(capacity);
}

double Candidates::total_weight() const {
    double sums[CHAINS] = {};
    i64 i = 0;
    for (; i + CHAINS <= count; i += CHAINS) {
        for (i64 chain = 0; chain < CHAINS; ++chain) sums[chain] += weights[i + chain];
    }
    for (; i < count; ++i) sums[i % CHAINS] += weights[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void Candidates::keep_count(i64 most) {
    if (count > most) keep(static_cast<double>(most), [](i64) { return 1.0; });
}

void Candidates::keep_weight(double limit) {
    keep(limit, [this](i64 i) { return static_cast<double>(weights[i]); });
}

// Finds the distance at which the sum reaches the limit, by bins of distances, then by the bits of those in the bin.
template <class Weight>
void Candidates::keep(double limit, const Weight &weight_of) {
    limit = std::max(limit, std::numeric_limits<double>::min());
    bins_.resize(CHAINS * NUM_BINS);
    double *bins = bins_.data(), before = 0;
    const float factor = widest > std::numeric_limits<float>::min() * NUM_BINS ? (NUM_BINS - 1) / widest : 0;
    const auto bin_of = [&](i64 i) { return static_cast<int>(std::min(distances[i] * factor, NUM_BINS - 1.0f)); };
    std::fill_n(bins, CHAINS * NUM_BINS, 0.0);
    for (i64 i = 0; i < count; ++i) bins[i % CHAINS * NUM_BINS + bin_of(i)] += weight_of(i);
    for (int bin = 0; bin < NUM_BINS; ++bin) {
        bins[bin] = (bins[bin] + bins[NUM_BINS + bin]) + (bins[2 * NUM_BINS + bin] + bins[3 * NUM_BINS + bin]);
    }
    const int edge_bin = find_bin(bins, limit, before);
    if (edge_bin == NUM_BINS) return;
    edge_.clear();
    for (i64 i = 0; i < count; ++i) {
        if (bin_of(i) == edge_bin) edge_.push_back(i);
    }
    std::uint32_t base = 0;  // bits of a distance; all closer ones are kept
    for (int shift = 32 - BIN_BITS; true; shift = std::max(shift - BIN_BITS, 0)) {
        std::fill_n(bins, NUM_BINS, 0.0);
        for (const i64 i : edge_) {
            const std::uint32_t offset = (bits_of(distances[i]) - base) >> shift;  // wraps if it is closer
            if (offset < NUM_BINS) bins[offset] += weight_of(i);
        }
        const int bin = find_bin(bins, limit, before);
        // sums in another order may be smaller by rounding; then the limit is at the last of them
        base += static_cast<std::uint32_t>(std::min(bin, NUM_BINS - 1)) << shift;
        if (shift == 0) break;
    }
    float last;  // of the distances that are kept
    std::memcpy(&last, &base, sizeof last);
    i64 num_kept = 0;
    for (i64 i = 0; i < count; ++i) {
        bool is_kept = distances[i] < last;
        if (distances[i] == last && before < limit) {
            is_kept = true;
            before += weight_of(i);
        }
        token_ids[num_kept] = token_ids[i];
        weights[num_kept] = weights[i];
        distances[num_kept] = distances[i];
        num_kept += is_kept;
    }
    count = num_kept;
}

template <class Filter>
void Candidates::keep_if(const Filter &is_kept) {
    i64 kept = 0;
    for (i64 i = 0; i < count; ++i) {
        if (!is_kept(i)) continue;
        token_ids[kept] = token_ids[i];
        weights[kept] = weights[i];
        distances[kept++] = distances[i];
    }
    count = kept;
}

void Candidates::keep_typical(double most) {
    const double total = total_weight();
    double entropy = 0;
    std::vector<double> strangeness(count);
    for (i64 i = 0; i < count; ++i) {
        const double surprise = weights[i] > 0 ? -std::log(weights[i] / total) : std::numeric_limits<double>::infinity();
        strangeness[i] = surprise;
        if (weights[i] > 0) entropy += weights[i] / total * surprise;
    }
    for (double &surprise : strangeness) surprise = std::abs(surprise - entropy);
    edge_.resize(count);
    for (i64 i = 0; i < count; ++i) edge_[i] = i;
    std::stable_sort(edge_.begin(), edge_.end(), [&](i64 a, i64 b) { return strangeness[a] < strangeness[b]; });
    std::vector<char> is_kept(count, 0);
    double sum = 0;
    for (const i64 i : edge_) {
        is_kept[i] = 1;
        sum += weights[i];
        if (sum > most * total) break;
    }
    keep_if([&](i64 i) { return is_kept[i] != 0; });
}

void Candidates::drop_likely(double least) {
    const double bound = least * total_weight();
    i64 num_likely = 0, last = -1;
    for (i64 i = 0; i < count; ++i) {
        if (weights[i] < bound) continue;
        ++num_likely;
        if (last < 0 || weights[i] <= weights[last]) last = i;
    }
    if (num_likely > 1) keep_if([&](i64 i) { return i == last || weights[i] < bound; });
}

}  // namespace tokamak::cpu

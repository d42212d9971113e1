#include "draft_tokens.h"

#include <algorithm>
#include <cmath>

namespace tokamak::cpu {

namespace {

constexpr i64 BLOCKS_ALONE = 8;        // blocks of logits that are too little work for several threads
constexpr double DRAFT_DECAY = 0.998;  // per row with draft tokens
constexpr double DRAFT_PRIOR =
    8;  // weight, in draft tokens, of the prior of a class: that of the previous place, or the layer's own
constexpr float ENDS[DraftChances::CLASSES - 1] = {0.1F, 0.25F, 0.4F, 0.55F, 0.7F, 0.85F, 0.95F};
constexpr double OWN[DraftChances::CLASSES] = {0.05, 0.17, 0.32, 0.47,
                                               0.62, 0.77, 0.9,  0.97};  // approximate chance of each class

struct DraftScan {
    std::vector<float> lane_largest, largest, sums;  // [blocks, lanes], [blocks]
};

DraftToken choose_draft_token(const Kernels &kernels, const float *logits, i64 vocab, bool has_probability, DraftScan &scan) {
    const i64 num_blocks = (vocab + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
    scan.lane_largest.resize(num_blocks * kernels.lanes);
    scan.largest.resize(num_blocks);
    scan.sums.resize(num_blocks);
    const float scale = has_probability ? 1.0F : 0.0F;
    kernels.sampling.scan({logits, nullptr, vocab, scale, scan.lane_largest.data(), scan.largest.data(), scan.sums.data()}, 0,
                          num_blocks);
    i64 best = 0;
    for (i64 block = 0; block < num_blocks; ++block) {
        if (std::isnan(scan.largest[block]) || scan.largest[block] == HUGE_VALF) return {0, 0};
        if (scan.largest[block] > scan.largest[best]) best = block;
    }
    const float largest = scan.largest[best], *begin = logits + best * SAMPLING_BLOCK;
    const float *found = std::find(begin, std::min(begin + SAMPLING_BLOCK, logits + vocab), largest);
    double sum = 0;
    for (i64 block = 0; has_probability && block < num_blocks; ++block) {
        if (scan.sums[block] > 0) sum += scan.sums[block] * std::exp(static_cast<double>(scan.largest[block]) - largest);
    }
    return {static_cast<i32>(found - logits), sum > 0 ? static_cast<float>(1 / sum) : 0.0F};
}

}  // namespace

void choose_draft_tokens(Engine &engine, const float *logits, i64 num_rows, i64 vocab, bool has_probabilities,
                         DraftToken *draft_tokens) {
    static std::vector<DraftScan> scans;  // one per thread; one plan runs at a time
    scans.resize(engine.pool().num_threads());
    const auto choose = [&](i64 row, int thread) {
        draft_tokens[row] = choose_draft_token(engine.kernels(), logits + row * vocab, vocab, has_probabilities, scans[thread]);
    };
    if (num_rows > 1 && num_rows * vocab > BLOCKS_ALONE * SAMPLING_BLOCK) return engine.pool().run(num_rows, choose);
    for (i64 row = 0; row < num_rows; ++row) choose(row, 0);
}

DraftChances::DraftChances(i64 num_places, double *chances)
    : num_places_(num_places), chances_(chances), tried_(num_places * CLASSES), stood_(num_places * CLASSES) {
    tell();
}

i64 DraftChances::class_of(float probability) {
    return std::upper_bound(std::begin(ENDS), std::end(ENDS), probability) - std::begin(ENDS);
}

void DraftChances::learn(i64 place, i64 which, bool stood) {
    num_learned_ += place == 0;
    tried_[place * CLASSES + which] += 1;
    stood_[place * CLASSES + which] += stood;
}

void DraftChances::tell() {
    const double decay = std::pow(DRAFT_DECAY, static_cast<double>(num_learned_));
    num_learned_ = 0;
    for (i64 place = 0; place < num_places_; ++place) {
        const double *before = place ? chances_ + (place - 1) * CLASSES : OWN;
        for (i64 which = 0; which < CLASSES; ++which) {
            const i64 cell = place * CLASSES + which;
            tried_[cell] *= decay, stood_[cell] *= decay;
            chances_[cell] = (DRAFT_PRIOR * before[which] + stood_[cell]) / (DRAFT_PRIOR + tried_[cell]);
        }
    }
}

}  // namespace tokamak::cpu

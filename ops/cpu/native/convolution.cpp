// Causal convolutions over the rows of sequences. Rows are divided among threads together with pieces of their channels, small
// enough for the rows of all taps to stay in the L1 cache; then the last inputs go to the slots.
#include <algorithm>
#include <cstring>

#include "states.h"
#include "tasks.h"

namespace tokamak::cpu {
namespace {

constexpr i64 PIECE_CHANNELS = 512;

class Convolution {
public:
    Convolution(Engine &engine, const Convolve &op)
        : engine_(engine), op_(op), shape_(op.shape), runs_(runs_of(op.states)), x_(op.x), x_floats_(op.x_floats) {
        for (const PanelRange &range : op.ranges) {
            for (i64 begin = range.begin; begin < range.end; begin += PIECE_CHANNELS) {
                pieces_.push_back({begin, std::min(begin + PIECE_CHANNELS, range.end)});
            }
        }
        for (const StateRun &run : runs_) num_rows_ = std::max(num_rows_, run.first + run.count);
    }

    void run() {
        if (op_.is_gated) multiply_inputs();
        const i64 num_pieces = static_cast<i64>(pieces_.size());
        for_rows(engine_, num_rows_ * num_pieces, PIECE_CHANNELS, [&](i64 begin, i64 end) {
            for (i64 index = begin; index < end; ++index) convolve(index % num_rows_, pieces_[index / num_rows_]);
        });
        for_rows(engine_, static_cast<i64>(runs_.size()), shape_.taps * shape_.channels, [&](i64 begin, i64 end) {
            for (i64 index = begin; index < end; ++index) store(runs_[index]);
        });
    }

private:
    // B * x in place of x, and C as factors of the results.
    void multiply_inputs() {
        const i64 channels = shape_.channels;
        float *products = static_cast<float *>(engine_.prepared(num_rows_ * channels * sizeof(float)));
        for_rows(engine_, num_rows_, channels, [&](i64 begin, i64 end) {
            for (i64 row = begin; row < end; ++row) {
                const float *b = op_.x + row * op_.x_floats, *x = b + 2 * channels;
                for (const PanelRange &range : op_.ranges) {
                    for (i64 i = range.begin; i < range.end; ++i) products[row * channels + i] = b[i] * x[i];
                }
            }
        });
        shape_.factors = op_.x + channels;
        shape_.factor_floats = op_.x_floats;
        x_ = products;
        x_floats_ = channels;
    }

    // Inputs of a row that comes `time` rows after the state's position: -1 is the last one in its window.
    const float *inputs_at(const StateRun &run, i64 time) const {
        if (time >= run.replayed) return x_ + (run.first + time - run.replayed) * x_floats_;
        const i64 at = time >= 0 ? op_.log_at : op_.window_at, row = time >= 0 ? time : time + shape_.taps - 1;
        return reinterpret_cast<const float *>(run.read + at) + row * shape_.channels;
    }

    void convolve(i64 row, const PanelRange &piece) const {
        const auto next =
            std::upper_bound(runs_.begin(), runs_.end(), row, [](i64 row, const StateRun &run) { return row < run.first; });
        const StateRun &run = *(next - 1);
        const float *inputs[MAX_TAPS];
        for (i64 tap = 0; tap < shape_.taps; ++tap) {
            inputs[tap] = inputs_at(run, run.replayed + row - run.first - shape_.taps + 1 + tap);
        }
        engine_.kernels().convolve(shape_, inputs, row, piece.begin, piece.end);
    }

    void copy(char *slot, i64 at, i64 row, const float *inputs) const {
        float *to = reinterpret_cast<float *>(slot + at) + row * shape_.channels;
        for (const PanelRange &range : op_.ranges) {
            std::memcpy(to + range.begin, inputs + range.begin, (range.end - range.begin) * sizeof(float));
        }
    }

    void store_window(const StateRun &run, char *slot, i64 time) const {
        for (i64 row = 0; row < shape_.taps - 1; ++row) {
            copy(slot, op_.window_at, row, inputs_at(run, time - shape_.taps + 1 + row));
        }
    }

    void store(const StateRun &run) const {
        if (run.kept >= 0) store_window(run, run.keep, run.kept);
        if (run.write == nullptr) return;
        store_window(run, run.write, run.written());
        for (i64 row = run.certain; row < run.count; ++row) {
            copy(run.write, op_.log_at, row - run.certain, inputs_at(run, run.replayed + row));
        }
    }

    Engine &engine_;
    const Convolve &op_;
    ConvolutionShape shape_;
    std::vector<StateRun> runs_;  // in the order of their rows
    std::vector<PanelRange> pieces_;
    const float *x_;
    i64 x_floats_, num_rows_ = 0;
};

}  // namespace

void convolve(Engine &engine, const Convolve &op) { Convolution(engine, op).run(); }

}  // namespace tokamak::cpu

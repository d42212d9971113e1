// Recurrent layers: convolutions, and the recurrence of a head token by token in float32. A block has 32 values of a head, one
// per thread, and their part of the state in shared memory; a number of the state is only computed with numbers of its own
// column, in the order of the keys, so results do not depend on how rows or columns are divided.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int CHANNELS = 128;  // of a block
constexpr int ROW_BLOCKS = 8;  // that share the rows of a sequence

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Rows of a sequence in a step: `count` from `first` on, after `replayed` rows of the log. Times count both.
struct Run {
    int first, count, replayed, certain, kept;
    Buffer<float> read, write, keep;  // slots; empty: none

    DEVICE bool is_idle() const { return count <= 0 && write.is_empty() && keep.is_empty(); }
    DEVICE bool is_logged(int row) const { return row >= certain && !write.is_empty(); }
    DEVICE bool is_kept_at(int time) const { return time == kept && !keep.is_empty(); }
    DEVICE bool is_written_at(int time) const { return time == replayed + certain && !write.is_empty(); }
};

DEVICE Buffer<float> slot_of(const States &states, int slot) {
    unsigned char *from = states.memory.data + static_cast<long long>(slot) * states.slot_bytes;
    return {reinterpret_cast<float *>(from), states.slot_bytes / static_cast<int>(sizeof(float))};
}

DEVICE Run run_of(const States &states, int index) {
    int at = 6 * index, read = states.sequences[at], position = states.sequences[at + 1], write = states.sequences[at + 2];
    int keep = states.sequences[at + 3], keep_at = states.sequences[at + 4], certain = states.sequences[at + 5];
    int first = states.offsets[index], replayed = states.starts[index] - position, kept = keep_at - position;
    Run run{first, states.offsets[index + 1] - first, replayed, certain, kept > replayed + certain ? -1 : kept, {}, {}, {}};
    run.read = slot_of(states, read);
    if (write != 0) run.write = slot_of(states, write);
    if (keep != 0) run.keep = slot_of(states, keep);
    return run;
}

template <typename T>
__global__ void __launch_bounds__(CHANNELS, 8) convolve(Convolve o) {
    int channel = blockIdx.y * CHANNELS + threadIdx.x;
    Run run = run_of(o.states, blockIdx.x);
    if (channel >= o.channels || run.is_idle()) return;
    Buffer<T> x = o.x.as<T>(), y = o.y.as<T>();
    auto place_of = [&](int row, int part) {
        return static_cast<long long>(run.first + row) * o.stride + o.first + part * o.channels + channel;
    };
    auto input = [&](int time) {
        if (time < run.replayed) {
            int at = time < 0 ? o.window_at : o.log_at, row = time < 0 ? time + o.taps - 1 : time;
            return run.read[at / 4 + row * o.channels + channel];
        }
        float value = to_float(x[place_of(time - run.replayed, 0)]);
        return o.is_gated ? value * to_float(x[place_of(time - run.replayed, 2)]) : value;
    };
    for (int row = blockIdx.z; row < run.count; row += ROW_BLOCKS) {
        float sum = o.bias.is_empty() ? 0.0f : o.bias[channel];
        for (int tap = 0; tap < o.taps; ++tap) {
            sum = fmaf(o.weight[tap * o.channels + channel], input(run.replayed + row - o.taps + 1 + tap), sum);
        }
        if (o.is_activated) sum = sum * sigmoid(sum);
        if (o.is_gated) sum = sum * to_float(x[place_of(row, 1)]);
        y[static_cast<long long>(run.first + row) * o.channels + channel] = from_float<T>(sum);
    }
    if (blockIdx.z != 0) return;
    auto store_window = [&](const Buffer<float> &slot, int time) {
        for (int row = 0; row < o.taps - 1; ++row) {
            slot[o.window_at / 4 + row * o.channels + channel] = input(time - o.taps + 1 + row);
        }
    };
    if (!run.keep.is_empty() && run.kept >= 0) store_window(run.keep, run.kept);
    if (run.write.is_empty()) return;
    store_window(run.write, run.replayed + run.certain);
    for (int row = run.certain; row < run.count; ++row) {
        run.write[o.log_at / 4 + (row - run.certain) * o.channels + channel] = input(run.replayed + row);
    }
}

template <typename T>
__global__ void __launch_bounds__(WARP) recur(Recur o) {
    Run run = run_of(o.states, blockIdx.x);
    if (run.is_idle()) return;
    int head = blockIdx.y, lane = threadIdx.x, column = blockIdx.z * WARP + lane, dim = o.key_dim;
    int key_head = head * o.key_heads / o.heads, all_keys = o.key_heads * dim, all_values = o.heads * o.value_dim;
    bool is_delta = !o.betas.is_empty(), is_by_key = o.num_decays > 1, is_own = column < o.value_dim;
    bool has_key = blockIdx.z == 0 && (head == 0 || (head - 1) * o.key_heads / o.heads != key_head);
    Buffer<float> state = dynamic_shared<float>(0, dim * WARP);
    Buffer<float> keys = dynamic_shared<float>(4 * dim * WARP, dim), queries = dynamic_shared<float>(4 * dim * (WARP + 1), dim);
    Buffer<float> decays = dynamic_shared<float>(4 * dim * (WARP + 2), dim);
    Buffer<T> x = o.x.as<T>(), inputs = o.decays.as<T>(), betas = o.betas.as<T>(), y = o.y.as<T>();
    int matrix = o.matrix_at / 4 + head * dim * o.value_dim + column;

    for (int i = 0; i < dim; ++i) state[i * WARP + lane] = is_own ? run.read[matrix + i * o.value_dim] : 0.0f;
    auto store = [&](const Buffer<float> &slot) {
        for (int i = 0; i < dim && is_own; ++i) slot[matrix + i * o.value_dim] = state[i * WARP + lane];
    };
    auto store_at = [&](int time) {
        if (run.is_kept_at(time)) store(run.keep);
        if (run.is_written_at(time)) store(run.write);
    };
    auto log_of = [&](int row) { return o.log_at / 4 + row * o.log_width; };

    for (int row = 0; row < run.replayed; ++row) {
        store_at(row);
        int at = log_of(row), decay_at = at + all_keys + all_values + head * o.num_decays;
        float delta = is_own ? run.read[at + all_keys + head * o.value_dim + column] : 0.0f;
        for (int i = 0; i < dim; ++i) {
            float decay = run.read[decay_at + (is_by_key ? i : 0)];
            float &number = state[i * WARP + lane];
            number = fmaf(run.read[at + key_head * dim + i], delta, decay * number);
        }
    }
    float rate = o.rates[head];
    for (int row = 0; row < run.count; ++row) {
        store_at(run.replayed + row);
        long long number = run.first + row, from = number * o.x_stride + o.first;
        long long keys_at = from + (is_delta ? all_keys : all_values) + key_head * dim;
        long long queries_at = from + (is_delta ? 0 : all_values + all_keys) + key_head * dim;
        long long decay_at = number * o.decay_stride + o.decay_first + head * o.num_decays;
        auto step_of = [&](int i) {
            float step = softplus(to_float(inputs[decay_at + i]) + o.biases[head * o.num_decays + i]);
            return is_delta ? step : fminf(o.most, fmaxf(o.least, step));
        };
        float of_keys = 0.0f, of_queries = 0.0f, step = is_by_key ? 0.0f : step_of(0);
        __syncthreads();  // the last row's were read
        for (int i = lane; i < dim; i += WARP) {
            float key = to_float(x[keys_at + i]), query = to_float(x[queries_at + i]);
            keys[i] = key, queries[i] = query;
            of_keys = fmaf(key, key, of_keys), of_queries = fmaf(query, query, of_queries);
            decays[i] = expf(rate * (is_by_key ? step_of(i) : step));
        }
        if (is_delta) {
            float key_factor = 1.0f / sqrtf(warp_sum(of_keys) + o.epsilon);
            float query_factor = 1.0f / sqrtf(static_cast<float>(dim)) / sqrtf(warp_sum(of_queries) + o.epsilon);
            for (int i = lane; i < dim; i += WARP) keys[i] *= key_factor, queries[i] *= query_factor;
        }
        __syncthreads();
        long long value_at = from + (is_delta ? 2 * all_keys : 0) + head * o.value_dim + column;
        float value = is_own ? to_float(x[value_at]) : 0.0f, delta, result = 0.0f;
        if (is_delta) {
            float remembered = 0.0f, beta = sigmoid(to_float(betas[number * o.beta_stride + o.beta_first + head]));
            for (int i = 0; i < dim; ++i) {
                float &held = state[i * WARP + lane];
                held = decays[i] * held;
                remembered = fmaf(keys[i], held, remembered);
            }
            delta = (value - remembered) * beta;
            for (int i = 0; i < dim; ++i) {
                float &held = state[i * WARP + lane];
                held = fmaf(keys[i], delta, held);
                result = fmaf(queries[i], held, result);
            }
        } else {
            delta = value * step;
            for (int i = 0; i < dim; ++i) {
                float &held = state[i * WARP + lane];
                held = fmaf(keys[i], delta, decays[i] * held);
                result = fmaf(queries[i], held, result);
            }
            result = fmaf(o.skips[head], value, result);
        }
        if (is_own) y[number * all_values + head * o.value_dim + column] = from_float<T>(result);
        if (!run.is_logged(row)) continue;
        int log = log_of(row - run.certain);
        if (is_own) run.write[log + all_keys + head * o.value_dim + column] = delta;
        for (int i = lane; i < dim && has_key; i += WARP) run.write[log + key_head * dim + i] = keys[i];
        for (int i = lane; i < o.num_decays && blockIdx.z == 0; i += WARP) {
            run.write[log + all_keys + all_values + head * o.num_decays + i] = decays[i];
        }
    }
    store_at(run.replayed + run.count);
}

}  // namespace

#ifndef __CUDACC__  // the host's part
extern "C" int tokamak_Convolve(const Convolve *o, void *stream) {
    dim3 grid(o->states.num_sequences, (o->channels + CHANNELS - 1) / CHANNELS, ROW_BLOCKS);
    return with_type(o->type, [&](auto x) { return launch<convolve<decltype(x)>>(*o, grid, CHANNELS, 0, stream); });
}

extern "C" int tokamak_Recur(const Recur *o, void *stream) {
    dim3 grid(o->states.num_sequences, o->heads, (o->value_dim + WARP - 1) / WARP);
    int num_bytes = 4 * o->key_dim * (WARP + 3);
    return with_type(o->type, [&](auto x) { return launch<recur<decltype(x)>>(*o, grid, WARP, num_bytes, stream); });
}
#endif

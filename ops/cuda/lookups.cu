// Rows that are looked up or replaced: embeddings, rows of a batch, features of media, and values of the slots' memory.
#include "weights.h"

namespace {

constexpr int THREADS = 128;

// One block per row.
template <typename T>
__global__ void __launch_bounds__(THREADS) take_rows(TakeRows o) {
    Buffer<T> x = o.x.as<T>(), y = o.y.as<T>();
    long long to = static_cast<long long>(blockIdx.x) * o.width, from = static_cast<long long>(o.ids[blockIdx.x]) * o.width;
    for (int i = threadIdx.x; i < o.width; i += THREADS) y[to + i] = x[from + i];
}

// One block per row; each thread takes eight numbers at a time. With scales of the segments of a linear, integers are
// multiplied here.
template <typename T, typename W>
__global__ void __launch_bounds__(THREADS, 8) embed(Embed o) {
    Buffer<T> y = o.y.as<T>();
    const Weights &w = o.weights;
    long long row = blockIdx.x, id = o.ids[row];
    for (int i = 0; i < o.num_same; ++i)
        if (id == o.same[2 * i]) id = o.same[2 * i + 1];
    for (int first = 8 * threadIdx.x; first < w.num_inputs; first += 8 * THREADS) {
        Eight<float> values;
        if constexpr (INTEGER_BITS<W> == 0) {
            Eight<T> found = load_weights<T, W>(w, id, first);
            for (int i = 0; i < 8; ++i) values.values[i] = number(found, i);
        } else {
            values = load_weights<float, W>(w, id, first);
            float scale = has_scaled_segments<W>(w) ? w.scales[scale_place<W>(w, id, first)] : 1.0f;
            for (float &value : values.values) value *= scale;
        }
        for (int i = 0; i < 8 && first + i < w.num_inputs; ++i)
            y[row * w.num_inputs + first + i] = from_float<T>(values.values[i]);
    }
}

// One block per row.
template <typename T>
__global__ void __launch_bounds__(THREADS) take_features(TakeFeatures o) {
    Buffer<T> x = o.x.as<T>();
    int row = blockIdx.x;
    long long place = o.feature_rows[row], to = static_cast<long long>(row) * o.width;
    if (place < 0) return;
    unsigned char *from = &o.features[place * o.row_bytes];
    long long count = o.row_bytes / (o.are_bfloat16 ? 2 : 4);
    Buffer<float> floats{reinterpret_cast<float *>(from), count};
    Buffer<Bfloat16> halves{reinterpret_cast<Bfloat16 *>(from), count};
    for (int i = threadIdx.x; i < o.width; i += THREADS) {
        float value = o.are_bfloat16 ? to_float(halves[o.first + i]) : floats[o.first + i];
        x[to + i] = from_float<T>(o.are_added ? to_float(x[to + i]) + value : value);
    }
}

__global__ void __launch_bounds__(THREADS) scatter(Scatter o) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < o.count) o.to[o.places[i]] = o.values[i];
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

template <typename T>
int run(const Embed &o, void *stream) {
    dim3 grid(o.num_rows);
    if (o.weights.type == INT8) return launch<embed<T, Integer<8>>>(o, grid, THREADS, 0, stream);
    if (o.weights.type == INT4) return launch<embed<T, Integer<4>>>(o, grid, THREADS, 0, stream);
    if (o.weights.type == FLOAT4) return launch<embed<T, Float4>>(o, grid, THREADS, 0, stream);
    return launch<embed<T, T>>(o, grid, THREADS, 0, stream);
}

}  // namespace

extern "C" int tokamak_Embed(const Embed *o, void *stream) {
    return with_type(o->type, [&](auto x) { return run<decltype(x)>(*o, stream); });
}

extern "C" int tokamak_TakeRows(const TakeRows *o, void *stream) {
    return with_type(o->type,
                     [&](auto x) { return launch<take_rows<decltype(x)>>(*o, dim3(o->num_rows), THREADS, 0, stream); });
}

extern "C" int tokamak_TakeFeatures(const TakeFeatures *o, void *stream) {
    return with_type(o->type,
                     [&](auto x) { return launch<take_features<decltype(x)>>(*o, dim3(o->num_rows), THREADS, 0, stream); });
}

extern "C" int tokamak_Scatter(const Scatter *o, void *stream) {
    return launch<scatter>(*o, dim3((o->count + THREADS - 1) / THREADS), THREADS, 0, stream);
}
#endif

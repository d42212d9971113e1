// Rows whose results depend on few numbers each: activations, sums, products, copies and conversions. A thread computes one
// result.
#include "numbers.h"
#include "operands.h"

namespace {

constexpr int THREADS = 256;

DEVICE long long number_of_thread() { return static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; }

// Numbered as ACTIVATIONS in ops/modules.py.
DEVICE float activated(int activation, float x) {
    switch (activation) {
        case 0: return x * sigmoid(x);                                      // SiLU
        case 1: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));  // GELU
        case 2: return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case 3: return x * sigmoid(1.702f * x);
        case 4: return x < 0.0f ? 0.0f : x;
        case 5: return x < 0.0f ? 0.0f : x * x;
        case 6: return tanhf(x);
        default: return sigmoid(x);
    }
}

DEVICE float clamped(float x, float low, float high) { return x > high ? high : x < low ? low : x; }  // NaN stays

template <typename T>
__global__ void __launch_bounds__(THREADS) activate(Activate o) {
    long long place = number_of_thread(), row = place / o.width, column = place % o.width;
    if (row >= o.num_rows) return;
    Buffer<T> x = o.x.as<T>();
    long long from = row * (1 + o.is_gated) * o.width + column;
    float gate = to_float(x[from]);
    if (!o.is_gated) {
        o.y.as<T>()[place] = from_float<T>(activated(o.activation, gate));
        return;
    }
    float up = to_float(x[from + o.width]);
    if (o.limit == 0.0f) {
        o.y.as<T>()[place] = from_float<T>(activated(o.activation, gate) * up);
        return;
    }
    gate = clamped(gate, -INF, o.limit);
    up = clamped(up, -o.limit, o.limit);
    o.y.as<T>()[place] = from_float<T>((up + 1.0f) * (gate * sigmoid(o.alpha * gate)));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) scale_and_add(ScaleAndAdd o) {
    long long place = number_of_thread();
    if (place >= o.count) return;
    float value = to_float(o.x.as<T>()[place]) * o.factor;
    o.y.as<T>()[place] = from_float<T>(o.other.is_empty() ? value : value + to_float(o.other.as<T>()[place]));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) multiply_rows(Multiply o) {
    long long place = number_of_thread(), row = place / o.width;
    if (row >= o.num_rows) return;
    long long factor = o.num_factors == 0 ? 0 : o.num_factors == 1 ? row : place;
    o.y.as<T>()[place] = from_float<T>(to_float(o.x.as<T>()[place]) * to_float(o.factors.as<T>()[factor]));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) mean_rows(MeanRows o) {
    long long place = number_of_thread(), row = place / o.width, column = place % o.width;
    if (row >= o.num_rows) return;
    float sum = 0.0f;
    for (int number = 0; number < o.group; ++number) sum += to_float(o.x.as<T>()[(row * o.group + number) * o.width + column]);
    o.y.as<T>()[place] = from_float<T>(sum / static_cast<float>(o.group));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) adjust_columns(AdjustColumns o) {
    long long place = number_of_thread(), row = place / o.width, column = o.first + place % o.width;
    if (row >= o.num_rows) return;
    long long all = o.width_of_y;
    float value = to_float(o.x.as<T>()[place]) * o.rules[column] + o.rules[all + column];
    o.y.as<T>()[row * all + column] = from_float<T>(clamped(value, o.rules[2 * all + column], o.rules[3 * all + column]));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) copy_columns(CopyColumns o) {
    long long place = number_of_thread(), row = place / o.count, column = place % o.count;
    if (row >= o.num_rows) return;
    o.y.as<T>()[row * o.width_of_y + o.first_of_y + column] = o.x.as<T>()[row * o.width + o.first + column];
}

template <typename T>
__global__ void __launch_bounds__(THREADS) convert(Convert o) {
    long long place = number_of_thread();
    if (place >= o.count) return;
    if (o.is_to_float) o.floats[place] = to_float(o.x.as<T>()[place]);
    else o.x.as<T>()[place] = from_float<T>(o.floats[place]);
}

}  // namespace

#ifndef __CUDACC__  // the host's part
namespace {

dim3 grid_of(long long count) { return dim3(static_cast<unsigned>((count + THREADS - 1) / THREADS)); }

long long count_of(int num_rows, int width) { return static_cast<long long>(num_rows) * width; }

}  // namespace

extern "C" int tokamak_Activate(const Activate *o, void *stream) {
    dim3 grid = grid_of(count_of(o->num_rows, o->width));
    return with_type(o->type, [&](auto x) { return launch<activate<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}

extern "C" int tokamak_ScaleAndAdd(const ScaleAndAdd *o, void *stream) {
    dim3 grid = grid_of(o->count);
    return with_type(o->type, [&](auto x) { return launch<scale_and_add<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}

extern "C" int tokamak_Multiply(const Multiply *o, void *stream) {
    dim3 grid = grid_of(count_of(o->num_rows, o->width));
    return with_type(o->type, [&](auto x) { return launch<multiply_rows<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}

extern "C" int tokamak_MeanRows(const MeanRows *o, void *stream) {
    dim3 grid = grid_of(count_of(o->num_rows, o->width));
    return with_type(o->type, [&](auto x) { return launch<mean_rows<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}

extern "C" int tokamak_AdjustColumns(const AdjustColumns *o, void *stream) {
    dim3 grid = grid_of(count_of(o->num_rows, o->width));
    return with_type(o->type, [&](auto x) { return launch<adjust_columns<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}

extern "C" int tokamak_CopyColumns(const CopyColumns *o, void *stream) {
    dim3 grid = grid_of(count_of(o->num_rows, o->count));
    return with_type(o->type, [&](auto x) { return launch<copy_columns<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}

extern "C" int tokamak_Convert(const Convert *o, void *stream) {
    dim3 grid = grid_of(o->count);
    return with_type(o->type, [&](auto x) { return launch<convert<decltype(x)>>(*o, grid, THREADS, 0, stream); });
}
#endif

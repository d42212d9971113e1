// Keys and values in their blocks, as drawn in `operands.h`: written a head at a time, read eight elements at a time.
#pragma once

#include "operands.h"
#include "products.h"

DEVICE int bytes_of(int type) { return type == FLOAT32 ? 4 : type == FLOAT16 || type == BFLOAT16 ? 2 : 1; }

// Position of a slot's head in the keys or values, relative to the block's first byte, and of its scale.
struct HeadPlace {
    long long block;  // bytes before it
    int number;       // index of the head's first number in the block
    int scale;        // bytes from the block's beginning
};

DEVICE HeadPlace place_of(const Cache &cache, bool is_value, int slot, int head) {
    int dim = is_value ? cache.value_dim : cache.key_dim;
    int numbers = cache.block_size * cache.kv_heads * dim, line = slot % cache.block_size * cache.kv_heads + head;
    long long block_bytes = is_value ? cache.value_bytes : cache.key_bytes;
    return {slot / cache.block_size * block_bytes, line * dim, numbers + 4 * line};
}

template <typename T>
DEVICE Buffer<T> numbers_of(const Buffer<unsigned char> &bytes, long long first) {
    return {reinterpret_cast<T *>(bytes.data + first), (bytes.count - first) / static_cast<long long>(sizeof(T))};
}

// The warp writes value(i) for each number i of a head. int8: the largest magnitude becomes 127.
template <typename Value>
DEVICE void store_head(const Cache &cache, bool is_value, int slot, int head, int lane, Value value) {
    int dim = is_value ? cache.value_dim : cache.key_dim;
    const Buffer<unsigned char> &bytes = is_value ? cache.values : cache.keys;
    HeadPlace place = place_of(cache, is_value, slot, head);
    if (cache.type == INT8) {
        float largest = 0.0f;
        for (int i = lane; i < dim; i += WARP) largest = fmaxf(largest, fabsf(value(i)));
        largest = warp_max(largest);
        float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        Buffer<int8_t> numbers = numbers_of<int8_t>(bytes, place.block);
        for (int i = lane; i < dim; i += WARP) numbers[place.number + i] = static_cast<int8_t>(rintf(value(i) * inverse));
        if (lane == 0) numbers_of<float>(bytes, place.block + place.scale)[0] = scale;
        return;
    }
    for (int i = lane; i < dim; i += WARP) switch (cache.type) {
            case FLOAT32: numbers_of<float>(bytes, place.block)[place.number + i] = value(i); break;
            case FLOAT16: numbers_of<Float16>(bytes, place.block)[place.number + i] = from_float<Float16>(value(i)); break;
            case BFLOAT16: numbers_of<Bfloat16>(bytes, place.block)[place.number + i] = from_float<Bfloat16>(value(i)); break;
            default: numbers_of<Float8>(bytes, place.block)[place.number + i] = from_float<Float8>(value(i));
        }
}

template <typename From>
DEVICE void read_eight(const Buffer<unsigned char> &bytes, const HeadPlace &place, int first, int dim, float (&values)[8]) {
    Buffer<From> numbers = numbers_of<From>(bytes, place.block);
    if constexpr (sizeof(From) == 2) {
        if (dim % 8 == 0) {
            const uint4 &words = numbers.template vector<uint4>(place.number + first);
            uint32_t all[4] = {words.x, words.y, words.z, words.w};
            for (int i = 0; i < 8; ++i) values[i] = to_float(From{static_cast<uint16_t>(all[i / 2] >> (16 * (i % 2)))});
            return;
        }
    }
    for (int i = 0; i < 8; ++i) values[i] = first + i < dim ? to_float(numbers[place.number + first + i]) : 0.0f;
}

// Eight numbers of a head from `first` on; zeros after its end.
DEVICE void load_head(const Cache &cache, bool is_value, int slot, int head, int first, float (&values)[8]) {
    int dim = is_value ? cache.value_dim : cache.key_dim;
    const Buffer<unsigned char> &bytes = is_value ? cache.values : cache.keys;
    HeadPlace place = place_of(cache, is_value, slot, head);
    switch (cache.type) {
        case FLOAT32: read_eight<float>(bytes, place, first, dim, values); break;
        case FLOAT16: read_eight<Float16>(bytes, place, first, dim, values); break;
        case BFLOAT16: read_eight<Bfloat16>(bytes, place, first, dim, values); break;
        case FLOAT8: read_eight<Float8>(bytes, place, first, dim, values); break;
        default: {
            read_eight<int8_t>(bytes, place, first, dim, values);
            float scale = numbers_of<float>(bytes, place.block + place.scale)[0];
            for (float &value : values) value *= scale;
        }
    }
}

// Number types in memory, and their conversion to float32. Conversions round to the nearest, ties to even.
#pragma once

#include "platform.h"

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

// Numbered as in `operands.py`.
enum Type : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, INT8 = 3, FLOAT8 = 4, INT4 = 5, FLOAT4 = 6 };

struct Float16 {
    uint16_t bits;
};

struct Bfloat16 {
    uint16_t bits;
};

struct Float8 {  // e4m3: no infinities, the largest is 448
    uint8_t bits;
};

template <typename A, typename B>
constexpr bool IS_SAME = false;
template <typename A>
constexpr bool IS_SAME<A, A> = true;

#ifndef __CUDACC__
// Calls run(x) with an x of the type of a row's activations.
template <typename Run>
int with_type(int type, Run run) {
    switch (type) {
        case FLOAT32: return run(float{});
        case FLOAT16: return run(Float16{});
        default: return run(Bfloat16{});
    }
}
#endif

DEVICE uint32_t bits_of(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
#endif
}

DEVICE float float_of(uint32_t bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
#endif
}

DEVICE double double_of(uint32_t low, uint32_t high) {
#ifdef __CUDACC__
    return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
#else
    uint64_t bits = uint64_t{high} << 32 | low;
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(Bfloat16 x) { return float_of(uint32_t{x.bits} << 16); }
DEVICE float to_float(int8_t x) { return x; }

DEVICE float to_float(Float16 x) {
#ifdef __CUDACC__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
#else
    uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest < 0x400) {  // below 2^-14: multiples of 2^-24
        float value = static_cast<float>(rest) * 5.9604644775390625e-8f;
        return sign != 0 ? -value : value;
    }
    return float_of(sign | ((rest << 13) + ((127u - 15u) << 23)));
#endif
}

DEVICE float to_float(Float8 x) {
    uint32_t sign = uint32_t{x.bits & 0x80u} << 24, rest = x.bits & 0x7fu;
    if (rest == 0x7f) return float_of(0x7fc00000u);
    if (rest < 8) {  // below 2^-6: multiples of 2^-9
        float value = static_cast<float>(rest) * 0.001953125f;
        return sign != 0 ? -value : value;
    }
    return float_of(sign | ((rest << 20) + ((127u - 7u) << 23)));
}

template <typename T>
DEVICE T from_float(float x);

template <>
DEVICE float from_float<float>(float x) {
    return x;
}

template <>
DEVICE Bfloat16 from_float<Bfloat16>(float x) {
#ifdef __CUDACC__
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
#else
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // as on a card
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
DEVICE Float16 from_float<Float16>(float x) {
#ifdef __CUDACC__
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
#else
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (rest >= bits_of(65520.0f)) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (rest < bits_of(6.103515625e-5f))
        return {static_cast<uint16_t>(sign | static_cast<uint32_t>(rintf(float_of(rest) * 16777216.0f)))};
    rest += 0xfffu + ((rest >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((rest >> 13) - ((127u - 15u) << 10)))};
#endif
}

template <>
DEVICE Float8 from_float<Float8>(float x) {
    uint32_t bits = bits_of(x), sign = (bits >> 24) & 0x80u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
    if (rest > bits_of(448.0f)) rest = bits_of(448.0f);
    if (rest < bits_of(0.015625f)) return {static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(float_of(rest) * 512.0f)))};
    rest += 0x7ffffu + ((rest >> 20) & 1u);
    return {static_cast<uint8_t>(sign | ((rest >> 20) - ((127u - 7u) << 3)))};
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// -------------------------------------------------------------------------------- sums, always in the same order

// Over all lanes of a warp; each gets the sum.
DEVICE float warp_sum(float x) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

DEVICE float warp_max(float x) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
}

// ------------------------------------------------------------- products of a warp: c [16, 8] += a [16, 16] b [16, 8]

// Of lane 4 g + t: `a` has rows g and g + 8 (words 0, 2 and 1, 3), columns 2 t and 2 t + 1 (words 0, 1), 8 further on (words 2,
// 3); `b` the same places of k of column g; `c` columns 2 t, 2 t + 1 of rows g (0, 1) and g + 8 (2, 3). PTX ISA, mma.m16n8k16.
template <typename T>
DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#ifdef __CUDACC__
template <>
DEVICE void multiply<Bfloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DEVICE void multiply<Float16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
template <typename T>
void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    auto &[of_a, of_b] = emulation::exchange().numbers;
    unsigned lane = emulation::lane(), g = lane / 4, t = lane % 4;
    auto part = [](uint32_t word, int half) { return to_float(T{static_cast<uint16_t>(word >> (16 * half))}); };
    for (int half = 0; half < 2; ++half) {
        for (int word = 0; word < 4; ++word) of_a[g + word % 2 * 8][2 * t + word / 2 * 8 + half] = part(a[word], half);
        for (int word = 0; word < 2; ++word) of_b[2 * t + word * 8 + half][g] = part(b[word], half);
    }
    __syncwarp();
    for (int k = 0; k < 16; ++k)  // products of these numbers are exact in float32
        for (unsigned i = 0; i < 4; ++i) c[i] += of_a[g + i / 2 * 8][k] * of_b[k][2 * t + i % 2];
}
#endif

DEVICE uint32_t pair(Bfloat16 low, Bfloat16 high) { return low.bits | uint32_t{high.bits} << 16; }
DEVICE uint32_t pair(Float16 low, Float16 high) { return low.bits | uint32_t{high.bits} << 16; }

// a b + c of both numbers of a pair, rounded once.
template <typename T>
DEVICE uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDACC__
    uint32_t result;
    if constexpr (IS_SAME<T, Bfloat16>) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
#else
    auto part = [](uint32_t pair, int half) { return to_float(T{static_cast<uint16_t>(pair >> (16 * half))}); };
    auto of = [&](int half) { return from_float<T>(std::fma(part(a, half), part(b, half), part(c, half))); };
    return pair(of(0), of(1));
#endif
}

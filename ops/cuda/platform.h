// Language of the kernels in this directory: CUDA C++, as NVRTC compiles it for a card, and its replacements when a C++ compiler
// builds the host's part, and an emulation of the kernels, for a processor.
//
// `Buffer` is memory with its bounds, which only the emulation checks. `Shared` is an array of a block, and `DynamicShared`
// one with a size that the launch chooses.
#pragma once

#ifdef __CUDACC__
using int8_t = signed char;  // NVRTC has no headers
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
using size_t = unsigned long;
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define HOST_AND_DEVICE __host__ __device__
#else
#include <cstdint>

#include "emulation.h"
#define DEVICE [[gnu::always_inline]] inline
#define SHARED static
#define HOST_AND_DEVICE
#endif

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

template <typename T>
struct Buffer {
    T *data;
    long long count;

    HOST_AND_DEVICE bool is_empty() const { return count == 0; }

#ifdef __CUDACC__
    __device__ __forceinline__ T &operator[](long long index) const { return data[index]; }
    template <typename Vector>
    __device__ __forceinline__ const Vector &vector(long long index) const {
        return *reinterpret_cast<const Vector *>(data + index);
    }
#else
    [[gnu::always_inline]] T &operator[](long long index) const {
        if (index < 0 || index >= count) emulation::fail_beyond("element ", index, " of a buffer of ", count);
        return data[index];
    }
    // Accesses as many elements from `index` on as fit into `Vector`, at once.
    template <typename Vector>
    [[gnu::always_inline]] const Vector &vector(long long index) const {
        if (index < 0 || index + static_cast<long long>(sizeof(Vector) / sizeof(T)) > count)
            emulation::fail_beyond("a vector at element ", index, " of a buffer of ", count);
        if (reinterpret_cast<uintptr_t>(data + index) % sizeof(Vector) != 0)
            emulation::fail_beyond("a vector is not aligned: element ", index, " in units of bytes: ", sizeof(Vector));
        return *reinterpret_cast<const Vector *>(data + index);
    }
#endif
};

#ifdef __CUDACC__
template <typename T, int N>
struct Shared {
    T values[N];
    __device__ __forceinline__ T &operator[](int index) { return values[index]; }
};

// The part of the block's memory with `count` elements from byte `offset` on.
template <typename T>
DEVICE Buffer<T> dynamic_shared(int offset, int count) {
    extern __shared__ __align__(16) unsigned char tokamak_shared[];
    return {reinterpret_cast<T *>(tokamak_shared + offset), count};
}

// Copies 16 bytes while the thread continues; they arrive at `wait_for_copies`, for this thread, and are visible to others after
// a barrier.
DEVICE void copy_16_bytes(void *shared, const void *global, bool is_there) {
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    int num_bytes = is_there ? 16 : 0;  // the others are zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(num_bytes) : "memory");
}
DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// What another block wrote before a fence: not from this multiprocessor's own cache, which may have older lines.
DEVICE float load_beyond_l1(const float *from) { return __ldcg(from); }
#else
template <typename T, int N>
struct Shared {
    T values[N];
    emulation::SharedMemory registered{values, sizeof values};
    [[gnu::always_inline]] T &operator[](int index) {
        if (index < 0 || index >= N) emulation::fail_beyond("element ", index, " of shared memory for ", N);
        return values[index];
    }
};

template <typename T>
Buffer<T> dynamic_shared(int offset, int count) {
    return {static_cast<T *>(emulation::dynamic_shared(offset, count * sizeof(T))), count};
}

inline void copy_16_bytes(void *shared, const void *global, bool is_there) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || (is_there && reinterpret_cast<uintptr_t>(global) % 16))
        emulation::fail("a copy of 16 bytes is not aligned");
    emulation::Fiber &own = *emulation::machine().running;
    own.copies.push_back({shared, is_there ? global : nullptr, own.num_groups});
}
inline float load_beyond_l1(const float *from) { return *from; }

inline void close_copies() { ++emulation::machine().running->num_groups; }
template <int LEFT>
void wait_for_copies() {
    emulation::Fiber &own = *emulation::machine().running;
    size_t left = 0;
    for (emulation::Copy &copy : own.copies) {
        if (copy.group >= own.num_groups - LEFT) {
            own.copies[left++] = copy;
            continue;
        }
        if (copy.from == nullptr) std::memset(copy.to, 0, 16);
        else std::memcpy(copy.to, copy.from, 16);
    }
    own.copies.resize(left);
}

// Known by its name from the start, not from its first launch.
template <auto KERNEL, typename Operands>
struct Registered {
    static int emulate(const void *operands, dim3 grid, unsigned num_threads, size_t num_shared_bytes) {
        return emulation::launch([operands] { KERNEL(*static_cast<const Operands *>(operands)); }, grid, num_threads,
                                 num_shared_bytes);
    }
    static inline emulation::Kernel kernel{emulation::kernel_name<KERNEL>(), {emulate, sizeof(Operands)}};
};

template <auto KERNEL, typename Operands>
int launch(const Operands &operands, dim3 grid, int num_threads, int num_shared_bytes, void *stream) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;  // there is nothing to compute
    return Registered<KERNEL, Operands>::kernel.launch(&operands, grid, num_threads, num_shared_bytes, stream);
}
#endif

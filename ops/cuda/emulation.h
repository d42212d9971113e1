// Emulation of nvcc and a GPU for the kernels of this directory, with g++ on a processor.
//
// The threads of a block are fibers of one thread. They run one after another, each until it waits for the others
// (__syncthreads, a shuffle, a product of the warp): a random part of a random warp's lanes, in a random order. The seed gives the
// order, and that of the blocks, so code that depends on an unspecified order gives different bits with another seed. Every buffer
// has bounds, shared memory begins as NaN, and an asynchronous copy arrives only when it is waited for.
//
// `launch` returns 0, or 1 and leaves the kernel's error in `emulation::error()`. One launch at a time in a process.
#pragma once

#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

struct alignas(8) uint2 {
    uint32_t x, y;
};

struct alignas(8) float2 {
    float x, y;
};

#define __global__ static
#define __launch_bounds__(...)
#define __restrict__

namespace emulation {

constexpr size_t STACK_BYTES = 96 << 10;
constexpr size_t MAX_SHARED_BYTES = 227 << 10;  // per block, on the cards with the most
constexpr int MAX_THREADS = 1024, LANES = 32, MAX_WARPS = MAX_THREADS / LANES;

enum class State { AT_BARRIER, AT_WARP, DONE };

struct Copy {
    void *to;
    const void *from;
    int group;
};

struct Fiber {
    void *here[5];  // where it continues
    std::unique_ptr<char[]> stack;
    bool is_alive = false;  // its stack is in use: it waits for a block, or inside one
    State state = State::DONE;
    int num_groups = 0;        // of copies, closed so far
    std::vector<Copy> copies;  // under way
};

union Exchange {  // data that the lanes of a warp exchange
    uint32_t words[LANES];
    struct {
        float a[16][16], b[16][8];
    } numbers;  // of a product
};

struct Warp {
    uint32_t lanes = 0, ready = 0, at_warp = 0;  // a bit each: those that have not ended, that may run, that wait for the warp
    unsigned num_meetings = 0;
    Exchange exchanges[2];  // used in turn: none is written before all lanes have read it
};

// A quick generator (xorshift64*).
struct Random {
    using result_type = uint32_t;
    uint64_t state = 1;
    static constexpr result_type min() { return 0; }
    static constexpr result_type max() { return ~result_type{0}; }
    void seed(unsigned value) { state = value * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du; }
    result_type operator()() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return static_cast<result_type>(state * 0x2545f4914f6cdd1du >> 32);
    }
};

struct Machine {
    std::vector<Fiber> fibers{MAX_THREADS};
    std::vector<Warp> warps{MAX_WARPS};
    std::vector<std::pair<void *, size_t>> shared_variables;
    alignas(128) unsigned char shared[MAX_SHARED_BYTES];
    size_t num_shared_bytes = 0;
    Random random;
    std::function<void()> kernel;
    void *scheduler[5];
    Fiber *running = nullptr;
    std::string error;
    dim3 grid, block, block_index;
    unsigned thread = 0, num_threads = 0, num_at_barrier = 0, num_done = 0;
    uint32_t ready_warps = 0;
};

struct ThreadIndex {
    unsigned x;
};

inline Machine the_machine;
[[gnu::always_inline]] inline Machine &machine() { return the_machine; }

inline const char *error() { return machine().error.c_str(); }
inline void seed(unsigned value) { machine().random.seed(value); }

[[noreturn, gnu::noinline]] inline void jump(void **to) { __builtin_longjmp(to, 1); }

// Returns to the scheduler until it continues this fiber.
[[gnu::noinline]] inline void wait(State state) {
    Fiber &own = *machine().running;
    own.state = state;
    if (__builtin_setjmp(own.here) == 0) jump(machine().scheduler);
}

// Lets other processes run, one of which may change what a thread waits for.
inline void give_way() { sched_yield(); }

// Ends the kernel. The fiber's frames are abandoned; nothing on them needs a destructor.
[[noreturn, gnu::noinline]] inline void fail(const std::string &text) {
    Machine &m = machine();
    char place[96];
    std::snprintf(place, sizeof place, " (block %u %u %u, thread %u)", m.block_index.x, m.block_index.y, m.block_index.z,
                  m.thread);
    m.error = text + place;
    jump(m.scheduler);
}

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_beyond(const char *what, long long index, const char *of,
                                                               long long count) {
    fail(what + std::to_string(index) + of + std::to_string(count));
}

inline void fiber_main() {
    for (;;) {
        machine().kernel();
        if (!machine().running->copies.empty()) fail("a thread ended with a copy under way");
        wait(State::DONE);
    }
}

[[noreturn, gnu::noinline]] inline void begin(Fiber &fiber, unsigned thread) {
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    fiber.is_alive = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = STACK_BYTES - thread * 320 % 8192;  // stacks begin in different sets of the cache
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
    std::abort();
}

[[gnu::noinline]] inline void resume(unsigned thread) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[thread];
    m.thread = thread;
    m.running = &fiber;
    if (__builtin_setjmp(m.scheduler) != 0) return;
    if (fiber.is_alive) jump(fiber.here);
    begin(fiber, thread);
}

// Runs some of the warp's lanes that may run, each until it waits.
inline void run_some(unsigned number) {
    Machine &m = machine();
    Warp &warp = m.warps[number];
    uint32_t bits = m.random(), some = bits % 4 == 0 ? warp.ready & m.random() : warp.ready;
    unsigned first = bits >> 8, stride = bits >> 16 | 1;
    warp.ready &= ~some;
    for (unsigned i = 0; i < LANES; ++i) {
        unsigned lane = (first + i * stride) % LANES;
        if ((some >> lane & 1) == 0) continue;
        resume(number * LANES + lane);
        if (!m.error.empty()) return;
        State state = m.running->state;
        if (state == State::AT_WARP) warp.at_warp |= 1u << lane;
        else if (state == State::AT_BARRIER) ++m.num_at_barrier;
        else warp.lanes &= ~(1u << lane), ++m.num_done;
    }
    if (warp.at_warp != 0 && warp.at_warp == warp.lanes) {
        warp.ready = warp.at_warp, warp.at_warp = 0;
        ++warp.num_meetings;
    }
    if (warp.ready == 0) m.ready_warps &= ~(1u << number);
}

// All lanes may run, if the block has any left.
inline void release_block() {
    Machine &m = machine();
    for (unsigned i = 0; i < MAX_WARPS; ++i)
        if ((m.warps[i].ready = m.warps[i].lanes) != 0) m.ready_warps |= 1u << i;
    m.num_at_barrier = 0;
}

inline void run_block() {
    Machine &m = machine();
    for (auto [memory, size] : m.shared_variables) std::memset(memory, 0xff, size);
    std::memset(m.shared, 0xff, m.num_shared_bytes);
    for (unsigned i = 0; i < MAX_WARPS; ++i) {
        int num_lanes = std::clamp(static_cast<int>(m.num_threads) - static_cast<int>(i) * LANES, 0, LANES);
        m.warps[i].lanes = static_cast<uint32_t>((uint64_t{1} << num_lanes) - 1), m.warps[i].at_warp = 0;
    }
    for (unsigned i = 0; i < m.num_threads; ++i) m.fibers[i].num_groups = 0;
    m.num_done = m.ready_warps = 0;
    for (release_block(); m.num_done < m.num_threads;) {
        if (m.ready_warps == 0) {
            if (m.num_at_barrier + m.num_done < m.num_threads) {
                m.error = "threads of a block wait for each other at different places";
                return;
            }
            release_block();
        }
        uint32_t warps = m.ready_warps;
        for (unsigned i = m.random() % __builtin_popcount(warps); i > 0; --i) warps &= warps - 1;
        run_some(__builtin_ctz(warps));
        if (!m.error.empty()) return;
    }
}

inline int launch(std::function<void()> kernel, dim3 grid, unsigned num_threads, size_t num_shared_bytes) {
    Machine &m = machine();
    m.error.clear();
    if (num_threads > MAX_THREADS || num_shared_bytes > MAX_SHARED_BYTES) {
        m.error = "a block of " + std::to_string(num_threads) + " threads with " + std::to_string(num_shared_bytes) +
                  " bytes of shared memory; no card has as many";
        return 1;
    }
    m.kernel = std::move(kernel);
    m.grid = grid;
    m.block = dim3(num_threads);
    m.num_threads = num_threads;
    m.num_shared_bytes = num_shared_bytes;
    std::vector<unsigned> order(size_t{grid.x} * grid.y * grid.z);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), m.random);
    for (unsigned i : order) {
        m.block_index = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        run_block();
        if (!m.error.empty()) {
            for (Fiber &fiber : m.fibers) {  // some are inside the kernel
                fiber.is_alive = false;
                fiber.copies.clear();
            }
            return 1;
        }
    }
    return 0;
}

// ------------------------------------------------------------- kernels by name, for cards that only have a driver

// The part of CUDA's driver that launches need. `resolve` (Python: `ops/cuda/compiler.py`) finds a compiled kernel, which may
// use that many bytes of dynamic shared memory; `launch` is cuLaunchKernel. Without it kernels are emulated.
struct Driver {
    int (*resolve)(const char *name, int num_shared_bytes, void **function) = nullptr;
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned num_shared_bytes, void *stream, void **operands, void **more) = nullptr;
};

inline Driver &driver() {
    static Driver the_one;
    return the_one;
}

struct Emulation {
    int (*run)(const void *operands, dim3 grid, unsigned num_threads, size_t num_shared_bytes);
    int num_operand_bytes;
};

inline std::map<std::string, Emulation> &kernels() {
    static std::map<std::string, Emulation> all;
    return all;
}

// The name in source code, "attend<float, 64>", by which NVRTC knows a kernel.
template <auto KERNEL>
std::string kernel_name() {
    std::string text = __PRETTY_FUNCTION__;  // GCC: "... [with auto KERNEL = {anonymous}::attend<float, 64>; ...]"
    text = text.substr(text.find("KERNEL = ") + 9);
    text = text.substr(0, text.find_first_of(";]"));
    for (const std::string scope : {"{anonymous}::", "(anonymous namespace)::", "&"})
        for (size_t at; (at = text.find(scope)) != std::string::npos;) text.erase(at, scope.size());
    return text;
}

class Kernel {
public:
    Kernel(std::string name, Emulation emulation) : name_(std::move(name)), emulation_(emulation) {
        kernels()[name_] = emulation;
    }

    int launch(const void *operands, dim3 grid, unsigned num_threads, int num_shared_bytes, void *stream) {
        if (driver().launch == nullptr) return emulation_.run(operands, grid, num_threads, num_shared_bytes);
        if (resolve_ != driver().resolve || num_shared_bytes > num_shared_bytes_) {
            if (int status = driver().resolve(name_.c_str(), num_shared_bytes, &function_)) return status;
            resolve_ = driver().resolve;
            num_shared_bytes_ = num_shared_bytes;
        }
        void *all[] = {const_cast<void *>(operands)};
        return driver().launch(function_, grid.x, grid.y, grid.z, num_threads, 1, 1, num_shared_bytes, stream, all, nullptr);
    }

private:
    std::string name_;
    Emulation emulation_;
    decltype(Driver::resolve) resolve_ = nullptr;  // which found the function
    void *function_ = nullptr;
    int num_shared_bytes_ = 0;
};

inline void *dynamic_shared(size_t offset, size_t size) {
    if (offset + size > machine().num_shared_bytes)
        fail("bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) + " of " +
             std::to_string(machine().num_shared_bytes) + " of shared memory");
    return machine().shared + offset;
}

// A static variable of a kernel represents memory of each block: it is reset when a block begins.
struct SharedMemory {
    SharedMemory(void *memory, size_t size) {
        machine().shared_variables.emplace_back(memory, size);
        std::memset(memory, 0xff, size);
    }
};

// The memory for the next exchange, whatever it is when the others have arrived.
inline Exchange &exchange() {
    Warp &warp = machine().warps[machine().thread / LANES];
    return warp.exchanges[warp.num_meetings % 2];
}
[[gnu::always_inline]] inline ThreadIndex thread_index() { return {machine().thread}; }
[[gnu::always_inline]] inline unsigned lane() { return machine().thread % LANES; }

}  // namespace emulation

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::machine().block_index)
#define blockDim (emulation::machine().block)
#define gridDim (emulation::machine().grid)

inline void __syncthreads() { emulation::wait(emulation::State::AT_BARRIER); }
inline void __syncwarp() { emulation::wait(emulation::State::AT_WARP); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    static_assert(sizeof(T) == 4);
    emulation::Exchange &all = emulation::exchange();
    std::memcpy(&all.words[emulation::lane()], &value, 4);
    __syncwarp();
    std::memcpy(&value, &all.words[emulation::lane() ^ mask], 4);
    return value;
}

inline void __threadfence() {}

inline int atomicAdd(int *place, int value) {
    int before = *place;
    *place += value;
    return before;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
using std::max;
using std::min;

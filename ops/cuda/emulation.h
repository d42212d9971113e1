// Emulation of nvcc and a GPU for the kernels of this directory, with g++ on a processor.
//
// The threads of a block are fibers of one thread. They run one after another, each until it waits for the others
// (__syncthreads, a shuffle, a product of the warp), in a random order given by the seed, as do the blocks. So code that
// depends on an unspecified order gives different bits with another seed. Every buffer has bounds, shared memory begins as NaN,
// and an asynchronous copy arrives only when it is waited for.
//
// `launch` returns 0, or 1 and leaves the kernel's error in `emulation::error()`. One launch at a time in a process.
#pragma once

#include <sched.h>
#include <setjmp.h>
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
constexpr int MAX_THREADS = 1024, LANES = 32;

enum class State { READY, AT_BARRIER, AT_WARP, DONE };

struct Copy {
    void *to;
    const void *from;
    int group;
};

struct Fiber {
    jmp_buf here;
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool is_alive = false;  // its stack is in use: it waits for a block, or inside one
    State state = State::DONE;
    std::vector<Copy> copies;  // under way
    int num_groups = 0;        // of copies, closed so far
};

struct Exchange {  // data that the lanes of a warp exchange
    uint32_t words[LANES][8];
};

struct Machine {
    std::vector<Fiber> fibers{MAX_THREADS};
    std::vector<Exchange> warps{MAX_THREADS / LANES};
    std::vector<std::pair<void *, size_t>> shared_variables;
    alignas(128) unsigned char shared[MAX_SHARED_BYTES];
    size_t num_shared_bytes = 0;
    std::mt19937 random{0};
    std::function<void()> kernel;
    jmp_buf scheduler;
    Fiber *running = nullptr;
    std::string error;
    dim3 grid, block, block_index;
    unsigned thread = 0, num_threads = 0;
};

inline Machine &machine() {
    static Machine the_one;
    return the_one;
}

inline const char *error() { return machine().error.c_str(); }
inline void seed(unsigned value) { machine().random.seed(value); }

// Returns to the scheduler until it continues this fiber.
[[gnu::noinline]] inline void wait(State state) {
    Fiber &own = *machine().running;
    own.state = state;
    if (_setjmp(own.here) == 0) _longjmp(machine().scheduler, 1);
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
    m.running->is_alive = false;
    m.running->copies.clear();
    _longjmp(m.scheduler, 1);
}

inline void fiber_main() {
    for (;;) {
        machine().kernel();
        if (!machine().running->copies.empty()) fail("a thread ended with a copy under way");
        wait(State::DONE);
    }
}

[[gnu::noinline]] inline void resume(unsigned thread) {
    Machine &m = machine();
    Fiber &fiber = m.fibers[thread];
    m.thread = thread;
    m.running = &fiber;
    if (_setjmp(m.scheduler) != 0) return;
    if (fiber.is_alive) _longjmp(fiber.here, 1);
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.is_alive = true;
    makecontext(&fiber.context, fiber_main, 0);
    setcontext(&fiber.context);
}

// Whether all of [begin, end) are in `state` or have ended, and at least one waits.
inline bool have_met(unsigned begin, unsigned end, State state) {
    bool is_any = false;
    for (unsigned i = begin; i < end; ++i) {
        State of_thread = machine().fibers[i].state;
        if (of_thread != state && of_thread != State::DONE) return false;
        is_any |= of_thread == state;
    }
    return is_any;
}

inline bool release(unsigned begin, unsigned end, State state) {
    if (!have_met(begin, end, state)) return false;
    for (unsigned i = begin; i < end; ++i)
        if (machine().fibers[i].state == state) machine().fibers[i].state = State::READY;
    return true;
}

inline void run_block() {
    Machine &m = machine();
    for (auto [memory, size] : m.shared_variables) std::memset(memory, 0xff, size);
    std::memset(m.shared, 0xff, m.num_shared_bytes);
    std::vector<unsigned> order(m.num_threads);
    for (unsigned i = 0; i < m.num_threads; ++i) {
        order[i] = i;
        m.fibers[i].state = State::READY;
        m.fibers[i].num_groups = 0;
    }
    for (bool is_done = false; !is_done;) {
        std::shuffle(order.begin(), order.end(), m.random);
        bool has_moved = false;
        for (unsigned thread : order)
            if (m.fibers[thread].state == State::READY) {
                resume(thread);
                has_moved = true;
                if (!m.error.empty()) return;
            }
        for (unsigned first = 0; first < m.num_threads; first += LANES)
            has_moved |= release(first, std::min(first + LANES, m.num_threads), State::AT_WARP);
        has_moved |= release(0, m.num_threads, State::AT_BARRIER);
        is_done = std::all_of(order.begin(), order.end(), [&](unsigned i) { return m.fibers[i].state == State::DONE; });
        if (!has_moved && !is_done) {
            m.error = "threads of a block wait for each other at different places";
            for (Fiber &fiber : m.fibers) fiber.is_alive = false;
            return;
        }
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
            for (Fiber &fiber : m.fibers) fiber.is_alive = false;  // some are inside the kernel
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

inline Exchange &exchange() { return machine().warps[machine().thread / LANES]; }
inline unsigned lane() { return machine().thread % LANES; }

}  // namespace emulation

#define threadIdx (dim3(emulation::machine().thread, 0, 0))
#define blockIdx (emulation::machine().block_index)
#define blockDim (emulation::machine().block)
#define gridDim (emulation::machine().grid)

inline void __syncthreads() { emulation::wait(emulation::State::AT_BARRIER); }
inline void __syncwarp() { emulation::wait(emulation::State::AT_WARP); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    static_assert(sizeof(T) == 4);
    emulation::Exchange &all = emulation::exchange();
    std::memcpy(&all.words[emulation::lane()][0], &value, 4);
    __syncwarp();
    std::memcpy(&value, &all.words[emulation::lane() ^ mask][0], 4);
    __syncwarp();
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

// NVIDIA's driver without a card: what `shm/cuda_driver.py` calls. Memory that processes share is a file in memory; addresses are
// the host's; a card has 1 GiB. Kernels are those of an emulated library (`ops/cuda/emulation.h`): a module is its path and the
// kernel's name.
//
// Work of a stream is done when someone waits for it, at the latest: whoever reads a result too early, or changes the source of a
// copy too soon, gets wrong numbers. A call that a capture does not allow fails, and ends it. Calls that LIBCUDA_FAILS names
// (separated by commas) are not supported; "cuLaunchKernel:7": the seventh of them loses the context, as a kernel does that fails;
// "cuMemAlloc_v2>7": only seven find room.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using Handle = unsigned long long;  // a descriptor

static constexpr size_t GRANULARITY = size_t{2} << 20, ROOM = size_t{1} << 30, LARGE = size_t{1} << 20;
static constexpr int INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NO_CONTEXT = 201, NOT_READY = 600, LAUNCH_FAILED = 719;
static constexpr int NOT_SUPPORTED = 801, CAPTURES = 900;

static int failed = 0;  // of the context: after some errors every later call fails

// The status of a call by LIBCUDA_FAILS: 0 if it may go on.
static int refusal(const std::string &name) {
    static std::map<std::string, int> calls;
    static std::mutex counts;
    const char *names = getenv("LIBCUDA_FAILS");
    if (names == nullptr) return 0;
    const std::string all = "," + std::string(names) + ",";
    if (all.find("," + name + ",") != std::string::npos) return NOT_SUPPORTED;
    const size_t loses = all.find("," + name + ":"), fills = all.find("," + name + ">"), at = std::min(loses, fills);
    if (at == std::string::npos) return 0;
    std::lock_guard guard(counts);
    const int count = ++calls[name], limit = atoi(all.c_str() + at + name.size() + 2);
    if (at == fills) return count > limit ? OUT_OF_MEMORY : 0;
    if (count == limit) failed = LAUNCH_FAILED;
    return failed;
}
#define REFUSE \
    if (int status = refusal(__func__)) return status;

struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    Location location;
};
struct Access {
    Location location;
    int flags;
};

extern "C" {

int cuInit(unsigned) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible != nullptr && visible[0] == 0 ? NO_DEVICE : 0;
}
int cuDeviceGetCount(int *count) {
    REFUSE
    *count = 2;
    return 0;
}
int cuDeviceGet(int *device, int ordinal) {
    REFUSE
    *device = ordinal;
    return ordinal < 2 ? 0 : NO_DEVICE;
}
int cuDeviceGetName(char *name, int size, int) {
    REFUSE
    snprintf(name, size, "no card at all");
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int) {
    REFUSE
    static char one;
    *context = &one;
    return 0;
}
static thread_local bool has_context = false;  // a context is current in one thread, not in all
int cuCtxSetCurrent(void *context) {
    REFUSE
    has_context = context != nullptr;
    return context ? 0 : INVALID;
}

int cuGetErrorName(int code, const char **text) {
    *text = code == OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NO_DEVICE     ? "CUDA_ERROR_NO_DEVICE"
            : code == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
            : code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                    : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

int cuMemGetAllocationGranularity(size_t *size, const Properties *properties, int) {
    REFUSE
    *size = GRANULARITY;
    return properties->type == 1 && properties->location.type == 1 ? 0 : INVALID;
}

int cuMemCreate(Handle *handle, size_t size, const Properties *properties, uint64_t) {
    REFUSE
    if (size % GRANULARITY || properties->handle_types != 1) return INVALID;
    if (size > ROOM) return OUT_OF_MEMORY;
    const int file = memfd_create("card", MFD_CLOEXEC);
    *handle = file;
    return file >= 0 && ftruncate(file, size) == 0 ? 0 : OUT_OF_MEMORY;
}

int cuMemExportToShareableHandle(int *descriptor, Handle handle, int, uint64_t) {
    REFUSE
    *descriptor = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
    return *descriptor < 0 ? INVALID : 0;
}

int cuMemImportFromShareableHandle(Handle *handle, void *descriptor, int) {
    REFUSE
    const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
    *handle = file;
    return file < 0 ? INVALID : 0;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t, uint64_t, uint64_t) {
    REFUSE
    void *found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = reinterpret_cast<uint64_t>(found);
    return found == MAP_FAILED ? OUT_OF_MEMORY : 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, Handle handle, uint64_t) {
    REFUSE
    void *at = reinterpret_cast<void *>(address);
    return mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), offset) == at ? 0 : INVALID;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t) {
    REFUSE
    if (access->flags != 3) return INVALID;
    return mprotect(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE) == 0 ? 0 : INVALID;
}

int cuMemRelease(Handle handle) {
    REFUSE
    return close(static_cast<int>(handle)) == 0 ? 0 : INVALID;
}

int cuMemUnmap(uint64_t address, size_t size) {
    void *at = reinterpret_cast<void *>(address);
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at ? 0 : INVALID;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    return munmap(reinterpret_cast<void *>(address), size) == 0 ? 0 : INVALID;
}

int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t size) {
    REFUSE
    memset(reinterpret_cast<void *>(address), value, size);
    return 0;
}
}

// ------------------------------------------------------------------------------------------------------ streams and kernels

namespace {

using Work = std::function<int()>;

struct Graph {
    std::vector<Work> works;
};

struct Stream {
    std::deque<Work> works;
    Graph *capture = nullptr;
    bool is_broken = false;  // the capture
};

struct File {
    int file;
    size_t size;
};

struct Lent {  // CUipcMemHandle
    int process, file;
    size_t size;
    char unused[48];
};

struct Event {
    timespec time{};
    Stream *stream = nullptr;  // with work before the event
    bool is_done = true;
};

struct Kernel {
    std::string name;
    int num_bytes;  // of operands
    int (*emulate)(const char *, const void *, unsigned, unsigned, unsigned, unsigned, unsigned);
};

std::map<uint64_t, File> files;  // by address
std::recursive_mutex turns;      // one work at a time
std::mutex queues;               // of the streams
Stream default_stream;
std::vector<Stream *> streams{&default_stream};

Stream &stream_of(void *stream) { return stream ? *static_cast<Stream *>(stream) : default_stream; }

int enqueue(void *stream, Work work) {
    std::lock_guard guard(queues);
    Stream &own = stream_of(stream);
    if (own.capture) own.capture->works.push_back(std::move(work));
    else own.works.push_back(std::move(work));
    return failed;
}

// Runs the first work of the stream, if there is any.
void advance(Stream &stream) {
    std::lock_guard turn(turns);
    Work work;
    {
        std::lock_guard guard(queues);
        if (stream.works.empty()) return;
        work = std::move(stream.works.front());
        stream.works.pop_front();
    }
    if (failed == 0) failed = work();
}

bool has_work(const Stream &stream) {
    std::lock_guard guard(queues);
    return !stream.works.empty();
}

int finish(Stream &stream) {
    if (stream.capture) {
        stream.is_broken = true;
        return CAPTURES;
    }
    while (has_work(stream)) advance(stream);
    std::lock_guard turn(turns);  // the last work may still run
    return failed;
}

int finish_all() {
    for (Stream *stream : streams)
        if (int status = finish(*stream)) return status;
    return failed;
}

}  // namespace

extern "C" {

int cuDriverGetVersion(int *version) {
    REFUSE
    *version = 13000;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
    REFUSE
    const char *capability = getenv("LIBCUDA_CAPABILITY");  // "9.0"; that of an emulated card is 0.0
    *value = attribute == 16 ? 2 : capability == nullptr ? 0 : capability[attribute == 75 ? 0 : 2] - '0';
    return 0;
}
int cuDeviceTotalMem_v2(size_t *size, int) {
    REFUSE
    *size = ROOM;
    return 0;
}
int cuCtxSynchronize() {
    REFUSE
    return finish_all();
}

// Memory of this process, which it can lend to others: small pieces of the heap, large ones in files. LIBCUDA_WRONG: what is
// fetched is not what was there.
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    if (size > ROOM) return OUT_OF_MEMORY;
    if (int status = finish_all()) return status;  // it may wait, and does in a capture
    void *memory = nullptr;
    if (size >= LARGE) {
        const int file = memfd_create("card", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, size) != 0) return OUT_OF_MEMORY;
        memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory == MAP_FAILED) return OUT_OF_MEMORY;
        files[reinterpret_cast<uint64_t>(memory)] = {file, size};
    } else {
        memory = aligned_alloc(256, (size + 255) / 256 * 256);
        memset(memory, 0xff, size);  // NaN
    }
    *address = reinterpret_cast<uint64_t>(memory);
    return 0;
}
int cuMemFree_v2(uint64_t address) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    if (int status = finish_all()) return status;
    auto found = files.find(address);
    if (found == files.end()) {
        free(reinterpret_cast<void *>(address));
        return 0;
    }
    munmap(reinterpret_cast<void *>(address), found->second.size);
    close(found->second.file);
    files.erase(found);
    return 0;
}

int cuIpcCloseMemHandle(uint64_t) {
    REFUSE
    return finish_all();
}
int cuIpcGetMemHandle(Lent *handle, uint64_t address) {
    REFUSE
    auto found = files.find(address);
    if (found == files.end()) return INVALID;
    *handle = {getpid(), found->second.file, found->second.size, {}};
    return 0;
}
// From now on cards wait for each other, so work goes on though no one here waits for it.
int cuIpcOpenMemHandle_v2(uint64_t *address, Lent handle, unsigned) {
    REFUSE
    static std::thread works([] {
        for (;; usleep(5000))
            for (size_t i = 0; i < streams.size(); ++i)
                while (!streams[i]->capture && has_work(*streams[i])) advance(*streams[i]);
    });
    static const bool is_detached = (works.detach(), true);
    if (!is_detached) return INVALID;
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID;
    void *memory = mmap(nullptr, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    *address = reinterpret_cast<uint64_t>(memory);
    return memory == MAP_FAILED ? INVALID : 0;
}

// Pages of the host's that are registered.
static size_t num_registered_bytes = 0;
size_t libcuda_registered_bytes() { return num_registered_bytes; }
int cuMemHostRegister_v2(void *address, size_t size, unsigned) {
    REFUSE
    const size_t page = sysconf(_SC_PAGESIZE);
    if (reinterpret_cast<size_t>(address) % page || size % page || size == 0) return INVALID;
    num_registered_bytes += size;
    return failed;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    REFUSE
    if (int status = finish_all()) return status;
    memcpy(reinterpret_cast<void *>(to), from, size);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    REFUSE
    if (int status = finish_all()) return status;
    memcpy(to, reinterpret_cast<void *>(from), size);
    if (getenv("LIBCUDA_WRONG") && size >= 4) static_cast<unsigned char *>(to)[size - 1] ^= 0x40;
    return 0;
}
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t size, void *stream) {
    REFUSE
    return enqueue(stream, [=] {
        memset(reinterpret_cast<void *>(address), value, size);
        return 0;
    });
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    return enqueue(stream, [=] {
        memcpy(reinterpret_cast<void *>(to), from, size);
        return 0;
    });
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    return enqueue(stream, [=] {
        memcpy(to, reinterpret_cast<void *>(from), size);
        if (getenv("LIBCUDA_WRONG") && size >= 4) static_cast<unsigned char *>(to)[size - 1] ^= 0x40;
        return 0;
    });
}
int cuMemHostGetDevicePointer_v2(uint64_t *to, void *address, unsigned) {
    REFUSE
    *to = reinterpret_cast<uint64_t>(address);
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    REFUSE
    return enqueue(stream, [=] {
        memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size);
        return 0;
    });
}

int cuStreamCreate(void **stream, unsigned) {
    REFUSE
    streams.push_back(new Stream);
    *stream = streams.back();
    return failed;
}
int cuStreamSynchronize(void *stream) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    return finish(stream_of(stream));
}

int cuEventCreate(void **event, unsigned) {
    REFUSE
    *event = new Event;
    return failed;
}
int cuEventRecord(void *event, void *stream) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    Event &own = *static_cast<Event *>(event);
    own.is_done = false;
    own.stream = &stream_of(stream);
    return enqueue(stream, [event] {
        Event &own = *static_cast<Event *>(event);
        own.is_done = true;
        return clock_gettime(CLOCK_MONOTONIC, &own.time);
    });
}
int cuEventSynchronize(void *event) {
    REFUSE
    Event &own = *static_cast<Event *>(event);
    while (!own.is_done && has_work(*own.stream)) advance(*own.stream);
    std::lock_guard turn(turns);
    return failed;
}
int cuEventQuery(void *event) {
    REFUSE
    if (failed) return failed;
    return static_cast<Event *>(event)->is_done ? 0 : NOT_READY;
}
int cuEventElapsedTime(float *milliseconds, const void *first, const void *last) {
    REFUSE
    const timespec &a = static_cast<const Event *>(first)->time, &b = static_cast<const Event *>(last)->time;
    *milliseconds = static_cast<float>((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
    return 0;
}

int cuModuleLoadData(void **module, const char *image) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    const std::string text = image;
    const size_t end = text.find('\n');
    if (end == std::string::npos) return INVALID;
    void *library = dlopen(text.substr(0, end).c_str(), RTLD_NOW);
    if (library == nullptr) return INVALID;
    auto *found = new Kernel{text.substr(end + 1), 0, nullptr};
    found->emulate = reinterpret_cast<decltype(Kernel::emulate)>(dlsym(library, "tokamak_emulate"));
    auto size_of = reinterpret_cast<int (*)(const char *)>(dlsym(library, "tokamak_operand_bytes"));
    found->num_bytes = size_of(found->name.c_str());
    *module = found;
    return found->num_bytes > 0 ? 0 : INVALID;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    REFUSE
    *function = module;
    return static_cast<Kernel *>(module)->name == name ? 0 : INVALID;
}
int cuFuncSetAttribute(void *, int, int) {
    REFUSE
    return 0;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned num_threads, unsigned, unsigned,
                   unsigned num_shared_bytes, void *stream, void **operands, void **) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    const Kernel *kernel = static_cast<Kernel *>(function);
    if (x == 0 || y == 0 || z == 0) return INVALID;
    const std::string copy(static_cast<const char *>(operands[0]), kernel->num_bytes);
    return enqueue(stream, [=] {
        if (kernel->emulate(kernel->name.c_str(), copy.data(), x, y, z, num_threads, num_shared_bytes) == 0) return 0;
        fprintf(stderr, "libcuda: %s failed\n", kernel->name.c_str());
        return LAUNCH_FAILED;
    });
}

int cuStreamBeginCapture_v2(void *stream, int) {
    REFUSE
    Stream &own = stream_of(stream);
    if (own.capture || stream == nullptr) return INVALID;
    own.capture = new Graph;
    own.is_broken = false;
    return 0;
}
int cuStreamEndCapture(void *stream, void **graph) {
    REFUSE
    Stream &own = stream_of(stream);
    *graph = own.is_broken ? nullptr : own.capture;
    own.capture = nullptr;
    return own.is_broken ? CAPTURES + 1 : 0;
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, uint64_t) {
    REFUSE
    *executable = new Graph(*static_cast<Graph *>(graph));
    return 0;
}
int cuGraphDestroy(void *graph) {
    REFUSE
    delete static_cast<Graph *>(graph);
    return 0;
}
int cuGraphExecDestroy(void *executable) {
    REFUSE
    delete static_cast<Graph *>(executable);
    return failed;
}
int cuGraphLaunch(void *executable, void *stream) {
    REFUSE
    if (!has_context) return NO_CONTEXT;
    for (const Work &work : static_cast<Graph *>(executable)->works) enqueue(stream, work);
    return failed;
}
}

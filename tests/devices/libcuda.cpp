// The driver's calls for virtual memory over files in memory, and for memory, copies and events: what `shm/device_memory.py` and
// `tools/device/card.py` ask of a card, without one. Its addresses are the host's. A card has 1 GiB.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

using Handle = unsigned long long;  // a descriptor

static constexpr size_t GRANULARITY = size_t{2} << 20, ROOM = size_t{1} << 30;
static constexpr int INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100;

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

int cuInit(unsigned) { return 0; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < 2 ? 0 : NO_DEVICE;
}
int cuDeviceGetName(char *name, int size, int) {
    snprintf(name, size, "no card at all");
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int) {
    static char one;
    *context = &one;
    return 0;
}
int cuCtxSetCurrent(void *context) { return context ? 0 : INVALID; }
int cuCtxSynchronize() { return 0; }

int cuGetErrorName(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NO_DEVICE   ? "CUDA_ERROR_NO_DEVICE"
                                  : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

int cuMemGetAllocationGranularity(size_t *size, const Properties *properties, int) {
    *size = GRANULARITY;
    return properties->type == 1 && properties->location.type == 1 ? 0 : INVALID;
}

int cuMemCreate(Handle *handle, size_t size, const Properties *properties, uint64_t) {
    if (size % GRANULARITY || properties->handle_types != 1) return INVALID;
    if (size > ROOM) return OUT_OF_MEMORY;
    const int file = memfd_create("card", MFD_CLOEXEC);
    *handle = file;
    return file >= 0 && ftruncate(file, size) == 0 ? 0 : OUT_OF_MEMORY;
}

int cuMemExportToShareableHandle(int *descriptor, Handle handle, int, uint64_t) {
    *descriptor = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
    return *descriptor < 0 ? INVALID : 0;
}

int cuMemImportFromShareableHandle(Handle *handle, void *descriptor, int) {
    const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
    *handle = file;
    return file < 0 ? INVALID : 0;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t, uint64_t, uint64_t) {
    void *found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = reinterpret_cast<uint64_t>(found);
    return found == MAP_FAILED ? OUT_OF_MEMORY : 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, Handle handle, uint64_t) {
    void *at = reinterpret_cast<void *>(address);
    return mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), offset) == at ? 0 : INVALID;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t) {
    if (access->flags != 3) return INVALID;
    return mprotect(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE) == 0 ? 0 : INVALID;
}

int cuMemRelease(Handle handle) { return close(static_cast<int>(handle)) == 0 ? 0 : INVALID; }

int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t size) {
    memset(reinterpret_cast<void *>(address), value, size);
    return 0;
}

// Memory that a process has for itself. LIBCUDA_WRONG: what is fetched is not what was there.
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    if (size > ROOM) return OUT_OF_MEMORY;
    *address = reinterpret_cast<uint64_t>(aligned_alloc(256, (size + 255) / 256 * 256));
    return 0;
}
int cuMemFree_v2(uint64_t address) {
    free(reinterpret_cast<void *>(address));
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    memcpy(reinterpret_cast<void *>(to), from, size);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    memcpy(to, reinterpret_cast<void *>(from), size);
    if (getenv("LIBCUDA_WRONG") && size >= 4) static_cast<unsigned char *>(to)[size - 1] ^= 0x40;
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *) {
    return cuMemcpyHtoD_v2(to, reinterpret_cast<void *>(from), size);
}

int cuEventCreate(void **event, unsigned) {
    *event = new timespec{};
    return 0;
}
int cuEventRecord(void *event, void *) { return clock_gettime(CLOCK_MONOTONIC, static_cast<timespec *>(event)); }
int cuEventSynchronize(void *) { return 0; }
int cuEventElapsedTime(float *milliseconds, const void *first, const void *last) {
    const auto &a = *static_cast<const timespec *>(first), &b = *static_cast<const timespec *>(last);
    *milliseconds = static_cast<float>((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
    return 0;
}
}

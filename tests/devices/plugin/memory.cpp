#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <stdexcept>

#include "board.h"

namespace tokasim {

static std::unique_ptr<Memory> memories[NUM_DEVICES];
static std::mutex making;

Memory &Memory::of(int device) {
    std::lock_guard lock(making);
    if (!memories[device]) memories[device].reset(new Memory(device));
    return *memories[device];
}

Memory::Memory(int device) : device_(device) {
    const int file = memfd_create("tokasim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, SIZE) != 0) throw std::runtime_error("tokasim: no file for its memory");
    auto map = [&](int protection, int flags, int of) {
        void *found = mmap(nullptr, SIZE, protection, flags | MAP_NORESERVE, of, 0);
        if (found == MAP_FAILED) throw std::runtime_error("tokasim: no addresses for its memory");
        return static_cast<char *>(found);
    };
    own_ = map(PROT_READ | PROT_WRITE, MAP_SHARED, file);
    guarded_ = map(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    close(file);
}

size_t Memory::limit() {
    const int64_t limit = get(Control::memory_bytes);
    return limit ? limit : SIZE;
}

void *Memory::allocate(size_t size, bool is_capturing) {
    std::lock_guard lock(mutex_);
    size = (size + ALIGNMENT) / ALIGNMENT * ALIGNMENT;  // never 0
    if (is_capturing && !was_capturing_) num_before_capture_ = num_used_;
    was_capturing_ = is_capturing;
    const int64_t devices = get(Control::capture_devices);
    const size_t in_captures = devices && !(devices >> device_ & 1) ? 0 : get(Control::capture_bytes);
    if (num_used_ + size > limit()) return nullptr;
    if (is_capturing && in_captures && num_used_ + size > num_before_capture_ + in_captures) return nullptr;
    size_t begin = 0;
    for (const auto &[offset, taken] : used_) {
        if (offset - begin >= size) break;
        begin = offset + taken;
    }
    if (begin + size > SIZE) return nullptr;
    used_[begin] = size;
    num_used_ += size;
    count(device_, Counter::allocations);
    count(device_, Counter::allocated_bytes, size);
    return guarded_ + begin;
}

void Memory::free(void *address) {
    std::lock_guard lock(mutex_);
    const size_t begin = static_cast<char *>(address) - guarded_;
    memset(own_ + begin, 0xff, used_.at(begin));
    num_used_ -= used_.at(begin);
    count(device_, Counter::freed_bytes, used_.at(begin));
    used_.erase(begin);
}

size_t Memory::num_used() {
    std::lock_guard lock(mutex_);
    return num_used_;
}

void *Memory::own(const void *address) {
    char *at = static_cast<char *>(const_cast<void *>(address));
    for (const auto &memory : memories) {
        if (memory && at >= memory->guarded_ && at < memory->guarded_ + SIZE) return memory->own_ + (at - memory->guarded_);
    }
    return at;
}

}  // namespace tokasim

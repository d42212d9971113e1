#include "comm.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <vector>

#include "clock.h"
#include "progress.h"
#include "spin.h"

namespace tokamak::cpu {
namespace {

constexpr int SEQUENCE_BITS = 40;
constexpr std::int64_t SLICE_NS = 100'000'000;  // length of a sleep, followed by the heartbeat and another check

std::uint32_t *low_half(std::atomic<std::uint64_t> &word) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    return reinterpret_cast<std::uint32_t *>(&word);
}

std::string text_of(const CommCall &call) {
    return std::string(COMM_NAMES[std::min<std::size_t>(call.kind, std::size(COMM_NAMES) - 1)]) + " " +
           std::to_string(call.sequence) + " of " + std::to_string(call.bytes) + " bytes in step " + std::to_string(call.step) +
           (call.versions == 0 ? "" : " with versions " + std::to_string(call.versions));
}

}  // namespace

Comm::Comm(std::uintptr_t arena, int rank, int first, int count, std::int64_t spin_ns, std::int64_t timeout_ns, int lines)
    : arena_(arena), rank_(rank), first_(first), count_(count), lines_(lines), spin_ns_(spin_ns), timeout_ns_(timeout_ns) {
    if (first < 0 || count < 1 || first + count > MAX_RANKS || rank < first || rank >= first + count) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " is none of the " + std::to_string(count) +
                                    " ranks from " + std::to_string(first) + " on, of " + std::to_string(MAX_RANKS));
    }
}

void Comm::join(std::uint64_t epoch, std::uint64_t members) {
    if (epoch != epoch_) sequence_ = 0;  // in the same epoch, peers continue counting
    epoch_ = epoch;
    members_ = members;
}

std::uint64_t Comm::epoch_now() const { return __atomic_load_n(&header().epoch, __ATOMIC_SEQ_CST); }

void Comm::check_epoch() const {
    const std::uint64_t now = epoch_now();
    if (now != epoch_) break_up(now, rank_);
}

char *Comm::window(int place, std::uint64_t sequence) const {
    const auto number = 2 * (COMM_GROUPS * (first_ + place) + lines_) + static_cast<std::int64_t>(sequence % 2);
    return reinterpret_cast<char *>(arena_) + COMM_WINDOWS_AT + number * COMM_WINDOW;
}

void Comm::meet(CommKind kind, std::int64_t bytes) {
    arrive(kind, bytes);
    for (int peer = first_; peer < first_ + count_; ++peer) {
        if (peer == rank_ || !is_member(peer)) continue;
        await(peer);
        compare(peer);
    }
}

void Comm::arrive(CommKind kind, std::int64_t bytes) {
    ++sequence_;
    ++num_calls_;
    own_call() = {step_, sequence_, static_cast<std::uint64_t>(bytes), static_cast<std::uint32_t>(kind), versions_};
    // SYNC: publishes the call and the data written for other ranks; pairs with is_there(). Sequentially consistent, like
    // is_asleep and a sleeper's last check: either the sleeper sees this store, or it is seen asleep.
    line(rank_).arrived.store(epoch_ << SEQUENCE_BITS | sequence_);
    for (int peer = first_; peer < first_ + count_; ++peer) {
        if (peer == rank_ || line(peer).is_asleep.load() == 0) continue;
        line(peer).bell.fetch_add(1);
        syscall(SYS_futex, low_half(line(peer).bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
}

bool Comm::is_there(int peer) const {
    const std::uint64_t arrived = line(peer).arrived.load();
    return arrived >> SEQUENCE_BITS == epoch_ && arrived >= (epoch_ << SEQUENCE_BITS | sequence_);
}

void Comm::await(int peer) {
    if (is_there(peer)) return;
    const std::int64_t begin = monotonic_ns();
    if (!spin_until([&] { return is_there(peer) || epoch_now() != epoch_; }, spin_ns_)) {
        line(rank_).is_asleep.store(1);
        try {
            sleep_until_there(peer);
        } catch (...) {
            line(rank_).is_asleep.store(0);
            throw;
        }
        line(rank_).is_asleep.store(0);
    }
    waited_ns_ += monotonic_ns() - begin;
    if (!is_there(peer)) break_up(epoch_now(), peer);
}

// Returns also when the epoch has changed.
void Comm::sleep_until_there(int peer) {
    const std::int64_t deadline = monotonic_ns() + timeout_ns_;
    while (true) {
        const auto seen = static_cast<std::uint32_t>(line(rank_).bell.load());
        if (is_there(peer) || epoch_now() != epoch_) return;
        const std::int64_t left = deadline - monotonic_ns();
        if (left <= 0) give_up(peer);
        const timespec slice{0, static_cast<long>(std::min(left, SLICE_NS))};
        syscall(SYS_futex, low_half(line(rank_).bell), FUTEX_WAIT, seen, &slice, nullptr, 0);
        beat();
    }
}

void Comm::compare(int peer) const {
    const CommCall &own = own_call(), &other = line(peer).calls[sequence_ % 2];
    if (own.step == other.step && own.sequence == other.sequence && own.kind == other.kind && own.bytes == other.bytes &&
        own.versions == other.versions) {
        return;
    }
    throw std::runtime_error("comm: rank " + std::to_string(rank_) + " is at " + text_of(own) + ", rank " +
                             std::to_string(peer) + " at " + text_of(other) + ": they do not run the same step");
}

void Comm::break_up(std::uint64_t epoch, int peer) const {
    const std::uint64_t members = __atomic_load_n(&header().members, __ATOMIC_ACQUIRE);
    int gone = peer;
    for (int rank = first_ + count_ - 1; rank >= first_; --rank) {
        if ((members >> rank & 1) == 0) gone = rank;
    }
    throw RankGroupBroken("comm: the rank group of epoch " + std::to_string(epoch_) + " is broken: rank " +
                              std::to_string(gone) + ", epoch " + std::to_string(epoch),
                          gone, epoch);
}

void Comm::give_up(int peer) const {
    throw std::runtime_error("comm: rank " + std::to_string(peer) + " did not come to " + text_of(own_call()) +
                             ", where rank " + std::to_string(rank_) + " waited " + std::to_string(timeout_ns_ / 1'000'000) +
                             " ms; its log says what it does, --hang-timeout how long that may take");
}

// Data longer than `most`, at most a window, is sent in rounds: fill(own window, begin, size), then, when all ranks have
// arrived, take(begin, size). Windows alternate: while one is read the next is written, and when all ranks have reached the
// next call, no rank reads the previous one.
template <class Fill, class Take>
void Comm::in_rounds(CommKind kind, std::int64_t bytes, std::int64_t length, std::int64_t most, const Fill &fill,
                     const Take &take) {
    for (std::int64_t begin = 0; begin < length; begin += most) {
        const std::int64_t size = std::min(length - begin, most);
        fill(window(rank_ - first_, sequence_ + 1), begin, size);
        meet(kind, bytes);
        take(begin, size);
    }
}

void Comm::all_gather(void *y, const void *x, std::int64_t bytes) {
    const char *from = static_cast<const char *>(x);
    char *to = static_cast<char *>(y);
    in_rounds(
        CommKind::ALL_GATHER, bytes, bytes, COMM_WINDOW,
        [&](char *own, std::int64_t begin, std::int64_t size) { std::memcpy(own, from + begin, size); },
        [&](std::int64_t begin, std::int64_t size) {
            for (int place = 0; place < count_; ++place) {
                std::memcpy(to + place * bytes + begin, window(place, sequence_), size);
            }
        });
}

// y = the sum of the numbers from `at` on in all windows, in the order of the ranks. `own`: this rank's numbers, which may be
// y.
void Comm::add_windows(float *y, const float *own, std::int64_t at, std::int64_t count) const {
    const auto values = [&](int place) {
        if (place == rank_ - first_ && place < 2) return own;  // later ones are added when y has been written
        return reinterpret_cast<const float *>(window(place, sequence_)) + at;
    };
    if (count_ == 1) {
        std::memmove(y, own, count * sizeof(float));
        return;
    }
    const float *first = values(0), *second = values(1);
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) y[i] = first[i] + second[i];
    for (int place = 2; place < count_; ++place) {
        const float *next = values(place);
        for (std::int64_t i = 0; i < count; ++i) y[i] += next[i];
    }
}

void Comm::all_reduce(float *y, const float *x, std::int64_t count) {
    constexpr std::int64_t most = COMM_WINDOW / sizeof(float);
    in_rounds(
        CommKind::ALL_REDUCE, count * sizeof(float), count, most,
        [&](char *own, std::int64_t begin, std::int64_t size) { std::memcpy(own, x + begin, size * sizeof(float)); },
        [&](std::int64_t begin, std::int64_t size) { add_windows(y + begin, x + begin, 0, size); });
}

void Comm::reduce_scatter(float *y, const float *x, std::int64_t count) {
    const std::int64_t most = COMM_WINDOW / sizeof(float) / count_;
    in_rounds(
        CommKind::REDUCE_SCATTER, count * sizeof(float), count, most,
        [&](char *own, std::int64_t begin, std::int64_t size) {
            for (int place = 0; place < count_; ++place) {
                const float *part = x + place * count + begin;
                std::memcpy(reinterpret_cast<float *>(own) + place * size, part, size * sizeof(float));
            }
        },
        [&](std::int64_t begin, std::int64_t size) {
            const int own_place = rank_ - first_;
            add_windows(y + begin, x + own_place * count + begin, own_place * size, size);
        });
}

void Comm::broadcast(void *values, std::int64_t bytes, int root) {
    const bool is_root = rank_ - first_ == root;
    char *at = static_cast<char *>(values);
    in_rounds(
        CommKind::BROADCAST, bytes, bytes, COMM_WINDOW,
        [&](char *own, std::int64_t begin, std::int64_t size) {
            if (is_root) std::memcpy(own, at + begin, size);
        },
        [&](std::int64_t begin, std::int64_t size) {
            if (!is_root) std::memcpy(at + begin, window(root, sequence_), size);
        });
}

// Each rank's parts form a stream, and a window holds a piece of it; each rank copies the data for it.
void Comm::all_to_all(void *y, std::int64_t most, std::int64_t *received, const void *x, const std::int64_t *sent) {
    const int own_place = rank_ - first_;
    std::vector<std::int64_t> counts(count_ * count_), begins(count_), totals(count_), places(count_);
    all_gather(counts.data(), sent, count_ * static_cast<std::int64_t>(sizeof(std::int64_t)));
    std::int64_t needed = 0, longest = 0;
    for (int place = 0; place < count_; ++place) {
        const std::int64_t *of_peer = counts.data() + place * count_;
        for (int to = 0; to < count_; ++to) {
            if (to < own_place) begins[place] += of_peer[to];
            totals[place] += of_peer[to];
        }
        received[place] = of_peer[own_place];
        places[place] = needed;
        needed += received[place];
        longest = std::max(longest, totals[place]);
    }
    const bool has_room = needed <= most;
    const char *from = static_cast<const char *>(x);
    char *to = static_cast<char *>(y);
    in_rounds(
        CommKind::ALL_TO_ALL, longest, longest, COMM_WINDOW,
        [&](char *own, std::int64_t begin, std::int64_t size) {
            const std::int64_t left = std::min(size, totals[own_place] - begin);
            if (left > 0) std::memcpy(own, from + begin, left);
        },
        [&](std::int64_t begin, std::int64_t size) {
            for (int place = 0; place < count_ && has_room; ++place) {
                const std::int64_t first = std::max(begin, begins[place]);
                const std::int64_t end = std::min(begin + size, begins[place] + received[place]);
                if (first >= end) continue;
                std::memcpy(to + places[place] + first - begins[place], window(place, sequence_) + first - begin, end - first);
            }
        });
    if (has_room) return;
    throw std::invalid_argument("comm: rank " + std::to_string(rank_) + " is sent " + std::to_string(needed) +
                                " bytes and has room for " + std::to_string(most));
}

}  // namespace tokamak::cpu

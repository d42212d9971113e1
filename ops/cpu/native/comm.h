// Memory through which the ranks of a rank group exchange tensors: all of them map it, with one writer for each byte.
//
//     0          128 * rank of 64, two lines each, twice   WINDOWS_AT                          buffers_at
//     +--------+-----------------------------------+-----+-----------------------------------+-------------------------+
//     | header | line of each rank | where it sleeps | x2 | twice two windows of WINDOW a rank | gathers, and experts    |
//     +--------+-----------------------------------+-----+-----------------------------------+-------------------------+
//
// Only the supervisor writes the header: the members, and the epoch, which each death and each return increments. Before a
// rank waits, it writes its current call (step, sequence, op, bytes) to its line; waiting ranks compare it with their own.
// The place of a call on the line, like a window, is used again by the next call but one, and by then all ranks have left
// it. Sequences start again with each epoch. A rank has two lines, with two windows each, because it can be in two groups:
// with the ranks that share its matrices, and with all that share the experts. It continues with a call of the other group
// while its peers still read its data.
//
// A wait spins for a short while and then sleeps, in slices that each report progress. It ends when all ranks have arrived,
// when the epoch changes (RankGroupBroken), or after the limit.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tokamak::cpu {

constexpr int MAX_RANKS = 64;
constexpr std::int64_t COMM_LINE = 128;
constexpr std::int64_t COMM_WINDOW = 1 << 20;  // two per rank stay in the last-level cache
constexpr int COMM_GROUPS = 2;                 // groups that a rank can be in

struct CommHeader {
    std::uint64_t epoch, members, clock, num_ranks;  // members: a bit for each rank; clock: see workers/rank_group/clock.py
};

enum class CommKind : std::uint32_t {
    BARRIER,
    GATHER,
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    BROADCAST,
    ALL_TO_ALL,
    DISPATCH,
    COMBINE
};
inline constexpr const char *COMM_NAMES[] = {"barrier",   "gather",     "all_gather", "all_reduce", "reduce_scatter",
                                             "broadcast", "all_to_all", "dispatch",   "combine"};

struct CommCall {
    std::uint64_t step, sequence, bytes;
    std::uint32_t kind, versions;
};

struct alignas(COMM_LINE) CommLine {
    std::atomic<std::uint64_t> arrived;  // epoch << SEQUENCE_BITS | sequence
    std::uint64_t unused;
    CommCall calls[2];
    alignas(COMM_LINE) std::atomic<std::uint64_t> bell;  // futex word in its low half; counts rings
    std::atomic<std::uint32_t> is_asleep;
};
static_assert(sizeof(CommHeader) <= COMM_LINE && sizeof(CommLine) == 2 * COMM_LINE);

constexpr std::int64_t COMM_WINDOWS_AT = COMM_LINE + COMM_GROUPS * MAX_RANKS * static_cast<std::int64_t>(sizeof(CommLine));
static_assert(COMM_WINDOWS_AT % 64 == 0);

// The epoch is no longer that in which this rank joined: `rank` died or came back.
struct RankGroupBroken : std::runtime_error {
    RankGroupBroken(const std::string &text, int gone, std::uint64_t now) : std::runtime_error(text), rank(gone), epoch(now) {}
    int rank;
    std::uint64_t epoch;
};

// A rank's side of a group of `count` ranks from `first` on, as far as they are members in the epoch that it joined. Called by
// one thread at a time. `lines`: 0 or 1, the set of lines of the group.
class Comm {
public:
    Comm(std::uintptr_t arena, int rank, int first, int count, std::int64_t spin_ns, std::int64_t timeout_ns, int lines);

    int rank() const { return rank_; }
    int first() const { return first_; }
    int count() const { return count_; }
    std::uint64_t epoch() const { return epoch_; }
    // From now on, calls belong to this epoch and these members.
    void join(std::uint64_t epoch, std::uint64_t members = ~std::uint64_t{0});
    bool is_member(int rank) const { return (members_ >> rank & 1) != 0; }
    // `versions`: of anything that must be equal on all ranks
    void begin_step(std::uint64_t step, std::uint32_t versions = 0) { step_ = step, versions_ = versions; }
    std::int64_t waited_ns() const { return waited_ns_; }  // in all
    std::int64_t num_calls() const { return num_calls_; }
    void check_epoch() const;  // throws RankGroupBroken if the epoch has changed since `join`

    void meet(CommKind kind, std::int64_t bytes);  // returns when all ranks have arrived
    // y: `bytes` of each rank, in the order of the ranks
    void all_gather(void *y, const void *x, std::int64_t bytes);
    // y [count]: the sum of the ranks' x in the order of the ranks; y may be x
    void all_reduce(float *y, const float *x, std::int64_t count);
    // x [ranks, count], y [count]: the rank's own part of the sum
    void reduce_scatter(float *y, const float *x, std::int64_t count);
    void broadcast(void *values, std::int64_t bytes, int root);  // a rank's place in the group
    // x: `sent[i]` bytes for each rank, one after another; y: data of the others for this rank, `received[i]` bytes of each.
    // std::invalid_argument if this exceeds `most`, on that rank only; the others continue.
    void all_to_all(void *y, std::int64_t most, std::int64_t *received, const void *x, const std::int64_t *sent);

private:
    CommHeader &header() const { return *reinterpret_cast<CommHeader *>(arena_); }
    CommLine &line(int rank) const {
        return *reinterpret_cast<CommLine *>(arena_ + COMM_LINE + (lines_ * MAX_RANKS + rank) * sizeof(CommLine));
    }
    char *window(int place, std::uint64_t sequence) const;  // of the rank at this place in the group, for a call
    template <class Fill, class Take>
    void in_rounds(CommKind kind, std::int64_t bytes, std::int64_t length, std::int64_t most, const Fill &fill,
                   const Take &take);
    void add_windows(float *y, const float *own, std::int64_t at, std::int64_t count) const;
    std::uint64_t epoch_now() const;
    void arrive(CommKind kind, std::int64_t bytes);
    void await(int peer);
    void sleep_until_there(int peer);
    bool is_there(int peer) const;
    void compare(int peer) const;
    [[noreturn]] void break_up(std::uint64_t epoch, int peer) const;
    [[noreturn]] void give_up(int peer) const;
    CommCall &own_call() const { return line(rank_).calls[sequence_ % 2]; }

    std::uintptr_t arena_;
    int rank_, first_, count_, lines_;
    std::int64_t spin_ns_, timeout_ns_, waited_ns_ = 0, num_calls_ = 0;
    std::uint64_t epoch_ = 0, members_ = ~std::uint64_t{0}, sequence_ = 0, step_ = 0;
    std::uint32_t versions_ = 0;
};

}  // namespace tokamak::cpu

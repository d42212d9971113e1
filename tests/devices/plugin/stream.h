// A stream: a thread that does what it is given, in order. Between two pieces of work it may pause, so that a host that does
// not wait where it has to finds the wrong bytes. While it captures, work is kept in place of being done.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace tokasim {

enum class Kind { KERNEL, COPY, ORDER };  // the first two count as work of the device

struct Work {
    Kind kind;
    std::function<void()> run;
};

using Captured = std::vector<Work>;  // with the addresses that it was given

class Stream {
public:
    explicit Stream(int device);
    ~Stream();

    void enqueue(Kind kind, std::function<void()> run);
    bool is_idle();
    void wait();

    void begin_capture();
    std::unique_ptr<Captured> end_capture();
    bool is_capturing() const { return captured_ != nullptr; }
    std::shared_ptr<const std::atomic<int64_t>> num_launches() const { return num_launches_; }
    void launch(std::shared_ptr<const Captured> captured);

    // Of all streams of a device.
    static void wait_for_all(int device);
    static bool is_any_capturing(int device);

    const int device;

private:
    void add(Work work);
    void launched();
    void work();
    void run(const Work &work);

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> todo_;
    std::shared_ptr<std::atomic<int64_t>> num_launches_ = std::make_shared<std::atomic<int64_t>>(0);  // events outlive streams
    bool is_working_ = false, is_ending_ = false;
    std::unique_ptr<Captured> captured_;  // of the host's thread
    std::minstd_rand random_;
    std::thread thread_;
};

// Complete when the streams have come to it as often as it was recorded.
class Event {
public:
    void record(Stream &stream);
    bool is_complete();
    bool has_work_behind() const;  // which the stream was given since
    void wait();
    void wait(Stream &stream);

private:
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        int64_t num_recorded = 0, num_reached = 0;
    };
    static void wait(State &state, int64_t count);
    int64_t num_recorded();
    std::shared_ptr<const std::atomic<int64_t>> launches_;  // of the stream in which it was recorded last, and how many then
    int64_t num_before_ = 0;
    std::shared_ptr<State> state_ = std::make_shared<State>();  // streams may come to it when it is gone
};

}  // namespace tokasim

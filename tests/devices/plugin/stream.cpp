#include "stream.h"

#include <algorithm>
#include <chrono>

#include "board.h"

namespace tokasim {

static std::mutex streams_mutex;
static std::vector<Stream *> streams;

static int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
static void sleep_ns(int64_t duration) { std::this_thread::sleep_for(std::chrono::nanoseconds(duration)); }

Stream::Stream(int device_) : device(device_), random_(1 + get(Control::delay_seed)), thread_([this] { work(); }) {
    std::lock_guard lock(streams_mutex);
    streams.push_back(this);
}

Stream::~Stream() {
    {
        std::lock_guard lock(streams_mutex);
        streams.erase(std::find(streams.begin(), streams.end(), this));
    }
    {
        std::lock_guard lock(mutex_);
        is_ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Stream::enqueue(Kind kind, std::function<void()> run) {
    if (captured_) {
        captured_->push_back({kind, std::move(run)});
        return;
    }
    if (kind != Kind::ORDER) launched();
    add({kind, std::move(run)});
}

void Stream::launch(std::shared_ptr<const Captured> captured) {
    count(device, Counter::replays);
    launched();
    add({Kind::ORDER, [this, captured] {
             for (const Work &work : *captured) run(work);
         }});
}

void Stream::launched() {
    num_launches_->fetch_add(1);
    count(device, Counter::launches);
}

void Stream::add(Work work) {
    {
        std::lock_guard lock(mutex_);
        todo_.push_back(std::move(work));
    }
    changed_.notify_all();
}

bool Stream::is_idle() {
    std::lock_guard lock(mutex_);
    return todo_.empty() && !is_working_;
}

void Stream::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return todo_.empty() && !is_working_; });
}

void Stream::begin_capture() {
    captured_ = std::make_unique<Captured>();
    count(device, Counter::captures);
}

std::unique_ptr<Captured> Stream::end_capture() { return std::move(captured_); }

void Stream::wait_for_all(int device) {
    std::vector<Stream *> found;
    {
        std::lock_guard lock(streams_mutex);
        found = streams;
    }
    for (Stream *stream : found)
        if (stream->device == device) stream->wait();
}

bool Stream::is_any_capturing(int device) {
    std::lock_guard lock(streams_mutex);
    return std::any_of(streams.begin(), streams.end(),
                       [&](Stream *stream) { return stream->device == device && stream->is_capturing(); });
}

void Stream::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return is_ending_ || !todo_.empty(); });
        if (todo_.empty()) return;
        const Work next = std::move(todo_.front());
        todo_.pop_front();
        is_working_ = true;
        lock.unlock();
        run(next);
        lock.lock();
        is_working_ = false;
        if (todo_.empty()) changed_.notify_all();
    }
}

void Stream::run(const Work &work) {
    while (get(Control::is_stopped)) sleep_ns(1000000);
    if (get(Control::delay_seed) && random_() % 64 == 0) sleep_ns(random_() % 200000);
    const int64_t begin = now_ns();
    work.run();
    if (work.kind == Kind::ORDER) return;
    if (work.kind == Kind::KERNEL) {
        count(device, Counter::kernels);
        if (const int64_t left = begin + get(Control::kernel_ns) - now_ns(); left > 0) sleep_ns(left);
    }
    const int64_t end = now_ns();
    int64_t never = 0;
    cell(device, Counter::first_ns).compare_exchange_strong(never, begin);
    cell(device, Counter::last_ns) = end;
    count(device, Counter::busy_ns, end - begin);
}

void Event::record(Stream &stream) {
    std::lock_guard lock(state_->mutex);
    state_->num_recorded++;
    launches_ = stream.num_launches();
    num_before_ = *launches_;
    stream.enqueue(Kind::ORDER, [state = state_] {
        std::lock_guard inner(state->mutex);
        state->num_reached++;
        state->changed.notify_all();
    });
}

bool Event::is_complete() {
    std::lock_guard lock(state_->mutex);
    return state_->num_reached >= state_->num_recorded;
}

bool Event::has_work_behind() const { return launches_ && *launches_ > num_before_; }

void Event::wait(State &state, int64_t count) {
    std::unique_lock lock(state.mutex);
    state.changed.wait(lock, [&] { return state.num_reached >= count; });
}

void Event::wait() { wait(*state_, num_recorded()); }

int64_t Event::num_recorded() {
    std::lock_guard lock(state_->mutex);
    return state_->num_recorded;
}

void Event::wait(Stream &stream) {
    stream.enqueue(Kind::ORDER, [state = state_, count = num_recorded()] { wait(*state, count); });
}

}  // namespace tokasim

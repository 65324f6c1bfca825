// Threads that wait asleep, work together on one thing at a time, and meet at barriers while they do.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace unspool {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // One pool for each number of threads in a process: two engines take turns instead of crowding the cores.
    static std::shared_ptr<Pool> shared(int threads);

    int threads() const { return threads_; }

    // Calls work(argument, thread) on every thread, the caller's being thread 0. Work must not throw.
    void run(void (*work)(void*, int), void* argument);

    // Waits until every thread of the work under way has come here.
    void barrier();

private:
    struct Crew;  // the threads themselves; a forked child, where they do not exist, hires another
    void hire();

    int threads_;
    std::mutex turn_;
    std::unique_ptr<Crew> crew_;
};

}  // namespace unspool

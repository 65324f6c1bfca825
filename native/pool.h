// Threads that wait asleep and work together on one thing at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "process_lock.h"

namespace unspool {

class Pool {
public:
    explicit Pool(int threads);  // throws when the system has not so many to give
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // One pool for each number of threads in a process: two engines take turns instead of crowding the cores.
    static std::shared_ptr<Pool> shared(int threads);

    int threads() const { return threads_; }

    // Calls work(argument, thread) on every thread, the caller's being thread 0. Work must not throw.
    void run(void (*work)(void*, int), void* argument);

    // Call it between two runs that belong together: whoever waits for a turn has it first.
    void let_others();

    // Waits, first on the core and then off it, until something that other threads do is done.
    template <class Done> static void await(Done done) {
        for (int turn = 0; !done(); turn++) rest(turn);
    }

private:
    struct Crew;  // the threads themselves; a forked child, where they do not exist, hires another
    static void rest(int turn);

    int threads_;
    ProcessLock turn_;
    std::atomic<uint32_t> num_asked_{0}, num_begun_{0};  // turns
    std::unique_ptr<Crew> crew_;
};

}  // namespace unspool

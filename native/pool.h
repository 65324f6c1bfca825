// Threads that sleep until there is work, and process one task at a time together.
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
    explicit Pool(int threads);  // throws if the system cannot start them
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // One pool per number of threads in a process: two engines alternate instead of competing for the cores.
    static std::shared_ptr<Pool> shared(int threads);

    int threads() const { return threads_; }

    // Calls work(argument, thread) on every thread; the caller is thread 0. Work must not throw.
    void run(void (*work)(void*, int), void* argument);

    // Call it between two runs that belong together: waiting callers get their turn first.
    void let_others();

    // Waits for work of other threads, first by spinning and then by yielding the core.
    template <class Done> static void await(Done done) {
        for (int turn = 0; !done(); turn++) rest(turn);
    }

private:
    struct Crew;  // the threads; a forked child, in which they do not exist, starts new ones
    static void rest(int turn);

    int threads_;
    ProcessLock turn_;
    std::atomic<uint32_t> num_asked_{0}, num_begun_{0};  // calls of run that were requested, and that have begun
    std::unique_ptr<Crew> crew_;
};

}  // namespace unspool

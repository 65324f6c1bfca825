// A lock that a forked child can tell from its own: threads do not survive a fork, and so one that held a mutex in the
// parent would hold it in the child for ever.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <atomic>

namespace unspool {

class ProcessLock {
public:
    // Held while this object lives.
    class Hold {
    public:
        explicit Hold(ProcessLock& lock) : lock_(lock), was_abandoned_(lock.take()) {}
        ~Hold() { lock_.give(); }
        Hold(const Hold&) = delete;
        Hold& operator=(const Hold&) = delete;
        // A thread of the parent process held it at the fork: what it guards may be half changed.
        bool was_abandoned() const { return was_abandoned_; }

    private:
        ProcessLock& lock_;
        const bool was_abandoned_;
    };

private:
    bool take() {
        const pid_t own = getpid();
        for (;;) {
            pid_t holder = 0;
            if (holder_.compare_exchange_weak(holder, own, std::memory_order_acquire)) return false;
            if (holder == own) holder_.wait(own);
            else if (holder != 0 && holder_.compare_exchange_strong(holder, own, std::memory_order_acquire)) return true;
        }
    }
    void give() {
        holder_.store(0, std::memory_order_release);
        holder_.notify_one();
    }

    std::atomic<pid_t> holder_{0};  // the process whose thread holds it; 0: nobody
};

}  // namespace unspool

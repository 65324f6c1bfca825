// A lock that works across fork. A child process has no other threads, so a mutex that another thread of the parent
// held at the fork would stay locked forever in the child.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <atomic>

namespace unspool {

class ProcessLock {
public:
    // Holds the lock while this object lives.
    class Hold {
    public:
        explicit Hold(ProcessLock& lock) : lock_(lock), was_abandoned_(lock.take()) {}
        ~Hold() { lock_.give(); }
        Hold(const Hold&) = delete;
        Hold& operator=(const Hold&) = delete;
        // A thread of the parent process held the lock at the fork: the data that it protects may be inconsistent.
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

    std::atomic<pid_t> holder_{0};  // the process whose thread holds it; 0: unlocked
};

}  // namespace unspool

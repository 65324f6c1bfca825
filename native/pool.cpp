#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef UNSPOOL_X86
#include <immintrin.h>
#endif

namespace unspool {

namespace {

void pause() {
#ifdef UNSPOOL_X86
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Yields the core when no thread waits for this one, so that other work can run: in a server, the event loop with the
// tokens of the last step. If this thread were suspended later, within a unit, all other threads would wait for it.
void make_way() { sched_yield(); }

constexpr int SPINS = 128;  // pauses before yielding the core: about 2 µs
constexpr auto AWAKE =
    std::chrono::microseconds(500);  // how long an idle thread waits for the next step before it sleeps

}  // namespace

struct Pool::Crew {
    explicit Crew(int threads) : threads(threads), pid(getpid()) {
        try {
            workers.reserve(static_cast<size_t>(threads));
            for (int i = 1; i < threads; i++) workers.emplace_back([this, i] { serve(i); });
        } catch (const std::exception& error) {
            const std::string started = std::to_string(workers.size() + 1);
            dismiss();
            throw std::runtime_error("only " + started + " of " + std::to_string(threads) +
                                     " threads could be started: " + error.what());
        }
    }

    void dismiss() {
        stop.store(true);
        epoch.fetch_add(1);
        epoch.notify_all();
        for (auto& worker : workers) worker.join();
    }

    void run(void (*the_work)(void*, int), void* the_argument) {
        if (threads == 1) return the_work(the_argument, 0);
        work = the_work, argument = the_argument;
        epoch.fetch_add(1, std::memory_order_release);
        if (sleepers.load() > 0) epoch.notify_all();
        make_way();
        the_work(the_argument, 0);
        meet();  // all threads must be done before the caller continues
    }

    void serve(int index) {
        uint32_t seen = 0;
        for (;;) {
            await(seen);
            seen++;
            if (stop.load()) return;
            make_way();
            work(argument, index);
            meet();
        }
    }

    void await(uint32_t seen) {
        auto until = std::chrono::steady_clock::now() + AWAKE;
        for (int i = 0; epoch.load(std::memory_order_acquire) == seen; i++) {
            pause();
            if (i % 64 == 63 && std::chrono::steady_clock::now() > until) {
                sleepers.fetch_add(1);
                epoch.wait(seen);
                sleepers.fetch_sub(1);
            }
        }
    }

    void meet() {
        uint32_t now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            phase.store(now + 1, std::memory_order_release);
            return;
        }
        Pool::await([&] { return phase.load(std::memory_order_acquire) != now; });
    }

    const int threads;
    const pid_t pid;
    std::vector<std::thread> workers;
    void (*work)(void*, int) = nullptr;
    void* argument = nullptr;
    std::atomic<bool> stop{false};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<int> sleepers{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> phase{0};
};

Pool::Pool(int threads) : threads_(threads), crew_(std::make_unique<Crew>(threads)) {}

Pool::~Pool() {
    if (crew_->pid == getpid()) crew_->dismiss();
    else (void)crew_.release();  // these threads stayed in the parent process
}

void Pool::run(void (*work)(void*, int), void* argument) {
    num_asked_.fetch_add(1);
    const ProcessLock::Hold turn(turn_);
    num_begun_.fetch_add(1);
    if (crew_->pid != getpid()) {  // the old crew's state after a fork is undefined, so it is not used again
        auto crew = std::make_unique<Crew>(threads_);
        (void)crew_.release();
        crew_ = std::move(crew);
    }
    crew_->run(work, argument);
}

void Pool::let_others() {
    const uint32_t begun = num_begun_.load();
    const auto until = std::chrono::steady_clock::now() + AWAKE;  // a thread that did not survive a fork never stops
    while (num_asked_.load() != begun && num_begun_.load() == begun && std::chrono::steady_clock::now() < until)
        sched_yield();
}

void Pool::rest(int turn) {
    if (turn < SPINS) pause();
    else sched_yield();  // another thread may need this core
}

std::shared_ptr<Pool> Pool::shared(int threads) {
    static ProcessLock guard;
    static std::map<std::pair<pid_t, int>, std::weak_ptr<Pool>> pools;
    const ProcessLock::Hold hold(guard);
    std::weak_ptr<Pool>& known = pools[{getpid(), threads}];
    std::shared_ptr<Pool> pool = known.lock();
    if (!pool) known = pool = std::make_shared<Pool>(threads);
    return pool;
}

}  // namespace unspool

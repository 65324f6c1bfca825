#include "mapped_file.h"

#include <csignal>
#include <cstring>
#include <mutex>

#include <unistd.h>

#include <atomic>

namespace unspool {

// Entries are reused and never freed, because a signal handler may read them at any time.
struct MappedFile::Entry {
    std::atomic<uintptr_t> begin{0}, end{0};  // both 0: unused
    char path[1024];
    Entry* next;
};

namespace {

std::mutex guard;  // protects changes
std::atomic<void*> entries{nullptr};

constexpr int SIGNALS[] = {SIGBUS, SIGSEGV};
struct sigaction handled_before[2];

void say(const char* text) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, strlen(text));
}

}  // namespace

// Async-signal-safe: it reads atomics and calls write(2).
void report_fault(uintptr_t address) {
    auto* entry = static_cast<MappedFile::Entry*>(entries.load(std::memory_order_acquire));
    for (; entry; entry = entry->next) {
        if (address < entry->begin.load(std::memory_order_acquire)) continue;
        if (address >= entry->end.load(std::memory_order_acquire)) continue;
        say("unspool: ");
        say(entry->path);
        say(" was cut shorter, or cannot be read any more, while a model was using it; this process ends here. To "
            "replace a model file, write a new file and rename it over the old one.\n");
        return;
    }
}

namespace {

void on_fault(int number, siginfo_t* info, void* context) {
    const struct sigaction& before = handled_before[number == SIGBUS ? 0 : 1];
    const bool has_address = info->si_code > 0;  // otherwise another process or thread sent the signal
    if (has_address) report_fault(reinterpret_cast<uintptr_t>(info->si_addr));
    if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(number, info, context);
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(number);
    sigaction(number, &before, nullptr);
    if (!has_address) raise(number);  // otherwise the instruction runs again and raises the signal again
}

void install() {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 2; i++) sigaction(SIGNALS[i], &action, &handled_before[i]);
}

}  // namespace

MappedFile::MappedFile(const uint8_t* data, size_t bytes, const std::string& path) {
    std::lock_guard lock(guard);
    auto* head = static_cast<Entry*>(entries.load());
    if (!head) install();
    for (entry_ = head; entry_ && entry_->end.load() != 0; entry_ = entry_->next) {}
    const bool is_new = !entry_;
    if (is_new) entry_ = new Entry, entry_->next = head;
    strncpy(entry_->path, path.c_str(), sizeof entry_->path - 1);
    entry_->path[sizeof entry_->path - 1] = 0;
    entry_->begin.store(reinterpret_cast<uintptr_t>(data));
    entry_->end.store(reinterpret_cast<uintptr_t>(data) + bytes);
    if (is_new) entries.store(entry_);
}

MappedFile::~MappedFile() {
    std::lock_guard lock(guard);
    entry_->end.store(0);
    entry_->begin.store(0);
}

}  // namespace unspool

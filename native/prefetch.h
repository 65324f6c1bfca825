// Prefetches memory before it is read.
#pragma once
#include <cstdint>
#include <vector>

namespace unspool {

// Memory that will be read or written within about a microsecond.
inline void prefetch_for_read(const void* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(data) + at, 0, 3);
}
inline void prefetch_for_write(const void* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(data) + at, 1, 3);
}

// Memory that a thread will soon read, prefetched a few cache lines at a time between other work, because all
// prefetches at once would compete for the same buffers.
class alignas(64) Prefetcher {
public:
    void clear() { stretches_.clear(), index_ = 0, at_ = 0, left_ = MOST; }
    void add(const uint8_t* data, int64_t bytes) {
        if (left_ <= 0) return;
        stretches_.push_back({data, bytes < left_ ? bytes : left_});
        left_ -= bytes;
    }
    // After it, `times` calls of prefetch_next cover everything.
    void pace(int64_t times) { lines_ = times > 0 ? (MOST - (left_ > 0 ? left_ : 0)) / 64 / times + 1 : 0; }

    void prefetch_next() {
        for (int64_t line = 0; line < lines_ && index_ < stretches_.size(); line++) {
            __builtin_prefetch(stretches_[index_].data + at_, 0, 2);
            at_ += 64;
            if (at_ >= stretches_[index_].bytes) index_++, at_ = 0;
        }
    }

private:
    static constexpr int64_t MOST = 128 << 10;  // bytes; they must stay in the core's own cache with the weights
    struct Stretch {
        const uint8_t* data;
        int64_t bytes;
    };
    std::vector<Stretch> stretches_;
    size_t index_ = 0;
    int64_t at_ = 0, left_ = MOST, lines_ = 0;
};

}  // namespace unspool

// Packing the weights of a model into tiles. It begins on a thread of its own, while the rest of a start goes on, and
// whoever first needs the tiles helps to finish.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "matrix.h"
#include "pool.h"

namespace unspool {

// A file in memory, from its first byte to behind its last; both zero: there is none.
struct Span {
    uintptr_t begin, end;
};

class Packing {
public:
    explicit Packing(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
    ~Packing();
    Packing(const Packing&) = delete;
    Packing& operator=(const Packing&) = delete;

    // `files`: where the files of its parts lie in memory. Their pages are given back as they are packed.
    void add(Matrix& matrix, const std::vector<Span>& files);
    void start();  // on a thread of its own, where there is one to be had
    // Packs a few pieces with all threads of the pool, which others may use between two calls; the share that is done.
    // Call it until that is 1, then `finish`.
    double advance(Pool& pool);
    // False: some bytes could not be read, their file having been cut shorter, and the tiles must not be used.
    bool finish();

private:
    // Some tiles that lie together, in the file and packed.
    struct Piece {
        const uint8_t* source;
        const TileRef* tiles;
        int64_t count, columns;
        Span file;
    };
    bool pack_one();  // false: all have been begun
    void join();

    std::shared_ptr<Arena> arena_;
    std::vector<Piece> pieces_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> is_cut_{false};
    std::atomic<bool> leave_{false};  // the thread of its own
    std::unique_ptr<std::thread> thread_;
    pid_t pid_ = 0;
};

}  // namespace unspool

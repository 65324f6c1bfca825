// Packs a model's weights into tiles. A background thread begins during the start; the thread that first needs the
// tiles helps to finish.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "matrix.h"
#include "pool.h"

namespace unspool {

// A file in memory, from its first byte to after its last; both zero: no file.
struct Span {
    uintptr_t begin, end;
};

class Packing {
public:
    explicit Packing(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
    ~Packing();
    Packing(const Packing&) = delete;
    Packing& operator=(const Packing&) = delete;

    // `files`: the addresses of the parts' files. Their pages are released when they have been packed.
    void add(Matrix& matrix, const std::vector<Span>& files);
    void start();  // on a background thread, if the system can start one
    // Packs a few pieces with all threads of the pool, which other programs may use between two calls. Returns the
    // share that is done. Call it until that is 1, then call `finish`.
    double advance(Pool& pool);
    // False: some bytes could not be read because their file was truncated, and the tiles must not be used.
    bool finish();

private:
    // Some tiles that are contiguous, both in the file and packed.
    struct Piece {
        const uint8_t* source;
        const TileRef* tiles;
        int64_t count, columns;
        Span file;
    };
    bool pack_one();  // false: all pieces have been started
    void join();

    std::shared_ptr<Arena> arena_;
    std::vector<Piece> pieces_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> is_cut_{false};
    std::atomic<bool> leave_{false};  // tells the background thread to stop
    std::unique_ptr<std::thread> thread_;
    pid_t pid_ = 0;
};

}  // namespace unspool

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

class Packing {
public:
    explicit Packing(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
    ~Packing();
    Packing(const Packing&) = delete;
    Packing& operator=(const Packing&) = delete;

    // `is_mapped`: its bytes are a file's, and the memory they came to lie in is given back as they are packed.
    void add(Matrix& matrix, bool is_mapped);
    void start();
    void finish(Pool& pool);

private:
    // Some tiles that lie together, in the file and packed.
    struct Piece {
        const uint8_t* source;
        const TileRef* tiles;
        int64_t count, columns;
        bool is_mapped;
    };
    void work();
    void join();

    std::shared_ptr<Arena> arena_;
    std::vector<Piece> pieces_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> stop_{false};
    std::unique_ptr<std::thread> thread_;
    pid_t pid_ = 0;
};

}  // namespace unspool

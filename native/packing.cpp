#include "packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace unspool {

namespace {

constexpr int64_t PIECE_BYTES = 1 << 20;  // of the file, that a thread packs at a time
constexpr int PIECES = 8;  // pieces that each thread packs before another model may compute a step: about 20 ms

// Loads all of a piece's pages at once; loading them one by one on access takes a fifth of the packing time. Without
// this system call they are loaded on access. Returns false if some pages no longer exist, so that reading them would
// be fatal.
bool populate([[maybe_unused]] const uint8_t* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_POPULATE_READ
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), start = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = start / page * page, length = start + static_cast<uintptr_t>(bytes) - first;
    if (madvise(reinterpret_cast<void*>(first), length, MADV_POPULATE_READ) != 0) return errno != EFAULT;
#endif
    return true;
}

// Releases this process's pages; they stay in the system's page cache. Access to a page also maps the pages around it,
// so these are released too; pages that another thread still reads are mapped again.
void give_back(const uint8_t* data, int64_t bytes, const Span& file) {
    constexpr uintptr_t AROUND = 64 << 10;  // a multiple of any page's size
    const auto start = reinterpret_cast<uintptr_t>(data), stop = start + static_cast<uintptr_t>(bytes);
    const uintptr_t first = std::max(start / AROUND * AROUND, file.begin);
    const uintptr_t end = std::min((stop + AROUND - 1) / AROUND * AROUND, file.end);
    if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
}

}  // namespace

Packing::~Packing() {
    leave_.store(true);
    join();
}

void Packing::join() {
    if (!thread_) return;
    if (pid_ == getpid()) thread_->join();
    else (void)thread_.release();  // it stayed in the parent process
    thread_.reset();
}

void Packing::add(Matrix& matrix, const std::vector<Span>& files) {
    if (matrix.packed()) return;
    matrix.lay_out(arena_);
    const TileRef* tiles = matrix.tiles().data();
    auto file = files.begin();
    for (const Part& part : matrix.parts()) {
        const int64_t count = (part.rows + TILE - 1) / TILE, bytes = TILE * row_bytes(part.format, matrix.columns());
        const int64_t step = PIECE_BYTES / bytes > 1 ? PIECE_BYTES / bytes : 1;
        for (int64_t t = 0; t < count; t += step)
            pieces_.push_back({part.data + t * bytes, tiles + t, count - t < step ? count - t : step, matrix.columns(),
                               *file});
        tiles += count, ++file;
    }
}

bool Packing::pack_one() {
    const size_t i = next_.fetch_add(1);
    if (i >= pieces_.size()) return false;
    const Piece& piece = pieces_[i];
    const int64_t stride = row_bytes(piece.tiles->format, piece.columns);
    const int64_t bytes = ((piece.count - 1) * TILE + piece.tiles[piece.count - 1].count) * stride;
    if (piece.file.end > 0 && !populate(piece.source, bytes)) {
        is_cut_.store(true);
        return true;
    }
    for (int64_t t = 0; t < piece.count; t++) {
        const TileRef& tile = piece.tiles[t];
        pack_tile(tile.format, piece.source + t * TILE * stride, tile.count, piece.columns,
                  const_cast<uint8_t*>(tile.data));
    }
    if (piece.file.end > 0) give_back(piece.source, bytes, piece.file);
    return true;
}

void Packing::start() {
    pid_ = getpid();
    try {
        thread_ = std::make_unique<std::thread>([this] { while (!leave_.load() && pack_one()) {} });
    } catch (const std::system_error&) {}  // the system has no more threads: finish() packs everything
}

double Packing::advance(Pool& pool) {
    if (pieces_.empty()) return 1.0;
    if (pid_ != 0 && pid_ != getpid()) {  // a forked child: pieces that the parent had started are incomplete
        next_.store(0);
        (void)thread_.release();
    }
    pid_ = getpid();
    if (!leave_.load()) {
#ifdef __GLIBC__
        malloc_trim(0);  // releases a megabyte or two of free memory before memory use is highest
#endif
        leave_.store(true);  // the pool has a thread for every core
    } else {
        pool.let_others();
    }
    pool.run([](void* self, int) {
        for (int i = 0; i < PIECES && static_cast<Packing*>(self)->pack_one(); i++) {}
    }, this);
    return std::min(1.0, static_cast<double>(next_.load()) / static_cast<double>(pieces_.size()));
}

bool Packing::finish() {
    join();
    std::vector<Piece>().swap(pieces_);
    return !is_cut_.load();
}

}  // namespace unspool

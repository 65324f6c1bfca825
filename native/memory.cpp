#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace unspool {

Memory::Memory(size_t bytes, bool huge_pages) : size_(bytes) {
    if (bytes == 0) return;
    const size_t alignment = huge_pages ? size_t{2} << 20 : 4096;
    mapped_ = (bytes + alignment - 1) / alignment * alignment + (huge_pages ? alignment : 0);
    mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) {
        mapping_ = nullptr;
        throw std::bad_alloc();
    }
    auto start = reinterpret_cast<uintptr_t>(mapping_);
    data_ = reinterpret_cast<uint8_t*>((start + alignment - 1) / alignment * alignment);
#ifdef MADV_HUGEPAGE
    if (huge_pages) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() {
    if (mapping_) munmap(mapping_, mapped_);
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
    return *this;
}

}  // namespace unspool

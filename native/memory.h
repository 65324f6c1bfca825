// Memory directly from the system: zeroed, aligned, and allocated page by page on first access.
#pragma once
#include <cstddef>
#include <cstdint>

namespace unspool {

class Memory {
public:
    Memory() = default;
    Memory(size_t bytes, bool huge_pages);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
    void* mapping_ = nullptr;
    size_t mapped_ = 0;
};

}  // namespace unspool

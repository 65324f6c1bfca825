// Files mapped into memory. When one is cut shorter, the system answers a read of what is gone with SIGBUS, at any
// instruction of any thread: no error can be raised from there, but the process can say which file it was.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace unspool {

// While it lives, a fatal fault at an address of this mapping prints one line with the file's path on stderr, before
// the process ends by the signal as it would have without it. Faults elsewhere go to whoever handled them before.
class MappedFile {
public:
    MappedFile(const uint8_t* data, size_t bytes, const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

private:
    struct Entry;
    friend void report_fault(uintptr_t address);
    Entry* entry_;
};

}  // namespace unspool

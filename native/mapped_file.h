// Files mapped into memory. If a file is truncated, reading the missing part raises SIGBUS, at any instruction of any
// thread. No error can be returned from there, but the process can report which file it was.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace unspool {

// While this object lives, a fatal fault at an address of the mapping prints one line with the file's path on stderr;
// the process then ends by the signal as usual. Faults at other addresses are passed to the previous handler.
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

// A weight matrix: parts that share their input, stacked by output features. Row lookup reads the bytes of the file;
// products read tiles that are packed from them (formats.h).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "formats.h"
#include "memory.h"

namespace unspool {

// The packed weights of a model are contiguous, so that many small matrices share huge pages.
class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void reserve(size_t bytes);  // the total that will be allocated next, so that no memory is left over
    uint8_t* take(size_t bytes);
    size_t bytes() const { return taken_; }

private:
    std::vector<Memory> chunks_;
    size_t used_ = 0, taken_ = 0;
};

struct Part {
    Format format;
    const uint8_t* data;
    int64_t rows;
};

struct TileRef {
    const uint8_t* data;
    Format format;
    int32_t count;   // output features; fewer than 16 in a part's last tile
    int64_t column;  // the first of them
};

class Matrix {
public:
    Matrix(std::vector<Part> parts, int64_t columns);

    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    bool packed() const { return !tiles_.empty(); }  // or will be soon
    bool wants_q8() const { return wants_q8_; }    // some part reads 8-bit activations
    // Tiles keep the file's exact values, for row lookup and for a head.
    void keep_exact() { whole_ = false; }
    // Its 8-bit rows have integer scales (formats.h).
    bool whole() const { return whole_; }
    Format tile_format(Format format) const {
        return !whole_ ? format : format == Q4_0 ? W4_0 : format == Q4_1 ? W4_1 : format;
    }
    bool wants_f32() const { return wants_f32_; }  // some part reads float32 activations
    int64_t packed_bytes() const;  // size of its tiles, once they are packed
    const std::vector<TileRef>& tiles() const { return tiles_; }
    const std::vector<Part>& parts() const { return parts_; }

    // Allocates the tiles; the caller fills them (packing.h).
    void lay_out(std::shared_ptr<Arena> arena);

    // Row `row` in float32: from the tiles if they exist.
    void read_row(int64_t row, float* out) const;

private:
    std::vector<Part> parts_;
    int64_t rows_ = 0, columns_;
    bool wants_q8_ = false, wants_f32_ = false, whole_ = false;
    std::vector<TileRef> tiles_;
    std::shared_ptr<Arena> arena_;
};

// Packs `count` rows of `columns` values, in the file's format, into a tile.
void pack_tile(Format format, const uint8_t* source, int count, int64_t columns, uint8_t* tile);

int64_t row_bytes(Format format, int64_t columns);
int64_t tile_bytes(Format format, int64_t columns);

}  // namespace unspool

// Gathers the outliers of 8-bit rows (formats.h) for the panels that kernels multiply. For files that are compiled
// once, not once per instruction set.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace unspool {

inline const Outliers* list_of(const Outliers* first, int64_t width, int64_t row) {
    return reinterpret_cast<const Outliers*>(reinterpret_cast<const uint8_t*>(first) +
                                             row * outliers_bytes(width / BLOCK));
}

// Bytes of the scratch buffer for gather_outliers: one bit per place, and the number of its column.
constexpr int64_t gathering_bytes(int64_t width) { return ((width + 63) / 64 * 8 + width * 4 + 63) / 64 * 64; }

// The unit of a row's outliers when they are stored as integers: as small as their sum allows.
inline float outlier_unit(const Outliers& of_row) {
    float most = 0.0f, sum = 0.0f;
    for (int i = 0; i < of_row.count; i++) {
        const float size = std::fabs(of_row.list[i].value);
        most = std::max(most, size), sum += size;
    }
    if (most == 0.0f) return 0.0f;
    return std::max({most / OUTLIER_MOST, sum / static_cast<float>(OUTLIER_SUM - of_row.count - 1), 1e-30f});
}

template <class Act> void each_outlier(const Outliers* first, int64_t width, int rows, Act act) {
    for (int r = 0; r < rows; r++) {
        const Outliers* of_row = list_of(first, width, r);
        for (int i = 0; i < of_row->count; i++) act(r, of_row->list[i]);
    }
}

// Merges the rows' lists of outliers into one. Returns the end of the used part of the buffer.
inline uint8_t* gather_outliers(const Outliers* first, int64_t width, int rows, bool whole, uint8_t* scratch, uint8_t* room,
                         OutlierColumns& out) {
    const int64_t words = (width + 63) / 64;
    auto* bits_of = reinterpret_cast<uint64_t*>(scratch);
    auto* number = reinterpret_cast<int32_t*>(bits_of + words);
    std::fill(bits_of, bits_of + words, 0);
    each_outlier(first, width, rows, [&](int, Outlier o) { bits_of[o.k / 64] |= uint64_t{1} << o.k % 64; });
    auto* places = reinterpret_cast<int32_t*>(room);
    for (int64_t word = 0; word < words; word++)
        for (uint64_t bits = bits_of[word]; bits; bits &= bits - 1) {
            const auto k = static_cast<int32_t>(word * 64 + __builtin_ctzll(bits));
            number[k] = out.count;
            places[out.count++] = k;
        }
    if (whole && out.count % 2) places[out.count++] = 0;  // a place where no row has an outlier, for this column
    out.places = places;
    if (whole) {
        auto* units = reinterpret_cast<float*>(places + out.count);
        auto* pairs = reinterpret_cast<int16_t*>(units + rows);
        for (int r = 0; r < rows; r++) units[r] = outlier_unit(*list_of(first, width, r));
        std::fill(pairs, pairs + out.count * rows, int16_t{0});
        each_outlier(first, width, rows, [&](int r, Outlier o) {
            const int at = number[o.k];
            pairs[(at / 2 * rows + r) * 2 + at % 2] = static_cast<int16_t>(std::lrintf(o.value / units[r]));
        });
        out.units = units, out.pairs = pairs;
    } else {
        auto* values = reinterpret_cast<float*>(places + out.count);
        std::fill(values, values + out.count * rows, 0.0f);
        each_outlier(first, width, rows, [&](int r, Outlier o) { values[number[o.k] * rows + r] = o.value; });
        out.values = values;
    }
    const int64_t bytes = out.count * 4 + (whole ? rows * (4 + 2 * out.count) : rows * 4 * out.count);
    return room + (bytes + 63) / 64 * 64;
}

// Buffer bytes per row if this many rows are gathered together: places and floats. Integers and units take less.
constexpr int64_t outlier_columns_bytes(int64_t width, int rows) {
    return width / BLOCK * 4 * (1 + rows) + 8 + 4 * rows;
}

}  // namespace unspool

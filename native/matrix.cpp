#include "matrix.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <type_traits>

// Packing takes a large part of a cold start, so its helpers are inlined.
#define ALWAYS inline __attribute__((always_inline))

namespace unspool {

namespace {

float half_to_float(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = static_cast<uint32_t>(h & 0x7FFF) << 13;
    if (rest < 0x00800000u) {  // zero or subnormal: count in units of 2⁻²⁴
        float f = static_cast<float>(h & 0x7FFF) * 5.9604644775390625e-8f;
        return sign ? -f : f;
    }
    rest += rest >= 0x0F800000u ? 0x70000000u : 0x38000000u;  // infinity and NaN keep a full exponent
    rest |= sign;
    float f;
    memcpy(&f, &rest, 4);
    return f;
}

// Thirty-two values of one row, unpacked.
struct Codes {
    alignas(16) uint32_t quads[8];  // one byte per code
    uint16_t d = 0, dmin = 0;       // float16, or an exponent; minima of super formats are subtracted
    int8_t scales[2] = {0, 0};      // of super formats
    uint8_t mins[2] = {0, 0};

    uint8_t* bytes() { return reinterpret_cast<uint8_t*>(quads); }
};

// The scale of an exponent as tiles store it: the exponent of a float32.
float power_of_two(uint8_t exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// MXFP4's exponents count from -127, and codes are in units of half their scale. What is below 2⁻¹²⁶ counts as zero.
ALWAYS uint8_t half_of_scale(uint8_t exponent) { return exponent > 0 ? static_cast<uint8_t>(exponent - 1) : 0; }

ALWAYS uint32_t word(const uint8_t* p) {
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
}

ALWAYS uint16_t short_word(const uint8_t* p) {
    uint16_t w;
    memcpy(&w, p, 2);
    return w;
}

constexpr uint32_t NIBBLES = 0x0F0F0F0Fu, PAIRS = 0x03030303u, BITS = 0x01010101u;

// 16 bytes: the low nibbles are the first 16 values, the high ones the last.
ALWAYS void split_nibbles(const uint8_t* qs, Codes& out) {
    for (int j = 0; j < 4; j++) {
        uint32_t w = word(qs + 4 * j);
        out.quads[j] = w & NIBBLES;
        out.quads[j + 4] = w >> 4 & NIBBLES;
    }
}

ALWAYS void add_fifth_bits(const uint8_t* qh, Codes& out) {
    uint32_t bits = word(qh);
    for (int i = 0; i < 32; i++) out.bytes()[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

ALWAYS void six_bit_scales(const uint8_t* packed, int sub, Codes& out) {
    const uint8_t *a = packed, *b = packed + 4, *c = packed + 8;
    if (sub < 4) {
        out.scales[0] = static_cast<int8_t>(a[sub] & 63);
        out.mins[0] = b[sub] & 63;
    } else {
        out.scales[0] = static_cast<int8_t>((c[sub - 4] & 15) | (a[sub - 4] >> 6) << 4);
        out.mins[0] = static_cast<uint8_t>(c[sub - 4] >> 4 | (b[sub - 4] >> 6) << 4);
    }
}

// Block `b` of 32 values, in a row that begins at `row`.
template <Format format> ALWAYS void take_apart(const uint8_t* row, int64_t b, Codes& out) {
    const int sub = static_cast<int>(b % 8), shift = 2 * (sub % 4);
    switch (format) {
        case Q8_0: {
            const uint8_t* p = row + b * 34;
            out.d = short_word(p);
            for (int j = 0; j < 8; j++) out.quads[j] = word(p + 2 + 4 * j) ^ 0x80808080u;
            break;
        }
        case Q4_0: {
            const uint8_t* p = row + b * 18;
            out.d = short_word(p);
            split_nibbles(p + 2, out);
            break;
        }
        case MXFP4: {
            const uint8_t* p = row + b * 17;
            out.d = half_of_scale(*p);
            split_nibbles(p + 1, out);
            break;
        }
        case Q4_1: {
            const uint8_t* p = row + b * 20;
            out.d = short_word(p), out.dmin = short_word(p + 2);
            split_nibbles(p + 4, out);
            break;
        }
        case Q5_0: {
            const uint8_t* p = row + b * 22;
            out.d = short_word(p);
            split_nibbles(p + 6, out);
            add_fifth_bits(p + 2, out);
            break;
        }
        case Q5_1: {
            const uint8_t* p = row + b * 24;
            out.d = short_word(p), out.dmin = short_word(p + 2);
            split_nibbles(p + 8, out);
            add_fifth_bits(p + 4, out);
            break;
        }
        case Q2_K: {
            const uint8_t *p = row + b / 8 * 84, *qs = p + 16 + sub / 4 * 32;
            out.d = short_word(p + 80), out.dmin = short_word(p + 82);
            for (int j = 0; j < 8; j++) out.quads[j] = word(qs + 4 * j) >> shift & PAIRS;
            for (int g = 0; g < 2; g++)
                out.scales[g] = static_cast<int8_t>(p[2 * sub + g] & 15), out.mins[g] = p[2 * sub + g] >> 4;
            break;
        }
        case Q3_K: {
            const uint8_t *p = row + b / 8 * 110, *qs = p + 32 + sub / 4 * 32, *packed = p + 96;
            out.d = short_word(p + 108);
            for (int j = 0; j < 8; j++)
                out.quads[j] = (word(qs + 4 * j) >> shift & PAIRS) | (word(p + 4 * j) >> sub & BITS) << 2;
            for (int g = 0; g < 2; g++) {
                int i = 2 * sub + g;
                int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
                out.scales[g] = static_cast<int8_t>((low | high << 4) - 32);
            }
            break;
        }
        case Q4_K:
        case Q5_K: {
            const uint8_t* p = row + b / 8 * (format == Q4_K ? 144 : 176);
            const uint8_t* qs = p + (format == Q4_K ? 16 : 48) + sub / 2 * 32;
            out.d = short_word(p), out.dmin = short_word(p + 2);
            six_bit_scales(p + 4, sub, out);
            for (int j = 0; j < 8; j++) {
                out.quads[j] = word(qs + 4 * j) >> (sub % 2 * 4) & NIBBLES;
                if (format == Q5_K) out.quads[j] |= (word(p + 16 + 4 * j) >> sub & BITS) << 4;
            }
            break;
        }
        case Q6_K: {
            const uint8_t* p = row + b / 8 * 210;
            const uint8_t *ql = p + sub / 4 * 64 + sub % 2 * 32, *qh = p + 128 + sub / 4 * 32;
            out.d = short_word(p + 208);
            for (int j = 0; j < 8; j++)
                out.quads[j] = (word(ql + 4 * j) >> (sub % 4 / 2 * 4) & NIBBLES) | (word(qh + 4 * j) >> shift & PAIRS)
                                                                                       << 4;
            for (int g = 0; g < 2; g++) out.scales[g] = static_cast<int8_t>(p[192 + 2 * sub + g]);
            break;
        }
        default: throw std::logic_error("a format without codes");
    }
}

// Calls a function with the format as a constant.
template <class F> auto with_format(Format format, F f) {
    switch (format) {
        case Q8_0: return f(std::integral_constant<Format, Q8_0>());
        case Q4_0: return f(std::integral_constant<Format, Q4_0>());
        case Q4_1: return f(std::integral_constant<Format, Q4_1>());
        case Q5_0: return f(std::integral_constant<Format, Q5_0>());
        case Q5_1: return f(std::integral_constant<Format, Q5_1>());
        case Q2_K: return f(std::integral_constant<Format, Q2_K>());
        case Q3_K: return f(std::integral_constant<Format, Q3_K>());
        case Q4_K: return f(std::integral_constant<Format, Q4_K>());
        case Q5_K: return f(std::integral_constant<Format, Q5_K>());
        case Q6_K: return f(std::integral_constant<Format, Q6_K>());
        case MXFP4: return f(std::integral_constant<Format, MXFP4>());
        default: throw std::logic_error("a format without codes");
    }
}

// The value of each of the 32 codes, by the arithmetic of the format's definition.
template <Format format> ALWAYS void values_of(Codes& codes, float* out) {
    constexpr Scheme s = SCHEMES[format];
    const float d = s.fp4 ? power_of_two(static_cast<uint8_t>(codes.d))
                          : half_to_float(reinterpret_cast<uint8_t*>(&codes.d));
    const float m = half_to_float(reinterpret_cast<uint8_t*>(&codes.dmin));
    for (int i = 0; i < BLOCK; i++) {
        const int g = i / s.group;
        const float scale = s.super ? d * static_cast<float>(codes.scales[g]) : d;
        const int code = s.fp4 ? FP4_CODES[codes.bytes()[i]] : codes.bytes()[i];
        float value = scale * static_cast<float>(code - s.offset);
        if (s.min) value = s.super ? value - m * static_cast<float>(codes.mins[g]) : value + m;
        out[i] = value;
    }
}

// --- Tiles -----------------------------------------------------------------------------------------------------------

// The 32-bit words that each lane contributes to the vectors of a block's codes, one word per vector.
template <int bits> ALWAYS void code_words(const uint32_t* quads, uint32_t* words) {
    if constexpr (bits == 8)
        for (int q = 0; q < 8; q++) words[q] = quads[q];
    if constexpr (bits >= 4 && bits < 8)
        for (int j = 0; j < 4; j++) words[j] = (quads[j] & NIBBLES) | (quads[j + 4] & NIBBLES) << 4;
    constexpr int low = bits >= 4 ? 4 : 0;
    uint32_t* rest = words + low;
    if constexpr (bits == 2 || bits == 3 || bits == 6) {
        for (int v = 0; v < 2; v++) {
            rest[v] = 0;
            for (int q = 0; q < 4; q++) rest[v] |= (quads[4 * v + q] >> low & PAIRS) << (2 * q);
        }
        rest += 2;
    }
    if constexpr (bits == 3 || bits == 5) {
        *rest = 0;
        for (int q = 0; q < 8; q++) *rest |= (quads[q] >> (bits - 1) & BITS) << q;
    }
}

// Bit i of quad q, at 4q + i, moves to bit q of byte i: eight bits at a time.
constexpr auto SINGLE_BITS = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t bits = 0; bits < 256; bits++)
        for (uint32_t i = 0; i < 4; i++)
            table[bits] |= (bits >> i & 1) << (8 * i) | (bits >> (4 + i) & 1) << (8 * i + 1);
    return table;
}();

// Formats without super-blocks already have their codes in the order of the words. Only the scales of `c` are set.
template <Format format> ALWAYS void plain_words(const uint8_t* row, int64_t b, Codes& c, uint32_t* words) {
    constexpr Scheme s = SCHEMES[format];
    constexpr int head = s.fp4 ? 1 : s.min ? 4 : 2, fifth = s.bits == 5 ? 4 : 0;
    const uint8_t* p = row + b * (head + fifth + (s.bits == 8 ? 32 : 16));
    c.d = s.fp4 ? half_of_scale(*p) : short_word(p);
    if (s.min) c.dmin = short_word(p + 2);
    if constexpr (s.bits == 8)
        for (int q = 0; q < 8; q++) words[q] = word(p + head + 4 * q) ^ 0x80808080u;
    else memcpy(words, p + head + fifth, 16);
    if constexpr (s.bits == 5) {
        const uint8_t* bits = p + head;
        words[4] = SINGLE_BITS[bits[0]] | SINGLE_BITS[bits[1]] << 2 | SINGLE_BITS[bits[2]] << 4 |
                   SINGLE_BITS[bits[3]] << 6;
    }
}

// Transpose: word w of lane l moves to vector w, place l.
template <int bits> ALWAYS void put_words(const uint32_t (*words)[8], uint8_t* codes) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    constexpr int whole = bits / 4 * 4;
    for (int lane = 0; lane < TILE; lane += 4) {
        for (int w = 0; w < whole; w += 4) {
            Four row[4];
            for (int i = 0; i < 4; i++) memcpy(&row[i], &words[lane + i][w], 16);
            const Four a = __builtin_shuffle(row[0], row[1], Four{0, 4, 1, 5});
            const Four b = __builtin_shuffle(row[2], row[3], Four{0, 4, 1, 5});
            const Four c = __builtin_shuffle(row[0], row[1], Four{2, 6, 3, 7});
            const Four d = __builtin_shuffle(row[2], row[3], Four{2, 6, 3, 7});
            const Four columns[4] = {
                __builtin_shuffle(a, b, Four{0, 1, 4, 5}), __builtin_shuffle(a, b, Four{2, 3, 6, 7}),
                __builtin_shuffle(c, d, Four{0, 1, 4, 5}), __builtin_shuffle(c, d, Four{2, 3, 6, 7})};
            for (int i = 0; i < 4; i++) memcpy(codes + 64 * (w + i) + 4 * lane, &columns[i], 16);
        }
        for (int w = whole; w < bits; w++)
            for (int i = 0; i < 4; i++) memcpy(codes + 64 * w + 4 * (lane + i), &words[lane + i][w], 4);
    }
}

void get_codes(const uint8_t* c, int bits, int lane, uint32_t* quads) {
    const uint8_t* rest = c;
    for (int q = 0; q < 8; q++) {
        if (bits == 8) quads[q] = word(c + 64 * q + 4 * lane);
        else if (bits >= 4) quads[q] = word(c + 64 * (q % 4) + 4 * lane) >> (q < 4 ? 0 : 4) & NIBBLES;
        else quads[q] = 0;
    }
    if (bits == 8) return;
    if (bits >= 4) rest += 256;
    const int low = bits >= 4 ? 4 : 0;
    if (bits == 2 || bits == 3 || bits == 6) {
        for (int q = 0; q < 8; q++) quads[q] |= (word(rest + 64 * (q / 4) + 4 * lane) >> (2 * (q % 4)) & PAIRS) << low;
        rest += 128;
    }
    if (bits == 3 || bits == 5)
        for (int q = 0; q < 8; q++) quads[q] |= (word(rest + 4 * lane) >> q & BITS) << (bits - 1);
}

template <Format format>
void pack_codes_tile(const uint8_t* source, int64_t source_stride, int count, int64_t columns, uint8_t* tile) {
    constexpr Scheme s = SCHEMES[format];
    constexpr int groups = BLOCK / s.group;
    const int64_t blocks = columns / BLOCK, step = source_stride / blocks;
    alignas(16) uint32_t words[TILE][8] = {};
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t* scales = tile + scales_offset(s, b);
        for (int lane = 0; lane < count; lane++) {
            const uint8_t* row = source + lane * source_stride;
            // The hardware prefetcher does not follow sixteen rows at once, so the next ones are prefetched here.
            __builtin_prefetch(row + TILE * source_stride + b * step);
            Codes c;
            if constexpr (s.super) {
                take_apart<format>(row, b, c);
                code_words<s.bits>(c.quads, words[lane]);
            } else {
                plain_words<format>(row, b, c, words[lane]);
            }
            if (s.fp4) {
                scales[lane] = static_cast<uint8_t>(c.d);
                continue;
            }
            if (!s.super) {
                memcpy(scales + 2 * lane, &c.d, 2);
                if (s.min) memcpy(scales + 32 + 2 * lane, &c.dmin, 2);
                continue;
            }
            if (b % 8 == 0) {
                memcpy(scales - 64 + 2 * lane, &c.d, 2);
                memcpy(scales - 32 + 2 * lane, &c.dmin, 2);
            }
            for (int g = 0; g < groups; g++) {
                scales[g * TILE + lane] = static_cast<uint8_t>(c.scales[g]);
                if (s.min) scales[(groups + g) * TILE + lane] = c.mins[g];
            }
        }
        put_words<s.bits>(words, tile + codes_offset(s, b));
    }
}

// Scales become integers: fractions of the largest scale of their row.
template <Format from, Format to>
void pack_whole_tile(const uint8_t* source, int64_t source_stride, int count, int64_t columns, uint8_t* tile) {
    constexpr Scheme s = SCHEMES[to];
    const int64_t blocks = columns / BLOCK, step = source_stride / blocks;
    struct Scales {
        float d[TILE], m[TILE];  // for codes that count from the middle one
    };
    std::vector<Scales> scales(static_cast<size_t>(blocks + blocks % 2), Scales{});
    alignas(16) uint32_t words[TILE][8] = {};
    for (int64_t b = 0; b < blocks; b++) {
        Scales& at = scales[static_cast<size_t>(b)];
        for (int lane = 0; lane < count; lane++) {
            const uint8_t* row = source + lane * source_stride;
            __builtin_prefetch(row + TILE * source_stride + b * step);  // as above
            Codes c;
            plain_words<from>(row, b, c, words[lane]);
            at.d[lane] = half_to_float(reinterpret_cast<uint8_t*>(&c.d));
            if (s.min) at.m[lane] = half_to_float(reinterpret_cast<uint8_t*>(&c.dmin)) + MIDDLE_CODE * at.d[lane];
        }
        put_words<s.bits>(words, tile + tile_head_bytes(s) + codes_offset(s, b));
    }
    float most[TILE] = {}, strange[TILE] = {}, scale[TILE], worth[TILE];
    for (const Scales& at : scales)
        for (int lane = 0; lane < TILE; lane++) {
            const float d = std::fabs(at.d[lane]), m = std::fabs(at.m[lane]) * (float{WHOLE_UNIT} / WHOLE_MIN);
            most[lane] = std::max(most[lane], std::max(d, m));
            strange[lane] += 0.0f * at.d[lane] + 0.0f * at.m[lane];  // NaN if a scale is not finite
        }
    for (int lane = 0; lane < TILE; lane++) {
        const bool usable = most[lane] > 0.0f && strange[lane] == 0.0f;
        scale[lane] = usable ? 1.0f / most[lane] : 0.0f;
        worth[lane] = (usable ? most[lane] / WHOLE_UNIT : 0.0f) + strange[lane];
    }
    memcpy(tile, worth, sizeof worth);
    auto rounded = [](float x) { return static_cast<int16_t>(static_cast<int32_t>(x + (x < 0 ? -0.5f : 0.5f))); };
    for (size_t b = 0; b < scales.size(); b++) {
        int16_t* to_scales =
            reinterpret_cast<int16_t*>(tile + tile_head_bytes(s) + unit_offset(s, static_cast<int64_t>(b)));
        for (int lane = 0; lane < TILE; lane++) {
            const Scales& at = scales[b];
            const float by = scale[lane];  // zero if a scale is not finite; the integers are then zero
            to_scales[2 * lane + b % 2] = rounded(by == 0.0f ? 0.0f : at.d[lane] * by * WHOLE_SCALE);
            if (s.min) to_scales[2 * (TILE + lane) + b % 2] = rounded(by == 0.0f ? 0.0f : at.m[lane] * by * WHOLE_UNIT);
        }
    }
}

template <Format format> void unpack_codes_row(const uint8_t* tile, int lane, int64_t columns, float* out) {
    constexpr Scheme s = SCHEMES[format];
    const int64_t blocks = columns / BLOCK;
    const int groups = BLOCK / s.group;
    for (int64_t b = 0; b < blocks; b++) {
        Codes c;
        get_codes(tile + codes_offset(s, b), s.bits, lane, c.quads);
        const uint8_t* scales = tile + scales_offset(s, b);
        const uint8_t* head = s.super ? tile + unit_offset(s, b) : scales;
        c.d = s.fp4 ? scales[lane] : short_word(head + 2 * lane);
        if (s.min || s.super) c.dmin = short_word(head + 32 + 2 * lane);
        if (s.super)
            for (int g = 0; g < groups; g++) {
                c.scales[g] = static_cast<int8_t>(scales[g * TILE + lane]);
                if (s.min) c.mins[g] = scales[(groups + g) * TILE + lane];
            }
        values_of<format>(c, out + b * BLOCK);
    }
}

template <class T>
void pack_plain_tile(const uint8_t* source, int64_t stride, int count, int64_t columns, uint8_t* tile) {
    T* out = reinterpret_cast<T*>(tile);
    for (int lane = 0; lane < count; lane++)
        for (int64_t k = 0; k < columns; k++)
            memcpy(out + k * TILE + lane, source + lane * stride + k * sizeof(T), sizeof(T));
}

float plain_value(Format format, const uint8_t* p) {
    if (format == F16) return half_to_float(p);
    float f;
    if (format == F32) {
        memcpy(&f, p, 4);
    } else {
        uint32_t bits = static_cast<uint32_t>(short_word(p)) << 16;
        memcpy(&f, &bits, 4);
    }
    return f;
}

int plain_size(Format format) { return format == F32 ? 4 : 2; }

}  // namespace

int64_t row_bytes(Format format, int64_t columns) {
    constexpr int block_bytes[NUM_FORMATS] = {4, 2, 2, 34, 18, 20, 22, 24, 84, 110, 144, 176, 210, 17, 18, 20};
    return columns / block_values(format) * block_bytes[format];
}

int64_t tile_bytes(Format format, int64_t columns) {
    if (SCHEMES[format].bits == 0) return (columns * TILE * plain_size(format) + 63) / 64 * 64;
    const Scheme& s = SCHEMES[format];
    const int64_t blocks = columns / BLOCK, units = (blocks + blocks_per_unit(s) - 1) / blocks_per_unit(s);
    const int64_t missing = s.fp4 ? units * blocks_per_unit(s) - blocks : 0;
    return tile_head_bytes(s) + units * unit_bytes(s) - missing * code_bytes(s);
}

void Arena::reserve(size_t bytes) {
    if (bytes == 0) return;
    chunks_.emplace_back(bytes, true);
    used_ = 0;
}

uint8_t* Arena::take(size_t bytes) {
    constexpr size_t CHUNK = size_t{64} << 20;
    if (chunks_.empty() || used_ + bytes > chunks_.back().size()) {
        chunks_.emplace_back(bytes > CHUNK ? bytes : CHUNK, true);
        used_ = 0;
    }
    uint8_t* at = chunks_.back().data() + used_;
    used_ += bytes, taken_ += bytes;
    return at;
}

Matrix::Matrix(std::vector<Part> parts, int64_t columns) : parts_(std::move(parts)), columns_(columns) {
    for (const Part& part : parts_) {
        rows_ += part.rows;
        (SCHEMES[part.format].bits ? wants_q8_ : wants_f32_) = true;
    }
    whole_ = wants_q8_;
    for (const Part& part : parts_)
        whole_ &= SCHEMES[part.format].bits == 0 || part.format == Q4_0 || part.format == Q4_1;
}

int64_t Matrix::packed_bytes() const {
    int64_t bytes = 0;
    for (const Part& part : parts_)
        bytes += (part.rows + TILE - 1) / TILE * tile_bytes(tile_format(part.format), columns_);
    return bytes;
}

void pack_tile(Format format, const uint8_t* source, int count, int64_t columns, uint8_t* tile) {
    const int64_t stride = row_bytes(format, columns);
    if (format == W4_0) return pack_whole_tile<Q4_0, W4_0>(source, stride, count, columns, tile);
    if (format == W4_1) return pack_whole_tile<Q4_1, W4_1>(source, stride, count, columns, tile);
    if (format == F32) return pack_plain_tile<uint32_t>(source, stride, count, columns, tile);
    if (format <= BF16) return pack_plain_tile<uint16_t>(source, stride, count, columns, tile);
    with_format(format, [&](auto constant) { pack_codes_tile<constant()>(source, stride, count, columns, tile); });
}

void Matrix::lay_out(std::shared_ptr<Arena> arena) {
    int64_t column = 0;
    for (const Part& part : parts_) {
        const Format format = tile_format(part.format);
        const int64_t count = (part.rows + TILE - 1) / TILE, bytes = tile_bytes(format, columns_);
        uint8_t* data = arena->take(static_cast<size_t>(count * bytes));
        for (int64_t t = 0; t < count; t++) {
            const int64_t left = part.rows - t * TILE;
            tiles_.push_back(
                {data + t * bytes, format, static_cast<int32_t>(left < TILE ? left : TILE), column + t * TILE});
        }
        column += part.rows;
    }
    arena_ = std::move(arena);
}

void Matrix::read_row(int64_t row, float* out) const {
    int64_t tile = 0;
    for (const Part& part : parts_) {
        if (row >= part.rows) {
            row -= part.rows;
            tile += (part.rows + TILE - 1) / TILE;
            continue;
        }
        const Format format = part.format;
        const int lane = static_cast<int>(row % TILE);
        const uint8_t* data = packed() ? tiles_[static_cast<size_t>(tile + row / TILE)].data
                                       : part.data + row * row_bytes(format, columns_);
        if (format <= BF16) {
            const int size = plain_size(format);
            const int64_t step = packed() ? TILE * size : size, start = packed() ? lane * size : 0;
            for (int64_t k = 0; k < columns_; k++) out[k] = plain_value(format, data + start + k * step);
        } else {
            with_format(format, [&](auto constant) {
                if (packed()) return unpack_codes_row<constant()>(data, lane, columns_, out);
                for (int64_t b = 0; b < columns_ / BLOCK; b++) {
                    Codes codes;
                    take_apart<constant()>(data, b, codes);
                    values_of<constant()>(codes, out + b * BLOCK);
                }
            });
        }
        return;
    }
}

}  // namespace unspool

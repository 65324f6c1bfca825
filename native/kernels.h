// The kernels, compiled for each instruction set, behind one table of pointers.
#pragma once
#include "formats.h"

namespace unspool {

enum Isa : int { PLAIN, AVX2, AVX512 };
enum KvType : int { KV_Q8, KV_F16, KV_F32 };
enum Activation : int { NO_ACTIVATION, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, CLAMPED_SWIGLU };

constexpr int SPLIT =
    256;  // keys per split: each split's softmax has its own state; splits begin at position 0 and are merged in order

// Integer keys have most channels in 8 bits (narrow), and those that affect scores most in 16 (wide).
constexpr int narrow_channels(int head_dim) { return head_dim * 3 / 16 * 4; }
constexpr int key_words(int head_dim) {
    return narrow_channels(head_dim) / 4 + (head_dim - narrow_channels(head_dim) + 1) / 2;
}

// The address of one layer's keys and values of one KV head. Keys: [channel][token]; values: [token][padded channel].
// Integers lie in words that are multiplied together, followed by a float32 scale per token: keys [quad of narrow
// channels][token][4], then [pair of wide channels][token][2]; values [quad of tokens][padded channel][4]. If the block
// size is not a multiple of sixteen, both are [token][channel] and are gathered.
struct KvView {
    const uint8_t* base;  // of this layer and head in block 0
    int64_t block_stride;
    int64_t values;  // offset from keys to values
    int block_size;
    int head_dim;    // channels of a key
    int value_dim;   // channels of a value
    int padded_dim;  // channels of a value, rounded up to a multiple of 16
    KvType type;
    // For integer keys: the unit of narrow channels is 2^finer of the wide ones'; wide integers are at most the limit.
    int finer;
    float limit;
};

// Queries that read one KV head of one sequence in the same pass over its keys.
struct Queries {
    const float* q;        // [count][head_dim], rotated; for integer keys in the order of the keys' channels
    int count;             // at most Kernels::max_queries
    const int32_t* first;  // first key that each query may see
    const int32_t* last;   // last key that each query may see: its position
    const int32_t* table;  // the sequence's blocks
    float scale;
    float softcap;  // 0: none
    bool base2;     // maxima and weights are powers of 2 instead of e
    // For integer keys, from Kernels::prepare: [words of channels][max_queries], initial sums, the scale of a product.
    const int32_t* words;
    const int32_t* starts;
    const float* factors;
};

// The first two halves of a head's channels are rotated in pairs; the other channels are unchanged.
struct Rotation {
    const float *cos, *sin;
    int half;
    bool interleaved;
};

// Channel i comes from order[i], multiplied by times[i]; if order is null, channels stay unchanged.
struct Arrangement {
    const int32_t* order;
    const float* times;
};

constexpr int MOST_ROWS = 16;  // the largest of any kernel's row_counts

// The places where some row of a panel has an outlier, in order, and each row's value there: zero if it has none.
struct OutlierColumns {
    int count = 0;
    const int32_t* places = nullptr;
    const float* values = nullptr;  // [place][rows]
    // For rows with integer scales, whose number of places is even: [pair of places][rows][2], in units of each row.
    const int16_t* pairs = nullptr;
    const float* units = nullptr;  // [rows]
};

// A panel: a few rows that a kernel processes together.
struct Panel {
    int rows = 0;
    const float* f32 = nullptr;  // [k][rows]
    // [block][rows], one of these:
    const QBlock* q8 = nullptr;
    const FineBlock* fine = nullptr;
    const WholeBlock* whole = nullptr;
    float scales[MOST_ROWS] = {};  // of rows with integer scales
    OutlierColumns outliers;
};

// One token and one head of a recurrent layer, or some of the head's columns.
struct Recurrence {
    float* state;  // [rows][stride], of which this call updates some columns
    int64_t stride;
    int rows, columns;
    const float *q, *k;  // [rows]
    const float* v;      // [columns]
    float decay, beta, skip;
    bool is_delta;
    float* out;  // [columns]
};

struct Kernels {
    const char* name;
    // Numbers of rows that the tile kernels process at once, largest first, ending in 1.
    const int* row_counts;
    int max_queries;

    // out[r][16] = a tile of weights times each row r of a panel.
    using Tile = void (*)(const uint8_t* tile, int64_t k, const Panel& panel, float* out);
    Tile tiles[NUM_FORMATS];

    void (*norm)(const float* x, const float* weight, const float* residual, int n, float eps, float* out);
    // (x - mean) / deviation · weight + bias (or null), plus residual (or null).
    void (*layer_norm)(const float* x, const float* weight, const float* bias, const float* residual, int n, float eps,
                       float* out);
    // Blocks are written to out[0], out[stride], …; if outliers is null, none are stored separately.
    void (*quantize)(const float* x, int blocks, QBlock* out, int stride, Outliers* outliers);
    void (*quantize_fine)(const float* x, int blocks, FineBlock* out, int stride);
    // Consecutive rows of one panel, at most ROWS_TOGETHER; `room` has space for their magnitudes.
    void (*quantize_whole)(const float* x, int rows, int blocks, WholeBlock* out, int stride, Outliers* outliers,
                           float* room);
    // Copies rows of n (at most 16) values, 16 apart, to rows with the given stride.
    void (*gate)(const float* gate, const float* up, int rows, int n, Activation activation, float* out,
                 int64_t stride);
    // out = add (or null) + bias (or null) + part, in the same layout; add has the strides of out.
    void (*put)(const float* part, int rows, int n, const float* bias, const float* add, float* out, int64_t stride);
    void (*softcap)(float* x, int n, float cap);
    void (*activate)(float* x, int n, Activation activation);
    // out = x · activation(gate)
    void (*multiply)(const float* x, const float* gate, int n, Activation activation, float* out);

    // state = decay · state + k · (beta · (v - the decayed state's value for k, in a delta rule)); out = stateᵀq + skip
    // · v. The sums over rows have one fixed order.
    void (*recur)(const Recurrence& of);

    // A head of n channels, rotated and reordered; the buffer has room for as many channels after it.
    void (*turn)(const float* x, const Rotation& by, const Arrangement& as, int n, float* out);
    void (*store_kv)(const KvView& kv, int64_t block, int offset, const float* key, const float* value);
    void (*prepare)(const KvView& kv, Queries& queries, int32_t* room);
    // parts[count][padded_dim + 16]: Σ weight · value, then maximum and Σ weight, for the keys of one split.
    void (*attend)(const KvView& kv, const Queries& queries, int split, float* scratch, float* parts);
    void (*merge)(const Queries& queries, int split, int padded_dim, const float* parts, float* state);
    // Divides by the sum of weights, including the weight of `sink` (a score without a key, or null).
    void (*finish)(const float* state, int head_dim, int padded_dim, const float* sink, bool base2, float* out);

    // Multiply-adds of float32, and sums of products of 8-bit integers, without memory access; returns the operation
    // count.
    double (*spin_floats)(int64_t rounds);
    double (*spin_integers)(int64_t rounds);
};

// For Kernels::quantize_whole: one number per block of a row, rounded up to a multiple of sixteen.
constexpr int ROWS_TOGETHER = 4;
constexpr int magnitudes_room(int blocks) { return (blocks + TILE - 1) / TILE * TILE; }

// For Kernels::prepare: words of at least two channels, and two numbers per query.
inline constexpr int prepare_room(int head_dim, int max_queries) { return max_queries * ((head_dim + TILE) / 2 + 2); }

// Weights in float32 and in at most 16 bits; then sixteen keys, or a split's keys and values as integers, with scales.
inline constexpr int attend_scratch_floats(int head_dim, int max_queries) {
    return max_queries * SPLIT * 3 / 2 + (head_dim + TILE) * SPLIT * 3 / 4 + 2 * SPLIT + TILE * 4;
}

const Kernels* kernels_plain();
#ifdef UNSPOOL_X86
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
#endif

}  // namespace unspool

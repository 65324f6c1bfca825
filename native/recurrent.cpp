// Layers with a state per sequence. They process token by token in one order, the same for prompts and single tokens.
// Threads divide channels and heads, never tokens.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.h"

namespace unspool {

namespace {

constexpr int COLUMNS = 64;  // channels per unit

struct BySequence : Instruction {
    Operand out;
    int64_t tiles;  // per sequence

    bool varies() const override { return true; }  // with the number of sequences
    int64_t units(const Program&, const Step& step) const override { return step.sequences * tiles; }

    // The inputs and outputs within a slot, for the rows of a sequence.
    static bool is_first(const Step& step, int64_t sequence) {
        return step.positions[step.starts[sequence]] == 0;
    }
    static int32_t saved_to(const Step& step, int64_t row) { return step.num_saves ? step.saves[row] : -1; }
};

struct ShortConv : BySequence {
    Operand x;
    int width;
    ConvShape shape;
    std::vector<float> weight;  // [taps][channels]

    float* state(const Program& program, int32_t slot) const {
        return reinterpret_cast<float*>(program.kv().state(slot, shape.layer) + shape.offset);
    }

    int64_t scratch_bytes() const { return 4 * COLUMNS * (shape.taps + 1) + 64; }

    // The last `taps` inputs are in a ring buffer; y is the result.
    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* rows = program.floats(x, step, thread);
        float* outs = program.floats(out, step, thread);
        float* const ring = reinterpret_cast<float*>(program.scratch(thread));
        float* const y = ring + COLUMNS * shape.taps;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t sequence = unit / tiles;
            const int from = static_cast<int>(unit % tiles) * COLUMNS, count = std::min(COLUMNS, shape.channels - from);
            const int past = shape.taps - 1;
            float* const kept = state(program, step.states[sequence]) + from;
            if (is_first(step, sequence)) memset(ring, 0, static_cast<size_t>(COLUMNS * past) * 4);
            else
                for (int j = 0; j < past; j++)
                    memcpy(ring + j * COLUMNS, kept + j * shape.channels, static_cast<size_t>(count) * 4);
            int newest = past;  // index in the ring of the next input
            for (int64_t r = step.starts[sequence]; r < step.starts[sequence + 1]; r++) {
                const float* row = rows + r * width + from;
                float* input = ring + newest * COLUMNS;
                memcpy(input, row + shape.start, static_cast<size_t>(count) * 4);
                if (shape.before >= 0)
                    for (int c = 0; c < count; c++) input[c] *= row[shape.before + c];
                const int oldest = (newest + 1) % shape.taps;
                add_up(ring, oldest, from, count, y);
                program.kernels().activate(y, count, shape.activation);
                float* to = outs + r * shape.channels + from;
                if (shape.after >= 0)
                    for (int c = 0; c < count; c++) to[c] = y[c] * row[shape.after + c];
                else memcpy(to, y, static_cast<size_t>(count) * 4);
                newest = oldest;
                if (const int32_t slot = saved_to(step, r); slot >= 0)
                    put(ring, newest, state(program, slot) + from, count);
            }
            put(ring, newest, kept, count);
        }
    }

    // From the oldest input to the newest, then the bias.
    void add_up(const float* ring, int oldest, int from, int count, float* y) const {
        for (int j = 0; j < shape.taps; j++) {
            const float* input = ring + (oldest + j) % shape.taps * COLUMNS;
            const float* factors = weight.data() + j * shape.channels + from;
            if (j == 0)
                for (int c = 0; c < count; c++) y[c] = input[c] * factors[c];
            else
                for (int c = 0; c < count; c++) y[c] += input[c] * factors[c];
        }
        if (shape.bias)
            for (int c = 0; c < count; c++) y[c] += shape.bias[from + c];
    }

    // All inputs except the one that the next input replaces, oldest first.
    void put(const float* ring, int newest, float* to, int count) const {
        for (int j = 0; j + 1 < shape.taps; j++)
            memcpy(to + j * shape.channels, ring + (newest + 1 + j) % shape.taps * COLUMNS,
                   static_cast<size_t>(count) * 4);
    }
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x · scale / |x|; the squares are added in sixteen partial sums.
void normalize(const float* x, int n, float eps, float scale, float* out) {
    float sums[TILE] = {};
    for (int i = 0; i < n; i += TILE)
        for (int j = 0; j < std::min(TILE, n - i); j++) sums[j] += x[i + j] * x[i + j];
    for (int half = TILE / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    const float factor = scale / std::sqrt(sums[0] + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * factor;
}

struct Recurrent : BySequence {
    Operand x, gates;
    RecurrenceShape shape;

    int64_t tiles_of_head() const { return (shape.value_dim + COLUMNS - 1) / COLUMNS; }
    int64_t head_floats() const { return static_cast<int64_t>(shape.key_dim) * shape.value_dim; }
    int row_width() const { return 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim; }
    int64_t scratch_bytes() const { return 8 * shape.key_dim + 64; }
    int key_head(int head) const {
        return shape.tiled ? head % shape.key_heads : head / (shape.heads / shape.key_heads);
    }
    float* state(const Program& program, int32_t slot, int head, int from) const {
        uint8_t* base = program.kv().state(slot, shape.layer) + shape.offset;
        return reinterpret_cast<float*>(base) + head * head_floats() + from;
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        for (int64_t unit = begin; unit < end; unit++) {
            const int head = static_cast<int>(unit % tiles / tiles_of_head());
            run_tile(program, step, thread, unit / tiles, head, static_cast<int>(unit % tiles_of_head()) * COLUMNS);
        }
    }

    void run_tile(Program& program, const Step& step, int thread, int64_t sequence, int head, int from) {
        Recurrence next{};
        next.state = state(program, step.states[sequence], head, from);
        next.stride = shape.value_dim, next.rows = shape.key_dim;
        next.columns = std::min(COLUMNS, shape.value_dim - from);
        next.skip = shape.skip ? shape.skip[head] : 0.0f, next.is_delta = shape.is_delta;
        if (is_first(step, sequence))
            for (int row = 0; row < next.rows; row++)
                memset(next.state + row * next.stride, 0, static_cast<size_t>(next.columns) * 4);
        const float* rows = program.floats(x, step, thread);
        float* outs = program.floats(out, step, thread);
        for (int64_t r = step.starts[sequence]; r < step.starts[sequence + 1]; r++) {
            read(program, step, thread, rows + r * row_width(), r, head, from, next);
            next.out = outs + r * shape.heads * shape.value_dim + head * shape.value_dim + from;
            program.kernels().recur(next);
            if (const int32_t slot = saved_to(step, r); slot >= 0) {
                float* to = state(program, slot, head, from);
                for (int row = 0; row < next.rows; row++)
                    memcpy(to + row * next.stride, next.state + row * next.stride,
                           static_cast<size_t>(next.columns) * 4);
            }
        }
    }

    // A head's inputs from one row.
    void read(Program& program, const Step& step, int thread, const float* row, int64_t r, int head, int from,
              Recurrence& next) const {
        const int at = key_head(head) * shape.key_dim;
        const float* gate = program.floats(gates, step, thread) + r * shape.heads * (shape.is_delta ? 2 : 1);
        const float dt = softplus(gate[(shape.is_delta ? shape.heads : 0) + head] + shape.bias[head]);
        next.decay = std::exp(shape.rate[head] * dt);
        next.q = row + shape.q + at, next.k = row + shape.k + at;
        next.v = row + shape.v + head * shape.value_dim + from;
        next.beta = dt;
        if (!shape.is_delta) return;
        next.beta = 1.0f / (1.0f + std::exp(-gate[head]));
        float* const unit = reinterpret_cast<float*>(program.scratch(thread));
        const float scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));
        normalize(next.q, shape.key_dim, shape.eps, scale, unit);
        normalize(next.k, shape.key_dim, shape.eps, 1.0f, unit + shape.key_dim);
        next.q = unit, next.k = unit + shape.key_dim;
    }
};

}  // namespace

void Program::short_conv(Operand x, int width, ConvShape shape, Operand out) {
    auto conv = std::make_unique<ShortConv>();
    conv->x = x, conv->width = width, conv->shape = shape, conv->out = out;
    conv->tiles = (shape.channels + COLUMNS - 1) / COLUMNS;
    for (int j = 0; j < shape.taps; j++)
        for (int c = 0; c < shape.channels; c++) conv->weight.push_back(shape.weight[c * shape.taps + j]);
    want_scratch(conv->scratch_bytes());
    instructions_.push_back(std::move(conv));
}

void Program::recurrence(Operand x, Operand gates, RecurrenceShape shape, Operand out) {
    auto recurrent = std::make_unique<Recurrent>();
    recurrent->x = x, recurrent->gates = gates, recurrent->shape = shape, recurrent->out = out;
    recurrent->tiles = shape.heads * recurrent->tiles_of_head();
    want_scratch(recurrent->scratch_bytes());
    instructions_.push_back(std::move(recurrent));
}

}  // namespace unspool

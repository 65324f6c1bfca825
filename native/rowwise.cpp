// Operations on rows of float32, element by element or part by part.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.h"

namespace unspool {

namespace {

constexpr int64_t FEW_ROWS = 8;  // rows taken at once

struct RowByRow : Instruction {
    Operand out;

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(out, step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        return program.cut_rows(out, units, thread);
    }
};

struct Multiply : RowByRow {
    Operand x, gate;
    int width;
    Activation activation;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* values = program.floats(x, step, thread);
        const float* gates = program.floats(gate, step, thread);
        float* to = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t at = program.row_at(out, unit) * width;
            program.kernels().multiply(values + at, gates + at, width, activation, to + at);
        }
    }
};

struct Arrange : RowByRow {
    Operand x;
    int width, out_width;
    std::vector<RowPart> parts;
    const float* weight;
    float eps;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* rows = program.floats(x, step, thread);
        float* outs = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = program.row_at(out, unit);
            put_together(program.kernels(), rows + row * width, outs + row * out_width);
        }
    }

    void put_together(const Kernels& kernels, const float* row, float* to) const {
        const float* next = weight;
        for (const RowPart& part : parts) {
            const float* from = row + part.start;
            if (part.kind == RowPart::COPY) {
                memcpy(to, from, static_cast<size_t>(part.width) * 4);
            } else {
                if (part.kind == RowPart::SCALED)
                    for (int i = 0; i < part.width; i++) to[i] = from[i] * next[i];
                else if (part.kind == RowPart::RMS) kernels.norm(from, next, nullptr, part.width, eps, to);
                else kernels.layer_norm(from, next, nullptr, nullptr, part.width, eps, to);
                next += part.width;
            }
            to += part.width;
        }
    }
};

struct Join : RowByRow {
    Operand x, y;
    int x_width, y_width;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* first = program.floats(x, step, thread);
        const float* second = program.floats(y, step, thread);
        float* outs = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = program.row_at(out, unit);
            float* to = outs + row * (x_width + y_width);
            memcpy(to, first + row * x_width, static_cast<size_t>(x_width) * 4);
            memcpy(to + x_width, second + row * y_width, static_cast<size_t>(y_width) * 4);
        }
    }
};

struct GivenRows : RowByRow {
    int width;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        float* outs = program.floats(out, step, thread);
        const size_t bytes = static_cast<size_t>(width) * 4;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t at = program.row_at(out, unit) * width;
            if (step.given) memcpy(outs + at, step.given + at, bytes);
            else memset(outs + at, 0, bytes);  // the step that measures keys has tokens only
        }
    }
};

// The sum of f(x) over a row, in a fixed order: eight partial sums.
template <typename F>
double sum_of(const float* x, int n, F f) {
    constexpr int LANES = 8;
    double sums[LANES] = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += f(static_cast<double>(x[i + lane]));
    for (; i < n; i++) sums[0] += f(static_cast<double>(x[i]));
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

double mean_square(const float* x, int n) {
    return sum_of(x, n, [](double value) { return value * value; }) / n;
}

struct Add : RowByRow {
    Operand x, y;
    int width, y_width, start;
    float x_scale, y_scale;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* first = program.floats(x, step, thread);
        const float* second = program.floats(y, step, thread);
        float* outs = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = program.row_at(out, unit);
            const float *from = first + row * width, *added = second + row * y_width;
            float* to = outs + row * width;
            for (int i = 0; i < start; i++) to[i] = x_scale * from[i];
            for (int part = start; part < width; part += y_width)
                for (int i = 0; i < y_width; i++) to[part + i] = x_scale * from[part + i] + y_scale * added[i];
        }
    }
};

struct Cut : RowByRow {
    Operand x;
    int width;
    double deviations;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* rows = program.floats(x, step, thread);
        float* outs = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t at = program.row_at(out, unit) * width;
            const float* from = rows + at;
            const double mean = sum_of(from, width, [](double value) { return value; }) / width;
            const double variance =
                sum_of(from, width, [mean](double value) { return (value - mean) * (value - mean); }) / width;
            const float cutoff = static_cast<float>(mean + deviations * std::sqrt(variance));
            for (int i = 0; i < width; i++) outs[at + i] = std::max(from[i] - cutoff, 0.0f);
        }
    }
};

struct Level : RowByRow {
    Operand x, like;
    int width, part;
    double least;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* rows = program.floats(x, step, thread);
        const float* models = program.floats(like, step, thread);
        float* outs = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = program.row_at(out, unit);
            const float *model = models + row * part, *from = rows + row * width;
            float* to = outs + row * (part + width);
            memcpy(to, model, static_cast<size_t>(part) * 4);
            const double wanted = mean_square(model, part);
            for (int start = 0; start < width; start += part) {
                const double size = std::max(mean_square(from + start, part), least);
                const float by = static_cast<float>(std::sqrt(wanted / size));
                for (int i = start; i < start + part; i++) to[part + i] = from[i] * by;
            }
        }
    }
};

struct Mix : RowByRow {
    Operand x, logits, residual;
    int part, inputs, outputs, num_logits;
    const float* table;  // [outputs][inputs][num_logits]
    float bias;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* rows = program.floats(x, step, thread);
        const float* told = program.floats(logits, step, thread);
        const float* added = program.floats(residual, step, thread);
        float* outs = program.floats(out, step, thread);
        std::vector<float> gates(static_cast<size_t>(num_logits));
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = program.row_at(out, unit);
            for (int k = 0; k < num_logits; k++) gates[k] = std::tanh(told[row * num_logits + k]);
            mix(rows + row * inputs * part, gates.data(), added + row * outputs * part, outs + row * outputs * part);
        }
    }

    void mix(const float* from, const float* gates, const float* added, float* to) const {
        memcpy(to, added, static_cast<size_t>(outputs) * part * 4);
        for (int i = 0; i < outputs; i++)
            for (int j = 0; j < inputs; j++) {
                float by = bias;
                for (int k = 0; k < num_logits; k++) by += table[(i * inputs + j) * num_logits + k] * gates[k];
                for (int c = 0; c < part; c++) to[i * part + c] += by * from[j * part + c];
            }
    }
};

}  // namespace

void Program::given(int width, Operand out) {
    auto given = std::make_unique<GivenRows>();
    given->width = width, given->out = out;
    given_width_ = width;
    instructions_.push_back(std::move(given));
}

void Program::add(Operand x, int width, Operand y, int y_width, float x_scale, float y_scale, int start, Operand out) {
    auto add = std::make_unique<Add>();
    add->x = x, add->width = width, add->y = y, add->y_width = y_width, add->start = start, add->out = out;
    add->x_scale = x_scale, add->y_scale = y_scale;
    instructions_.push_back(std::move(add));
}

void Program::cut(Operand x, int width, float deviations, Operand out) {
    auto cut = std::make_unique<Cut>();
    cut->x = x, cut->width = width, cut->deviations = deviations, cut->out = out;
    instructions_.push_back(std::move(cut));
}

void Program::level(Operand x, int width, Operand like, int part, float least, Operand out) {
    auto level = std::make_unique<Level>();
    level->x = x, level->width = width, level->like = like, level->part = part, level->least = least, level->out = out;
    instructions_.push_back(std::move(level));
}

void Program::mix(Operand x, Operand logits, MixShape of, Operand residual, Operand out) {
    auto mix = std::make_unique<Mix>();
    mix->x = x, mix->logits = logits, mix->residual = residual, mix->out = out;
    mix->part = of.part, mix->inputs = of.inputs, mix->outputs = of.outputs, mix->num_logits = of.num_logits;
    mix->table = of.table, mix->bias = of.bias;
    instructions_.push_back(std::move(mix));
}

void Program::join(Operand x, int x_width, Operand y, int y_width, Operand out) {
    auto join = std::make_unique<Join>();
    join->x = x, join->x_width = x_width, join->y = y, join->y_width = y_width, join->out = out;
    instructions_.push_back(std::move(join));
}

void Program::multiply(Operand x, Operand gate, int width, Activation activation, Operand out) {
    auto multiply = std::make_unique<Multiply>();
    multiply->x = x, multiply->gate = gate, multiply->width = width, multiply->activation = activation;
    multiply->out = out;
    instructions_.push_back(std::move(multiply));
}

void Program::arrange(Operand x, int width, std::vector<RowPart> parts, const float* weight, float eps, Operand out) {
    auto arrange = std::make_unique<Arrange>();
    arrange->x = x, arrange->width = width, arrange->weight = weight, arrange->eps = eps, arrange->out = out;
    arrange->out_width = 0;
    for (const RowPart& part : parts) arrange->out_width += part.width;
    arrange->parts = std::move(parts);
    instructions_.push_back(std::move(arrange));
}

}  // namespace unspool

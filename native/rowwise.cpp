// What is done to rows of float32 value by value, or part by part.
#include <cstring>

#include "program.h"

namespace unspool {

namespace {

constexpr int64_t FEW_ROWS = 8;  // taken at once

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
            else memset(outs + at, 0, bytes);  // a step that measures keys is of tokens alone
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

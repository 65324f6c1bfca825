// Mixtures of experts. Rows are routed first. Then the inputs and outputs of experts have one place per use of an
// expert by a row, expert after expert, so that each expert's weights are read once per step, however many rows use it.
//
//   route              which experts each row uses, and its places; one thread
//   spread             each place's row, in the format that experts read
//   gate, up           for each expert its gate and up projections, or only the latter, over the expert's places
//   spread, project    the same for its down projection
//   gather             each row's places, weighted and added up in the order of the router's choice
//
// A place's bits depend only on its row and its expert: kernels give the same bits for panels of any size.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "outliers.h"
#include "program.h"

namespace unspool {

// The rows of each expert in the current step.
struct Routed {
    RoutingShape shape;
    std::vector<int32_t> begin;     // each expert's first place, and the end
    std::vector<int32_t> row;       // of each place
    std::vector<int32_t> place;     // [row][use], in the order of the router's choice
    std::vector<float> weight;      // [row][use]
    std::vector<int32_t> first, size;  // of the panel that contains a place
    std::vector<int32_t> active;    // experts that have a row
};

namespace {

constexpr int64_t FEW_ROWS = 8;

void score(const RoutingShape& shape, const float* logits, float* scores) {
    const int n = shape.experts;
    if (shape.sigmoid) {
        for (int i = 0; i < n; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        return;
    }
    const float most = *std::max_element(logits, logits + n);
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += scores[i] = std::exp(logits[i] - most);
    for (int i = 0; i < n; i++) scores[i] /= sum;
}

// Experts outside the best groups can no longer be chosen.
void close_groups(const RoutingShape& shape, float* choice) {
    const int size = shape.experts / shape.groups;
    std::vector<float> sums, best(static_cast<size_t>(size));
    for (int g = 0; g < shape.groups; g++) {
        std::partial_sort_copy(choice + g * size, choice + (g + 1) * size, best.begin(), best.end(),
                               std::greater<float>());
        float sum = 0.0f;
        for (int i = std::min(shape.group_top, size) - 1; i >= 0; i--) sum += best[static_cast<size_t>(i)];
        sums.push_back(sum);
    }
    std::vector<int> order(sums.size());
    for (size_t g = 0; g < order.size(); g++) order[g] = static_cast<int>(g);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return sums[static_cast<size_t>(a)] > sums[static_cast<size_t>(b)]; });
    for (size_t i = static_cast<size_t>(shape.used_groups); i < order.size(); i++)
        std::fill_n(choice + order[i] * size, size, -std::numeric_limits<float>::infinity());
}

// The experts of one row, best first; of equal ones the lower number first; a NaN is never better than a number.
void choose(const RoutingShape& shape, const float* logits, float* scores, float* choice, int32_t* experts,
            float* weights) {
    score(shape, logits, scores);
    for (int i = 0; i < shape.experts; i++) choice[i] = scores[i] + (shape.choice_bias ? shape.choice_bias[i] : 0.0f);
    if (shape.groups > 1) close_groups(shape, choice);
    float sum = 0.0f;
    for (int use = 0; use < shape.used; use++) {
        int best = -1;
        for (int i = 0; i < shape.experts; i++)
            if (!std::isnan(choice[i]) && (best < 0 || choice[i] > choice[best])) best = i;
        if (best < 0)  // only NaN is left: take any expert that is not used yet
            for (int i = 0; best < 0; i++)
                if (std::find(experts, experts + use, i) == experts + use) best = i;
        experts[use] = best;
        weights[use] = scores[best];
        sum += scores[best];
        choice[best] = std::numeric_limits<float>::quiet_NaN();
    }
    const float by = shape.normalized ? sum + 1e-20f : 1.0f;
    for (int use = 0; use < shape.used; use++) {
        weights[use] = weights[use] / by * shape.scale;
        if (shape.expert_scale) weights[use] *= shape.expert_scale[experts[use]];
    }
}

struct Route : Instruction {
    Operand scores;
    Routed* routed;

    int64_t units(const Program& program, const Step& step) const override {
        return program.rows_of(scores, step) ? 1 : 0;
    }

    void run(Program& program, const Step& step, int thread, int64_t, int64_t) override {
        const RoutingShape& shape = routed->shape;
        const int64_t rows = program.rows_of(scores, step), uses = rows * shape.used;
        const float* logits = program.floats(scores, step, thread);
        std::vector<float> room(2 * static_cast<size_t>(shape.experts));
        std::vector<int32_t> experts(static_cast<size_t>(uses));
        routed->weight.resize(static_cast<size_t>(uses));
        for (int64_t r = 0; r < rows; r++)
            choose(shape, logits + r * shape.experts, room.data(), room.data() + shape.experts,
                   experts.data() + r * shape.used, routed->weight.data() + r * shape.used);
        place(experts, program.kernels().row_counts);
    }

    // Places are ordered by expert, and within one expert by row.
    void place(const std::vector<int32_t>& experts, const int* counts) {
        Routed& to = *routed;
        const size_t uses = experts.size();
        to.begin.assign(static_cast<size_t>(to.shape.experts) + 1, 0);
        for (int32_t expert : experts) to.begin[static_cast<size_t>(expert) + 1]++;
        to.active.clear();
        for (size_t e = 0; e + 1 < to.begin.size(); e++) {
            if (to.begin[e + 1]) to.active.push_back(static_cast<int32_t>(e));
            to.begin[e + 1] += to.begin[e];
        }
        std::vector<int32_t> next(to.begin.begin(), to.begin.end() - 1);
        to.row.resize(uses), to.place.resize(uses), to.first.resize(uses), to.size.resize(uses);
        for (size_t use = 0; use < uses; use++) {
            const int32_t at = next[static_cast<size_t>(experts[use])]++;
            to.place[use] = at;
            to.row[static_cast<size_t>(at)] = static_cast<int32_t>(use) / to.shape.used;
        }
        for (int32_t expert : to.active) cut_panels(counts, to.begin[static_cast<size_t>(expert)],
                                                    to.begin[static_cast<size_t>(expert) + 1]);
    }

    // Places [from, to) in panels, the largest first.
    void cut_panels(const int* counts, int32_t from, int32_t to) {
        for (int32_t at = from; at < to; counts++)
            for (; to - at >= *counts; at += *counts)
                for (int32_t i = at; i < at + *counts; i++) {
                    routed->first[static_cast<size_t>(i)] = at;
                    routed->size[static_cast<size_t>(i)] = *counts;
                }
    }
};

// A place's row of 8-bit blocks.
BlockRow blocks_at(const Program& program, const Step& step, int thread, const Routed& routed, const Forms& forms,
                   int64_t width, int64_t place) {
    const int64_t blocks = blocks_of(forms.rows, width), bytes = block_bytes(forms.rows);
    const int64_t first = routed.first[static_cast<size_t>(place)];
    uint8_t* base = program.at(forms.q8, step, thread);
    uint8_t* outliers = base + static_cast<int64_t>(routed.row.size()) * blocks * bytes +
                        place * outliers_bytes(width / BLOCK);
    return {base + (first * blocks + (place - first)) * bytes, routed.size[static_cast<size_t>(place)],
            reinterpret_cast<Outliers*>(outliers)};
}

// The experts' input rows: places in 8 bits, from rows of the step or from places in float32.
struct Spread : Instruction {
    const Routed* routed;
    Operand x;
    bool from_places;
    int width;
    Forms out;

    int64_t units(const Program& program, const Step& step) const override {
        return program.rows_of(x, step) * routed->shape.used;
    }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const Kernels& kernels = program.kernels();
        const int blocks = width / BLOCK;
        auto* room = reinterpret_cast<float*>(program.scratch(thread));
        for (int64_t place = begin; place < end; place++) {
            const int64_t row = from_places ? place : routed->row[static_cast<size_t>(place)];
            const BlockRow to = blocks_at(program, step, thread, *routed, out, width, place);
            if (out.rows == WHOLE)
                kernels.quantize_whole(in + row * width, 1, blocks, to.whole(), to.stride, to.outliers, room);
            else kernels.quantize(in + row * width, blocks, to.coarse(), to.stride, to.outliers);
        }
    }
};

// Each expert's places times its weights. Units are tiles, with the same indices for every expert: a thread reads the
// same range of tiles of each active expert, in order.
struct ExpertProduct : Instruction {
    const Routed* routed;
    Forms x;
    bool from_places;  // rows in float32 are ordered by place, not by row
    std::vector<const Matrix*> experts;
    const float* bias;  // [expert][output feature], or null
    Operand out;        // [place][output feature]

    int64_t width() const { return experts[0]->columns(); }
    virtual int64_t tiles() const { return static_cast<int64_t>(experts[0]->tiles().size()); }

    int64_t units(const Program& program, const Step& step) const override {
        return program.rows_of(out, step) ? tiles() : 0;
    }
    bool by_halves(const Program& program, const Step& step) const override {
        return program.rows_of(out, step) <= FEW_ROWS;
    }
    int64_t grain(const Program& program, const Step&) const override {
        return tiles() / (8 * program.pool().threads()) + 1;
    }
    int64_t most(const Program& program, const Step&) const override { return tiles() / program.pool().threads() + 1; }

    int64_t scratch_bytes(const Kernels& kernels) const {
        const int most = kernels.row_counts[0];
        return gathering_bytes(width()) + most * outlier_columns_bytes(width(), most) + most * width() * 4 + 128;
    }

    // The places [first, first + count), which are one panel, in the kernels' format.
    Panel panel(const Program& program, const Step& step, int thread, int64_t first, int count) const {
        Panel result;
        result.rows = count;
        const int64_t k = width();
        uint8_t* scratch = program.scratch(thread);
        if (experts[0]->wants_q8()) {
            const BlockRow row = blocks_at(program, step, thread, *routed, x, k, first);
            if (x.rows == WHOLE) {
                result.whole = row.whole();
                for (int r = 0; r < count; r++) result.scales[r] = list_of(row.outliers, k, r)->scale;
            } else {
                result.q8 = row.coarse();
            }
            scratch = gather_outliers(row.outliers, k, count, x.rows == WHOLE, scratch, scratch + gathering_bytes(k),
                                      result.outliers);
        }
        if (experts[0]->wants_f32()) {
            const float* rows = program.floats(x.f32, step, thread);
            auto* values = reinterpret_cast<float*>(scratch);
            for (int r = 0; r < count; r++) {
                const int64_t row = from_places ? first + r : routed->row[static_cast<size_t>(first + r)];
                for (int64_t i = 0; i < k; i++) values[i * count + r] = rows[row * k + i];
            }
            result.f32 = values;
        }
        return result;
    }

    void multiply(const Program& program, const TileRef& tile, const Panel& panel, float* to) const {
        program.kernels().tiles[tile.format](tile.data, width(), panel, to);
    }

    // Calls each(tiles of the expert, its number, tile, first place, panel).
    template <class Each>
    void sweep(Program& program, const Step& step, int thread, int64_t begin, int64_t end, Each each) const {
        for (int32_t expert : routed->active) {
            const auto e = static_cast<size_t>(expert);
            const auto& of_expert = experts[e]->tiles();
            for (int64_t at = routed->begin[e]; at < routed->begin[e + 1];) {
                const int count = routed->size[static_cast<size_t>(at)];
                const Panel rows = panel(program, step, thread, at, count);
                for (int64_t tile = begin; tile < end; tile++) each(of_expert, expert, tile, at, rows);
                at += count;
            }
        }
    }
};

struct ExpertGate : ExpertProduct {
    Activation activation;

    int64_t tiles() const override { return static_cast<int64_t>(experts[0]->tiles().size()) / 2; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t half = experts[0]->rows() / 2, half_tiles = tiles();
        float* rows = program.floats(out, step, thread);
        sweep(program, step, thread, begin, end,
              [&](const std::vector<TileRef>& of, int32_t expert, int64_t unit, int64_t at, const Panel& p) {
                  alignas(64) float gates[MOST_ROWS * TILE], ups[MOST_ROWS * TILE];
                  const TileRef& tile = of[static_cast<size_t>(unit)];
                  multiply(program, tile, p, gates);
                  multiply(program, of[static_cast<size_t>(half_tiles + unit)], p, ups);
                  const float* add = bias ? bias + expert * 2 * half + tile.column : nullptr;
                  if (add) {
                      add_bias(gates, p.rows, tile.count, add);
                      add_bias(ups, p.rows, tile.count, add + half);
                  }
                  program.kernels().gate(gates, ups, p.rows, tile.count, activation,
                                         rows + at * half + tile.column, half);
              });
    }

    static void add_bias(float* rows, int count, int n, const float* bias) {
        for (int r = 0; r < count; r++)
            for (int i = 0; i < n; i++) rows[r * TILE + i] += bias[i];
    }
};

// activation(up · x), for experts without gates.
struct ExpertUp : ExpertProduct {
    Activation activation;

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t n = experts[0]->rows();
        float* rows = program.floats(out, step, thread);
        sweep(program, step, thread, begin, end,
              [&](const std::vector<TileRef>& of, int32_t expert, int64_t unit, int64_t at, const Panel& p) {
                  alignas(64) float part[MOST_ROWS * TILE];
                  const TileRef& tile = of[static_cast<size_t>(unit)];
                  float* to = rows + at * n + tile.column;
                  multiply(program, tile, p, part);
                  program.kernels().put(part, p.rows, tile.count, bias ? bias + expert * n + tile.column : nullptr,
                                        nullptr, to, n);
                  for (int r = 0; r < p.rows; r++) program.kernels().activate(to + r * n, tile.count, activation);
              });
    }
};

struct ExpertProject : ExpertProduct {
    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t n = experts[0]->rows();
        float* rows = program.floats(out, step, thread);
        sweep(program, step, thread, begin, end,
              [&](const std::vector<TileRef>& of, int32_t expert, int64_t unit, int64_t at, const Panel& p) {
                  alignas(64) float part[MOST_ROWS * TILE];
                  const TileRef& tile = of[static_cast<size_t>(unit)];
                  multiply(program, tile, p, part);
                  program.kernels().put(part, p.rows, tile.count, bias ? bias + expert * n + tile.column : nullptr,
                                        nullptr, rows + at * n + tile.column, n);
              });
    }
};

struct Gather : Instruction {
    const Routed* routed;
    Operand x, residual, out;
    int width;

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(out, step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int used = routed->shape.used;
        const float* in = program.floats(x, step, thread);
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        float* rows = program.floats(out, step, thread);
        for (int64_t r = begin; r < end; r++) {
            float* to = rows + r * width;
            if (add) memmove(to, add + r * width, static_cast<size_t>(width) * 4);
            else std::fill_n(to, width, 0.0f);
            for (int64_t use = r * used; use < (r + 1) * used; use++) {
                const float* from = in + static_cast<int64_t>(routed->place[static_cast<size_t>(use)]) * width;
                const float weight = routed->weight[static_cast<size_t>(use)];
                for (int i = 0; i < width; i++) to[i] += weight * from[i];
            }
        }
    }
};

// residual + sigmoid(logit) · x, with one logit per row.
struct ScaleRows : Instruction {
    Operand x, logit, residual, out;
    int width;

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(out, step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const float* logits = program.floats(logit, step, thread);
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        float* rows = program.floats(out, step, thread);
        for (int64_t r = begin; r < end; r++) {
            const float by = 1.0f / (1.0f + std::exp(-logits[r]));
            for (int64_t i = r * width; i < (r + 1) * width; i++) rows[i] = by * in[i] + (add ? add[i] : 0.0f);
        }
    }
};

}  // namespace

int Program::route(Operand scores, RoutingShape shape) {
    routed_.push_back(std::make_shared<Routed>());
    routed_.back()->shape = shape;
    auto route = std::make_unique<Route>();
    route->scores = scores, route->routed = routed_.back().get();
    instructions_.push_back(std::move(route));
    return static_cast<int>(routed_.size()) - 1;
}

void Program::spread(int routed, Operand x, bool from_places, int width, Forms out) {
    auto spread = std::make_unique<Spread>();
    spread->routed = routed_.at(static_cast<size_t>(routed)).get();
    spread->x = x, spread->from_places = from_places, spread->width = width, spread->out = out;
    want_scratch(magnitudes_room(width / BLOCK) * 4 + 64);
    instructions_.push_back(std::move(spread));
}

void Program::expert_gate(int routed, Forms x, std::vector<const Matrix*> experts, const float* bias,
                          Activation activation, Operand out) {
    auto gate = std::make_unique<ExpertGate>();
    gate->routed = routed_.at(static_cast<size_t>(routed)).get();
    gate->x = x, gate->from_places = false, gate->experts = std::move(experts), gate->bias = bias, gate->out = out;
    gate->activation = activation;
    want_scratch(gate->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(gate));
}

void Program::expert_up(int routed, Forms x, std::vector<const Matrix*> experts, const float* bias,
                        Activation activation, Operand out) {
    auto up = std::make_unique<ExpertUp>();
    up->routed = routed_.at(static_cast<size_t>(routed)).get();
    up->x = x, up->from_places = false, up->experts = std::move(experts), up->bias = bias, up->out = out;
    up->activation = activation;
    want_scratch(up->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(up));
}

void Program::expert_project(int routed, Forms x, std::vector<const Matrix*> experts, const float* bias, Operand out) {
    auto project = std::make_unique<ExpertProject>();
    project->routed = routed_.at(static_cast<size_t>(routed)).get();
    project->x = x, project->from_places = true, project->experts = std::move(experts), project->bias = bias;
    project->out = out;
    want_scratch(project->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(project));
}

void Program::gather_experts(int routed, Operand x, Operand residual, int width, Operand out) {
    auto gather = std::make_unique<Gather>();
    gather->routed = routed_.at(static_cast<size_t>(routed)).get();
    gather->x = x, gather->residual = residual, gather->width = width, gather->out = out;
    instructions_.push_back(std::move(gather));
}

void Program::scale_rows(Operand x, Operand logit, Operand residual, int width, Operand out) {
    auto scale = std::make_unique<ScaleRows>();
    scale->x = x, scale->logit = logit, scale->residual = residual, scale->width = width, scale->out = out;
    instructions_.push_back(std::move(scale));
}

}  // namespace unspool

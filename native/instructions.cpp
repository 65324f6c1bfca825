// The instructions of a program, and their units: output features for linear layers, rows for everything else.
// Attention is in attention.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "outliers.h"
#include "program.h"

namespace unspool {

namespace {

// The buffers for the forms of an activation's rows. Consecutive rows are written together.
struct Sink {
    const Program& program;
    const Step& step;
    const int thread;
    const Forms& forms;
    const int64_t width;
    float *f32, *spare;  // spare: scratch for ROWS_TOGETHER rows, followed by the magnitudes of their blocks

    static int64_t scratch_bytes(int64_t width) {
        return ROWS_TOGETHER * 4 * (width + magnitudes_room(static_cast<int>(width / BLOCK))) + 64;
    }

    Sink(const Program& program, const Step& step, int thread, const Forms& forms, int64_t width)
        : program(program),
          step(step),
          thread(thread),
          forms(forms),
          width(width),
          f32(forms.f32 ? program.floats(forms.f32, step, thread) : nullptr),
          spare(reinterpret_cast<float*>(program.scratch(thread))) {}

    // The number of rows from a unit on, and before `end`, that are consecutive in one panel.
    int together(Operand of, int64_t unit, int64_t end) const {
        const auto& panels = program.panels(forms).first;
        const int64_t first = program.row_at(of, unit);
        int count = 1;
        while (count < ROWS_TOGETHER && unit + count < end && program.row_at(of, unit + count) == first + count &&
               panels[static_cast<size_t>(first + count)] == panels[static_cast<size_t>(first)])
            count++;
        return count;
    }

    void put(const float* rows, int64_t first, int count) const {
        if (f32 && f32 + first * width != rows)
            memcpy(f32 + first * width, rows, static_cast<size_t>(count * width) * 4);
        if (!forms.q8) return;
        const Kernels& kernels = program.kernels();
        const int blocks = static_cast<int>(width / BLOCK);
        if (forms.rows == WHOLE) {
            const BlockRow out = program.block_row(forms, step, thread, width, first);
            return kernels.quantize_whole(rows, count, blocks, out.whole(), out.stride, out.outliers,
                                          spare + ROWS_TOGETHER * width);
        }
        for (int r = 0; r < count; r++) {
            const BlockRow out = program.block_row(forms, step, thread, width, first + r);
            const float* row = rows + r * width;
            if (forms.rows == FINE) kernels.quantize_fine(row, blocks, out.fine(), out.stride);
            else kernels.quantize(row, blocks, out.coarse(), out.stride, out.outliers);
        }
    }
};

constexpr int64_t FEW_ROWS = 8;  // rows taken at once, for instructions whose units are rows

struct Embed : Instruction {
    const Matrix* table;
    float scale;
    const Matrix* positions;  // or null: rows that are added by position
    Operand out;

    int64_t units(const Program&, const Step& step) const override { return step.rows; }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    int64_t cut(const Program& program, int64_t units, int thread) const override {
        return program.cut_rows(out, units, thread);
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t width = table->columns();
        float* rows = program.floats(out, step, thread);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t r = program.row_at(out, unit);
            float* row = rows + r * width;
            table->read_row(step.ids[r] < table->rows() ? step.ids[r] : 0, row);
            if (scale != 1.0f)
                for (int64_t i = 0; i < width; i++) row[i] *= scale;
            if (!positions) continue;
            float* added = reinterpret_cast<float*>(program.scratch(thread));
            positions->read_row(std::min<int64_t>(step.positions[r], positions->rows() - 1), added);
            for (int64_t i = 0; i < width; i++) row[i] += added[i];
        }
    }
};

struct Norm : Instruction {
    Operand x, residual;
    NormOf of;
    int width;
    Forms out;

    Operand any() const { return out.f32 ? out.f32 : out.q8; }

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(any(), step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }
    bool copied(const Program& program, const Step& step) const override { return program.is_copied(any(), step); }
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        return program.cut_rows(any(), units, thread);
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        const Sink sink(program, step, thread, out, width);
        for (int64_t unit = begin, count; unit < end; unit += count) {
            count = sink.together(any(), unit, end);
            const int64_t first = program.row_at(any(), unit);
            float* rows = sink.f32 ? sink.f32 + first * width : sink.spare;
            for (int64_t r = 0; r < count; r++) {
                const int64_t at = (first + r) * width, next = unit + r + 1;
                if (next < end) prefetch_for_read(in + program.row_at(any(), next) * width, width * 4);
                const float* beside = add ? add + at : nullptr;
                float* to = rows + r * width;
                if (of.centered) program.kernels().layer_norm(in + at, of.weight, of.bias, beside, width, of.eps, to);
                else program.kernels().norm(in + at, of.weight, beside, width, of.eps, to);
            }
            sink.put(rows, first, static_cast<int>(count));
        }
    }
};

struct Take : Instruction {
    Operand x;
    int width;
    Forms out;

    int64_t units(const Program&, const Step& step) const override { return step.num_logits; }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const Sink sink(program, step, thread, out, width);
        for (int64_t r = begin; r < end; r++) sink.put(in + static_cast<int64_t>(step.logit_rows[r]) * width, r, 1);
    }
};

struct Quantize : Instruction {
    Operand x;
    int width;
    Forms out;

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(out.q8, step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }
    bool copied(const Program& program, const Step& step) const override { return program.is_copied(out.q8, step); }
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        return program.cut_rows(out.q8, units, thread);
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const Sink sink(program, step, thread, out, width);
        for (int64_t unit = begin, count; unit < end; unit += count) {
            count = sink.together(out.q8, unit, end);
            const int64_t first = program.row_at(out.q8, unit), next = unit + count;
            if (next < end) prefetch_for_read(in + program.row_at(out.q8, next) * width, count * width * 4);
            sink.put(in + first * width, first, static_cast<int>(count));
        }
    }
};

// --- Products --------------------------------------------------------------------------------------------------------

constexpr int64_t GROUP_BYTES = 256 << 10;  // of weights that stay in the cache while all rows are multiplied by them

// With many rows, each panel is made once, and not for every group of weights that it is multiplied by.
constexpr int64_t gathered_bytes(int64_t width, int rows) {
    return (static_cast<int64_t>(sizeof(Panel)) + outlier_columns_bytes(width, rows) + 63) / 64 * 64;
}

struct Product : Instruction {
    Forms x;
    const Matrix* weight;
    std::vector<int64_t> bytes_before;  // sum over all units before each: tiles, or pairs of gate and up projection

    void measure(int64_t count) {
        const auto& tiles = weight->tiles();
        const size_t together = tiles.size() / static_cast<size_t>(count);
        bytes_before.assign(1, 0);
        for (size_t unit = 0; unit < static_cast<size_t>(count); unit++) {
            int64_t bytes = 0;
            for (size_t i = 0; i < together; i++)
                bytes += tile_bytes(tiles[unit + i * static_cast<size_t>(count)].format, weight->columns());
            bytes_before.push_back(bytes_before.back() + bytes);
        }
    }

    int64_t num_units() const { return static_cast<int64_t>(bytes_before.size()) - 1; }
    Operand input() const { return x.q8 ? x.q8 : x.f32; }

    // If rows are divided into parts, a unit of the program is a group of these units times a panel of rows, ordered by
    // part and group. A thread that takes units from another core then reads few of its rows, and weights that it has
    // just used.
    int64_t num_groups() const { return std::min(num_units(), (bytes_before.back() + GROUP_BYTES - 1) / GROUP_BYTES); }
    int64_t group_at(int64_t group) const { return num_units() * group / num_groups(); }

    int64_t units(const Program& program, const Step& step) const override {
        if (rows(program, step) == 0) return 0;
        return program.parted(input()) ? program.parts().first_panel.back() * num_groups() : num_units();
    }
    virtual int64_t rows(const Program& program, const Step& step) const = 0;

    // Shares with equal numbers of bytes.
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        if (units == 0) return 0;
        if (program.parted(input()))
            return program.cut_parts(thread, [&](int part) {
                return program.parts().first_panel[static_cast<size_t>(part)] * num_groups();
            });
        const int64_t goal = bytes_before.back() * thread / program.pool().threads();
        const auto at = std::lower_bound(bytes_before.begin(), bytes_before.end(), goal);
        return std::min<int64_t>(at - bytes_before.begin(), units);
    }

    // Few rows: a thread takes its whole share, or halves of the rest down to an eighth. Many rows: as much as stays in
    // the cache while all rows are multiplied; with parts, less and less towards the end, so that waits are short.
    bool by_halves(const Program& program, const Step& step) const override { return rows(program, step) <= FEW_ROWS; }
    int64_t grain(const Program& program, const Step& step) const override {
        if (program.parted(input())) return 1;
        return rows(program, step) <= FEW_ROWS ? eighth(program) : units_cached(program);
    }
    int64_t most(const Program& program, const Step&) const override {
        return program.parted(input()) ? program.parts().first_panel[1] : 0;
    }
    int64_t eighth(const Program& program) const { return num_units() / (8 * program.pool().threads()) + 1; }
    int64_t units_cached(const Program& program) const {
        return std::min(eighth(program), std::max<int64_t>(1, GROUP_BYTES * num_units() / bytes_before.back()));
    }

    bool gathers(const Program& program, const Step& step) const {
        return weight->wants_q8() && x.rows != FINE && rows(program, step) > FEW_ROWS;
    }
    static Panel& gathered(const Program& program, int64_t first) {
        return *reinterpret_cast<Panel*>(program.gathered(first));
    }

    int64_t scratch_bytes(const Kernels& kernels) const {
        const int64_t k = weight->columns();
        const int most = kernels.row_counts[0];
        const int64_t gathering = gathering_bytes(k) + most * outlier_columns_bytes(k, most) + 64;
        return (weight->wants_f32() ? most * k * 4 + 64 : 0) + (weight->wants_q8() ? gathering : 0);
    }

    // Rows [first, first + count) in 8 bits, with their outliers in `room`. Returns the end of the used part.
    uint8_t* add_blocks(const Program& program, const Step& step, int thread, int64_t first, int count, uint8_t* room,
                        Panel& out) const {
        const int64_t k = weight->columns();
        const BlockRow row = program.block_row(x, step, thread, k, first);
        out.rows = count;
        if (x.rows == WHOLE) {
            out.whole = row.whole();
            for (int r = 0; r < count; r++) out.scales[r] = list_of(row.outliers, k, r)->scale;
        } else {
            out.q8 = row.coarse();
        }
        return gather_outliers(row.outliers, k, count, x.rows == WHOLE, program.scratch(thread), room, out.outliers);
    }

    // Rows [first, first + count) in the kernels' format; in scratch memory unless they have that format already.
    Panel panel(const Program& program, const Step& step, int thread, int64_t first, int count) const {
        Panel result;
        result.rows = count;
        const int64_t k = weight->columns();
        uint8_t* scratch = program.scratch(thread);
        if (x.rows == FINE) result.fine = program.block_row(x, step, thread, k, first).fine();
        else if (gathers(program, step)) result = gathered(program, first);
        else if (weight->wants_q8())
            scratch = add_blocks(program, step, thread, first, count, scratch + gathering_bytes(k), result);
        if (weight->wants_f32()) {
            const float* rows = program.floats(x.f32, step, thread) + first * k;
            result.f32 = rows;
            if (count > 1) {
                float* values = reinterpret_cast<float*>(scratch);
                for (int r = 0; r < count; r++)
                    for (int64_t i = 0; i < k; i++) values[i * count + r] = rows[r * k + i];
                result.f32 = values;
            }
        }
        return result;
    }

    void multiply(const Program& program, const TileRef& tile, const Panel& panel, float* out) const {
        program.kernels().tiles[tile.format](tile.data, weight->columns(), panel, out);
    }

    // Calls each(tile or pair of tiles, first row, panel) for all work of some units.
    template <class Each>
    void sweep(Program& program, const Step& step, int thread, int64_t begin, int64_t end, Each each) const {
        if (program.parted(input())) return sweep_part(program, step, thread, begin, end, each);
        const int64_t count = rows(program, step);
        const Panels& panels = program.panels(x);
        if (panels.size[0] == count) {
            Program::Made& made = program.made(thread);
            if (made.by != this) made = {this, panel(program, step, thread, 0, static_cast<int>(count))};
            for (int64_t unit = begin; unit < end; unit++)
                each(unit, 0, made.panel), program.prefetcher(thread).prefetch_next();
            return;
        }
        for (int64_t first = 0; first < count; first += panels.size[static_cast<size_t>(first)])
            sweep_panel(program, step, thread, begin, end, first, each);
    }

    template <class Each> void sweep_panel(Program& program, const Step& step, int thread, int64_t begin, int64_t end,
                                           int64_t first, Each each) const {
        std::optional<Panel> made;
        const bool is_made = gathers(program, step) && !weight->wants_f32();
        const int count = program.panels(x).size[static_cast<size_t>(first)];
        const Panel& p = is_made ? gathered(program, first) : made.emplace(panel(program, step, thread, first, count));
        Prefetcher& ahead = program.prefetcher(thread);
        for (int64_t unit = begin; unit < end; unit++) each(unit, first, p), ahead.prefetch_next();
    }

    template <class Each>
    void sweep_part(Program& program, const Step& step, int thread, int64_t begin, int64_t end, Each each) const {
        const Parts& parts = program.parts();
        const auto next = std::upper_bound(parts.first_panel.begin(), parts.first_panel.end(), begin / num_groups());
        const int32_t* firsts = parts.panels.data() + next[-1];
        const int64_t count = next[0] - next[-1], before = next[-1] * num_groups();
        for (int64_t unit = begin - before; unit < end - before;) {
            const int64_t group = unit / count, from = unit % count, to = std::min(count, from + end - before - unit);
            prefetch_group(program, thread, group + 1, from, to, count);
            for (int64_t p = from; p < to; p++)
                sweep_panel(program, step, thread, group_at(group), group_at(group + 1), firsts[p], each);
            unit += to - from;
        }
    }

    // Prefetches the next group's weights while this one is used, a share with each of `count` panels: the threads of
    // every part read all weights from memory.
    void prefetch_group(Program& program, int thread, int64_t group, int64_t from, int64_t to, int64_t count) const {
        Prefetcher& ahead = program.prefetcher(thread);
        ahead.clear();
        if (group == num_groups()) return;
        const int64_t first = group_at(group), size = group_at(group + 1) - first;
        for (int64_t unit = first + size * from / count; unit < first + size * to / count; unit++) {
            const auto& tiles = weight->tiles();
            for (size_t i = static_cast<size_t>(unit); i < tiles.size(); i += static_cast<size_t>(num_units()))
                ahead.add(tiles[i].data, tile_bytes(tiles[i].format, weight->columns()));
        }
        ahead.pace((to - from) * (group_at(group) - group_at(group - 1)));
    }
};

struct Gather : Instruction {
    const Product* product;

    int64_t units(const Program& program, const Step& step) const override {
        return product->gathers(program, step) ? product->rows(program, step) : 0;
    }
    int64_t grain(const Program&, const Step&) const override { return 4 * FEW_ROWS; }
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        return program.cut_rows(product->x.q8, units, thread);
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const Panels& panels = program.panels(product->x);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t first = program.row_at(product->x.q8, unit);
            if (panels.first[static_cast<size_t>(first)] != first) continue;
            Panel panel;
            product->add_blocks(program, step, thread, first, panels.size[static_cast<size_t>(first)],
                                program.gathered(first) + sizeof panel, panel);
            Product::gathered(program, first) = panel;
        }
    }
};

struct Linear : Product {
    const float* bias;
    Operand residual, out;
    AfterLinear after;

    int64_t rows(const Program& program, const Step& step) const override { return program.rows_of(out, step); }

    void finish(const Program& program, float* part, int size, int rows, int count, const float* biases) const {
        if (biases) program.kernels().put(part, rows, count, biases, nullptr, part, TILE);
        if (after.activation != NO_ACTIVATION) program.kernels().activate(part, size, after.activation);
        if (after.scale != 1.0f)
            for (int i = 0; i < size; i++) part[i] *= after.scale;
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t width = weight->rows();
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        float* rows = program.floats(out, step, thread);
        const auto& tiles = weight->tiles();
        sweep(program, step, thread, begin, end, [&](int64_t unit, int64_t first, const Panel& p) {
            const TileRef& tile = tiles[static_cast<size_t>(unit)];
            alignas(64) float part[MOST_ROWS * TILE];
            const int64_t at = first * width + tile.column;
            for (int r = 0; r < p.rows; r++) prefetch_for_write(rows + at + r * width, TILE * 4);
            if (add && add != rows)
                for (int r = 0; r < p.rows; r++) prefetch_for_read(add + at + r * width, TILE * 4);
            multiply(program, tile, p, part);
            const float* biases = bias ? bias + tile.column : nullptr;
            if (after.activation != NO_ACTIVATION || after.scale != 1.0f || (biases && after.softcap != 0.0f))
                finish(program, part, p.rows * TILE, p.rows, tile.count, std::exchange(biases, nullptr));
            if (after.softcap != 0.0f) program.kernels().softcap(part, p.rows * TILE, after.softcap);
            program.kernels().put(part, p.rows, tile.count, biases, add ? add + at : nullptr, rows + at, width);
        });
    }
};

struct Gated : Product {
    const float* bias;  // of the gate, then of the up projection; or null
    Activation activation;
    Operand out;
    int64_t half_tiles;  // tiles of the gate; those of the up projection follow

    int64_t rows(const Program& program, const Step& step) const override { return program.rows_of(out, step); }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t width = weight->rows() / 2;
        float* rows = program.floats(out, step, thread);
        const auto& tiles = weight->tiles();
        sweep(program, step, thread, begin, end, [&](int64_t unit, int64_t first, const Panel& p) {
            alignas(64) float gates[MOST_ROWS * TILE], ups[MOST_ROWS * TILE];
            const TileRef& tile = tiles[static_cast<size_t>(unit)];
            multiply(program, tile, p, gates);
            float* to = rows + first * width + tile.column;
            for (int r = 0; r < p.rows; r++) prefetch_for_write(to + r * width, TILE * 4);
            multiply(program, tiles[static_cast<size_t>(half_tiles + unit)], p, ups);
            if (bias) {
                const float* biases = bias + tile.column;
                program.kernels().put(gates, p.rows, tile.count, biases, nullptr, gates, TILE);
                program.kernels().put(ups, p.rows, tile.count, biases + width, nullptr, ups, TILE);
            }
            program.kernels().gate(gates, ups, p.rows, tile.count, activation, to, width);
        });
    }
};

}  // namespace

// Defined here because products are known here.
void Program::gather_for(const Instruction* product) {
    auto gather = std::make_unique<Gather>();
    gather->product = static_cast<const Product*>(product);
    want_gathered(gathered_bytes(gather->product->weight->columns(), kernels_->row_counts[0]));
    instructions_.push_back(std::move(gather));
}

void Program::embed(const Matrix* table, float scale, const Matrix* positions, Operand out) {
    auto embed = std::make_unique<Embed>();
    embed->table = table, embed->scale = scale, embed->positions = positions, embed->out = out;
    tables_.push_back(table);
    if (positions) positions_.push_back(positions), want_scratch(4 * positions->columns());
    instructions_.push_back(std::move(embed));
}

void Program::norm(Operand x, NormOf of, int width, Operand residual, Forms out) {
    auto norm = std::make_unique<Norm>();
    norm->x = x, norm->of = of, norm->width = width, norm->residual = residual, norm->out = out;
    want_scratch(Sink::scratch_bytes(width));
    instructions_.push_back(std::move(norm));
}

void Program::linear(Forms x, const Matrix* weight, const float* bias, Operand residual, AfterLinear after,
                     Operand out) {
    auto linear = std::make_unique<Linear>();
    linear->x = x, linear->weight = weight, linear->bias = bias, linear->residual = residual;
    linear->after = after, linear->out = out;
    linear->measure(static_cast<int64_t>(weight->tiles().size()));
    want_scratch(linear->scratch_bytes(*kernels_));
    gather_for(linear.get());
    instructions_.push_back(std::move(linear));
}

void Program::gated(Forms x, const Matrix* weight, const float* bias, Activation activation, Operand out) {
    auto gated = std::make_unique<Gated>();
    gated->x = x, gated->weight = weight, gated->bias = bias, gated->activation = activation, gated->out = out;
    gated->half_tiles = static_cast<int64_t>(weight->tiles().size()) / 2;
    gated->measure(gated->half_tiles);
    want_scratch(gated->scratch_bytes(*kernels_));
    gather_for(gated.get());
    instructions_.push_back(std::move(gated));
}

void Program::take(Operand x, int width, Forms out) {
    auto take = std::make_unique<Take>();
    take->x = x, take->width = width, take->out = out;
    want_scratch(Sink::scratch_bytes(width));
    instructions_.push_back(std::move(take));
}

void Program::quantize(Operand x, int width, Forms out) {
    auto quantize = std::make_unique<Quantize>();
    quantize->x = x, quantize->out = out, quantize->width = width;
    want_scratch(Sink::scratch_bytes(width));
    instructions_.push_back(std::move(quantize));
}

}  // namespace unspool

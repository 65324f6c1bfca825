// What each instruction of a program does, and the units that threads share it by: output features of linear layers, rows
// and kv heads of attention, rows of everything else.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace unspool {

namespace {

// Where the forms of an activation's rows go.
struct Sink {
    const Program& program;
    const Step& step;
    const int thread;
    const Forms& forms;
    const int64_t width;
    float* f32;

    Sink(const Program& program, const Step& step, int thread, const Forms& forms, int64_t width)
        : program(program), step(step), thread(thread), forms(forms), width(width),
          f32(forms.f32 ? program.floats(forms.f32, step, thread) : nullptr) {}

    // `spare` has room for a row, and may be the row itself.
    void put(const float* row, int64_t index, float* spare) const {
        if (f32 && f32 + index * width != row) memcpy(f32 + index * width, row, static_cast<size_t>(width) * 4);
        if (!forms.q8) return;
        const Kernels& kernels = program.kernels();
        const int blocks = static_cast<int>(width / BLOCK);
        const QRow out = program.q8_row(forms, step, thread, width, forms.fine ? 2 * index : index);
        kernels.quantize(row, blocks, out.blocks, out.stride, forms.fine ? nullptr : out.outliers);
        if (!forms.fine) return;
        const QRow rest = program.q8_row(forms, step, thread, width, 2 * index + 1);
        kernels.remainder(row, blocks, out.blocks, out.stride, spare);
        kernels.quantize(spare, blocks, rest.blocks, rest.stride, nullptr);
        out.outliers->count = rest.outliers->count = 0;
    }
};

constexpr int64_t FEW_ROWS = 8;  // taken at once where work goes by rows

struct Embed : Instruction {
    const Matrix* table;
    float scale;
    Operand out;

    int64_t units(const Program&, const Step& step) const override { return step.rows; }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t width = table->columns();
        float* rows = program.floats(out, step, thread);
        for (int64_t r = begin; r < end; r++) {
            float* row = rows + r * width;
            table->read_row(step.ids[r], row);
            if (scale != 1.0f)
                for (int64_t i = 0; i < width; i++) row[i] *= scale;
        }
    }
};

struct Norm : Instruction {
    Operand x, residual;
    const float* weight;
    int width;
    float eps;
    Forms out;

    Operand any() const { return out.f32 ? out.f32 : out.q8; }

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(any(), step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }
    bool copied(const Program& program, const Step& step) const override { return program.is_copied(any(), step); }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        const Sink sink(program, step, thread, out, width);
        float* spare = reinterpret_cast<float*>(program.scratch(thread));
        for (int64_t r = begin; r < end; r++) {
            float* row = sink.f32 ? sink.f32 + r * width : spare;
            program.kernels().norm(in + r * width, weight, add ? add + r * width : nullptr, width, eps, row);
            sink.put(row, r, spare);
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
        float* spare = reinterpret_cast<float*>(program.scratch(thread));
        for (int64_t r = begin; r < end; r++)
            sink.put(in + static_cast<int64_t>(step.logit_rows[r]) * width, r, spare);
    }
};

struct Quantize : Instruction {
    Operand x;
    int width;
    Forms out;

    int64_t units(const Program& program, const Step& step) const override { return program.rows_of(out.q8, step); }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }
    bool copied(const Program& program, const Step& step) const override { return program.is_copied(out.q8, step); }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        const Sink sink(program, step, thread, out, width);
        float* spare = reinterpret_cast<float*>(program.scratch(thread));
        for (int64_t r = begin; r < end; r++) sink.put(in + r * width, r, spare);
    }
};

// --- Products ---------------------------------------------------------------------------------------------------------

constexpr int MOST_ROWS = 16;              // of any kernel's row_counts
constexpr int64_t GROUP_BYTES = 256 << 10;  // of weights that stay in the cache while rows pass by

// The rows' lists of outliers, each in order of k, become one list of columns in order of k.
uint8_t* gather_outliers(const Outliers* first, int64_t width, int count, uint8_t* scratch, Panel& panel) {
    const Outliers* lists[MOST_ROWS];
    int32_t at[MOST_ROWS] = {}, total = 0;
    for (int r = 0; r < count; r++) {
        lists[r] = reinterpret_cast<const Outliers*>(reinterpret_cast<const uint8_t*>(first) + r * outliers_bytes(width / BLOCK));
        total += lists[r]->count;
    }
    auto* columns = reinterpret_cast<OutlierColumn*>(scratch);
    auto* entries = reinterpret_cast<OutlierEntry*>(columns + total);
    panel.columns = columns, panel.entries = entries;
    for (int32_t done = 0; done < total; panel.num_columns++, columns++) {
        *columns = {INT32_MAX, 0};
        for (int r = 0; r < count; r++)
            if (at[r] < lists[r]->count) columns->k = std::min(columns->k, lists[r]->list[at[r]].k);
        for (int r = 0; r < count; r++)
            if (at[r] < lists[r]->count && lists[r]->list[at[r]].k == columns->k) {
                *entries++ = {r, lists[r]->list[at[r]++].value};
                columns->num_entries++, done++;
            }
    }
    return scratch + (total * 16 + 63) / 64 * 64;
}

struct Product : Instruction {
    Forms x;
    const Matrix* weight;
    std::vector<int64_t> bytes_before;  // of all units before each: tiles, or a gate's with its up projection's

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
    int64_t units(const Program& program, const Step& step) const override { return rows(program, step) ? num_units() : 0; }
    virtual int64_t rows(const Program& program, const Step& step) const = 0;

    // Shares of equal bytes.
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        if (units == 0) return 0;
        const int64_t goal = bytes_before.back() * thread / program.pool().threads();
        const auto at = std::lower_bound(bytes_before.begin(), bytes_before.end(), goal);
        return std::min<int64_t>(at - bytes_before.begin(), units);
    }

    // Few rows: a share goes in eight pieces. Many: as much as stays in the cache while rows pass by.
    int64_t grain(const Program& program, const Step& step) const override {
        const int64_t eighth = num_units() / (8 * program.pool().threads()) + 1;
        const int64_t cached = std::max<int64_t>(1, GROUP_BYTES * num_units() / bytes_before.back());
        return rows(program, step) <= FEW_ROWS ? eighth : std::min(eighth, cached);
    }

    int64_t scratch_bytes(const Kernels& kernels) const {
        const int64_t most = kernels.row_counts[0], k = weight->columns();
        return (weight->wants_f32() ? most * k * 4 + 64 : 0) + (weight->wants_q8() ? most * (k / BLOCK) * 16 + 64 : 0);
    }

    // Rows [first, first + count) as the kernels want them, in scratch unless they lie so already.
    Panel panel(const Program& program, const Step& step, int thread, int64_t first, int count) const {
        Panel result{count, nullptr, nullptr, nullptr, nullptr, 0};
        const int64_t k = weight->columns();
        uint8_t* scratch = program.scratch(thread);
        if (weight->wants_q8()) {
            const QRow row = program.q8_row(x, step, thread, k, first);
            result.q8 = row.blocks;
            scratch = gather_outliers(row.outliers, k, count, scratch, result);
        }
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

    // Calls each(unit, first row, panel) for all units and rows. Fine rows are two rows each, which stay together.
    template <class Each> void sweep(const Program& program, const Step& step, int thread, int64_t begin, int64_t end, Each each) const {
        const int64_t count = rows(program, step) * (x.fine ? 2 : 1);
        const Panels& panels = program.panels(x);
        for (int64_t first = 0; first < count; first += panels.size[static_cast<size_t>(first)]) {
            const Panel p = panel(program, step, thread, first, panels.size[static_cast<size_t>(first)]);
            for (int64_t unit = begin; unit < end; unit++) each(unit, first, p);
        }
    }
};

struct Linear : Product {
    const float* bias;
    Operand residual, out;
    float softcap;

    int64_t rows(const Program& program, const Step& step) const override { return program.rows_of(out, step); }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t width = weight->rows();
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        float* rows = program.floats(out, step, thread);
        const auto& tiles = weight->tiles();
        sweep(program, step, thread, begin, end,
              [&](int64_t unit, int64_t first, const Panel& p) {
                  const TileRef& tile = tiles[static_cast<size_t>(unit)];
                  alignas(64) float part[MOST_ROWS * TILE];
                  multiply(program, tile, p, part);
                  const int count = x.fine ? p.rows / 2 : p.rows;
                  if (x.fine) {
                      first /= 2;
                      for (int i = 0; i < count * TILE; i++) {
                          const int at = i / TILE * 2 * TILE + i % TILE;
                          part[i] = part[at] + part[at + TILE];
                      }
                  }
                  if (softcap != 0.0f) program.kernels().softcap(part, count * TILE, softcap);
                  for (int r = 0; r < count; r++) {
                      const int64_t at = (first + r) * width + tile.column;
                      put(part + r * TILE, tile, add ? add + at : nullptr, rows + at);
                  }
              });
    }

    void put(const float* part, const TileRef& tile, const float* add, float* row) const {
        const float* b = bias ? bias + tile.column : nullptr;
        const int count = tile.count;
        if (count == TILE && !b) {
            for (int i = 0; i < TILE; i++) row[i] = add ? add[i] + part[i] : part[i];
            return;
        }
        for (int i = 0; i < count; i++) {
            const float value = b ? part[i] + b[i] : part[i];
            row[i] = add ? add[i] + value : value;
        }
    }
};

struct Gated : Product {
    Activation activation;
    Operand out;
    int64_t half_tiles;  // tiles of the gate; the up projection's follow

    int64_t rows(const Program& program, const Step& step) const override { return program.rows_of(out, step); }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int64_t width = weight->rows() / 2;
        float* rows = program.floats(out, step, thread);
        const auto& tiles = weight->tiles();
        sweep(program, step, thread, begin, end,
              [&](int64_t unit, int64_t first, const Panel& p) {
                  alignas(64) float gates[MOST_ROWS * TILE], ups[MOST_ROWS * TILE];
                  const TileRef& tile = tiles[static_cast<size_t>(unit)];
                  multiply(program, tile, p, gates);
                  multiply(program, tiles[static_cast<size_t>(half_tiles + unit)], p, ups);
                  for (int r = 0; r < p.rows; r++)
                      program.kernels().gate(gates + r * TILE, ups + r * TILE, tile.count, activation, rows + (first + r) * width + tile.column);
              });
    }
};

// --- Attention --------------------------------------------------------------------------------------------------------

struct Attention : Instruction {
    Operand qkv;
    AttentionShape shape;
    Forms out;

    struct Item {
        int32_t sequence, first, count;  // rows of the output
        int32_t splits;                  // of the last row
        int64_t part;                    // where its splits' parts lie when they are computed apart
    };
    std::vector<Item> items;
    std::vector<int64_t> work;  // (item · kv heads + kv head) · 2²⁴ + split + 1; 0 for all splits in turn
    std::unique_ptr<std::atomic<int>[]> arrived;
    size_t num_arrived = 0;
    std::vector<float> parts;
    bool store_first = false;

    int group() const { return shape.num_heads / shape.num_kv_heads; }
    int padded() const { return (shape.head_dim + TILE - 1) / TILE * TILE; }
    int64_t state_floats() const { return padded() + TILE; }

    int64_t scratch_bytes(const Kernels& kernels) const {
        const int most = kernels.max_queries;
        return 4 * (static_cast<int64_t>(most) * shape.head_dim + attend_scratch_floats(shape.head_dim, most) +
                    2 * most * state_floats() + 4 * shape.head_dim + 64);
    }

    int64_t row_at(const Step& step, int64_t out_row) const { return narrow() ? step.logit_rows[out_row] : out_row; }
    bool narrow() const { return (out.f32 ? out.f32 : out.q8).narrow; }

    // Work is rows of a sequence times kv heads. Where that is too little to go round, splits of the keys go apart and
    // the last to finish merges them, in order.
    void plan(const Program& program, const Step& step) {
        const int64_t rows = narrow() ? step.num_logits : step.rows;
        const int most = std::max(1, program.kernels().max_queries / group());
        items.clear();
        for (int64_t r = 0; r < rows;) {
            const int32_t sequence = program.sequence_of(row_at(step, r));
            int64_t end = r, last = 0;
            for (; end < rows && end - r < most && program.sequence_of(row_at(step, end)) == sequence; end++)
                last = std::max<int64_t>(last, step.positions[row_at(step, end)]);
            items.push_back({sequence, static_cast<int32_t>(r), static_cast<int32_t>(end - r), static_cast<int32_t>(last / SPLIT + 1), 0});
            r = end;
        }
        store_first = program.shares_fresh_blocks() || narrow() || step.rows != step.sequences;
        const int threads = program.pool().threads();
        const int64_t pieces = static_cast<int64_t>(items.size()) * shape.num_kv_heads;
        const bool apart = threads > 1 && pieces < 4 * threads && group() <= program.kernels().max_queries;
        work.clear();
        int64_t floats = 0;
        for (size_t i = items.size(); i-- > 0;) {  // the longest last rows first
            Item& item = items[i];
            const bool this_apart = apart && item.splits > 1;
            item.part = this_apart ? floats : -1;
            if (this_apart) floats += static_cast<int64_t>(item.splits) * shape.num_kv_heads * item.count * group() * state_floats();
            for (int head = 0; head < shape.num_kv_heads; head++)
                for (int split = this_apart ? 0 : -1; split < (this_apart ? item.splits : 0); split++)
                    work.push_back(((static_cast<int64_t>(i) * shape.num_kv_heads + head) << 24) | (split + 1));
        }
        if (static_cast<int64_t>(parts.size()) < floats) parts.resize(static_cast<size_t>(floats));
        const size_t counters = items.size() * static_cast<size_t>(shape.num_kv_heads);
        if (num_arrived < counters) arrived = std::make_unique<std::atomic<int>[]>(counters), num_arrived = counters;
        for (size_t i = 0; i < counters; i++) arrived[i].store(0, std::memory_order_relaxed);
    }

    int64_t units(const Program&, const Step&) const override { return static_cast<int64_t>(work.size()); }
    // Pieces differ too much in size for equal shares: everyone takes from one pile, the largest first.
    int64_t cut(const Program&, int64_t units, int thread) const override { return thread == 0 ? 0 : units; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        for (int64_t i = begin; i < end; i++) {
            const int64_t piece = work[static_cast<size_t>(i)];
            const int64_t where = piece >> 24;
            attend(program, step, thread, static_cast<size_t>(where / shape.num_kv_heads), static_cast<int>(where % shape.num_kv_heads),
                   static_cast<int>(piece & 0xFFFFFF) - 1);
        }
    }

    void turn(const Program& program, int64_t row, const float* head, const float* norm, float* to) const {
        if (norm) program.kernels().norm(head, norm, nullptr, shape.head_dim, shape.norm_eps, to);
        else memcpy(to, head, static_cast<size_t>(shape.head_dim) * 4);
        const Program::Rope& rope = program.rope(shape.rope);
        const int64_t half = static_cast<int64_t>(rope.inv_freq.size());
        program.kernels().rotate(to, rope.cos.data() + row * half, rope.sin.data() + row * half, static_cast<int>(half), rope.interleaved);
    }

    const float* row_of(const Program& program, const Step& step, int thread, int64_t row) const {
        return program.floats(qkv, step, thread) + row * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
    }

    void store(const Program& program, const Step& step, int thread, int64_t row, int head) const {
        const float* values = row_of(program, step, thread, row);
        float* key = reinterpret_cast<float*>(program.scratch(thread));
        turn(program, row, values + (shape.num_heads + head) * shape.head_dim, shape.k_norm, key);
        const KvCache& kv = program.kv();
        program.kernels().store_kv(kv.view(shape.layer, head), step.slots[row] / kv.block_size,
                                   static_cast<int>(step.slots[row] % kv.block_size), key,
                                   values + (shape.num_heads + shape.num_kv_heads + head) * shape.head_dim);
    }

    // One piece of work: a few rows' queries of one kv head, over all splits (split < 0) or one.
    void attend(Program& program, const Step& step, int thread, size_t index, int head, int split) {
        const Item& item = items[index];
        const int most = program.kernels().max_queries, queries = item.count * group(), last_split = item.splits - 1;
        if (!store_first && (split < 0 || split == last_split)) store(program, step, thread, row_at(step, item.first), head);
        for (int from = 0; from < queries; from += most) {
            const int count = std::min(most, queries - from);
            attend_some(program, step, thread, item, head, split, from, count);
        }
        if (split < 0) return;
        const size_t counter = index * static_cast<size_t>(shape.num_kv_heads) + static_cast<size_t>(head);
        if (arrived[counter].fetch_add(1, std::memory_order_acq_rel) + 1 == item.splits) merge_apart(program, step, thread, item, head);
    }

    struct Looking {
        Queries queries;
        int32_t first[MOST_ROWS], last[MOST_ROWS];
    };

    void look(const Program& program, const Step& step, const Item& item, int from, int count, const float* q, Looking& out) const {
        for (int n = 0; n < count; n++) {
            const int32_t position = step.positions[row_at(step, item.first + (from + n) / group())];
            out.last[n] = position;
            out.first[n] = shape.window ? std::max(0, position + 1 - shape.window) : 0;
        }
        out.queries = {q, count, out.first, out.last, step.tables + item.sequence * step.table_width, shape.scale, shape.softcap};
        (void)program;
    }

    void attend_some(Program& program, const Step& step, int thread, const Item& item, int head, int split, int from, int count) {
        float* q = reinterpret_cast<float*>(program.scratch(thread));
        float* scratch = q + static_cast<int64_t>(program.kernels().max_queries) * shape.head_dim;
        float* part = scratch + attend_scratch_floats(shape.head_dim, program.kernels().max_queries);
        float* state = part + program.kernels().max_queries * state_floats();
        for (int n = 0; n < count; n++) {
            const int64_t row = row_at(step, item.first + (from + n) / group());
            const int query_head = head * group() + (from + n) % group();
            turn(program, row, row_of(program, step, thread, row) + query_head * shape.head_dim, shape.q_norm, q + n * shape.head_dim);
        }
        Looking looking;
        look(program, step, item, from, count, q, looking);
        const KvView kv = program.kv().view(shape.layer, head);
        if (split >= 0) {
            program.kernels().attend(kv, looking.queries, split, scratch, part_at(item, head, split, from));
            return;
        }
        int first = looking.first[0];
        for (int n = 1; n < count; n++) first = std::min(first, looking.first[n]);
        for (int s = first / SPLIT; s < item.splits; s++) {
            program.kernels().attend(kv, looking.queries, s, scratch, part);
            program.kernels().merge(looking.queries, s, padded(), part, state);
        }
        put(program, step, thread, item, head, from, count, state);
    }

    float* part_at(const Item& item, int head, int split, int from) {
        const int64_t queries = item.count * group();
        return parts.data() + item.part + ((static_cast<int64_t>(head) * item.splits + split) * queries + from) * state_floats();
    }

    void merge_apart(Program& program, const Step& step, int thread, const Item& item, int head) {
        const int most = program.kernels().max_queries, queries = item.count * group();
        float* state = reinterpret_cast<float*>(program.scratch(thread));
        for (int from = 0; from < queries; from += most) {
            const int count = std::min(most, queries - from);
            Looking looking;
            look(program, step, item, from, count, nullptr, looking);
            for (int s = 0; s < item.splits; s++)
                program.kernels().merge(looking.queries, s, padded(), part_at(item, head, s, from), state);
            put(program, step, thread, item, head, from, count, state);
        }
    }

    void put(const Program& program, const Step& step, int thread, const Item& item, int head, int from, int count, float* state) const {
        const int64_t width = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
        for (int n = 0; n < count; n++) {
            const int64_t row = item.first + (from + n) / group(), column = (static_cast<int64_t>(head) * group() + (from + n) % group()) * shape.head_dim;
            float* values = state + n * state_floats();
            program.kernels().finish(values, shape.head_dim, padded(), values);
            if (out.f32) memcpy(program.floats(out.f32, step, thread) + row * width + column, values, static_cast<size_t>(shape.head_dim) * 4);
            if (!out.q8) continue;
            const QRow to = program.q8_row(out, step, thread, width, row);  // weighted means of values: none stands out
            program.kernels().quantize(values, shape.head_dim / BLOCK, to.blocks + column / BLOCK * to.stride, to.stride, nullptr);
            if (column == 0) to.outliers->count = 0;
        }
    }
};

// Keys and values of all rows, where queries of other rows will look for them.
struct Store : Instruction {
    Attention* attention;

    void prepare(Program& program, const Step& step) override { attention->plan(program, step); }
    int64_t units(const Program&, const Step& step) const override {
        return attention->store_first ? step.rows * attention->shape.num_kv_heads : 0;
    }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int heads = attention->shape.num_kv_heads;
        for (int64_t i = begin; i < end; i++) attention->store(program, step, thread, i / heads, static_cast<int>(i % heads));
    }
};

}  // namespace

void Program::embed(const Matrix* table, float scale, Operand out) {
    auto embed = std::make_unique<Embed>();
    embed->table = table, embed->scale = scale, embed->out = out;
    tables_.push_back(table);
    instructions_.push_back(std::move(embed));
}

void Program::norm(Operand x, const float* weight, int width, float eps, Operand residual, Forms out) {
    auto norm = std::make_unique<Norm>();
    norm->x = x, norm->weight = weight, norm->width = width, norm->eps = eps, norm->residual = residual, norm->out = out;
    want_scratch(width * 4 + 64);
    instructions_.push_back(std::move(norm));
}

void Program::linear(Forms x, const Matrix* weight, const float* bias, Operand residual, float softcap, Operand out) {
    auto linear = std::make_unique<Linear>();
    linear->x = x, linear->weight = weight, linear->bias = bias, linear->residual = residual;
    linear->softcap = softcap, linear->out = out;
    linear->measure(static_cast<int64_t>(weight->tiles().size()));
    want_scratch(linear->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(linear));
}

void Program::gated(Forms x, const Matrix* weight, Activation activation, Operand out) {
    auto gated = std::make_unique<Gated>();
    gated->x = x, gated->weight = weight, gated->activation = activation, gated->out = out;
    gated->half_tiles = static_cast<int64_t>(weight->tiles().size()) / 2;
    gated->measure(gated->half_tiles);
    want_scratch(gated->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(gated));
}

void Program::attention(Operand qkv, AttentionShape shape, Forms out) {
    auto attention = std::make_unique<Attention>();
    attention->qkv = qkv, attention->shape = shape, attention->out = out;
    want_scratch(attention->scratch_bytes(*kernels_));
    auto store = std::make_unique<Store>();
    store->attention = attention.get();
    instructions_.push_back(std::move(store));
    instructions_.push_back(std::move(attention));
}

void Program::take(Operand x, int width, Forms out) {
    auto take = std::make_unique<Take>();
    take->x = x, take->width = width, take->out = out;
    want_scratch(width * 4 + 64);
    instructions_.push_back(std::move(take));
}

void Program::quantize(Operand x, int width, Forms out) {
    auto quantize = std::make_unique<Quantize>();
    quantize->x = x, quantize->out = out, quantize->width = width;
    want_scratch(width * 4 + 64);
    instructions_.push_back(std::move(quantize));
}

}  // namespace unspool

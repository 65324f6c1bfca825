// What each instruction of a program does, and how threads share it: linear layers by output features, attention by
// rows and kv heads, everything else by rows.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace unspool {

namespace {

struct Span {
    int64_t begin, end;
};

Span share(int64_t count, int thread, int threads) { return {count * thread / threads, count * (thread + 1) / threads}; }

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

struct Embed : Instruction {
    const Matrix* table;
    float scale;
    Operand out;

    void run(Program& program, const Step& step, int thread) override {
        const int64_t width = table->columns();
        float* rows = program.floats(out, step, thread);
        const Span span = share(step.rows, thread, program.pool().threads());
        for (int64_t r = span.begin; r < span.end; r++) {
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

    void run(Program& program, const Step& step, int thread) override {
        const bool copied = program.is_copied(any(), step);
        const Span span = copied ? Span{0, program.rows_of(any(), step)}
                                 : share(program.rows_of(any(), step), thread, program.pool().threads());
        const float* in = program.floats(x, step, thread);
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        const Sink sink(program, step, thread, out, width);
        float* spare = reinterpret_cast<float*>(program.scratch(thread));
        for (int64_t r = span.begin; r < span.end; r++) {
            float* row = sink.f32 ? sink.f32 + r * width : spare;
            program.kernels().norm(in + r * width, weight, add ? add + r * width : nullptr, width, eps, row);
            sink.put(row, r, spare);
        }
    }

    bool barrier(const Program& program, const Step& step) const override { return !program.is_copied(any(), step); }
};

struct Take : Instruction {
    Operand x;
    int width;
    Forms out;

    void run(Program& program, const Step& step, int thread) override {
        const float* in = program.floats(x, step, thread);
        const Sink sink(program, step, thread, out, width);
        float* spare = reinterpret_cast<float*>(program.scratch(thread));
        const Span span = share(step.num_logits, thread, program.pool().threads());
        for (int64_t r = span.begin; r < span.end; r++)
            sink.put(in + static_cast<int64_t>(step.logit_rows[r]) * width, r, spare);
    }
};

struct Quantize : Instruction {
    Operand x;
    int width;
    Forms out;

    void run(Program& program, const Step& step, int thread) override {
        const float* in = program.floats(x, step, thread);
        const Sink sink(program, step, thread, out, width);
        float* spare = reinterpret_cast<float*>(program.scratch(thread));
        const int64_t rows = program.rows_of(out.q8, step);
        const Span span = program.is_copied(out.q8, step) ? Span{0, rows} : share(rows, thread, program.pool().threads());
        for (int64_t r = span.begin; r < span.end; r++) sink.put(in + r * width, r, spare);
    }

    bool barrier(const Program& program, const Step& step) const override { return !program.is_copied(out.q8, step); }
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
    std::vector<int64_t> cuts;  // thread t has units [cuts[t], cuts[t + 1])

    // Units are tiles, or a gate's tile with its up projection's: cut where the bytes are equal.
    void cut(int threads, int64_t units, const std::vector<int64_t>& bytes) {
        int64_t total = 0, done = 0, unit = 0;
        for (int64_t b : bytes) total += b;
        cuts.push_back(0);
        for (int t = 1; t < threads; t++) {
            while (unit < units && (done + bytes[static_cast<size_t>(unit)] / 2) * threads < total * t) done += bytes[static_cast<size_t>(unit++)];
            cuts.push_back(unit);
        }
        cuts.push_back(units);
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

    // Calls each(unit, first row, panel) for this thread's units, weights in groups that stay in the cache. Fine rows are
    // two rows each, which stay together.
    template <class Each> void sweep(const Program& program, const Step& step, int thread, int64_t rows, int64_t unit_bytes, Each each) const {
        const int64_t begin = cuts[static_cast<size_t>(thread)], end = cuts[static_cast<size_t>(thread) + 1];
        if (x.fine) rows *= 2;
        if (rows == 0) return;
        const Panels& panels = program.panels(x);
        const int64_t group = panels.size[0] == rows ? std::max<int64_t>(1, end - begin) : std::max<int64_t>(1, GROUP_BYTES / unit_bytes);
        for (int64_t from = begin; from < end; from += group)
            for (int64_t first = 0; first < rows; first += panels.size[static_cast<size_t>(first)]) {
                const Panel p = panel(program, step, thread, first, panels.size[static_cast<size_t>(first)]);
                for (int64_t unit = from; unit < std::min(end, from + group); unit++) each(unit, first, p);
            }
    }
};

struct Linear : Product {
    const float* bias;
    Operand residual, out;
    float softcap;

    void run(Program& program, const Step& step, int thread) override {
        const int64_t width = weight->rows();
        const float* add = residual ? program.floats(residual, step, thread) : nullptr;
        float* rows = program.floats(out, step, thread);
        const auto& tiles = weight->tiles();
        sweep(program, step, thread, program.rows_of(out, step), tile_bytes(tiles[0].format, weight->columns()),
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

    void run(Program& program, const Step& step, int thread) override {
        const int64_t width = weight->rows() / 2;
        float* rows = program.floats(out, step, thread);
        const auto& tiles = weight->tiles();
        sweep(program, step, thread, program.rows_of(out, step), 2 * tile_bytes(tiles[0].format, weight->columns()),
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
    std::atomic<int64_t> next{0};
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
    void prepare(Program& program, const Step& step) override {
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
        next.store(0, std::memory_order_relaxed);
    }

    void run(Program& program, const Step& step, int thread) override {
        if (store_first) {
            const int threads = program.pool().threads();
            const Span span = share(step.rows * shape.num_kv_heads, thread, threads);
            for (int64_t i = span.begin; i < span.end; i++)
                store(program, step, thread, i / shape.num_kv_heads, static_cast<int>(i % shape.num_kv_heads));
            program.meet();
        }
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < static_cast<int64_t>(work.size());) {
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
    std::vector<int64_t> bytes;
    for (const TileRef& tile : weight->tiles()) bytes.push_back(tile_bytes(tile.format, weight->columns()));
    linear->cut(pool_->threads(), static_cast<int64_t>(bytes.size()), bytes);
    want_scratch(linear->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(linear));
}

void Program::gated(Forms x, const Matrix* weight, Activation activation, Operand out) {
    auto gated = std::make_unique<Gated>();
    gated->x = x, gated->weight = weight, gated->activation = activation, gated->out = out;
    gated->half_tiles = static_cast<int64_t>(weight->tiles().size()) / 2;
    gated->cut(pool_->threads(), gated->half_tiles, std::vector<int64_t>(static_cast<size_t>(gated->half_tiles), 2));
    want_scratch(gated->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(gated));
}

void Program::attention(Operand qkv, AttentionShape shape, Forms out) {
    auto attention = std::make_unique<Attention>();
    attention->qkv = qkv, attention->shape = shape, attention->out = out;
    want_scratch(attention->scratch_bytes(*kernels_));
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

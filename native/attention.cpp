// Attention in a program: which rows and KV heads are processed together, and how the work is divided.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "program.h"

namespace unspool {

namespace {

constexpr int MOST_QUERIES = 16;  // of any kernel's max_queries
constexpr int64_t FEW_ROWS = 8;   // rows that are stored at once

struct Attention : Instruction {
    Operand qkv;
    AttentionShape shape;
    Forms out;

    struct Item {
        int32_t sequence, first, count;  // rows of the output
        int32_t splits;                  // of the last row
        int64_t part;                    // offset of its splits' results, if they are computed separately
    };
    // A KV head of an item, or only some of its queries; one split of the keys, or all (-1).
    struct Piece {
        int32_t item, head, split, from, count;
    };
    std::vector<Item> items;
    std::vector<Piece> work;
    std::vector<int64_t> by_part;     // index of each part's first piece, and the end
    int32_t num_whole = 0;            // pieces with all queries; the pieces after them share their head with others
    std::atomic<int64_t> stored{-1};  // the step whose keys of shared heads are stored
    std::unique_ptr<std::atomic<int>[]> arrived;
    size_t num_arrived = 0;
    std::vector<float> parts;
    bool store_first = false;

    static bool is_integer(const Program& program) { return program.kv().type == KV_Q8; }
    int group() const { return shape.num_heads / shape.num_kv_heads; }
    int padded() const { return (shape.value_dim + TILE - 1) / TILE * TILE; }
    int widest() const { return std::max(shape.head_dim, shape.value_dim); }
    int64_t state_floats() const { return padded() + TILE; }

    int64_t scratch_bytes(const Kernels& kernels) const {
        const int most = kernels.max_queries;
        return 4 * (static_cast<int64_t>(most) * shape.head_dim + prepare_room(shape.head_dim, most) +
                    attend_scratch_floats(widest(), most) + 2 * most * state_floats() + 4 * shape.head_dim + 64);
    }

    int64_t row_at(const Step& step, int64_t out_row) const { return narrow() ? step.logit_rows[out_row] : out_row; }
    bool narrow() const { return (out.f32 ? out.f32 : out.q8).narrow; }

    // Work is rows of a sequence times KV heads. If that is too little for all threads, splits of the keys are computed
    // separately, and the last thread to finish merges them in order.
    void plan(const Program& program, const Step& step) {
        const int64_t rows = narrow() ? step.num_logits : step.rows;
        // The number of rows that fills whole passes of queries.
        const int most = program.kernels().max_queries / std::gcd(program.kernels().max_queries, group());
        items.clear();
        for (int64_t r = 0; r < rows;) {
            const int32_t sequence = program.sequence_of(row_at(step, r));
            int64_t end = r, last = 0;
            for (; end < rows && end - r < most && program.sequence_of(row_at(step, end)) == sequence; end++)
                last = std::max<int64_t>(last, step.positions[row_at(step, end)]);
            items.push_back({sequence, static_cast<int32_t>(r), static_cast<int32_t>(end - r),
                             static_cast<int32_t>(last / SPLIT + 1), 0});
            r = end;
        }
        store_first = !shape.stores || program.shares_fresh_blocks() || narrow() || step.rows != step.sequences;
        const int threads = program.pool().threads();
        const int64_t pieces = static_cast<int64_t>(items.size()) * shape.num_kv_heads;
        const bool apart = threads > 1 && pieces < 4 * threads && group() <= program.kernels().max_queries;
        int64_t floats = 0, num_apart = 0;
        for (Item& item : items) {
            const bool this_apart = apart && item.splits > 1;
            item.part = this_apart ? floats : -1;
            num_apart += this_apart;
            if (this_apart) floats += int64_t{item.splits} * shape.num_kv_heads * item.count * group() * state_floats();
        }
        work.clear();
        by_part.assign(1, 0);
        const bool parted = program.parts().count > 1 && !narrow() && !apart;
        for (int part = 0; part < (parted ? program.parts().count : 1); part++) {
            for (size_t end = items.size(), begin; end > 0; end = begin) {
                for (begin = end - 1; begin > 0 && items[begin - 1].sequence == items[begin].sequence;) begin--;
                add_pieces(begin, end, [&](int row) { return !parted || program.part_of(row) == part; });
            }
            by_part.push_back(static_cast<int64_t>(work.size()));
        }
        num_whole = static_cast<int32_t>(work.size());
        if (apart && num_apart == 0) share_last(threads);
        if (static_cast<int64_t>(parts.size()) < floats) parts.resize(static_cast<size_t>(floats));
        const size_t counters = items.size() * static_cast<size_t>(shape.num_kv_heads);
        if (num_arrived < counters) arrived = std::make_unique<std::atomic<int>[]>(counters), num_arrived = counters;
        for (size_t i = 0; i < counters; i++) arrived[i].store(0, std::memory_order_relaxed);
    }

    // One sequence's: its keys and values stay in the cache while all rows read them, the longest rows first.
    template <class Wanted> void add_pieces(size_t begin, size_t end, Wanted wanted) {
        for (int head = 0; head < shape.num_kv_heads; head++)
            for (size_t i = end; i-- > begin;) {
                const Item& item = items[i];
                if (!wanted(item.first)) continue;
                const bool apart = item.part >= 0;
                for (int split = apart ? 0 : -1; split < (apart ? item.splits : 0); split++)
                    work.push_back({static_cast<int32_t>(i), head, split, 0, item.count * group()});
            }
    }

    // With three heads and two threads, one thread would get two heads. The remainder is divided by queries instead.
    void share_last(int threads) {
        const auto rest = static_cast<int32_t>(work.size() % static_cast<size_t>(threads));
        const std::vector<Piece> last(work.end() - rest, work.end());
        if (rest == 0 || last[0].count < threads) return;
        work.resize(work.size() - last.size());
        num_whole = static_cast<int32_t>(work.size());
        for (const Piece& piece : last)
            for (int t = 0; t < threads; t++) {
                const int32_t from = (piece.count * t + threads - 1) / threads;
                const int32_t to = (piece.count * (t + 1) + threads - 1) / threads;
                work.push_back({piece.item, piece.head, -1, from, to - from});
            }
    }

    bool varies() const override { return true; }
    int64_t units(const Program&, const Step&) const override { return static_cast<int64_t>(work.size()); }
    // Pieces differ too much in size for equal shares. All threads take from one list, or from one list per part, the
    // largest pieces first.
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        const auto piles = static_cast<int>(by_part.size()) - 1, of_pile = program.pool().threads() / piles;
        const auto pile = static_cast<size_t>((thread + of_pile - 1) / of_pile);
        return pile == by_part.size() - 1 ? units : by_part[pile];
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        for (int64_t i = begin; i < end; i++) {
            if (i == 0) store_shared(program, step, thread);
            if (i + 1 < units(program, step)) prefetch_queries(program, step, thread, work[static_cast<size_t>(i + 1)]);
            attend(program, step, thread, work[static_cast<size_t>(i)], i < num_whole);
        }
    }

    void prefetch_queries(const Program& program, const Step& step, int thread, const Piece& piece) const {
        const Item& item = items[static_cast<size_t>(piece.item)];
        const int width = group() * shape.head_dim;
        for (int r = 0; r < item.count; r++)
            prefetch_for_read(row_of(program, step, thread, row_at(step, item.first + r)) + piece.head * width,
                              width * 4);
    }

    void prefetch_keys(const Program& program, const Step& step, int thread, int64_t row) const {
        prefetch_for_read(row_of(program, step, thread, row) + shape.num_heads * shape.head_dim,
                          shape.num_kv_heads * (shape.head_dim + shape.value_dim) * 4);
    }

    // The thread that takes the first piece stores the keys of shared heads; the other pieces wait for that.
    void store_shared(const Program& program, const Step& step, int thread) {
        if (store_first || num_whole == static_cast<int32_t>(work.size())) return;
        for (auto piece = work.begin() + num_whole; piece != work.end(); piece++)
            if (piece->from == 0)
                store(program, step, thread, row_at(step, items[static_cast<size_t>(piece->item)].first), piece->head);
        stored.store(program.num_steps(), std::memory_order_release);
    }

    // Keys and values of the pieces that a thread will take, if threads take pieces in turn. With many rows they are
    // read repeatedly, so that prefetching does not help.
    void prefetch_hint(const Program& program, const Step& step, int thread, Prefetcher& ahead) const override {
        if (step.rows > Program::FEW) return;
        const KvCache& kv = program.kv();
        const size_t threads = static_cast<size_t>(program.pool().threads());
        for (size_t i = static_cast<size_t>(thread); i < work.size(); i += threads) {
            const Piece& piece = work[i];
            const Item& item = items[static_cast<size_t>(piece.item)];
            const int64_t last = step.positions[row_at(step, item.first + item.count - 1)];
            const int64_t seen = shape.window ? std::max<int64_t>(0, last + 1 - shape.window) : 0;
            const int64_t from = piece.split < 0 ? seen : std::max<int64_t>(seen, int64_t{piece.split} * SPLIT);
            const int64_t to = piece.split < 0 ? last : std::min<int64_t>(last, int64_t{piece.split + 1} * SPLIT - 1);
            const KvView view = kv.view(shape.layer, piece.head);
            const int32_t* table = step.table(kv.group_of(shape.layer), item.sequence);
            for (int64_t block = from / kv.block_size; block <= to / kv.block_size; block++)
                ahead.add(view.base + table[block] * view.block_stride, kv.head_bytes(shape.layer));
        }
    }

    const float* normed(const Program& program, const float* head, const float* norm, float* to) const {
        if (!norm) return head;
        program.kernels().norm(head, norm, nullptr, shape.head_dim, shape.norm_eps, to);
        return to;
    }

    // If the cache stores integers, in the order of its channels.
    void turn(const Program& program, int64_t row, const float* head, const float* norm, int kv_head,
              const std::vector<float> KeyChannels::* times, float* to) const {
        Rotation by = {nullptr, nullptr, 0, false};
        if (shape.rope >= 0) {
            const Program::Rope& rope = program.rope(shape.rope);
            const auto half = static_cast<int64_t>(rope.inv_freq.size());
            by = {rope.cos.data() + row * half, rope.sin.data() + row * half, static_cast<int>(half), rope.interleaved};
        }
        Arrangement as = {nullptr, nullptr};
        if (is_integer(program)) {
            const KeyChannels& channels = program.kv().channels(shape.layer);
            const int first = kv_head * shape.head_dim;
            as = {channels.order.data() + first, (channels.*times).data() + first};
        }
        program.kernels().turn(normed(program, head, norm, to + shape.head_dim), by, as, shape.head_dim, to);
    }

    const float* row_of(const Program& program, const Step& step, int thread, int64_t row) const {
        const int kept = shape.stores ? shape.num_kv_heads * (shape.head_dim + shape.value_dim) : 0;
        return program.floats(qkv, step, thread) + row * (shape.num_heads * shape.head_dim + kept);
    }

    void store(const Program& program, const Step& step, int thread, int64_t row, int head) const {
        const float* values = row_of(program, step, thread, row);
        float* key = reinterpret_cast<float*>(program.scratch(thread));
        turn(program, row, values + (shape.num_heads + head) * shape.head_dim, shape.k_norm, head,
             &KeyChannels::of_keys, key);
        const KvCache& kv = program.kv();
        const int64_t slot = step.slot(kv.group_of(shape.layer), row);
        program.kernels().store_kv(
            kv.view(shape.layer, head), slot / kv.block_size, static_cast<int>(slot % kv.block_size), key,
            values + (shape.num_heads + shape.num_kv_heads) * shape.head_dim + head * shape.value_dim);
    }

    void attend(Program& program, const Step& step, int thread, const Piece& piece, bool is_whole) {
        const auto index = static_cast<size_t>(piece.item);
        const Item& item = items[index];
        const int most = program.kernels().max_queries, end = piece.from + piece.count, head = piece.head;
        if (!store_first && !is_whole)
            Pool::await([&] { return stored.load(std::memory_order_acquire) == program.num_steps(); });
        else if (!store_first && (piece.split < 0 || piece.split == item.splits - 1))
            store(program, step, thread, row_at(step, item.first), head);
        for (int from = piece.from; from < end; from += most)
            attend_some(program, step, thread, item, head, piece.split, from, std::min(most, end - from));
        if (piece.split < 0) return;
        const size_t counter = index * static_cast<size_t>(shape.num_kv_heads) + static_cast<size_t>(head);
        if (arrived[counter].fetch_add(1, std::memory_order_acq_rel) + 1 == item.splits)
            merge_apart(program, step, thread, item, head);
    }

    struct QueryGroup {
        Queries queries;
        int32_t first[MOST_QUERIES], last[MOST_QUERIES];
    };

    void gather_queries(const Program& program, const Step& step, const Item& item, int from, int count, float* q,
                        QueryGroup& out) const {
        const int32_t* table = step.table(program.kv().group_of(shape.layer), item.sequence);
        for (int n = 0; n < count; n++) {
            const int32_t position = step.positions[row_at(step, item.first + (from + n) / group())];
            out.last[n] = position;
            out.first[n] = shape.window ? std::max(0, position + 1 - shape.window) : 0;
        }
        out.queries = {q,           count,         out.first,           out.last, table,  shape.scale,
                       shape.softcap, is_integer(program), nullptr,  nullptr, nullptr};
    }

    void attend_some(Program& program, const Step& step, int thread, const Item& item, int head, int split, int from,
                     int count) {
        float* q = reinterpret_cast<float*>(program.scratch(thread));
        const int most = program.kernels().max_queries;
        float* room = q + static_cast<int64_t>(most) * shape.head_dim;
        float* scratch = room + prepare_room(shape.head_dim, most);
        float* part = scratch + attend_scratch_floats(widest(), most);
        float* state = part + most * state_floats();
        for (int n = 0; n < count; n++) {
            const int64_t row = row_at(step, item.first + (from + n) / group());
            const int query_head = head * group() + (from + n) % group();
            turn(program, row, row_of(program, step, thread, row) + query_head * shape.head_dim, shape.q_norm, head,
                 &KeyChannels::of_queries, q + n * shape.head_dim);
            if (shape.growth != 0.0f) grow(q + n * shape.head_dim, step.positions[row]);
        }
        if (out.f32 && split < 0)
            for (int n = 0; n < count; n++)
                prefetch_for_write(result_at(program, step, thread, place_of(item, head, from + n)),
                                   shape.value_dim * 4);
        QueryGroup gathered;
        gather_queries(program, step, item, from, count, q, gathered);
        const KvView kv = program.kv().view(shape.layer, head);
        program.kernels().prepare(kv, gathered.queries, reinterpret_cast<int32_t*>(room));
        if (split >= 0) {
            program.kernels().attend(kv, gathered.queries, split, scratch, part_at(item, head, split, from));
            return;
        }
        int first = gathered.first[0];
        for (int n = 1; n < count; n++) first = std::min(first, gathered.first[n]);
        program.kernels().attend(kv, gathered.queries, first / SPLIT, scratch, state);
        for (int s = first / SPLIT + 1; s < item.splits; s++) {
            program.kernels().attend(kv, gathered.queries, s, scratch, part);
            program.kernels().merge(gathered.queries, s, padded(), part, state);
        }
        put(program, step, thread, item, head, from, count, state);
    }

    void grow(float* query, int32_t position) const {
        const auto by = static_cast<float>(1.0 + double{shape.growth} * std::log1p(position / shape.period));
        for (int c = 0; c < shape.head_dim; c++) query[c] *= by;
    }

    float* part_at(const Item& item, int head, int split, int from) {
        const int64_t queries = item.count * group();
        return parts.data() + item.part +
               ((static_cast<int64_t>(head) * item.splits + split) * queries + from) * state_floats();
    }

    void merge_apart(Program& program, const Step& step, int thread, const Item& item, int head) {
        const int most = program.kernels().max_queries, queries = item.count * group();
        float* state = reinterpret_cast<float*>(program.scratch(thread));
        for (int from = 0; from < queries; from += most) {
            const int count = std::min(most, queries - from);
            QueryGroup gathered;
            gather_queries(program, step, item, from, count, nullptr, gathered);
            for (int s = 0; s < item.splits; s++)
                program.kernels().merge(gathered.queries, s, padded(), part_at(item, head, s, from), state);
            put(program, step, thread, item, head, from, count, state);
        }
    }

    struct Place {
        int64_t row, column;
    };
    Place place_of(const Item& item, int head, int query) const {
        return {item.first + query / group(), (int64_t{head} * group() + query % group()) * shape.value_dim};
    }
    int64_t width() const { return int64_t{shape.num_heads} * shape.value_dim; }
    float* result_at(const Program& program, const Step& step, int thread, Place place) const {
        return program.floats(out.f32, step, thread) + place.row * width() + place.column;
    }

    void put(const Program& program, const Step& step, int thread, const Item& item, int head, int from, int count,
             float* state) const {
        for (int n = 0; n < count; n++) {
            const Place place = place_of(item, head, from + n);
            const float* sums = state + n * state_floats();
            float* values = out.f32 ? result_at(program, step, thread, place) : state;
            const float* sink = shape.sinks ? shape.sinks + head * group() + (from + n) % group() : nullptr;
            program.kernels().finish(sums, shape.value_dim, padded(), sink, is_integer(program), values);
            if (!out.q8) continue;
            const BlockRow to = program.block_row(out, step, thread, width(), place.row);
            // Weighted means of values: there are no outliers.
            program.kernels().quantize(values, shape.value_dim / BLOCK, to.coarse() + place.column / BLOCK * to.stride,
                                       to.stride, nullptr);
            if (place.column == 0) to.outliers->count = 0;
        }
    }
};

// Measures, on a few rows, the magnitude of the channels of queries and keys, and so how to store keys (KeyChannels).
struct Measure : Instruction {
    Attention* attention;

    bool varies() const override { return true; }
    int64_t units(const Program& program, const Step&) const override {
        return program.measures() && attention->shape.stores ? 1 : 0;
    }

    void run(Program& program, const Step& step, int thread, int64_t, int64_t) override {
        const AttentionShape& shape = attention->shape;
        const auto n = static_cast<size_t>(shape.head_dim);
        KeyChannels channels;
        for (int head = 0; head < shape.num_kv_heads; head++) {
            std::vector<double> queries(n), keys(n);
            for (int64_t row = 0; row < step.rows; row++) {
                const float* values = attention->row_of(program, step, thread, row);
                for (int i = 0; i < attention->group(); i++)
                    add_squares(program, thread, values + (head * attention->group() + i) * shape.head_dim,
                                shape.q_norm, queries);
                add_squares(program, thread, values + (shape.num_heads + head) * shape.head_dim, shape.k_norm, keys);
            }
            pool_pairs(program, queries), pool_pairs(program, keys);
            channels.add_head(queries, keys);
        }
        channels.known = true;
        program.kv().set_channels(shape.layer, std::move(channels));
    }

    void add_squares(const Program& program, int thread, const float* head, const float* norm,
                     std::vector<double>& squares) const {
        head = attention->normed(program, head, norm, reinterpret_cast<float*>(program.scratch(thread)));
        for (size_t c = 0; c < squares.size(); c++) squares[c] += double{head[c]} * double{head[c]};
    }

    // Channels that are rotated into each other get the same magnitude.
    void pool_pairs(const Program& program, std::vector<double>& squares) const {
        if (attention->shape.rope < 0) return;
        const Program::Rope& rope = program.rope(attention->shape.rope);
        const size_t half = rope.inv_freq.size();
        for (size_t i = 0; i < half; i++) {
            const size_t a = rope.interleaved ? 2 * i : i, b = rope.interleaved ? a + 1 : i + half;
            squares[a] = squares[b] = (squares[a] + squares[b]) / 2;
        }
    }
};

// Stores keys and values of all rows before queries of other rows read them.
struct Store : Instruction {
    Attention* attention;

    bool varies() const override { return true; }
    void prepare(Program& program, const Step& step) override { attention->plan(program, step); }
    int64_t units(const Program&, const Step& step) const override {
        return attention->shape.stores && attention->store_first ? step.rows * attention->shape.num_kv_heads : 0;
    }
    int64_t grain(const Program&, const Step&) const override { return FEW_ROWS; }
    int64_t cut(const Program& program, int64_t units, int thread) const override {
        return program.cut_rows(attention->qkv, units, thread, attention->shape.num_kv_heads);
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const int heads = attention->shape.num_kv_heads;
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = program.row_at(attention->qkv, i / heads), head = i % heads;
            if (head == 0 && row + 1 < step.rows) attention->prefetch_keys(program, step, thread, row + 1);
            attention->store(program, step, thread, row, static_cast<int>(head));
        }
    }
};

}  // namespace

void Program::attention(Operand qkv, AttentionShape shape, Forms out) {
    auto attention = std::make_unique<Attention>();
    attention->qkv = qkv, attention->shape = shape, attention->out = out;
    want_scratch(attention->scratch_bytes(*kernels_));
    if (shape.stores) layers_.push_back(shape.layer);
    look_back(kv_->group_of(shape.layer), shape.window);
    auto measure = std::make_unique<Measure>();
    measure->attention = attention.get();
    instructions_.push_back(std::move(measure));
    auto store = std::make_unique<Store>();
    store->attention = attention.get();
    instructions_.push_back(std::move(store));
    instructions_.push_back(std::move(attention));
}

}  // namespace unspool

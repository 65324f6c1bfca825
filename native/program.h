// A model's step, recorded once: a list of instructions over slots of activations, run in one call by a pool of
// threads.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "prefetch.h"
#include "kernels.h"
#include "kv.h"
#include "matrix.h"
#include "pool.h"
#include "process_lock.h"

namespace unspool {

// An activation: rows in a slot of the program's memory. Slots are shared by activations whose lives do not overlap.
// `narrow` ones have a row for each wanted row of logits, others one for each token. `copied` ones are computed by
// every thread for itself when rows are few, which is cheaper than meeting at a barrier.
struct Operand {
    int slot = -1;
    bool narrow = false;
    bool copied = false;

    explicit operator bool() const { return slot >= 0; }
};

// Both forms of an activation; either may be absent.
struct Forms {
    Operand f32, q8;
    Rows rows = COARSE;  // of the second
};

struct Step {
    int64_t rows;
    const int32_t* ids;
    const int32_t* positions;
    const int64_t* slots;
    int64_t sequences;
    const int32_t* starts;
    const int32_t* tables;  // [sequences][table_width]
    int64_t table_width;
    int64_t num_logits;
    const int32_t* logit_rows;
    int64_t num_states, num_saves;
    const int32_t* states;  // of recurrent layers: the slot of each sequence
    const int32_t* saves;   // by row: the slot that states are also written to after it, or below 0; null: none
    int64_t given_values = 0;
    const float* given = nullptr;  // rows of float32 that the caller brings; null: none
};

// A causal convolution over the last tokens of each sequence (ops/recurrence.py).
struct ConvShape {
    int layer;
    int64_t offset;  // of its state among those of the layer, in bytes
    int channels, taps;
    const float* weight;  // [channels][taps]
    const float* bias;    // or null
    Activation activation;
    int start, before, after;  // columns of a row: of the input, and of factors before and after, or -1
};

// A delta rule or a scan.
struct RecurrenceShape {
    bool is_delta;
    int layer;
    int64_t offset;
    int heads, key_heads, key_dim, value_dim;
    int q, k, v;  // where they begin in a row
    bool tiled;
    const float* rate;
    const float* bias;
    const float* skip;  // or null
    float eps;
};

struct AttentionShape {
    int layer;    // whose keys and values it reads
    bool stores;  // and whether it stores them itself
    int num_heads, num_kv_heads, head_dim, value_dim;
    float scale;
    int rope;    // index from Program::add_rope, or -1: no rotation
    int window;  // 0: none
    float softcap;
    const float* q_norm;  // or null
    const float* k_norm;
    float norm_eps;
    const float* sinks;  // a score of each head that belongs to no key, or null
    // Queries grow with their position: times 1 + growth · log(1 + ⌊position / period⌋).
    float growth;
    int period;
};

// A norm by the root of the mean square; or, centered, by the deviation from the mean, with a bias or null.
struct NormOf {
    const float* weight;
    const float* bias;
    float eps;
    bool centered;
};

// residual + scale · activation(capped(x · W + bias))
struct AfterLinear {
    float softcap = 0.0f;  // 0: none
    Activation activation = NO_ACTIVATION;
    float scale = 1.0f;
};

// What a row is put together of: columns of another row, normed with the next weights or as they are.
struct RowPart {
    enum Kind : int { COPY, RMS, CENTERED, SCALED };
    int start, width;
    Kind kind;
};

// Sums of a row's parts, each times a number that its logits determine (ops/__init__.py). The table lives as long as the
// program.
struct MixShape {
    int part;  // values in each
    int inputs, outputs, num_logits;
    const float* table;  // [outputs][inputs][num_logits]
    float bias;
};

// What a routing is a function of (ops/routing.py). The vectors live as long as the program.
struct RoutingShape {
    int experts, used;
    bool sigmoid, normalized;
    float scale;
    int groups, used_groups, group_top;
    const float* choice_bias;   // or null
    const float* expert_scale;  // or null
};
struct Routed;

// Rows of 8-bit activations in panels of as many as a kernel takes at once: row r is in the panel of `size[r]` rows
// that begins at `first[r]`.
struct Panels {
    std::vector<int32_t> first, size;
};

// Many rows go in parts that stay with their threads from one instruction to the next: what one core has written,
// another may fetch slowly. Stretches of rows go forth and back, so that each part has late ones, which attend to more
// keys.
struct Parts {
    int count = 1;
    std::vector<int32_t> rows;         // all rows of the step, part after part; empty where there is one
    std::vector<int32_t> of;           // the part of each row, likewise
    std::vector<int64_t> begin;        // of each part in `rows`, and the end
    std::vector<int32_t> panels;       // the first rows of all panels, part after part
    std::vector<int64_t> first_panel;  // of each part in `panels`, and the end
};

// One such row: its blocks lie `stride` apart.
struct BlockRow {
    uint8_t* blocks;
    int stride;
    Outliers* outliers;

    QBlock* coarse() const { return reinterpret_cast<QBlock*>(blocks); }
    FineBlock* fine() const { return reinterpret_cast<FineBlock*>(blocks); }
    WholeBlock* whole() const { return reinterpret_cast<WholeBlock*>(blocks); }
};

class Program;

// Work in units that any thread may do. Each thread has a share of its own, so that it reads memory in a straight line,
// and takes over from others when it is done: nobody waits for a thread that the system has put aside, only for units
// that are under way.
struct Instruction {
    virtual ~Instruction() = default;
    // Whether its units depend on more of a step than its numbers of rows. Such a one is prepared before every step, by
    // one thread.
    virtual bool varies() const { return false; }
    virtual void prepare(Program&, const Step&) {}
    virtual int64_t units(const Program&, const Step&) const = 0;
    virtual int64_t grain(const Program&, const Step&) const { return 1; }       // units taken at once, at least
    virtual bool by_halves(const Program&, const Step&) const { return false; }  // of what is left of one's own share
    // At most, of one's own share, while there is much left of it; 0: the grain.
    virtual int64_t most(const Program&, const Step&) const { return 0; }
    virtual int64_t cut(const Program& program, int64_t units, int thread) const;  // where a thread's share begins
    // Every thread does all units for itself, into copies of its own, and goes on at once.
    virtual bool copied(const Program&, const Step&) const { return false; }
    virtual void run(Program&, const Step&, int thread, int64_t begin, int64_t end) = 0;
    // Memory that a thread will likely read here and that no earlier instruction of this step writes. It is prefetched
    // during the product before.
    virtual void prefetch_hint(const Program&, const Step&, int /*thread*/, Prefetcher&) const {}
};

// Chooses how threads split a product of few rows: each takes its whole share at once, or halves of what is left. Each
// take is a barrier for earlier writes, so whole shares are faster on equal cores; halves balance cores of different
// speed. Both are timed in turn now and then, and the faster one is kept. The results are the same.
class WorkSplitTuner {
public:
    bool by_halves(int64_t rows);  // for a step of so many
    void record(int64_t nanoseconds);

private:
    static constexpr int TRIED = 16, KEPT = 240;  // steps
    int step_ = 0;
    int64_t rows_ = 0, best_[2] = {INT64_MAX, INT64_MAX};
    bool now_ = false, better_ = false;
};

class Program {
public:
    Program(std::shared_ptr<Pool> pool, const Kernels* kernels, std::shared_ptr<KvCache> kv);
    ~Program();

    // Building: each call appends.
    int add_slot(int64_t bytes_per_row);
    int add_rope(std::vector<float> inv_freq, bool interleaved, float scale);
    void embed(const Matrix* table, float scale, const Matrix* positions, Operand out);
    void norm(Operand x, NormOf of, int width, Operand residual, Forms out);
    void linear(Forms x, const Matrix* weight, const float* bias, Operand residual, AfterLinear after, Operand out);
    void gated(Forms x, const Matrix* weight, const float* bias, Activation activation, Operand out);
    void multiply(Operand x, Operand gate, int width, Activation activation, Operand out);
    void arrange(Operand x, int width, std::vector<RowPart> parts, const float* weight, float eps, Operand out);
    void join(Operand x, int x_width, Operand y, int y_width, Operand out);
    void add(Operand x, int width, Operand y, int y_width, float x_scale, float y_scale, int start, Operand out);
    void cut(Operand x, int width, float deviations, Operand out);
    void level(Operand x, int width, Operand like, int part, float least, Operand out);
    void mix(Operand x, Operand logits, MixShape of, Operand residual, Operand out);
    void linear_heads(Operand x, std::vector<const Matrix*> heads, Operand out);
    void attention(Operand qkv, AttentionShape shape, Forms out);
    void short_conv(Operand x, int width, ConvShape shape, Operand out);
    void recurrence(Operand x, Operand gates, RecurrenceShape shape, Operand out);
    void take(Operand x, int width, Forms out);
    void given(int width, Operand out);  // rows that a step brings
    void quantize(Operand x, int width, Forms out);
    // Experts. `route` returns a number for the others; what they read and write has `used` places for each row.
    int route(Operand scores, RoutingShape shape);
    void spread(int routed, Operand x, bool from_places, int width, Forms out);
    void expert_gate(int routed, Forms x, std::vector<const Matrix*> experts, const float* bias, Activation activation,
                     Operand out);
    void expert_up(int routed, Forms x, std::vector<const Matrix*> experts, const float* bias, Activation activation,
                   Operand out);
    void expert_project(int routed, Forms x, std::vector<const Matrix*> experts, const float* bias, Operand out);
    void gather_experts(int routed, Operand x, Operand residual, int width, Operand out);
    void scale_rows(Operand x, Operand logit, Operand residual, int width, Operand out);
    void set_output(Operand output, int64_t width);
    void set_kept(Operand kept, int64_t width);  // rows that can be read beside the output

    // Runs a step whose inputs have been checked by check(). The result stays until the next run.
    const float* run(const Step& step);
    // What is wrong with a step; empty when nothing is.
    std::string check(const Step& step) const;

    int64_t output_rows(const Step& step) const { return output_.narrow ? step.num_logits : step.rows; }
    int64_t output_width() const { return output_width_; }
    // The rows that the last step kept, which stay until the next one.
    const float* kept() const;
    int64_t kept_values() const { return kept_rows_ * kept_width_; }
    int64_t num_steps() const { return num_steps_; }  // with the one under way

    // For instructions ------------------------------------------------------------------------------------------------
    static constexpr int64_t FEW = 4;  // rows that each thread norms for itself

    int64_t rows_of(Operand o, const Step& step) const { return o.narrow ? step.num_logits : step.rows; }
    const Panels& panels(const Forms& forms) const {
        return (forms.q8 ? forms.q8 : forms.f32).narrow ? narrow_panels_ : panels_;
    }
    const Parts& parts() const { return parts_; }
    bool parted(Operand o) const { return parts_.count > 1 && !o.narrow; }
    int part_of(int64_t row) const { return parts_.count > 1 ? parts_.of[static_cast<size_t>(row)] : 0; }
    // Where units are rows: which one.
    int64_t row_at(Operand o, int64_t unit) const { return parted(o) ? parts_.rows[static_cast<size_t>(unit)] : unit; }
    // Where a thread's share begins of units that lie part after part, `begin(part)` being a part's first.
    template <class Begin> int64_t cut_parts(int thread, Begin begin) const {
        const int of_part = pool_->threads() / parts_.count, part = thread / of_part;
        return begin(part) + (begin(part + 1) - begin(part)) * (thread % of_part) / of_part;
    }
    int64_t cut_rows(Operand o, int64_t units, int thread, int64_t units_per_row = 1) const {
        if (!parted(o)) return units * thread / pool_->threads();
        return cut_parts(thread, [&](int part) { return parts_.begin[static_cast<size_t>(part)] * units_per_row; });
    }
    BlockRow block_row(const Forms& forms, const Step& step, int thread, int64_t width, int64_t row) const;
    bool is_copied(Operand o, const Step& step) const { return o.copied && rows_of(o, step) <= FEW; }
    uint8_t* at(Operand o, const Step& step, int thread) const;
    float* floats(Operand o, const Step& step, int thread) const {
        return reinterpret_cast<float*>(at(o, step, thread));
    }
    uint8_t* scratch(int thread) const { return scratch_.data() + thread * scratch_bytes_; }
    void want_scratch(int64_t bytes);
    // The panel that a thread has made in its scratch, for all pieces that it takes of one instruction.
    struct alignas(64) Made {
        const Instruction* by = nullptr;
        Panel panel{};
    };
    Made& made(int thread) { return made_[static_cast<size_t>(thread)]; }
    Prefetcher& prefetcher(int thread) { return prefetchers_[static_cast<size_t>(thread)]; }
    // Room for what a step with many rows gathers of a panel that begins at this row.
    uint8_t* gathered(int64_t row) const { return gathered_.data() + row * gathered_bytes_; }
    void want_gathered(int64_t bytes) { gathered_bytes_ = bytes > gathered_bytes_ ? bytes : gathered_bytes_; }

    struct Rope {
        std::vector<float> inv_freq;
        bool interleaved;
        float scale;
        std::vector<float> cos, sin;  // [row][pair] of the step
    };

    const Kernels& kernels() const { return *kernels_; }
    const Pool& pool() const { return *pool_; }
    KvCache& kv() const { return *kv_; }
    bool measures() const { return measures_; }
    const Rope& rope(int index) const { return ropes_[static_cast<size_t>(index)]; }
    int32_t sequence_of(int64_t row) const { return row_sequence_[static_cast<size_t>(row)]; }
    // Another sequence reads a block that is written in this step: keys are stored before anyone looks.
    bool shares_fresh_blocks() const { return shares_fresh_blocks_; }

private:
    friend struct Turns;
    void measure();
    const float* run_step(const Step& step);
    void reserve(const Step& step);
    void study(const Step& step);
    void part_rows(int64_t rows);
    void deal(const Step& step);
    void work(int thread);
    void gather_for(const Instruction* product);

    // All that a thread needs to know of one instruction of a step: its own share, and how much of anyone's it has
    // done. A cache line of its own: threads that write to one line wait for each other at every piece.
    struct alignas(64) Share {
        Instruction* instruction;
        int32_t units, grain, most;
        int32_t begin, end;
        bool is_copied, is_halved;
        std::atomic<int32_t> next;  // the first unit that nobody has taken
        std::atomic<int32_t> done;

        // As a share of the same that is begun or done.
        void renew(const Share& like) {
            instruction = like.instruction, units = like.units, grain = like.grain, most = like.most;
            begin = like.begin, end = like.end;
            is_copied = like.is_copied, is_halved = like.is_halved;
            next.store(begin, std::memory_order_relaxed), done.store(0, std::memory_order_relaxed);
        }
    };
    // Steps use two sets of shares in turn: each thread makes its shares of the next step ready as it goes.
    Share& share(size_t set, size_t index, int thread) const {
        const auto threads = static_cast<size_t>(pool_->threads());
        return shares_[(set * instructions_.size() + index) * threads + static_cast<size_t>(thread)];
    }
    Share& share(size_t index, int thread) const { return share(set_, index, thread); }
    bool is_over(size_t index) const;
    // Units of an instruction that one thread has taken, and will do.
    struct Claim {
        Share* owner = nullptr;  // of the share that they are from; null: none are taken
        int32_t begin = 0, end = 0;
        int turn = 0;  // whose shares to look at next: 0 one's own
    };
    bool claim(size_t index, int thread, Claim& claim) const;
    int32_t take_part(size_t index, int thread, Claim first);

    std::shared_ptr<Pool> pool_;
    const Kernels* kernels_;
    std::shared_ptr<KvCache> kv_;
    std::vector<std::unique_ptr<Instruction>> instructions_;
    std::vector<std::shared_ptr<Routed>> routed_;
    std::vector<Rope> ropes_;
    std::vector<const Matrix*> tables_;     // by token
    std::vector<const Matrix*> positions_;  // by position
    std::vector<int> layers_;               // with attention
    bool measures_ = false;                 // the step under way is measure()'s
    Operand output_;
    int64_t output_width_ = 0;
    Operand kept_;
    int64_t kept_width_ = 0, kept_rows_ = 0;
    int64_t given_width_ = 0;

    std::vector<int64_t> slot_bytes_, slot_offsets_, copy_offsets_;
    int64_t capacity_ = 0, copies_stride_ = 0;
    Memory slots_, copies_, scratch_, gathered_;
    int64_t scratch_bytes_ = 0, gathered_bytes_ = 0;

    std::vector<int32_t> row_sequence_;
    Panels panels_, narrow_panels_;
    Parts parts_;
    std::vector<int64_t> block_owner_;
    int64_t stamp_ = 0;
    bool shares_fresh_blocks_ = false;
    const Step* step_ = nullptr;
    ProcessLock turn_;
    bool is_broken_ = false;  // forked in the middle of a step
    std::vector<Made> made_;
    std::vector<Prefetcher> prefetchers_;
    int64_t num_steps_ = 0;
    WorkSplitTuner work_split_;
    bool by_halves_ = false;  // in the step under way
    std::vector<Instruction*> varying_;
    std::vector<int64_t> dealt_for_, now_;  // rows, wanted rows, units of what varies: of the shares, of this step
    std::unique_ptr<Share[]> shares_;
    size_t num_shares_ = 0, set_ = 0;  // of a thread in a set: instructions that have something to do
};

}  // namespace unspool

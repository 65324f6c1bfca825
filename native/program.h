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

// An activation: rows in a slot of the program's memory. Activations whose lifetimes do not overlap share slots.
// `narrow` ones have one row per logit row, others one per token. If rows are few, every thread computes its own copy
// of `copied` ones, which is cheaper than a barrier.
struct Operand {
    int slot = -1;
    bool narrow = false;
    bool copied = false;

    explicit operator bool() const { return slot >= 0; }
};

// The two forms of an activation; either may be absent.
struct Forms {
    Operand f32, q8;
    Rows rows = COARSE;  // of the second form
};

struct Step {
    int64_t rows;
    const int32_t* ids;
    const int32_t* positions;
    const int64_t* slots;  // [groups of blocks][rows]
    int64_t sequences;
    const int32_t* starts;
    const int32_t* tables;  // [groups of blocks][sequences][table_width]; -1: a block that no row sees any more
    int64_t table_width;
    int64_t num_logits;
    const int32_t* logit_rows;
    int64_t num_states, num_saves;
    const int32_t* states;  // of recurrent layers: the slot of each sequence
    const int32_t* saves;   // per row: the slot that states are also written to after this row, or negative; null: none
    int64_t given_values = 0;
    const float* given = nullptr;  // rows of float32 that the caller provides; null: none

    int64_t slot(int group, int64_t row) const { return slots[group * rows + row]; }
    const int32_t* table(int group, int64_t sequence) const {
        return tables + (group * sequences + sequence) * table_width;
    }
};

// A causal convolution over the last tokens of each sequence (ops/recurrence.py).
struct ConvShape {
    int layer;
    int64_t offset;  // of its state within the states of the layer, in bytes
    int channels, taps;
    const float* weight;  // [channels][taps]
    const float* bias;    // or null
    Activation activation;
    int start, before, after;  // columns of a row: of the input, and of the factors before and after, or -1
};

// A delta rule or a scan.
struct RecurrenceShape {
    bool is_delta;
    int layer;
    int64_t offset;
    int heads, key_heads, key_dim, value_dim;
    int q, k, v;  // their first columns in a row
    bool tiled;
    const float* rate;
    const float* bias;
    const float* skip;  // or null
    float eps;
};

struct AttentionShape {
    int layer;    // the layer whose keys and values it reads
    bool stores;  // whether it stores keys and values itself
    int num_heads, num_kv_heads, head_dim, value_dim;
    float scale;
    int rope;    // index from Program::add_rope, or -1: no rotation
    int window;  // 0: none
    float softcap;
    const float* q_norm;  // or null
    const float* k_norm;
    float norm_eps;
    const float* sinks;  // one score per head that belongs to no key, or null
    // Queries are multiplied by 1 + growth · log(1 + ⌊position / period⌋).
    float growth;
    int period;
};

// A norm by the root mean square; or, if centered, by the standard deviation, with a bias or null.
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

// The parts of an assembled row: columns of another row, normed with the next weights or unchanged.
struct RowPart {
    enum Kind : int { COPY, RMS, CENTERED, SCALED };
    int start, width;
    Kind kind;
};

// Weighted sums of a row's parts, with coefficients from its logits (ops/__init__.py). The table must outlive the
// program.
struct MixShape {
    int part;  // values per part
    int inputs, outputs, num_logits;
    const float* table;  // [outputs][inputs][num_logits]
    float bias;
};

// The parameters of a routing (ops/routing.py). The vectors must outlive the program.
struct RoutingShape {
    int experts, used;
    bool sigmoid, normalized;
    float scale;
    int groups, used_groups, group_top;
    const float* choice_bias;   // or null
    const float* expert_scale;  // or null
};
struct Routed;

// Rows of 8-bit activations in panels, as large as a kernel processes at once: row r is in the panel of `size[r]` rows
// that begins at `first[r]`.
struct Panels {
    std::vector<int32_t> first, size;
};

// Many rows are divided into parts that stay with their threads from one instruction to the next, because reading what
// another core has written may be slow. Stretches of rows are assigned back and forth, so that each part gets some late
// rows, which attend to more keys.
struct Parts {
    int count = 1;
    std::vector<int32_t> rows;         // all rows of the step, part after part; empty if there is only one part
    std::vector<int32_t> of;           // the part of each row; empty likewise
    std::vector<int64_t> begin;        // index of each part in `rows`, and the end
    std::vector<int32_t> panels;       // the first rows of all panels, part after part
    std::vector<int64_t> first_panel;  // index of each part in `panels`, and the end
};

// One such row; its blocks are `stride` apart.
struct BlockRow {
    uint8_t* blocks;
    int stride;
    Outliers* outliers;

    QBlock* coarse() const { return reinterpret_cast<QBlock*>(blocks); }
    FineBlock* fine() const { return reinterpret_cast<FineBlock*>(blocks); }
    WholeBlock* whole() const { return reinterpret_cast<WholeBlock*>(blocks); }
};

class Program;

// Work is divided into units that any thread may process. Each thread first processes its own share, to read memory in
// order, and then takes units from other shares. So no thread waits for one that the system has suspended, except for
// units that are already in progress.
struct Instruction {
    virtual ~Instruction() = default;
    // Whether its units depend on more than the numbers of rows of a step. Such an instruction is prepared before every
    // step, by one thread.
    virtual bool varies() const { return false; }
    virtual void prepare(Program&, const Step&) {}
    virtual int64_t units(const Program&, const Step&) const = 0;
    virtual int64_t grain(const Program&, const Step&) const { return 1; }       // fewest units taken at once
    virtual bool by_halves(const Program&, const Step&) const { return false; }  // takes half of the own share's rest
    // Largest number of units taken at once from the own share while much is left of it; 0: the grain.
    virtual int64_t most(const Program&, const Step&) const { return 0; }
    virtual int64_t cut(const Program& program, int64_t units, int thread) const;  // the first unit of a thread's share
    // Every thread computes all units into its own copy, and continues without a barrier.
    virtual bool copied(const Program&, const Step&) const { return false; }
    virtual void run(Program&, const Step&, int thread, int64_t begin, int64_t end) = 0;
    // Memory that this thread will probably read in the instruction, and that no earlier instruction of this step
    // writes. It is prefetched during the product before.
    virtual void prefetch_hint(const Program&, const Step&, int /*thread*/, Prefetcher&) const {}
};

// Chooses how threads divide a product of few rows: a thread takes its whole share at once, or half of the rest each
// time. Taking units is a barrier for earlier writes, so whole shares are faster on equal cores; halves balance cores
// of different speed. From time to time both are measured, and the faster one is kept. The results are identical.
class WorkSplitTuner {
public:
    bool by_halves(int64_t rows);  // for a step with this many rows
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

    // Recording: each call appends an instruction.
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
    void given(int width, Operand out);  // rows that the caller of a step provides
    void quantize(Operand x, int width, Forms out);
    // Experts. `route` returns a number for the other calls; their rows have `used` places per row of the step.
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
    void set_kept(Operand kept, int64_t width);  // rows that can be read in addition to the output

    // Runs a step whose inputs check() has accepted. The result is valid until the next run.
    const float* run(const Step& step);
    // Describes what is wrong with a step; empty if it is valid.
    std::string check(const Step& step) const;

    int64_t output_rows(const Step& step) const { return output_.narrow ? step.num_logits : step.rows; }
    int64_t output_width() const { return output_width_; }
    // The rows that the last step kept; valid until the next step.
    const float* kept() const;
    int64_t kept_values() const { return kept_rows_ * kept_width_; }
    int64_t num_steps() const { return num_steps_; }  // including the one in progress

    // For instructions ------------------------------------------------------------------------------------------------
    static constexpr int64_t FEW = 4;  // up to this many rows, each thread computes norms for itself

    int64_t rows_of(Operand o, const Step& step) const { return o.narrow ? step.num_logits : step.rows; }
    const Panels& panels(const Forms& forms) const {
        return (forms.q8 ? forms.q8 : forms.f32).narrow ? narrow_panels_ : panels_;
    }
    const Parts& parts() const { return parts_; }
    bool parted(Operand o) const { return parts_.count > 1 && !o.narrow; }
    int part_of(int64_t row) const { return parts_.count > 1 ? parts_.of[static_cast<size_t>(row)] : 0; }
    // For instructions whose units are rows: the row of a unit.
    int64_t row_at(Operand o, int64_t unit) const { return parted(o) ? parts_.rows[static_cast<size_t>(unit)] : unit; }
    // The beginning of a thread's share of units that are ordered by part; `begin(part)` is a part's first unit.
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
    // The panel in this thread's scratch memory, shared by all units that it takes of one instruction.
    struct alignas(64) Made {
        const Instruction* by = nullptr;
        Panel panel{};
    };
    Made& made(int thread) { return made_[static_cast<size_t>(thread)]; }
    Prefetcher& prefetcher(int thread) { return prefetchers_[static_cast<size_t>(thread)]; }
    // The buffer for the gathered outliers of a panel that begins at this row, in steps with many rows.
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
    int num_groups() const { return kv_ ? kv_->num_groups() : 1; }
    bool measures() const { return measures_; }
    const Rope& rope(int index) const { return ropes_[static_cast<size_t>(index)]; }
    int32_t sequence_of(int64_t row) const { return row_sequence_[static_cast<size_t>(row)]; }
    // Another sequence reads a block that this step writes, so all keys are stored before any query reads them.
    bool shares_fresh_blocks() const { return shares_fresh_blocks_; }

private:
    friend struct Turns;
    void measure();
    const float* run_step(const Step& step);
    void reserve(const Step& step);
    void study(const Step& step);
    void look_back(int group, int window);  // an attention over this group's blocks is added
    int64_t first_needed(int group, int64_t position) const;  // the first position that kernels read for a row
    void part_rows(int64_t rows);
    void deal(const Step& step);
    void work(int thread);
    void gather_for(const Instruction* product);

    // What a thread needs for one instruction of a step: its own share, and the number of units that it has done of any
    // share. It has its own cache line, because threads that write to the same line would slow each other down.
    struct alignas(64) Share {
        Instruction* instruction;
        int32_t units, grain, most;
        int32_t begin, end;
        bool is_copied, is_halved;
        std::atomic<int32_t> next;  // the first unit that no thread has taken
        std::atomic<int32_t> done;

        // Reset as a share like another one that may be in progress or done.
        void renew(const Share& like) {
            instruction = like.instruction, units = like.units, grain = like.grain, most = like.most;
            begin = like.begin, end = like.end;
            is_copied = like.is_copied, is_halved = like.is_halved;
            next.store(begin, std::memory_order_relaxed), done.store(0, std::memory_order_relaxed);
        }
    };
    // Steps alternate between two sets of shares: during a step, each thread resets its shares for the next one.
    Share& share(size_t set, size_t index, int thread) const {
        const auto threads = static_cast<size_t>(pool_->threads());
        return shares_[(set * instructions_.size() + index) * threads + static_cast<size_t>(thread)];
    }
    Share& share(size_t index, int thread) const { return share(set_, index, thread); }
    bool is_over(size_t index) const;
    // Units of an instruction that one thread has taken.
    struct Claim {
        Share* owner = nullptr;  // the share that they belong to; null: none are taken
        int32_t begin = 0, end = 0;
        int turn = 0;  // index of the share to take from next: 0 the own share
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
    std::vector<int64_t> windows_;          // of each group of blocks: the keys that a row sees at most; 0: all, -1: none
    bool measures_ = false;                 // the current step was started by measure()
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
    std::vector<std::vector<int64_t>> block_owner_;  // of each group: the sequence that wrote a block last
    int64_t stamp_ = 0;
    bool shares_fresh_blocks_ = false;
    const Step* step_ = nullptr;
    ProcessLock turn_;
    bool is_broken_ = false;  // the process was forked during a step
    std::vector<Made> made_;
    std::vector<Prefetcher> prefetchers_;
    int64_t num_steps_ = 0;
    WorkSplitTuner work_split_;
    bool by_halves_ = false;  // in the current step
    std::vector<Instruction*> varying_;
    std::vector<int64_t> dealt_for_, now_;  // rows, logit rows, units that vary: of the shares, of this step
    std::unique_ptr<Share[]> shares_;
    size_t num_shares_ = 0, set_ = 0;  // per thread and set: instructions that have work
};

}  // namespace unspool

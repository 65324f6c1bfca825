#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

namespace unspool {

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t HUGE_FROM = 2 << 20;  // bytes of rows
int64_t rounded(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

}  // namespace

int64_t Instruction::cut(const Program& program, int64_t units, int thread) const {
    return units * thread / program.pool().threads();
}

// Cosines and sines of the step's rows, for every rotation of the model.
struct Turns : Instruction {
    bool varies() const override { return true; }
    void prepare(Program& program, const Step& step) override {
        for (auto& rope : program.ropes_) {
            const size_t size = rope.inv_freq.size() * static_cast<size_t>(step.rows);
            if (rope.cos.size() < size) rope.cos.resize(size), rope.sin.resize(size);
        }
    }

    int64_t units(const Program& program, const Step& step) const override {
        return program.ropes_.empty() ? 0 : step.rows;
    }
    int64_t grain(const Program&, const Step&) const override { return 16; }

    void run(Program& program, const Step& step, int, int64_t begin, int64_t end) override {
        for (auto& rope : program.ropes_) {
            const size_t half = rope.inv_freq.size();
            for (int64_t row = begin; row < end; row++)
                for (size_t i = 0; i < half; i++) {
                    const float angle = static_cast<float>(step.positions[row]) * rope.inv_freq[i];
                    rope.cos[static_cast<size_t>(row) * half + i] = std::cos(angle) * rope.scale;
                    rope.sin[static_cast<size_t>(row) * half + i] = std::sin(angle) * rope.scale;
                }
        }
    }
};

bool WorkSplitTuner::by_halves(int64_t rows) {
    if (rows != rows_ && step_ < TRIED) step_ = rows_ ? TRIED : 0;  // steps with different rows are not comparable
    if (step_ == 0) best_[0] = best_[1] = INT64_MAX;
    rows_ = rows;
    return now_ = step_ < TRIED ? step_ % 2 == 1 : better_;
}

void WorkSplitTuner::record(int64_t nanoseconds) {
    best_[now_] = std::min(best_[now_], nanoseconds);
    if (++step_ == TRIED) better_ = best_[1] < best_[0];
    if (step_ == TRIED + KEPT) step_ = 0;
}

Program::Program(std::shared_ptr<Pool> pool, const Kernels* kernels, std::shared_ptr<KvCache> kv)
    : pool_(std::move(pool)), kernels_(kernels), kv_(std::move(kv)) {
    instructions_.push_back(std::make_unique<Turns>());
}

Program::~Program() = default;

int Program::add_slot(int64_t bytes_per_row) {
    slot_bytes_.push_back(rounded(bytes_per_row));
    return static_cast<int>(slot_bytes_.size()) - 1;
}

int Program::add_rope(std::vector<float> inv_freq, bool interleaved, float scale) {
    for (size_t i = 0; i < ropes_.size(); i++)
        if (ropes_[i].inv_freq == inv_freq && ropes_[i].interleaved == interleaved && ropes_[i].scale == scale)
            return static_cast<int>(i);
    ropes_.push_back({std::move(inv_freq), interleaved, scale, {}, {}});
    return static_cast<int>(ropes_.size()) - 1;
}

void Program::set_output(Operand output, int64_t width) { output_ = output, output_width_ = width; }

void Program::set_kept(Operand kept, int64_t width) { kept_ = kept, kept_width_ = width; }

const float* Program::kept() const {
    if (!kept_rows_) return nullptr;
    return reinterpret_cast<const float*>(slots_.data() + slot_offsets_[static_cast<size_t>(kept_.slot)]);
}

void Program::want_scratch(int64_t bytes) { scratch_bytes_ = std::max(scratch_bytes_, rounded(bytes)); }

uint8_t* Program::at(Operand o, const Step& step, int thread) const {
    const auto slot = static_cast<size_t>(o.slot);
    if (is_copied(o, step)) return copies_.data() + thread * copies_stride_ + copy_offsets_[slot];
    return slots_.data() + slot_offsets_[slot];
}

BlockRow Program::block_row(const Forms& forms, const Step& step, int thread, int64_t width, int64_t row) const {
    const int64_t blocks = blocks_of(forms.rows, width), bytes = block_bytes(forms.rows);
    const Panels& in = panels(forms);
    const int64_t first = in.first[static_cast<size_t>(row)];
    uint8_t* base = at(forms.q8, step, thread);
    uint8_t* outliers = base + rows_of(forms.q8, step) * blocks * bytes + row * outliers_bytes(width / BLOCK);
    return {base + (first * blocks + (row - first)) * bytes, in.size[static_cast<size_t>(row)],
            forms.rows == FINE ? nullptr : reinterpret_cast<Outliers*>(outliers)};
}

void Program::reserve(const Step& step) {
    const int threads = pool_->threads();
    const int64_t rows = std::max(step.rows, step.num_logits);
    if (rows > capacity_) {
        capacity_ = std::max<int64_t>(rows, 8);
        int64_t total = 0, largest = 0;
        slot_offsets_.clear();
        for (size_t i = 0; i < slot_bytes_.size(); i++) {
            slot_offsets_.push_back(total);
            // The output's rows are the logit rows, not all rows of the step, so it has a slot of its own.
            total += slot_bytes_[i] * capacity_ + LINE;
            largest = std::max(largest, slot_bytes_[i] * capacity_);
        }
        // Huge pages if rows fill some of them; those of a short prompt, and of the output, would be mostly empty.
        slots_ = Memory(static_cast<size_t>(total), total - largest >= HUGE_FROM);
        gathered_ = Memory(static_cast<size_t>(capacity_ * gathered_bytes_), false);
    }
    if (copies_.size() == 0) {
        copies_stride_ = 0;
        for (int64_t bytes : slot_bytes_) {
            copy_offsets_.push_back(copies_stride_);
            copies_stride_ += bytes * FEW + LINE;
        }
        copies_ = Memory(static_cast<size_t>(copies_stride_ * threads) + 4096, false);
    }
    if (scratch_.size() < static_cast<size_t>(scratch_bytes_ * threads))
        scratch_ = Memory(static_cast<size_t>(scratch_bytes_ * threads), false);
}

// Kernels read keys in sixteens, so the first position that they read is a multiple of that.
int64_t Program::first_needed(int group, int64_t position) const {
    const auto index = static_cast<size_t>(group);
    if (index >= windows_.size() || windows_[index] <= 0) return 0;
    return std::max<int64_t>(0, position + 1 - windows_[index]) / TILE * TILE;
}

void Program::look_back(int group, int window) {
    const auto index = static_cast<size_t>(group);
    if (index >= windows_.size()) windows_.resize(index + 1, -1);
    int64_t& most = windows_[index];
    most = most == 0 || window == 0 ? 0 : std::max<int64_t>(most, window);
}

std::string Program::check(const Step& s) const {
    auto text = [](const char* what, int64_t value, const char* limit, int64_t bound) {
        return std::string(what) + " " + std::to_string(value) + limit + std::to_string(bound);
    };
    if (s.rows < 1) return "a step needs at least one row";
    if (s.sequences < 1 || s.starts[0] != 0 || s.starts[s.sequences] != s.rows) return "starts do not cover the rows";
    for (int64_t i = 0; i < s.sequences; i++)
        if (s.starts[i] >= s.starts[i + 1]) return text("starts: sequence", i, " has no rows, of ", s.sequences);
    int64_t vocabulary = tables_.empty() ? INT64_MAX : 0;  // tokens beyond a smaller table share one of its rows
    for (const Matrix* table : tables_) vocabulary = std::max(vocabulary, table->rows());
    for (int64_t i = 0; i < s.rows; i++) {
        if (s.ids[i] < 0 || s.ids[i] >= vocabulary)
            return text("token id", s.ids[i], " is outside the vocabulary of ", vocabulary);
        if (s.positions[i] < 0) return text("position", s.positions[i], " is below ", 0);
        for (const Matrix* table : positions_)
            if (s.positions[i] >= table->rows())
                return text("position", s.positions[i], " is outside the table of ", table->rows());
        if (!kv_) continue;
        if (s.positions[i] / kv_->block_size >= s.table_width)
            return text("position", s.positions[i], " is past the end of a table of blocks: ", s.table_width);
        for (int group = 0; group < kv_->num_groups(); group++) {
            const int64_t slots = kv_->blocks(group) * kv_->block_size;
            if (s.slot(group, i) < 0 || s.slot(group, i) >= slots)
                return text("slot", s.slot(group, i), " is outside the cache's ", slots);
        }
    }
    for (int group = 0; kv_ && group < kv_->num_groups(); group++)
        for (int64_t sequence = 0; sequence < s.sequences; sequence++) {
            const int64_t needed = first_needed(group, s.positions[s.starts[sequence]]) / kv_->block_size;
            for (int64_t i = 0; i < s.table_width; i++) {
                const int32_t block = s.table(group, sequence)[i];
                if ((block < 0 && (block < -1 || i >= needed)) || block >= kv_->blocks(group))
                    return text("block", block, " is outside the cache's ", kv_->blocks(group));
            }
        }
    if (kv_ && kv_->state_bytes() > 0) {
        if (s.num_states != s.sequences)
            return text("a state for each of", s.sequences, " sequences is needed, not ", s.num_states);
        if (s.num_saves != 0 && s.num_saves != s.rows)
            return text("saves of", s.num_saves, " rows; the step has ", s.rows);
        for (int64_t i = 0; i < s.sequences; i++)
            if (s.states[i] < 0 || s.states[i] >= kv_->states)
                return text("state", s.states[i], " is outside the cache's ", kv_->states);
        for (int64_t i = 0; i < s.num_saves; i++)
            if (s.saves[i] >= kv_->states) return text("state", s.saves[i], " is outside the cache's ", kv_->states);
    }
    if (s.given_values != s.rows * given_width_)
        return text("given rows have", s.given_values, " values; the step needs ", s.rows * given_width_);
    for (int64_t i = 0; i < s.num_logits; i++)
        if (s.logit_rows[i] < 0 || s.logit_rows[i] >= s.rows)
            return text("logit row", s.logit_rows[i], " is outside the step's ", s.rows);
    return "";
}

namespace {

// Rows [from, to) in panels, the largest first.
void cut_panels(const int* counts, int64_t from, int64_t to, Panels& panels) {
    panels.first.resize(static_cast<size_t>(to));
    panels.size.resize(static_cast<size_t>(to));
    for (int64_t first = from; first < to; counts++)
        for (; to - first >= *counts; first += *counts)
            for (int64_t r = first; r < first + *counts; r++) {
                panels.first[static_cast<size_t>(r)] = static_cast<int32_t>(first);
                panels.size[static_cast<size_t>(r)] = *counts;
            }
}

constexpr int64_t PART_ROWS = 128;  // least number of rows per part, because each part's threads read all weights
constexpr int64_t STRETCH = 48;     // rows: whole panels, and keys of this many tokens fill whole cache lines

}  // namespace

// As many parts as divide the number of threads and as there are enough rows for. The last rows, too few for a stretch
// per part, are divided evenly: with one panel more in a part, all others would wait for it at every product.
void Program::part_rows(int64_t rows) {
    const int threads = pool_->threads();
    int& count = parts_.count = 1;
    for (int more = 2; more <= threads && rows / more >= PART_ROWS; more++)
        if (threads % more == 0) count = more;
    const int64_t whole = count > 1 ? rows / (STRETCH * count) * STRETCH * count : rows;
    const auto rest = [&](int part) { return whole + (rows - whole) * part / count; };
    cut_panels(kernels_->row_counts, 0, whole, panels_);
    for (int part = 0; part < count; part++) cut_panels(kernels_->row_counts, rest(part), rest(part + 1), panels_);
    parts_.rows.clear(), parts_.of.clear(), parts_.begin.assign(1, 0);
    parts_.panels.clear(), parts_.first_panel.assign(1, 0);
    if (count == 1) return;
    for (int64_t r = 0; r < whole; r++) {
        const int64_t round = r / (STRETCH * count), turn = r / STRETCH % count;
        parts_.of.push_back(static_cast<int32_t>(round % 2 ? count - 1 - turn : turn));
    }
    for (int part = 0; part < count; part++)
        parts_.of.insert(parts_.of.end(), static_cast<size_t>(rest(part + 1) - rest(part)), part);
    for (int part = 0; part < count; part++) {
        for (int64_t r = 0; r < rows; r++)
            if (part_of(r) == part) {
                parts_.rows.push_back(static_cast<int32_t>(r));
                if (panels_.first[static_cast<size_t>(r)] == r) parts_.panels.push_back(static_cast<int32_t>(r));
            }
        parts_.begin.push_back(static_cast<int64_t>(parts_.rows.size()));
        parts_.first_panel.push_back(static_cast<int64_t>(parts_.panels.size()));
    }
}

void Program::study(const Step& step) {
    part_rows(step.rows);
    cut_panels(kernels_->row_counts, 0, step.num_logits, narrow_panels_);
    row_sequence_.resize(static_cast<size_t>(step.rows));
    for (int64_t s = 0; s < step.sequences; s++)
        for (int64_t r = step.starts[s]; r < step.starts[s + 1]; r++)
            row_sequence_[static_cast<size_t>(r)] = static_cast<int32_t>(s);
    shares_fresh_blocks_ = false;
    if (!kv_ || step.sequences < 2) return;
    const int64_t base = stamp_ + 1;  // the owners that earlier steps wrote are below it
    block_owner_.resize(static_cast<size_t>(kv_->num_groups()));
    for (int group = 0; group < kv_->num_groups(); group++) {
        std::vector<int64_t>& owners = block_owner_[static_cast<size_t>(group)];
        owners.resize(static_cast<size_t>(kv_->blocks(group)), 0);
        for (int64_t r = 0; r < step.rows; r++) {
            int64_t& owner = owners[static_cast<size_t>(step.slot(group, r) / kv_->block_size)];
            const int64_t mine = base + sequence_of(r);
            if (owner >= base && owner != mine) shares_fresh_blocks_ = true;
            owner = mine;
        }
        for (int64_t s = 0; s < step.sequences; s++) {
            const int64_t used = step.positions[step.starts[s + 1] - 1] / kv_->block_size + 1;
            for (int64_t i = 0; i < std::min(used, step.table_width); i++) {
                const int32_t block = step.table(group, s)[i];
                const int64_t owner = block < 0 ? 0 : owners[static_cast<size_t>(block)];
                if (owner >= base && owner != base + s) shares_fresh_blocks_ = true;
            }
        }
    }
    stamp_ += step.sequences;
}

// Assigns each thread its share of every instruction that has work. Most steps are like the previous one, and then the
// shares are ready.
void Program::deal(const Step& step) {
    const int threads = pool_->threads();
    std::vector<int64_t>& like = now_;
    like.assign({step.rows, step.num_logits});
    if (!shares_) {
        shares_ = std::make_unique<Share[]>(2 * instructions_.size() * static_cast<size_t>(threads));
        for (const auto& instruction : instructions_)
            if (instruction->varies()) varying_.push_back(instruction.get());
    }
    for (Instruction* instruction : varying_) instruction->prepare(*this, step);
    for (Instruction* instruction : varying_) like.push_back(instruction->units(*this, step));
    set_ = 1 - set_;
    if (like == dealt_for_) return;
    dealt_for_ = like;
    num_shares_ = 0;
    for (const auto& instruction : instructions_) {
        const int64_t units = instruction->units(*this, step);
        if (units == 0) continue;
        for (int t = 0; t < threads; t++) {
            Share& dealt = share(num_shares_, t);
            dealt.instruction = instruction.get(), dealt.units = static_cast<int32_t>(units);
            dealt.grain = static_cast<int32_t>(std::max<int64_t>(1, instruction->grain(*this, step)));
            dealt.most = std::max(dealt.grain, static_cast<int32_t>(instruction->most(*this, step)));
            dealt.begin = static_cast<int32_t>(instruction->cut(*this, units, t));
            dealt.end = static_cast<int32_t>(t + 1 == threads ? units : instruction->cut(*this, units, t + 1));
            dealt.is_copied = instruction->copied(*this, step);
            dealt.is_halved = instruction->by_halves(*this, step);
            dealt.renew(dealt);
        }
        num_shares_++;
    }
}

bool Program::is_over(size_t index) const {
    const int threads = pool_->threads();
    int32_t done = 0;
    for (int t = 0; t < threads; t++) done += share(index, t).done.load(std::memory_order_acquire);
    return done == share(index, 0).units;
}

// Takes the next units of an instruction: from the own share, then from others' shares. Returns false if none are left.
bool Program::claim(size_t index, int thread, Claim& claim) const {
    const int threads = pool_->threads();
    for (; claim.turn < threads; claim.turn++) {
        Share& owner = share(index, (thread + claim.turn) % threads);
        const int32_t left = owner.end - owner.next.load(std::memory_order_relaxed);
        if (left <= 0) continue;
        const int32_t half = by_halves_ ? std::max(owner.grain, left / 2) : left;
        const int32_t own = owner.is_halved ? half : std::clamp(left / 4, owner.grain, owner.most);
        const int32_t count = claim.turn == 0 ? own : owner.grain;
        claim.begin = owner.next.fetch_add(count, std::memory_order_relaxed);
        if (claim.begin >= owner.end) continue;
        claim.end = std::min(owner.end, claim.begin + count);
        claim.owner = &owner;
        return true;
    }
    claim.owner = nullptr;
    return false;
}

// Does the claimed units, if any, and continues while there are more. Returns the number of units done.
int32_t Program::take_part(size_t index, int thread, Claim first) {
    int32_t done = 0;
    bool has_units = first.owner || claim(index, thread, first);
    for (; has_units; has_units = claim(index, thread, first)) {
        first.owner->instruction->run(*this, *step_, thread, first.begin, first.end);
        done += first.end - first.begin;
    }
    return done;
}

void Program::work(int thread) {
    for (size_t i = 0; i < num_shares_; i++) {
        Claim first;
        if (share(i, thread).is_copied) {
            // Units of the next instruction without copies are claimed before its copies are made. Until these units
            // are done, that instruction is not over, so nothing that is being copied is overwritten. A thread that
            // gets no unit needs no copies.
            size_t reader = i + 1;
            while (reader < num_shares_ && share(reader, thread).is_copied) reader++;
            const bool is_needed = reader == num_shares_ || claim(reader, thread, first);
            for (; i < reader; i++) {
                Share& mine = share(i, thread);
                share(1 - set_, i, thread).renew(mine);
                if (is_needed) mine.instruction->run(*this, *step_, thread, 0, mine.units);
            }
            if (reader == num_shares_) return;
        }
        Share& mine = share(i, thread);
        share(1 - set_, i, thread).renew(mine);
        Prefetcher& ahead = prefetcher(thread);
        ahead.clear();
        if (i + 1 < num_shares_) share(i + 1, thread).instruction->prefetch_hint(*this, *step_, thread, ahead);
        ahead.pace(mine.end - mine.begin);
        mine.done.store(take_part(i, thread, first), std::memory_order_release);
        Pool::await([&] { return is_over(i); });
    }
}

// Before the first step, a few tokens from all over the vocabulary are computed, to measure the channels of keys, which
// hardly depend on the choice of tokens. Their keys are stored in a separate cache.
void Program::measure() {
    const auto is_known = [&](int layer) { return kv_->channels(layer).known; };
    if (!kv_ || kv_->type != KV_Q8 || tables_.empty() || std::all_of(layers_.begin(), layers_.end(), is_known)) return;
    constexpr int TOKENS = 16;
    int64_t vocabulary = tables_[0]->rows();
    for (const Matrix* table : tables_) vocabulary = std::min(vocabulary, table->rows());
    int32_t ids[TOKENS], positions[TOKENS];
    const auto groups = static_cast<size_t>(kv_->num_groups());
    std::vector<int64_t> slots(groups * TOKENS);
    for (size_t i = 0; i < slots.size(); i++) slots[i] = static_cast<int64_t>(i) % TOKENS;
    for (int i = 0; i < TOKENS; i++) {
        const uint64_t part = static_cast<uint32_t>(i + 1) * 2654435761u;  // of 2³²: multiples of the golden ratio
        ids[i] = static_cast<int32_t>(part * static_cast<uint64_t>(vocabulary) >> 32);
        positions[i] = i;
    }
    const int32_t starts[] = {0, TOKENS}, logit_rows[] = {TOKENS - 1}, states[] = {0};
    const std::vector<int32_t> tables(groups, 0);
    const auto theirs = kv_;
    kv_ = std::make_shared<KvCache>(kv_->shapes(), TOKENS, std::vector<int64_t>(groups, 1), 1, kv_->type);
    measures_ = true;
    run_step({TOKENS, ids, positions, slots.data(), 1, starts, tables.data(), 1, 1, logit_rows, 1, 0, states, nullptr});
    measures_ = false;
    for (int layer : layers_)
        if (!theirs->channels(layer).known) theirs->set_channels(layer, kv_->channels(layer));
    kv_ = theirs;
}

const float* Program::run(const Step& step) {
    const ProcessLock::Hold turn(turn_);
    if (turn.was_abandoned()) is_broken_ = true;
    if (is_broken_)
        throw std::runtime_error(
            "this process was forked while the model computed a step; load the model after a fork");
    measure();
    return run_step(step);
}

const float* Program::run_step(const Step& step) {
    reserve(step);
    study(step);
    deal(step);
    step_ = &step;
    num_steps_++;
    made_.assign(static_cast<size_t>(pool_->threads()), {});
    prefetchers_.resize(static_cast<size_t>(pool_->threads()));
    by_halves_ = work_split_.by_halves(step.rows);
    const auto began = std::chrono::steady_clock::now();
    pool_->run([](void* self, int thread) { static_cast<Program*>(self)->work(thread); }, this);
    work_split_.record((std::chrono::steady_clock::now() - began) / std::chrono::nanoseconds(1));
    kept_rows_ = kept_ ? step.rows : 0;
    return floats(output_, step, 0);
}

}  // namespace unspool

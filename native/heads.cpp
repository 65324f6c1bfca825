// Heads that are concatenated in a row, each multiplied by its own matrix. Latent attention uses this for its queries
// and for its results.
//
// Units are heads. A thread rounds its head's part of a few rows, and multiplies it by the head's tiles. A row's bits
// depend only on that row and the matrix: kernels give the same bits for panels of any size.
#include "outliers.h"
#include "program.h"

namespace unspool {

namespace {

struct LinearHeads : Instruction {
    Operand x, out;
    std::vector<const Matrix*> heads;

    int64_t in_width() const { return heads[0]->columns(); }
    int64_t out_width() const { return heads[0]->rows(); }
    Rows rounding() const { return heads[0]->whole() ? WHOLE : COARSE; }

    int64_t units(const Program& program, const Step& step) const override {
        return program.rows_of(out, step) ? static_cast<int64_t>(heads.size()) : 0;
    }

    // A panel's rounded rows, then their outliers.
    int64_t rounded_bytes(int count) const {
        return (count * (blocks_of(rounding(), in_width()) * block_bytes(rounding()) + outliers_bytes(in_width() / BLOCK)) +
                63) / 64 * 64;
    }
    int64_t scratch_bytes(const Kernels& kernels) const {
        const int most = kernels.row_counts[0];
        return rounded_bytes(most) + gathering_bytes(in_width()) + most * outlier_columns_bytes(in_width(), most) +
               most * in_width() * 4 + magnitudes_room(static_cast<int>(in_width() / BLOCK)) * 4 + 256;
    }

    // The rows [first, first + count) of one head, in the kernels' format.
    Panel panel(const Program& program, const float* rows, int64_t stride, int count, uint8_t* scratch) const {
        Panel result;
        result.rows = count;
        const int64_t k = in_width();
        if (heads[0]->wants_f32()) {
            auto* values = reinterpret_cast<float*>(scratch);
            for (int r = 0; r < count; r++)
                for (int64_t i = 0; i < k; i++) values[i * count + r] = rows[r * stride + i];
            result.f32 = values;
            return result;
        }
        const bool whole = rounding() == WHOLE;
        const int blocks = static_cast<int>(k / BLOCK);
        uint8_t* lists = scratch + count * blocks_of(rounding(), k) * block_bytes(rounding());
        uint8_t* room = scratch + rounded_bytes(count);
        for (int r = 0; r < count; r++) {
            const BlockRow to{scratch + r * block_bytes(rounding()), count,
                              reinterpret_cast<Outliers*>(lists + r * outliers_bytes(blocks))};
            const float* from = rows + r * stride;
            if (whole) {
                program.kernels().quantize_whole(from, 1, blocks, to.whole(), to.stride, to.outliers,
                                                 reinterpret_cast<float*>(room));
            } else {
                program.kernels().quantize(from, blocks, to.coarse(), to.stride, to.outliers);
            }
        }
        auto* outliers = reinterpret_cast<Outliers*>(lists);
        if (whole) {
            result.whole = reinterpret_cast<WholeBlock*>(scratch);
            for (int r = 0; r < count; r++) result.scales[r] = list_of(outliers, k, r)->scale;
        } else {
            result.q8 = reinterpret_cast<QBlock*>(scratch);
        }
        gather_outliers(outliers, k, count, whole, room, room + gathering_bytes(k), result.outliers);
        return result;
    }

    void run(Program& program, const Step& step, int thread, int64_t begin, int64_t end) override {
        const float* in = program.floats(x, step, thread);
        float* to = program.floats(out, step, thread);
        const auto count = static_cast<int64_t>(heads.size());
        const int64_t rows = program.rows_of(out, step), in_stride = count * in_width(), stride = count * out_width();
        for (int64_t head = begin; head < end; head++) {
            const int* counts = program.kernels().row_counts;
            for (int64_t row = 0; row < rows;) {
                while (rows - row < *counts) counts++;
                const Panel p = panel(program, in + row * in_stride + head * in_width(), in_stride, *counts,
                                      program.scratch(thread));
                for (const TileRef& tile : heads[static_cast<size_t>(head)]->tiles()) {
                    alignas(64) float part[MOST_ROWS * TILE];
                    program.kernels().tiles[tile.format](tile.data, in_width(), p, part);
                    program.kernels().put(part, p.rows, tile.count, nullptr, nullptr,
                                          to + row * stride + head * out_width() + tile.column, stride);
                }
                row += *counts;
            }
        }
    }
};

}  // namespace

void Program::linear_heads(Operand x, std::vector<const Matrix*> heads, Operand out) {
    auto product = std::make_unique<LinearHeads>();
    product->x = x, product->heads = std::move(heads), product->out = out;
    want_scratch(product->scratch_bytes(*kernels_));
    instructions_.push_back(std::move(product));
}

}  // namespace unspool

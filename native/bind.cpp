// Python bindings of matrices, caches and programs. Arrays are checked here; a step's indices are checked before it
// runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "mapped_file.h"
#include "packing.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unspool {

namespace {

template <class T, size_t N> using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

const char* const FORMAT_NAMES[NUM_FORMATS] = {"f32",  "f16",  "bf16", "q8_0", "q4_0", "q4_1", "q5_0",
                                               "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4"};

Format format_of(const std::string& name) {
    for (int i = 0; i < NUM_FORMATS; i++)
        if (name == FORMAT_NAMES[i]) return static_cast<Format>(i);
    throw nb::value_error(("no kernel reads the format " + name).c_str());
}

bool supports(const std::string& isa) {
    if (isa == "plain") return true;
#ifdef UNSPOOL_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    if (isa == "avx2") return avx2;
    if (isa == "avx512")
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return false;
}

const Kernels* kernels_of(const std::string& isa) {
    if (!supports(isa)) throw nb::value_error(("this processor cannot run the kernels for " + isa).c_str());
#ifdef UNSPOOL_X86
    if (isa == "avx512") return kernels_avx512();
    if (isa == "avx2") return kernels_avx2();
#endif
    return kernels_plain();
}

Matrix* make_matrix(void* where, const std::vector<std::tuple<std::string, Array<uint8_t, 1>, int64_t>>& parts,
                    int64_t columns) {
    std::vector<Part> result;
    for (const auto& [name, data, rows] : parts) {
        const Format format = format_of(name);
        if (rows < 1 || columns < 1 || columns % block_values(format) ||
            static_cast<int64_t>(data.size()) != rows * row_bytes(format, columns))
            throw nb::value_error("a weight's bytes do not match its shape");
        result.push_back({format, data.data(), rows});
    }
    return new (where) Matrix(std::move(result), columns);
}

Rows rows_of(const std::string& name) {
    if (name == "coarse") return COARSE;
    if (name == "fine") return FINE;
    if (name == "whole") return WHOLE;
    throw nb::value_error("a row index is out of range");
}

Operand operand(const std::optional<std::tuple<int, bool, bool>>& given) {
    if (!given) return {};
    return {std::get<0>(*given), std::get<1>(*given), std::get<2>(*given)};
}
using Given = std::optional<std::tuple<int, bool, bool>>;

const float* pointer(const std::optional<Array<float, 1>>& array, int64_t size) {
    if (!array) return nullptr;
    if (static_cast<int64_t>(array->size()) != size)
        throw nb::value_error("a vector has the wrong length");
    return array->data();
}

void check_tiles(const Matrix& matrix, const std::string& rows) {
    if (!matrix.packed()) throw nb::value_error("a matrix must be packed before it is multiplied by");
    if (matrix.wants_q8() && matrix.whole() != (rows == "whole"))
        throw nb::value_error("a matrix is not packed for such rows");
}

// Rows as ordinary memory, one after the other; a numpy array would need an import of numpy.
nb::ndarray<nb::memview, float, nb::ndim<1>> run(nb::handle self, Array<int32_t, 1> ids, Array<int32_t, 1> positions,
                                                 Array<int64_t, 1> slots, Array<int32_t, 1> starts,
                                                 Array<int32_t, 2> tables, Array<int32_t, 1> logit_rows,
                                                 const std::optional<Array<int32_t, 1>>& states,
                                                 const std::optional<Array<int32_t, 1>>& saves,
                                                 const std::optional<Array<float, 1>>& given) {
    Program& program = nb::cast<Program&>(self);
    const auto groups = static_cast<size_t>(program.num_groups());
    if (positions.size() != ids.size() || slots.size() != groups * ids.size())
        throw nb::value_error("ids, positions and slots differ in length");
    if (starts.size() < 2 || tables.shape(0) != groups * (starts.size() - 1))
        throw nb::value_error("tables and starts differ in their number of sequences");
    const Step step{static_cast<int64_t>(ids.size()),
                    ids.data(),
                    positions.data(),
                    slots.data(),
                    static_cast<int64_t>(starts.size()) - 1,
                    starts.data(),
                    tables.data(),
                    static_cast<int64_t>(tables.shape(1)),
                    static_cast<int64_t>(logit_rows.size()),
                    logit_rows.data(),
                    states ? static_cast<int64_t>(states->size()) : 0,
                    saves ? static_cast<int64_t>(saves->size()) : 0,
                    states ? states->data() : nullptr,
                    saves ? saves->data() : nullptr,
                    given ? static_cast<int64_t>(given->size()) : 0,
                    given ? given->data() : nullptr};
    const std::string wrong = program.check(step);
    if (!wrong.empty()) throw nb::value_error(wrong.c_str());
    const float* out;
    {
        nb::gil_scoped_release release;
        out = program.run(step);
    }
    return {const_cast<float*>(out),
            {static_cast<size_t>(program.output_rows(step) * program.output_width())},
            self};
}

const KeyChannels& channels_of(const KvCache& kv, int layer) {
    if (kv.type != KV_Q8) throw nb::value_error("only integer keys have channel factors");
    if (layer < 0 || layer >= kv.num_layers()) throw nb::index_error("no such layer");
    return kv.channels(layer);
}

KeyChannels checked_channels(const LayerKv& kv, std::vector<int32_t> order, std::vector<float> of_keys) {
    const auto n = static_cast<size_t>(kv.key_dim), size = n * static_cast<size_t>(kv.heads);
    if (order.size() != size || of_keys.size() != size) throw nb::value_error("each channel needs one entry");
    std::vector<float> of_queries;
    for (size_t head = 0; head < size; head += n) {
        std::vector<bool> seen(n);
        for (size_t i = head; i < head + n; i++) {
            if (order[i] < 0 || order[i] >= kv.key_dim || seen[static_cast<size_t>(order[i])])
                throw nb::value_error("each channel of a head must occur once");
            seen[static_cast<size_t>(order[i])] = true;
            if (!std::isnormal(of_keys[i]) || of_keys[i] < 0)
                throw nb::value_error("factors of keys must be above 0");
            of_queries.push_back(1 / of_keys[i]);
        }
    }
    return {std::move(order), std::move(of_keys), std::move(of_queries), true};
}

uint8_t* checked_block(const KvCache& kv, int64_t block, int group) {
    if (group < 0 || group >= kv.num_groups() || block < 0 || block >= kv.blocks(group))
        throw nb::index_error("no such block");
    return kv.block(block, group);
}

uint8_t* checked_state(const KvCache& kv, int64_t slot) {
    if (slot < 0 || slot >= kv.states || kv.state_bytes() == 0) throw nb::index_error("no such state");
    return kv.state(slot);
}

void bind_kv(nb::module_& m) {
    nb::class_<KvCache>(m, "KvCache")
        .def("__init__",
             [](KvCache* self, const std::vector<std::tuple<int, int, int, int64_t, int>>& layers, int block_size,
                const std::vector<int64_t>& blocks, int64_t states, const std::string& type) {
                 const KvType kind = type == "f16" ? KV_F16 : type == "f32" ? KV_F32 : KV_Q8;
                 std::vector<LayerKv> shapes;
                 for (const auto& [heads, key_dim, value_dim, state_bytes, group] : layers) {
                     if (group < 0 || group >= static_cast<int>(blocks.size())) throw nb::index_error("no such group");
                     shapes.push_back({heads, key_dim, value_dim, state_bytes, group});
                 }
                 new (self) KvCache(shapes, block_size, blocks, states, kind);
             })
        .def_prop_ro("block_bytes",  // of each group
                     [](const KvCache& self) {
                         std::vector<int64_t> bytes;
                         for (int group = 0; group < self.num_groups(); group++) bytes.push_back(self.block_bytes(group));
                         return bytes;
                     })
        .def_prop_ro("state_bytes", &KvCache::state_bytes)
        // How a layer's keys are stored as integers: for each place, head after head, the channel and the factor of
        // keys; None until a program has measured it.
        .def("channels",
             [](KvCache& self, int layer) -> nb::object {
                 const KeyChannels& found = channels_of(self, layer);
                 if (!found.known) return nb::none();
                 return nb::make_tuple(found.order, found.of_keys);
             })
        .def("set_channels",
             [](KvCache& self, int layer, std::vector<int32_t> order, std::vector<float> of_keys) {
                 channels_of(self, layer);
                 self.set_channels(layer, checked_channels(self.shape(layer), std::move(order), std::move(of_keys)));
             })
        .def("copy_block",
             [](KvCache& self, int64_t source, int64_t target, int group) {
                 const uint8_t* from = checked_block(self, source, group);
                 uint8_t* to = checked_block(self, target, group);
                 if (from != to) memcpy(to, from, static_cast<size_t>(self.block_bytes(group)));
             })
        .def("read_block",
             [](KvCache& self, int64_t block, int group) {
                 const uint8_t* from = checked_block(self, block, group);
                 return nb::bytes(from, static_cast<size_t>(self.block_bytes(group)));
             })
        .def("write_block", [](KvCache& self, int64_t block, nb::bytes data, int group) {
            uint8_t* to = checked_block(self, block, group);
            if (static_cast<int64_t>(data.size()) != self.block_bytes(group))
                throw nb::value_error("the data does not have the size of a block");
            memcpy(to, data.data(), data.size());
        })
        .def("clear_state",
             [](KvCache& self, int64_t slot) {
                 memset(checked_state(self, slot), 0, static_cast<size_t>(self.state_bytes()));
             })
        .def("copy_state",
             [](KvCache& self, int64_t source, int64_t target) {
                 const uint8_t* from = checked_state(self, source);
                 uint8_t* to = checked_state(self, target);
                 if (from != to) memcpy(to, from, static_cast<size_t>(self.state_bytes()));
             })
        .def("read_state",
             [](KvCache& self, int64_t slot) {
                 return nb::bytes(checked_state(self, slot), static_cast<size_t>(self.state_bytes()));
             })
        .def("write_state", [](KvCache& self, int64_t slot, nb::bytes data) {
            if (static_cast<int64_t>(data.size()) != self.state_bytes())
                throw nb::value_error("the data does not have the size of a state");
            memcpy(checked_state(self, slot), data.data(), data.size());
        });
}

Activation activation_of(const std::string& name) {
    static const std::pair<const char*, Activation> known[] = {
        {"none", NO_ACTIVATION}, {"silu", SILU},   {"gelu", GELU},
        {"gelu_tanh", GELU_TANH}, {"relu", RELU}, {"relu2", RELU2}, {"sigmoid", SIGMOID},
        {"clamped_swiglu", CLAMPED_SWIGLU}};
    for (const auto& [each, activation] : known)
        if (name == each) return activation;
    throw nb::value_error("an unknown activation");
}

// The parts of a row, and the number of its normed values.
RowPart::Kind part_kind_of(const std::string& name) {
    if (name == "copy") return RowPart::COPY;
    if (name == "rms") return RowPart::RMS;
    if (name == "centered") return RowPart::CENTERED;
    if (name == "scaled") return RowPart::SCALED;
    throw nb::value_error("the kind of a part must be copy, rms, centered or scaled");
}

std::pair<std::vector<RowPart>, int64_t> parts_of(const std::vector<std::tuple<int, int, std::string>>& given, int width) {
    std::vector<RowPart> parts;
    int64_t normed = 0;
    for (const auto& [start, size, kind] : given) {
        if (start < 0 || size < 1 || start > width - size) throw nb::value_error("a part goes past the end of its row");
        parts.push_back({start, size, part_kind_of(kind)});
        if (kind != "copy") normed += size;
    }
    return {parts, normed};
}

// Matrices of one shape, packed in the same way.
std::vector<const Matrix*> checked_experts(const std::vector<const Matrix*>& experts, const std::string& rows) {
    if (experts.empty()) throw nb::value_error("a mixture needs experts");
    for (const Matrix* expert : experts) {
        check_tiles(*expert, rows);
        if (expert->rows() != experts[0]->rows() || expert->columns() != experts[0]->columns() ||
            expert->tiles().size() != experts[0]->tiles().size() || expert->wants_q8() != experts[0]->wants_q8() ||
            expert->wants_f32() != experts[0]->wants_f32() || expert->whole() != experts[0]->whole())
            throw nb::value_error("experts differ in shape or format");
    }
    return experts;
}

void bind_experts(nb::class_<Program>& program) {
    program
        .def(
            "route",
            [](Program& self, Given scores, int experts, int used, const std::string& scoring, bool normalized,
               float scale, int groups, int used_groups, int group_top, std::optional<Array<float, 1>> choice_bias,
               std::optional<Array<float, 1>> expert_scale) {
                if (experts < 1 || used < 1 || used > experts || groups < 1 || experts % groups || used_groups < 1 ||
                    used_groups > groups || group_top < 1 || used > experts / groups * used_groups)
                    throw nb::value_error("the numbers of experts and groups of a routing do not fit");
                return self.route(operand(scores),
                                  {experts, used, scoring == "sigmoid", normalized, scale, groups, used_groups,
                                   group_top, pointer(choice_bias, experts), pointer(expert_scale, experts)});
            },
            nb::keep_alive<1, 11>(), nb::keep_alive<1, 12>(), "scores"_a, "experts"_a, "used"_a, "scoring"_a,
            "normalized"_a, "scale"_a, "groups"_a, "used_groups"_a, "group_top"_a, "choice_bias"_a.none(),
            "expert_scale"_a.none())
        .def(
            "spread",
            [](Program& self, int routed, Given x, bool from_places, int width, Given q8, const std::string& rows) {
                self.spread(routed, operand(x), from_places, width, {{}, operand(q8), rows_of(rows)});
            },
            "routed"_a, "x"_a, "from_places"_a, "width"_a, "q8"_a, "rows"_a)
        .def(
            "expert_gate",
            [](Program& self, int routed, Given f32, Given q8, const std::string& rows,
               const std::vector<const Matrix*>& experts, std::optional<Array<float, 1>> bias,
               const std::string& activation, Given out) {
                const auto checked = checked_experts(experts, rows);
                const auto count = static_cast<int64_t>(checked.size());
                self.expert_gate(routed, {operand(f32), operand(q8), rows_of(rows)}, checked,
                                 pointer(bias, checked[0]->rows() * count), activation_of(activation),
                                 operand(out));
            },
            nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), "routed"_a, "f32"_a.none(), "q8"_a.none(), "rows"_a,
            "experts"_a, "bias"_a.none(), "activation"_a, "out"_a)
        .def(
            "expert_up",
            [](Program& self, int routed, Given f32, Given q8, const std::string& rows,
               const std::vector<const Matrix*>& experts, std::optional<Array<float, 1>> bias,
               const std::string& activation, Given out) {
                const auto checked = checked_experts(experts, rows);
                const auto count = static_cast<int64_t>(checked.size());
                self.expert_up(routed, {operand(f32), operand(q8), rows_of(rows)}, checked,
                               pointer(bias, checked[0]->rows() * count), activation_of(activation), operand(out));
            },
            nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), "routed"_a, "f32"_a.none(), "q8"_a.none(), "rows"_a,
            "experts"_a, "bias"_a.none(), "activation"_a, "out"_a)
        .def(
            "expert_project",
            [](Program& self, int routed, Given f32, Given q8, const std::string& rows,
               const std::vector<const Matrix*>& experts, std::optional<Array<float, 1>> bias, Given out) {
                const auto checked = checked_experts(experts, rows);
                const auto count = static_cast<int64_t>(checked.size());
                self.expert_project(routed, {operand(f32), operand(q8), rows_of(rows)}, checked,
                                    pointer(bias, checked[0]->rows() * count), operand(out));
            },
            nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), "routed"_a, "f32"_a.none(), "q8"_a.none(), "rows"_a,
            "experts"_a, "bias"_a.none(), "out"_a)
        .def(
            "gather_experts",
            [](Program& self, int routed, Given x, Given residual, int width, Given out) {
                self.gather_experts(routed, operand(x), operand(residual), width, operand(out));
            },
            "routed"_a, "x"_a, "residual"_a.none(), "width"_a, "out"_a)
        .def(
            "join",
            [](Program& self, Given x, int x_width, Given y, int y_width, Given out) {
                self.join(operand(x), x_width, operand(y), y_width, operand(out));
            },
            "x"_a, "x_width"_a, "y"_a, "y_width"_a, "out"_a)
        .def(
            "add",
            [](Program& self, Given x, int width, Given y, int y_width, float x_scale, float y_scale, int start,
               Given out) {
                if (y_width < 1 || start < 0 || start >= width || (width - start) % y_width)
                    throw nb::value_error("rows have the wrong width");
                self.add(operand(x), width, operand(y), y_width, x_scale, y_scale, start, operand(out));
            },
            "x"_a, "width"_a, "y"_a, "y_width"_a, "x_scale"_a, "y_scale"_a, "start"_a, "out"_a)
        .def(
            "cut",
            [](Program& self, Given x, int width, float deviations, Given out) {
                self.cut(operand(x), width, deviations, operand(out));
            },
            "x"_a, "width"_a, "deviations"_a, "out"_a)
        .def(
            "level",
            [](Program& self, Given x, int width, Given like, int part, float least, Given out) {
                if (part < 1 || width % part) throw nb::value_error("a row must be a multiple of its parts");
                self.level(operand(x), width, operand(like), part, least, operand(out));
            },
            "x"_a, "width"_a, "like"_a, "part"_a, "least"_a, "out"_a)
        .def(
            "mix",
            [](Program& self, Given x, Given logits, int part, int inputs, int outputs, int num_logits,
               Array<float, 1> table, float bias, Given residual, Given out) {
                const int64_t size = static_cast<int64_t>(inputs) * outputs * num_logits;
                self.mix(operand(x), operand(logits), {part, inputs, outputs, num_logits, pointer(table, size), bias},
                         operand(residual), operand(out));
            },
            nb::keep_alive<1, 8>(), "x"_a, "logits"_a, "part"_a, "inputs"_a, "outputs"_a, "num_logits"_a, "table"_a,
            "bias"_a, "residual"_a, "out"_a)
        .def(
            "linear_heads",
            [](Program& self, Given x, const std::vector<const Matrix*>& heads, Given out) {
                const bool whole = !heads.empty() && heads[0]->whole();
                self.linear_heads(operand(x), checked_experts(heads, whole ? "whole" : "coarse"), operand(out));
            },
            nb::keep_alive<1, 3>(), "x"_a, "heads"_a, "out"_a)
        .def(
            "scale_rows",
            [](Program& self, Given x, Given logit, Given residual, int width, Given out) {
                self.scale_rows(operand(x), operand(logit), operand(residual), width, operand(out));
            },
            "x"_a, "logit"_a, "residual"_a.none(), "width"_a, "out"_a);
}

// The offset of a state with this many floats within the cache.
void check_state(const Program& program, int layer, int64_t offset, int64_t floats) {
    const KvCache& kv = program.kv();
    if (layer < 0 || layer >= kv.num_layers() || offset < 0 || offset + 4 * floats > kv.shape(layer).state_bytes)
        throw nb::value_error("an offset is outside of the layer's state");
}

void bind_recurrent(nb::class_<Program>& program) {
    program
        .def(
            "short_conv",
            [](Program& self, Given x, int width, int layer, int64_t offset, int channels, int taps,
               Array<float, 1> weight, std::optional<Array<float, 1>> bias, const std::string& activation, int start,
               int before, int after, Given out) {
                if (channels < 1 || taps < 2 || start < 0 || std::max({start, before, after}) > width - channels)
                    throw nb::value_error("a convolution reads past the end of its rows");
                check_state(self, layer, offset, static_cast<int64_t>(taps - 1) * channels);
                self.short_conv(operand(x), width,
                                {layer, offset, channels, taps,
                                 pointer(weight, static_cast<int64_t>(channels) * taps), pointer(bias, channels),
                                 activation_of(activation), start, before, after},
                                operand(out));
            },
            nb::keep_alive<1, 9>(), "x"_a, "width"_a, "layer"_a, "offset"_a, "channels"_a, "taps"_a, "weight"_a,
            "bias"_a.none(), "activation"_a, "start"_a, "before"_a, "after"_a, "out"_a)
        .def(
            "recurrence",
            [](Program& self, Given x, Given gates, bool is_delta, int layer, int64_t offset, int heads, int key_heads,
               int key_dim, int value_dim, std::tuple<int, int, int> columns, bool tiled, Array<float, 1> rate,
               Array<float, 1> bias, std::optional<Array<float, 1>> skip, float eps, Given out) {
                if (heads < 1 || key_heads < 1 || heads % key_heads || key_dim < 1 || value_dim < 1)
                    throw nb::value_error("the numbers of heads and channels do not fit");
                check_state(self, layer, offset, static_cast<int64_t>(heads) * key_dim * value_dim);
                const auto [q, k, v] = columns;
                self.recurrence(operand(x), operand(gates),
                                {is_delta, layer, offset, heads, key_heads, key_dim, value_dim, q, k, v, tiled,
                                 pointer(rate, heads), pointer(bias, heads), pointer(skip, heads), eps},
                                operand(out));
            },
            nb::keep_alive<1, 13>(), nb::keep_alive<1, 14>(), nb::keep_alive<1, 15>(), "x"_a, "gates"_a, "is_delta"_a,
            "layer"_a, "offset"_a, "heads"_a, "key_heads"_a, "key_dim"_a, "value_dim"_a, "columns"_a, "tiled"_a,
            "rate"_a, "bias"_a, "skip"_a.none(), "eps"_a, "out"_a);
}

void bind_building(nb::class_<Program>& program) {
    program
        .def(
            "embed",
            [](Program& self, const Matrix& table, float scale, const Matrix* positions, Given out) {
                for (const Matrix* each : {&table, positions})
                    if (each && each->packed() && each->whole())
                        throw nb::value_error("a matrix is not packed for looking up rows");
                self.embed(&table, scale, positions, operand(out));
            },
            nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), "table"_a, "scale"_a, "positions"_a.none(), "out"_a)
        .def(
            "norm",
            [](Program& self, Given x, Array<float, 1> weight, std::optional<Array<float, 1>> bias, float eps,
               bool centered, Given residual, Given f32, Given q8, const std::string& rows) {
                const auto width = static_cast<int>(weight.size());
                self.norm(operand(x), {weight.data(), pointer(bias, width), eps, centered}, width, operand(residual),
                          {operand(f32), operand(q8), rows_of(rows)});
            },
            nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), "x"_a, "weight"_a, "bias"_a.none(), "eps"_a, "centered"_a,
            "residual"_a.none(), "f32"_a.none(), "q8"_a.none(), "rows"_a)
        .def(
            "linear",
            [](Program& self, Given f32, Given q8, const std::string& rows, const Matrix& weight,
               std::optional<Array<float, 1>> bias, Given residual, float softcap, const std::string& activation,
               float scale, Given out) {
                check_tiles(weight, rows);
                self.linear({operand(f32), operand(q8), rows_of(rows)}, &weight, pointer(bias, weight.rows()),
                            operand(residual), {softcap, activation_of(activation), scale}, operand(out));
            },
            nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), "f32"_a.none(), "q8"_a.none(), "rows"_a, "weight"_a,
            "bias"_a.none(), "residual"_a.none(), "softcap"_a, "activation"_a, "scale"_a, "out"_a)
        .def(
            "gated",
            [](Program& self, Given x_f32, Given x_q8, const std::string& rows, const Matrix& weight,
               std::optional<Array<float, 1>> bias, const std::string& activation, Given out) {
                check_tiles(weight, rows);
                self.gated({operand(x_f32), operand(x_q8), rows_of(rows)}, &weight, pointer(bias, weight.rows()),
                           activation_of(activation), operand(out));
            },
            nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), "f32"_a.none(), "q8"_a.none(), "rows"_a, "weight"_a,
            "bias"_a.none(), "activation"_a, "out"_a)
        .def(
            "multiply",
            [](Program& self, Given x, Given gate, int width, const std::string& activation, Given out) {
                self.multiply(operand(x), operand(gate), width, activation_of(activation), operand(out));
            },
            "x"_a, "gate"_a, "width"_a, "activation"_a, "out"_a)
        .def(
            "arrange",
            [](Program& self, Given x, int width, const std::vector<std::tuple<int, int, std::string>>& parts,
               std::optional<Array<float, 1>> weight, float eps, Given out) {
                const auto [found, normed] = parts_of(parts, width);
                if (normed && !weight) throw nb::value_error("scaled and normed parts need weights");
                self.arrange(operand(x), width, found, pointer(weight, normed), eps, operand(out));
            },
            nb::keep_alive<1, 5>(), "x"_a, "width"_a, "parts"_a, "weight"_a.none(), "eps"_a, "out"_a)
        .def(
            "attention",
            [](Program& self, Given qkv, int layer, bool stores, int num_heads, int num_kv_heads, int head_dim,
               int value_dim, float scale, int rope, int window, float softcap, std::optional<Array<float, 1>> q_norm,
               std::optional<Array<float, 1>> k_norm, float norm_eps, std::optional<Array<float, 1>> sinks, float growth,
               int period, Given f32, Given q8) {
                self.attention(operand(qkv),
                               {layer, stores, num_heads, num_kv_heads, head_dim, value_dim, scale, rope, window, softcap,
                                pointer(q_norm, head_dim), pointer(k_norm, head_dim), norm_eps, pointer(sinks, num_heads), growth,
                                period},
                               {operand(f32), operand(q8)});
            },
            nb::keep_alive<1, 13>(), nb::keep_alive<1, 14>(), nb::keep_alive<1, 16>(), "qkv"_a, "layer"_a, "stores"_a,
            "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "value_dim"_a, "scale"_a, "rope"_a, "window"_a, "softcap"_a,
            "q_norm"_a.none(), "k_norm"_a.none(), "norm_eps"_a, "sinks"_a.none(), "growth"_a, "period"_a,
            "f32"_a.none(), "q8"_a.none())
        .def(
            "take",
            [](Program& self, Given x, int width, Given f32, Given q8, const std::string& rows) {
                self.take(operand(x), width, {operand(f32), operand(q8), rows_of(rows)});
            },
            "x"_a, "width"_a, "f32"_a.none(), "q8"_a.none(), "rows"_a)
        .def(
            "quantize",
            [](Program& self, Given x, int width, Given q8, const std::string& rows) {
                self.quantize(operand(x), width, {{}, operand(q8), rows_of(rows)});
            },
            "x"_a, "width"_a, "q8"_a, "rows"_a)
        .def(
            "given",
            [](Program& self, int width, Given out) {
                if (width < 1) throw nb::value_error("given rows have at least one value");
                self.given(width, operand(out));
            },
            "width"_a, "out"_a)
        .def("set_kept", [](Program& self, Given kept, int64_t width) { self.set_kept(operand(kept), width); })
        .def("set_output", [](Program& self, Given out, int64_t width) { self.set_output(operand(out), width); });
}

}  // namespace

void bind_program(nb::module_& m) {
    m.def("supports", &supports);
    m.def("address_of", [](Array<uint8_t, 1> data) { return reinterpret_cast<uintptr_t>(data.data()); });
    nb::class_<MappedFile>(m, "MappedFile")
        .def(
            "__init__",
            [](MappedFile* self, Array<uint8_t, 1> data, nb::bytes path) {
                new (self) MappedFile(data.data(), data.size(), path.c_str());
            },
            "data"_a, "path"_a);
    // Version of packed tiles; the same for every instruction set so far.
    m.def("layout_version", [](const std::string& isa) { return (void)kernels_of(isa), LAYOUT_VERSION; }, "isa"_a);
    m.def(
        "spin",
        [](const std::string& isa, bool integers, int64_t rounds) {
            const Kernels* kernels = kernels_of(isa);
            const nb::gil_scoped_release unlocked;
            return integers ? kernels->spin_integers(rounds) : kernels->spin_floats(rounds);
        },
        "isa"_a, "integers"_a, "rounds"_a);
    m.def("block_row_bytes",
          [](const std::string& rows, int64_t width) { return row_of_blocks_bytes(rows_of(rows), width); });
    nb::class_<Pool>(m, "Pool").def_prop_ro("threads", &Pool::threads);
    m.def("shared_pool", &Pool::shared);
    nb::class_<Arena>(m, "Arena")
        .def(nb::init<>())
        .def_prop_ro("bytes", &Arena::bytes)
        .def("reserve", &Arena::reserve, "bytes"_a);
    nb::class_<Matrix>(m, "Matrix")
        .def(
            "__init__",
            [](Matrix* self, const std::vector<std::tuple<std::string, Array<uint8_t, 1>, int64_t>>& parts,
               int64_t columns) { make_matrix(self, parts, columns); },
            nb::keep_alive<1, 2>())
        .def_prop_ro("rows", &Matrix::rows)
        .def_prop_ro("columns", &Matrix::columns)
        .def_prop_ro("packed", &Matrix::packed)
        .def_prop_ro("packed_bytes", &Matrix::packed_bytes)
        .def_prop_ro("wants_q8", &Matrix::wants_q8)
        .def_prop_ro("whole", &Matrix::whole)
        .def("keep_exact", &Matrix::keep_exact)
        .def_prop_ro("wants_f32", &Matrix::wants_f32);
    nb::class_<Packing>(m, "Packing")
        .def(nb::init<std::shared_ptr<Arena>>())
        .def(
            "add",
            [](Packing& self, Matrix& matrix, const std::vector<std::pair<uintptr_t, uintptr_t>>& files) {
                if (files.size() != matrix.parts().size()) throw nb::value_error("a file for each part is needed");
                std::vector<Span> spans;
                for (const auto& [begin, end] : files) spans.push_back({begin, end});
                self.add(matrix, spans);
            },
            nb::keep_alive<1, 2>(), "matrix"_a, "files"_a)
        .def("start", &Packing::start)
        .def("advance", &Packing::advance, nb::call_guard<nb::gil_scoped_release>(), "pool"_a)
        .def("finish", &Packing::finish, nb::call_guard<nb::gil_scoped_release>());
    bind_kv(m);
    nb::class_<Program> program(m, "Program");
    program
        .def("__init__",
             [](Program* self, std::shared_ptr<Pool> pool, const std::string& isa, std::shared_ptr<KvCache> kv) {
                 new (self) Program(std::move(pool), kernels_of(isa), std::move(kv));
             })
        .def_prop_ro("output_width", &Program::output_width)
        .def("add_slot", &Program::add_slot)
        .def("add_rope",
             [](Program& self, Array<float, 1> inv_freq, bool interleaved, float scale) {
                 return self.add_rope({inv_freq.data(), inv_freq.data() + inv_freq.size()}, interleaved, scale);
             })
        .def("run", [](nb::handle self, Array<int32_t, 1> ids, Array<int32_t, 1> positions, Array<int64_t, 1> slots,
                       Array<int32_t, 1> starts, Array<int32_t, 2> tables, Array<int32_t, 1> logit_rows,
                       std::optional<Array<int32_t, 1>> states, std::optional<Array<int32_t, 1>> saves,
                       std::optional<Array<float, 1>> given) {
            return run(self, ids, positions, slots, starts, tables, logit_rows, states, saves, given);
        },
            "ids"_a, "positions"_a, "slots"_a, "starts"_a, "tables"_a, "logit_rows"_a, "states"_a = nb::none(),
            "saves"_a = nb::none(), "given"_a = nb::none())
        .def("kept", [](nb::handle self) -> nb::ndarray<nb::memview, float, nb::ndim<1>> {
            const Program& program = nb::cast<Program&>(self);
            return {const_cast<float*>(program.kept()), {static_cast<size_t>(program.kept_values())}, self};
        });
    bind_building(program);
    bind_experts(program);
    bind_recurrent(program);
}

}  // namespace unspool

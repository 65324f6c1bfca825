// Python bindings of vocabularies (text.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "text.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unspool {

namespace {

template <class T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::str text_of(std::string_view text) { return nb::str(text.data(), text.size()); }

nb::list ids_of(const std::vector<int32_t>& ids) {
    nb::list out;
    for (const int32_t id : ids) out.append(id);
    return out;
}

}  // namespace

void bind_text(nb::module_& m) {
    nb::class_<Strings>(m, "Strings")
        .def("__init__",
             [](Strings* self, Array<uint8_t> bytes, uint64_t position, uint64_t count) {
                 new (self) Strings(bytes.data(), bytes.size(), position, count);
             })
        .def("__len__", &Strings::size)
        .def("__getitem__",
             [](const Strings& self, uint64_t i) {
                 if (i >= self.size()) throw nb::index_error("no such string");
                 return text_of(self.at(i));
             })
        .def_prop_ro("end", &Strings::end)
        .def_prop_ro("twice", &Strings::twice)
        .def("index", &Strings::index)
        .def("find", [](Strings& self, std::string_view text) {
            self.index();
            return self.find(text);
        });
    nb::class_<BytePairs>(m, "BytePairs")
        .def(
            "__init__",
            [](BytePairs* self, Strings& tokens, const Strings& merges, bool whole_words,
               const std::optional<std::vector<int32_t>>& bytes) {
                tokens.index();
                if (bytes && bytes->size() != 256) throw nb::value_error("256 bytes are needed");
                new (self) BytePairs(tokens, merges, whole_words, bytes.value_or(std::vector<int32_t>()));
            },
            nb::keep_alive<1, 2>(), "tokens"_a, "merges"_a, "whole_words"_a, "bytes"_a.none() = nb::none())
        .def_prop_ro("fault", &BytePairs::fault)
        .def_prop_ro("missing", &BytePairs::missing)
        .def("encode", [](const BytePairs& self, nb::list words) {
            std::vector<std::string_view> texts;
            texts.reserve(words.size());
            for (nb::handle word : words) texts.push_back(nb::cast<std::string_view>(word));
            std::vector<int32_t> ids;
            {
                nb::gil_scoped_release release;  // the list keeps the words alive
                Scratch scratch;
                for (const std::string_view text : texts) self.encode(text, scratch, ids);
            }
            return ids_of(ids);
        });
    nb::class_<ScoredPieces>(m, "ScoredPieces")
        .def(
            "__init__",
            [](ScoredPieces* self, Strings& tokens, Array<uint8_t> scores, const std::vector<int64_t>& marks,
               const std::optional<std::vector<int32_t>>& bytes, int32_t unknown) {
                tokens.index();
                if (scores.size() != 4 * tokens.size()) throw nb::value_error("a score for each token is needed");
                if (bytes && bytes->size() != 256) throw nb::value_error("256 bytes are needed");
                std::vector<bool> plain(tokens.size(), true);
                for (const int64_t id : marks) plain.at(static_cast<size_t>(id)) = false;
                new (self) ScoredPieces(tokens, scores.data(), std::move(plain),
                                        bytes.value_or(std::vector<int32_t>()), unknown);
            },
            nb::keep_alive<1, 2>(), "tokens"_a, "scores"_a, "marks"_a, "bytes"_a.none(), "unknown"_a)
        .def("encode", [](const ScoredPieces& self, std::string_view text) {
            std::vector<int32_t> ids;
            {
                nb::gil_scoped_release release;
                Scratch scratch;
                self.encode(text, scratch, ids);
            }
            return ids_of(ids);
        });
    nb::class_<UnigramPieces>(m, "UnigramPieces")
        .def(
            "__init__",
            [](UnigramPieces* self, Strings& tokens, std::vector<float> scores,
               const std::optional<std::vector<int32_t>>& bytes, int32_t unknown, float unknown_score) {
                if (scores.size() != tokens.size()) throw nb::value_error("a score for each token is needed");
                if (bytes && bytes->size() != 256) throw nb::value_error("256 bytes are needed");
                new (self) UnigramPieces(tokens, std::move(scores), bytes.value_or(std::vector<int32_t>()), unknown,
                                         unknown_score);
            },
            nb::keep_alive<1, 2>(), "tokens"_a, "scores"_a, "bytes"_a.none(), "unknown"_a, "unknown_score"_a)
        .def("encode", [](const UnigramPieces& self, std::string_view text) {
            std::vector<int32_t> ids;
            {
                nb::gil_scoped_release release;
                self.encode(text, ids);
            }
            return ids_of(ids);
        });
    m.def(
        "others",
        [](Array<uint8_t> values, int32_t usual) {
            nb::list out;
            for (size_t i = 0; i < values.size() / 4; i++) {
                int32_t value;
                memcpy(&value, values.data() + 4 * i, 4);
                if (value != usual) out.append(i);
            }
            return out;
        },
        "The places where 32-bit integers, wherever they lie, are something else than usual.");
}

}  // namespace unspool

// The filters and the draw over one row, fused: one pass scales the logits and finds each block's maximum; after that,
// only the tokens that can still be chosen are read.
//
//   dense: every token, in a padded copy with block maxima ──first filter──► list: the survivors, ordered by id
//
// A filter that keeps the best tokens only needs the blocks whose maximum is large enough: the k-th largest block
// maximum is a lower bound of the k-th largest logit.
#include "sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace unspool {
namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float MAX_GUMBEL = 16.64f;  // the largest possible noise: draw.MAX_GUMBEL, rounded up
constexpr int SLACK_BITS = 20;

enum class Stage { TEMPERATURE, TOP_K, TOP_K_TIES, TOP_P, MIN_P, TYPICAL_P, TOP_N_SIGMA, XTC };

Stage stage_named(const std::string& name) {
    static const std::pair<const char*, Stage> stages[] = {
        {"temperature", Stage::TEMPERATURE}, {"top_k", Stage::TOP_K},         {"top_k_ties", Stage::TOP_K_TIES},
        {"top_p", Stage::TOP_P},             {"min_p", Stage::MIN_P},         {"typical_p", Stage::TYPICAL_P},
        {"top_n_sigma", Stage::TOP_N_SIGMA}, {"xtc", Stage::XTC},
    };
    for (const auto& [known, stage] : stages)
        if (name == known) return stage;
    throw std::invalid_argument("the sampling kernels have no stage " + name);
}

// The results of `choose` that are not tokens.
constexpr int64_t HAS_NAN = -1, HAS_INFINITY = -2, NONE_LEFT = -3;

int64_t share(int64_t total, double fraction) {
    auto part = static_cast<int64_t>(std::ceil(static_cast<double>(total) * fraction));
    return std::max<int64_t>(1, part - (total >> SLACK_BITS));
}

int64_t padded(int64_t n) { return (n + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK * SAMPLING_BLOCK; }

// A token in an order of preference: smaller keys first, then lower ids.
template <typename Key>
struct Ranked {
    Key key;
    int32_t id;
    int64_t weight;
    bool operator<(const Ranked& other) const { return key != other.key ? key < other.key : id < other.id; }
};

// The last element of the shortest prefix, in order, whose weights reach the target. This needs no full sort: halves
// that cannot contain the element are only summed.
template <typename Key>
Ranked<Key> last_within(std::vector<Ranked<Key>>& items, int64_t target) {
    size_t low = 0, high = items.size();
    int64_t mass = 0;
    if (items.empty()) throw std::logic_error("there is no token to choose from");
    while (high - low > 32) {
        size_t middle = low + (high - low) / 2;
        std::nth_element(items.begin() + low, items.begin() + middle, items.begin() + high);
        int64_t half = 0;
        for (size_t i = low; i < middle; i++) half += items[i].weight;
        if (mass + half >= target)
            high = middle;
        else
            mass += half, low = middle;
    }
    std::sort(items.begin() + low, items.begin() + high);
    for (size_t i = low; i < high; i++)
        if ((mass += items[i].weight) >= target) return items[i];
    return items[high - 1];
}

// The same for many items; only those in the bucket where the target is reached are compared. `distance` orders them
// approximately: it never decreases when `key` increases.
template <typename Key, typename KeyOf, typename DistanceOf>
Ranked<Key> last_within(int64_t count, const int32_t* ids, const int64_t* weights, int64_t target, KeyOf key,
                        DistanceOf distance) {
    constexpr int BUCKETS = 1024, PER_UNIT = 32;
    constexpr double END = static_cast<double>(BUCKETS - 1) / PER_UNIT;
    auto bucket_of = [&](int64_t i) { return static_cast<int>(std::min<double>(distance(i), END) * PER_UNIT); };
    std::vector<Ranked<Key>> items;
    auto gather = [&](auto wanted) {
        for (int64_t i = 0; i < count; i++)
            if (wanted(i)) items.push_back({key(i), ids[i], weights[i]});
    };
    if (count < 512) {
        gather([](int64_t) { return true; });
        return last_within(items, target);
    }
    int64_t masses[BUCKETS] = {};
    for (int64_t i = 0; i < count; i++) masses[bucket_of(i)] += weights[i];
    int bucket = 0;
    for (; bucket < BUCKETS - 1 && masses[bucket] < target; bucket++) target -= masses[bucket];
    gather([&](int64_t i) { return bucket_of(i) == bucket; });
    return last_within(items, target);
}

class Row {
  public:
    Row(const SamplingKernels& kernels, int64_t n) : k(kernels), n(n), size(padded(n)) {
        dense.resize(size), maxima.resize(size / SAMPLING_BLOCK);
        ids.resize(size), logits.resize(size), weights.resize(size);
    }

    bool load(const float* row, float divisor) {
        bool good = k.scale(row, n, divisor, dense.data(), maxima.data());
        max = *std::max_element(maxima.begin(), maxima.end());
        is_list = false;
        return good;
    }

    void apply(Stage stage, double value) {
        switch (stage) {
            case Stage::TEMPERATURE: return temperature(static_cast<float>(value));
            case Stage::TOP_K: return top_k(static_cast<int64_t>(value), false);
            case Stage::TOP_K_TIES: return top_k(static_cast<int64_t>(value), true);
            case Stage::TOP_P: return top_p(value);
            case Stage::MIN_P: return keep_near(static_cast<float>(value));
            case Stage::TYPICAL_P: return typical_p(value);
            case Stage::TOP_N_SIGMA: return keep_near(sigma_floor(value));
            case Stage::XTC: return xtc(value);
        }
    }

    int64_t draw(uint64_t seed, uint64_t position) { 
        return is_list ? draw_list(seed, position) : draw_from(dense.data(), nullptr, maxima, seed, position);
    }

    void write(float* out) const {
        if (!is_list) {
            std::copy(dense.begin(), dense.begin() + n, out);
            return;
        }
        std::fill(out, out + n, MINUS_INFINITY);
        for (int64_t i = 0; i < count; i++) out[ids[i]] = logits[i];
    }

    int64_t total() { return is_list ? weigh_list() : k.total(dense.data(), size, maxima.data(), max); }

    // The best tokens in order.
    std::vector<int32_t> best(int64_t wanted) {
        wanted = std::min(wanted, n);
        if (wanted == 0) return {};
        list_of_best(wanted);
        if (count < wanted) {  // removed tokens rank last
            collect(0.0f, MINUS_INFINITY);
            count = n;
        }
        auto order = ranked();
        std::partial_sort(order.begin(), order.begin() + wanted, order.end());
        std::vector<int32_t> tokens(wanted);
        for (int64_t i = 0; i < wanted; i++) tokens[i] = order[i].id;
        return tokens;
    }

    int64_t rank(int64_t token) const { return 1 + k.count_better(dense.data(), size, token); }

    const SamplingKernels& k;
    int64_t n, size;
    float max = MINUS_INFINITY;

  private:
    void temperature(float divisor) {
        max = max / divisor;
        if (is_list) {
            for (int64_t i = 0; i < count; i++) logits[i] = logits[i] / divisor;
            return keep_if([](float x, int32_t) { return x > MINUS_INFINITY; });  // also removes logits that overflowed
        }
        for (float& x : dense) x = x / divisor;
        for (float& x : maxima) x = x / divisor;
    }

    void top_k(int64_t wanted, bool ties) {
        if (wanted >= n) return;
        if (!is_list) list_of_best(wanted);
        if (count <= wanted) return;
        auto order = ranked();
        std::nth_element(order.begin(), order.begin() + (wanted - 1), order.end());
        Ranked<float> last = order[wanted - 1];
        keep_if([=](float x, int32_t id) { return x > -last.key || (x == -last.key && (ties || id <= last.id)); });
    }

    void top_p(double fraction) {
        int64_t target;
        if (is_list) {
            target = share(weigh_list(), fraction);
        } else {
            target = share(total(), fraction);
            auto blocks = static_cast<int64_t>(maxima.size());
            int64_t wanted = 32;
            for (list_of_best(wanted); weigh_list() < target; list_of_best(wanted)) {
                wanted = wanted * 8 < blocks ? wanted * 8 : n;  // too few: search again for more
            }
        }
        auto last = last_within<float>(
            count, ids.data(), weights.data(), target, [&](int64_t i) { return -logits[i]; },
            [&](int64_t i) { return max - logits[i]; });
        keep_if([=](float x, int32_t id) { return x > -last.key || (x == -last.key && id <= last.id); });
    }

    // Tokens at most -floor below the best.
    void keep_near(float floor) {
        if (is_list) return keep_if([=, this](float x, int32_t) { return x - max >= floor; });
        collect(max, std::max(floor, LOWEST));
    }

    void typical_p(double fraction) {
        if (!is_list) collect(0.0f, LOWEST);
        int64_t mass = weigh_list();
        double mean = static_cast<double>(k.moment(logits.data(), pad_list(), max)) / static_cast<double>(mass);
        auto deviation = [=, this](float x) { return std::abs(static_cast<double>(x - max) - mean); };
        auto key = [&](int64_t i) { return deviation(logits[i]); };
        auto last = last_within<double>(count, ids.data(), weights.data(), share(mass, fraction), key, key);
        keep_if([=](float x, int32_t id) {
            double far = deviation(x);
            return far < last.key || (far == last.key && id <= last.id);
        });
        max = *std::max_element(logits.begin(), logits.begin() + count);
    }

    // In sixteen lanes by token id, added in halves: filters.lane_sum.
    float sigma_floor(double deviations) const {
        double sums[16] = {}, squares[16] = {};
        int64_t alive = 0;
        auto add = [&](int64_t id, float x) {
            if (!(x > MINUS_INFINITY)) return;
            double d = x - max;
            sums[id & 15] += d, squares[id & 15] += d * d, alive++;
        };
        if (is_list)
            for (int64_t i = 0; i < count; i++) add(ids[i], logits[i]);
        else
            for (int64_t i = 0; i < n; i++) add(i, dense[i]);
        for (int half = 8; half; half /= 2)
            for (int i = 0; i < half; i++) sums[i] += sums[i + half], squares[i] += squares[i + half];
        double mean = sums[0] / static_cast<double>(alive);
        double variance = squares[0] / static_cast<double>(alive) - mean * mean;
        return static_cast<float>(-deviations * std::sqrt(std::max(variance, 0.0)));
    }

    void xtc(double threshold) {
        if (!is_list) collect(0.0f, LOWEST);
        int64_t floor = share(weigh_list(), threshold), eligible = 0;
        float least = max;
        for (int64_t i = 0; i < count; i++)
            if (weights[i] >= floor) eligible++, least = std::min(least, logits[i]);
        if (eligible < 2) return;
        keep_if([=](float x, int32_t) { return x <= least; });
        max = least;
    }

    // All tokens not below some lower bound of the wanted-th best: at least that many, if so many survive.
    void list_of_best(int64_t wanted) {
        float floor = LOWEST;
        if (wanted <= static_cast<int64_t>(maxima.size())) {
            std::vector<float> order(wanted);
            std::partial_sort_copy(maxima.begin(), maxima.end(), order.begin(), order.end(), std::greater<>());
            floor = std::max(floor, order[wanted - 1]);
        }
        collect(0.0f, floor);
    }

    void collect(float base, float floor) {
        count = 0;
        for (size_t b = 0; b < maxima.size(); b++) {
            if (!(maxima[b] - base >= floor)) continue;
            int64_t at = static_cast<int64_t>(b) * SAMPLING_BLOCK;
            count += k.collect(dense.data() + at, SAMPLING_BLOCK, static_cast<int32_t>(at), base, floor,
                               ids.data() + count, logits.data() + count);
        }
        is_list = true;
    }

    int64_t pad_list() {
        std::fill(logits.begin() + count, logits.begin() + padded(count), MINUS_INFINITY);
        return padded(count);
    }

    int64_t weigh_list() {
        k.weigh(logits.data(), pad_list(), max, weights.data());
        int64_t sum = 0;
        for (int64_t i = 0; i < count; i++) sum += weights[i];
        return sum;
    }

    std::vector<Ranked<float>> ranked() const {
        std::vector<Ranked<float>> order(count);
        for (int64_t i = 0; i < count; i++) order[i] = {-logits[i], ids[i], 1};
        return order;
    }

    template <typename Test>
    void keep_if(Test test) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (test(logits[i], ids[i])) ids[kept] = ids[i], logits[kept] = logits[i], kept++;
        count = kept;
    }

    // The best logit + noise in a padded array: of tokens[i], or of i itself without tokens. A block whose best logit
    // could not win with the largest noise is skipped; the block with the best logit is first.
    int64_t draw_from(const float* values, const int32_t* tokens, const std::vector<float>& highest, uint64_t seed,
                      uint64_t position) {
        int64_t token = NONE_LEFT;
        float best = MINUS_INFINITY;
        auto visit = [&](size_t block) {
            auto first = static_cast<int64_t>(block) * SAMPLING_BLOCK;
            const int32_t* named = tokens ? tokens + first : nullptr;
            k.gumbel(named, static_cast<int32_t>(first), SAMPLING_BLOCK, seed, position, noise);
            for (int64_t i = 0; i < SAMPLING_BLOCK; i++) {
                float score = values[first + i] + noise[i];
                int64_t id = tokens ? named[i] : first + i;
                if (score > best || (score == best && id < token)) best = score, token = id;
            }
        };
        size_t favourite = std::max_element(highest.begin(), highest.end()) - highest.begin();
        visit(favourite);
        for (size_t block = 0; block < highest.size(); block++)
            if (block != favourite && highest[block] + MAX_GUMBEL >= best) visit(block);
        return token;
    }

    int64_t draw_list(uint64_t seed, uint64_t position) {
        std::vector<float> highest(pad_list() / SAMPLING_BLOCK);
        for (size_t block = 0; block < highest.size(); block++) {
            const float* first = logits.data() + block * SAMPLING_BLOCK;
            highest[block] = *std::max_element(first, first + SAMPLING_BLOCK);
        }
        return highest.empty() ? NONE_LEFT : draw_from(logits.data(), ids.data(), highest, seed, position);
    }

    std::vector<float> dense, maxima;
    // After the first filter: the survivors, ordered by id. The arrays have room for all tokens and padding.
    bool is_list = false;
    int64_t count = 0;
    std::vector<int32_t> ids;
    std::vector<float> logits;
    float noise[SAMPLING_BLOCK];
    std::vector<int64_t> weights;
};

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Writable = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const SamplingKernels* kernels_named(const std::string& isa) {
#ifdef UNSPOOL_X86
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vnni");
    if ((isa == "auto" || isa == "avx512") && avx512) return sampling_avx512();
    if ((isa == "auto" || isa == "avx2") && avx2) return sampling_avx2();
#endif
    return isa == "auto" || isa == "plain" ? sampling_plain() : nullptr;
}

// The workspace of the calling thread, reused while rows have the same size.
Row& row_of(const SamplingKernels& kernels, int64_t n) {
    thread_local std::vector<Row> kept;
    if (kept.empty() || kept[0].n != n || &kept[0].k != &kernels) {
        kept.clear();
        kept.emplace_back(kernels, n);
    }
    return kept[0];
}

class Sampling {
  public:
    // `names`: the stages that `choose` accepts, each identified by its index in this list.
    Sampling(const std::string& isa, const std::vector<std::string>& names) : kernels(kernels_named(isa)) {
        if (!kernels) throw std::invalid_argument("this processor cannot run the sampling kernels for " + isa);
        for (const auto& name : names) stages_by_code.push_back(stage_named(name));
    }

    std::string isa() const { return kernels->name; }

    int64_t greedy(Floats logits) const {
        auto n = static_cast<int64_t>(logits.shape(0));
        nb::gil_scoped_release release;
        int64_t token = kernels->argmax(logits.data(), n);
        if (token < 0) return HAS_NAN;
        float best = logits.data()[token];
        return best == MINUS_INFINITY ? NONE_LEFT : best == -MINUS_INFINITY ? HAS_INFINITY : token;
    }

    int64_t choose(Floats logits, Ints stages, Doubles values, uint64_t seed, uint64_t position, nb::object out) const {
        auto n = static_cast<int64_t>(logits.shape(0));
        float* final = nullptr;
        if (!out.is_none()) {
            auto room = nb::cast<Writable>(out);
            if (room.shape(0) != logits.shape(0)) throw std::invalid_argument("the output is not as long as the row");
            final = room.data();
        }
        size_t count = stages.shape(0), first = count && stage_of(stages.data()[0]) == Stage::TEMPERATURE;
        for (size_t i = 0; i < count; i++) stage_of(stages.data()[i]);  // throws before the row is touched
        nb::gil_scoped_release release;
        Row& row = row_of(*kernels, n);
        if (!row.load(logits.data(), first ? static_cast<float>(values.data()[0]) : 1.0f)) return HAS_NAN;
        if (row.max == MINUS_INFINITY) return NONE_LEFT;
        if (row.max == -MINUS_INFINITY) return HAS_INFINITY;
        for (size_t i = first; i < count; i++) row.apply(stage_of(stages.data()[i]), values.data()[i]);
        if (row.max == -MINUS_INFINITY) return HAS_INFINITY;
        if (final) row.write(final);
        return row.draw(seed, position);
    }

    // The statistics of logprobs.py for a row: (max, total weight, the token's rank, the best ids).
    std::tuple<float, int64_t, int64_t, std::vector<int32_t>> describe(Floats logits, int64_t token,
                                                                       int64_t count) const {
        auto n = static_cast<int64_t>(logits.shape(0));
        if (token < 0 || token >= n || count < 0) throw std::invalid_argument("the row has no such token");
        nb::gil_scoped_release release;
        Row& row = row_of(*kernels, n);
        row.load(logits.data(), 1.0f);
        int64_t total = row.total(), rank = row.rank(token);
        return {row.max, total, rank, row.best(count)};
    }

    void mask(Writable logits, Words bits) const {
        if (bits.shape(0) * 32 < logits.shape(0)) throw std::invalid_argument("the mask is shorter than the row");
        kernels->mask(logits.data(), static_cast<int64_t>(logits.shape(0)), bits.data());
    }

    void gumbel(Ints ids, uint64_t seed, uint64_t position, Writable out) const {
        kernels->gumbel(ids.data(), 0, checked(ids.shape(0)), seed, position, out.data());
    }
    void log(Floats x, Writable out) const { kernels->log(x.data(), checked(x.shape(0)), out.data()); }
    void exp(Floats x, Writable out) const { kernels->exp(x.data(), checked(x.shape(0)), out.data()); }

  private:
    static int64_t checked(size_t n) {
        if (n % 16) throw std::invalid_argument("the number of values must be a multiple of 16");
        return static_cast<int64_t>(n);
    }

    Stage stage_of(int32_t code) const { return stages_by_code.at(static_cast<size_t>(code)); }

    const SamplingKernels* kernels;
    std::vector<Stage> stages_by_code;
};

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Sampling>(m, "Sampling", "Filters and draws over rows of logits; see unspool.sampling")
        .def(nb::init<const std::string&, const std::vector<std::string>&>(), nb::arg("isa") = "auto",
             nb::arg("stages") = std::vector<std::string>())
        .def_prop_ro("isa", &Sampling::isa)
        .def("greedy", &Sampling::greedy)
        .def("choose", &Sampling::choose, nb::arg("logits"), nb::arg("stages"), nb::arg("values"), nb::arg("seed"),
             nb::arg("position"), nb::arg("out").none())
        .def("describe", &Sampling::describe)
        .def("mask", &Sampling::mask)
        .def("gumbel", &Sampling::gumbel)
        .def("log", &Sampling::log)
        .def("exp", &Sampling::exp);
}

}  // namespace unspool

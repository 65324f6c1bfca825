#include "kv.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace unspool {

namespace {

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr double MOST_SUM = 1.9e9;  // of a head's products, in 32 bits
constexpr int FINER = 4;            // bits that wide channels are finer by, in queries and in keys

double narrow_sum(int head_dim, int finer) { return narrow_channels(head_dim) * 127.0 * 128.0 * std::exp2(2 * finer); }

constexpr double MOST_TIMES = 1024.0;  // that a channel is made larger or smaller

}  // namespace

void KeyChannels::add_head(const std::vector<double>& queries, const std::vector<double>& keys) {
    std::vector<double> weight(keys.size()), times(keys.size(), 1.0);
    for (size_t c = 0; c < keys.size(); c++) {
        weight[c] = queries[c] * keys[c];
        if (std::isnormal(weight[c]))
            times[c] = std::clamp(std::sqrt(std::sqrt(queries[c] / keys[c])), 1 / MOST_TIMES, MOST_TIMES);
        else weight[c] = 0.0;
    }
    std::vector<int32_t> by_weight(keys.size());
    std::iota(by_weight.begin(), by_weight.end(), 0);
    std::stable_sort(by_weight.begin(), by_weight.end(), [&](int32_t a, int32_t b) {
        return weight[static_cast<size_t>(a)] < weight[static_cast<size_t>(b)];
    });
    for (int32_t c : by_weight) {
        order.push_back(c);
        of_keys.push_back(static_cast<float>(times[static_cast<size_t>(c)]));
        of_queries.push_back(static_cast<float>(1 / times[static_cast<size_t>(c)]));
    }
}

KvCache::KvCache(int layers, int heads, int head_dim, int block_size, int64_t blocks, KvType type)
    : layers(layers), heads(heads), head_dim(head_dim), block_size(block_size), blocks(blocks), type(type) {
    const int64_t element = type == KV_F32 ? 4 : type == KV_F16 ? 2 : 1;
    const int64_t key_bytes = type == KV_Q8 ? 4 * key_words(head_dim) : element * head_dim;
    const int64_t scales = type == KV_Q8 ? 4 * block_size : 0;
    padded_dim_ = (head_dim + TILE - 1) / TILE * TILE;
    values_ = rounded(key_bytes * block_size + scales);
    head_bytes_ = values_ + rounded(element * padded_dim_ * block_size + scales);
    block_bytes_ = head_bytes_ * heads * layers;
    // Sixteen keys are read at once, and with small blocks the last of them may lie past the end.
    memory_ = Memory(static_cast<size_t>(block_bytes_ * blocks) + 4096, true);
    if (type != KV_Q8) return;
    for (finer_ = FINER; finer_ > 0 && narrow_sum(head_dim, finer_) > MOST_SUM / 2; finer_--) continue;
    const int wide = head_dim - narrow_channels(head_dim);
    const double fits = std::floor(std::sqrt((MOST_SUM - narrow_sum(head_dim, finer_)) / wide));
    limit_ = static_cast<float>(std::min(32767.0, fits));
    KeyChannels plain;
    plain.order.resize(static_cast<size_t>(heads * head_dim));
    for (int head = 0; head < heads; head++)
        std::iota(plain.order.begin() + head * head_dim, plain.order.begin() + (head + 1) * head_dim, 0);
    plain.of_keys.assign(plain.order.size(), 1.0f), plain.of_queries = plain.of_keys;
    channels_.assign(static_cast<size_t>(layers), plain);
}

KvView KvCache::view(int layer, int head) const {
    return {memory_.data() + (static_cast<int64_t>(layer) * heads + head) * head_bytes_,
            block_bytes_,
            values_,
            block_size,
            head_dim,
            padded_dim_,
            type,
            finer_,
            limit_};
}

}  // namespace unspool

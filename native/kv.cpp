#include "kv.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace unspool {

namespace {

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr double MOST_SUM = 1.9e9;  // limit for the sum of a head's products, which must fit in 32 bits
constexpr int FINER = 4;            // bits by which the unit of wide channels is finer, in queries and in keys

double narrow_sum(int head_dim, int finer) { return narrow_channels(head_dim) * 127.0 * 128.0 * std::exp2(2 * finer); }

constexpr double MOST_TIMES = 1024.0;  // the most by which a channel is scaled up or down

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

KvCache::Layer KvCache::layer_of(const LayerKv& shape) const {
    const int64_t element = type == KV_F32 ? 4 : type == KV_F16 ? 2 : 1;
    const int64_t key_bytes = type == KV_Q8 ? 4 * key_words(shape.key_dim) : element * shape.key_dim;
    const int64_t scales = type == KV_Q8 ? 4 * block_size : 0;
    Layer layer{shape, block_bytes(shape.group), 0, rounded(key_bytes * block_size + scales), state_bytes_, 0, 0, 0.0f};
    layer.padded_dim = (shape.value_dim + TILE - 1) / TILE * TILE;
    layer.head_bytes = layer.values + rounded(element * layer.padded_dim * block_size + scales);
    if (type != KV_Q8 || shape.heads == 0) return layer;
    const int wide = shape.key_dim - narrow_channels(shape.key_dim);
    layer.finer = FINER;
    while (layer.finer > 0 && narrow_sum(shape.key_dim, layer.finer) > MOST_SUM / 2) layer.finer--;
    const double fits = std::floor(std::sqrt((MOST_SUM - narrow_sum(shape.key_dim, layer.finer)) / wide));
    layer.limit = static_cast<float>(std::min(32767.0, fits));
    return layer;
}

KvCache::KvCache(const std::vector<LayerKv>& layers, int block_size, std::vector<int64_t> blocks, int64_t states,
                 KvType type)
    : block_size(block_size), states(states), type(type) {
    for (int64_t count : blocks) groups_.push_back({count, 0, 0});
    for (const LayerKv& shape : layers) {
        layers_.push_back(layer_of(shape));
        groups_[static_cast<size_t>(shape.group)].block_bytes += layers_.back().head_bytes * shape.heads;
        state_bytes_ += rounded(shape.state_bytes);
        KeyChannels plain;
        for (int head = 0; head < shape.heads; head++)
            for (int c = 0; c < shape.key_dim; c++) plain.order.push_back(c);
        plain.of_keys.assign(plain.order.size(), 1.0f), plain.of_queries = plain.of_keys;
        channels_.push_back(std::move(plain));
    }
    // Sixteen keys are read at once, so with small blocks the last read may go past the end.
    int64_t bytes = 0;
    for (Group& group : groups_) group.start = bytes, bytes += group.block_bytes * group.blocks;
    memory_ = Memory(static_cast<size_t>(bytes) + 4096, true);
    if (state_bytes_ * states > 0) states_ = Memory(static_cast<size_t>(state_bytes_ * states), true);
}

std::vector<LayerKv> KvCache::shapes() const {
    std::vector<LayerKv> shapes;
    for (const Layer& layer : layers_) shapes.push_back(layer.shape);
    return shapes;
}

KvView KvCache::view(int layer, int head) const {
    const Layer& found = layers_[static_cast<size_t>(layer)];
    return {block(0, found.shape.group) + found.offset + head * found.head_bytes,
            block_bytes(found.shape.group),
            found.values,
            block_size,
            found.shape.key_dim,
            found.shape.value_dim,
            found.padded_dim,
            type,
            found.finer,
            found.limit};
}

}  // namespace unspool

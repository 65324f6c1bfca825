// Keys and values in blocks. A block holds every layer and head of its tokens in one piece, so that a copy is one copy.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace unspool {

// How a layer's keys become integers. Those of channels that matter most to scores come last, where they are finer; and
// what is large in keys alone is made smaller there and larger in queries, which leaves their products as they are. The
// channels of all heads, one after the other, in the order in which they are kept.
struct KeyChannels {
    std::vector<int32_t> order;              // which of the head's own channels
    std::vector<float> of_keys, of_queries;  // what they are multiplied with
    bool known = false;

    // By the squares of a head's channels in queries and in keys.
    void add_head(const std::vector<double>& queries, const std::vector<double>& keys);
};

// What a layer keeps: so many KV heads, with keys and values of so many channels; no heads where it keeps none. And of
// each sequence a state of so many bytes.
struct LayerKv {
    int heads, key_dim, value_dim;
    int64_t state_bytes;
};

class KvCache {
public:
    KvCache(const std::vector<LayerKv>& layers, int block_size, int64_t blocks, int64_t states, KvType type);

    KvView view(int layer, int head) const;
    const LayerKv& shape(int layer) const { return layers_[static_cast<size_t>(layer)].shape; }
    const KeyChannels& channels(int layer) const { return channels_[static_cast<size_t>(layer)]; }
    void set_channels(int layer, KeyChannels channels) { channels_[static_cast<size_t>(layer)] = std::move(channels); }
    uint8_t* block(int64_t index) const { return memory_.data() + index * block_bytes_; }

    const int block_size;
    const int64_t blocks, states;
    const KvType type;
    int num_layers() const { return static_cast<int>(layers_.size()); }
    std::vector<LayerKv> shapes() const;
    int64_t block_bytes() const { return block_bytes_; }
    int64_t head_bytes(int layer) const { return layers_[static_cast<size_t>(layer)].head_bytes; }  // in a block

    // The states of a sequence lie in one piece, layer after layer, so that a copy is one copy, too.
    uint8_t* state(int64_t slot) const { return states_.data() + slot * state_bytes_; }
    uint8_t* state(int64_t slot, int layer) const { return state(slot) + layers_[static_cast<size_t>(layer)].state; }
    int64_t state_bytes() const { return state_bytes_; }

private:
    struct Layer {
        LayerKv shape;
        int64_t offset;              // in a block
        int64_t head_bytes, values;  // of a head in a block, and where its values begin there
        int64_t state;               // in a sequence's states
        int padded_dim, finer;
        float limit;
    };
    Layer layer_of(const LayerKv& shape);

    std::vector<Layer> layers_;
    std::vector<KeyChannels> channels_;
    int64_t block_bytes_ = 0, state_bytes_ = 0;
    Memory memory_, states_;
};

}  // namespace unspool

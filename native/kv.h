// Keys and values in blocks. Layers that keep keys equally long are a group. Each group has its own blocks; a block holds
// all of the group's layers and heads for its tokens contiguously, so one memcpy copies it.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace unspool {

// How a layer's keys become integers. Channels that affect scores most come last, and have a finer unit. A channel that
// is large only in keys is scaled down in keys and up in queries, which leaves the products unchanged. The vectors hold
// the channels of all heads, one head after the other, in the order in which they are stored.
struct KeyChannels {
    std::vector<int32_t> order;              // index of the channel within its head
    std::vector<float> of_keys, of_queries;  // the factors for keys and for queries
    bool known = false;

    // Computed from the squares of a head's channels in queries and in keys.
    void add_head(const std::vector<double>& queries, const std::vector<double>& keys);
};

// What a layer stores: its number of KV heads (0: no keys and values), the channels of a key and of a value, the bytes of
// each sequence's state, and the group whose blocks its keys and values are in.
struct LayerKv {
    int heads, key_dim, value_dim;
    int64_t state_bytes;
    int group = 0;
};

class KvCache {
public:
    // `blocks`: of each group.
    KvCache(const std::vector<LayerKv>& layers, int block_size, std::vector<int64_t> blocks, int64_t states,
            KvType type);

    KvView view(int layer, int head) const;
    const LayerKv& shape(int layer) const { return layers_[static_cast<size_t>(layer)].shape; }
    const KeyChannels& channels(int layer) const { return channels_[static_cast<size_t>(layer)]; }
    void set_channels(int layer, KeyChannels channels) { channels_[static_cast<size_t>(layer)] = std::move(channels); }
    uint8_t* block(int64_t index, int group) const {
        const Group& found = groups_[static_cast<size_t>(group)];
        return memory_.data() + found.start + index * found.block_bytes;
    }

    const int block_size;
    const int64_t states;
    const KvType type;
    int num_layers() const { return static_cast<int>(layers_.size()); }
    std::vector<LayerKv> shapes() const;
    int num_groups() const { return static_cast<int>(groups_.size()); }
    int group_of(int layer) const { return shape(layer).group; }
    int64_t blocks(int group) const { return groups_[static_cast<size_t>(group)].blocks; }
    int64_t block_bytes(int group) const { return groups_[static_cast<size_t>(group)].block_bytes; }
    int64_t head_bytes(int layer) const { return layers_[static_cast<size_t>(layer)].head_bytes; }  // within a block

    // The states of a sequence are contiguous, layer after layer, so one memcpy copies them too.
    uint8_t* state(int64_t slot) const { return states_.data() + slot * state_bytes_; }
    uint8_t* state(int64_t slot, int layer) const { return state(slot) + layers_[static_cast<size_t>(layer)].state; }
    int64_t state_bytes() const { return state_bytes_; }

private:
    struct Layer {
        LayerKv shape;
        int64_t offset;              // within a block
        int64_t head_bytes, values;  // of a head in a block, and the offset of its values
        int64_t state;               // within a sequence's states
        int padded_dim, finer;
        float limit;
    };
    struct Group {
        int64_t blocks, block_bytes, start;  // the start of its first block in memory
    };
    Layer layer_of(const LayerKv& shape) const;

    std::vector<Layer> layers_;
    std::vector<KeyChannels> channels_;
    std::vector<Group> groups_;
    int64_t state_bytes_ = 0;
    Memory memory_, states_;
};

}  // namespace unspool

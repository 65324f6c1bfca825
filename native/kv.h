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

class KvCache {
public:
    KvCache(int layers, int heads, int head_dim, int block_size, int64_t blocks, KvType type);

    KvView view(int layer, int head) const;
    const KeyChannels& channels(int layer) const { return channels_[static_cast<size_t>(layer)]; }
    void set_channels(int layer, KeyChannels channels) { channels_[static_cast<size_t>(layer)] = std::move(channels); }
    uint8_t* block(int64_t index) const { return memory_.data() + index * block_bytes_; }

    const int layers, heads, head_dim, block_size;
    const int64_t blocks;
    const KvType type;
    int64_t block_bytes() const { return block_bytes_; }
    int64_t head_bytes() const { return head_bytes_; }  // of one layer and head in a block

private:
    std::vector<KeyChannels> channels_;
    int padded_dim_, finer_ = 0;
    float limit_ = 0.0f;
    int64_t values_, head_bytes_, block_bytes_;
    Memory memory_;
};

}  // namespace unspool

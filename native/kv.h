// Keys and values in blocks. A block holds every layer and head of its tokens in one piece, so that a copy is one copy.
#pragma once
#include <string>

#include "kernels.h"
#include "memory.h"

namespace unspool {

class KvCache {
public:
    KvCache(int layers, int heads, int head_dim, int block_size, int64_t blocks, KvType type);

    KvView view(int layer, int head) const;
    uint8_t* block(int64_t index) const { return memory_.data() + index * block_bytes_; }

    const int layers, heads, head_dim, block_size;
    const int64_t blocks;
    const KvType type;
    int64_t block_bytes() const { return block_bytes_; }
    int64_t head_bytes() const { return head_bytes_; }  // of one layer and head in a block

private:
    int padded_dim_;
    int64_t values_, head_bytes_, block_bytes_;
    Memory memory_;
};

}  // namespace unspool

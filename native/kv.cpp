#include "kv.h"

namespace unspool {

namespace {

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

KvCache::KvCache(int layers, int heads, int head_dim, int block_size, int64_t blocks, KvType type)
    : layers(layers), heads(heads), head_dim(head_dim), block_size(block_size), blocks(blocks), type(type) {
    const int64_t element = type == KV_F32 ? 4 : type == KV_F16 ? 2 : 1;
    const int64_t key_bytes = type == KV_Q8      ? (head_dim + 3) / 4 * 4
                              : type == KV_K16V8 ? (head_dim + 1) / 2 * 4
                                                 : element * head_dim;
    const int64_t scales = is_integer(type) ? 4 * block_size : 0;
    padded_dim_ = (head_dim + TILE - 1) / TILE * TILE;
    values_ = rounded(key_bytes * block_size + scales);
    head_bytes_ = values_ + rounded(element * padded_dim_ * block_size + scales);
    block_bytes_ = head_bytes_ * heads * layers;
    // Sixteen keys are read at once, and with small blocks the last of them may lie past the end.
    memory_ = Memory(static_cast<size_t>(block_bytes_ * blocks) + 4096, true);
}

KvView KvCache::view(int layer, int head) const {
    return {memory_.data() + (static_cast<int64_t>(layer) * heads + head) * head_bytes_,
            block_bytes_,
            values_,
            block_size,
            head_dim,
            padded_dim_,
            type};
}

}  // namespace unspool

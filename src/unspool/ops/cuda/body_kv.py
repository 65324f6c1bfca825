"""Keys and values on the device, in blocks."""

from __future__ import annotations

import numpy as np
import torch

from unspool.config import EngineConfig, ModelConfig
from unspool.errors import BackendError, RequestError
from unspool.ops.cuda.steps import KEYS


class CudaKV:
    """f16 [layer, block, kv head, key or value, slot, channel]: a head's keys in a block are contiguous.

    Channels that rotate together lie 8 apart in every 16, the order in which the q, k and v projection makes them.
    """

    def __init__(self, config: ModelConfig, engine: EngineConfig, num_blocks: int, device: torch.device) -> None:
        if engine.suited("cuda").kv_dtype != "f16":
            raise RequestError(f"the CUDA body keeps f16 keys and values, not {engine.kv_dtype}", "kv_dtype")
        if KEYS % engine.block_size and engine.block_size % KEYS:
            raise RequestError(
                f"block_size is {engine.block_size}; the CUDA body takes divisors and multiples of {KEYS}", "block_size"
            )
        if config.head_dim % 16:
            raise BackendError(
                f"heads of {config.head_dim} channels are not supported by the CUDA body; multiples of 16 are"
            )
        self.config, self.engine = config, engine
        self.block_size = engine.block_size
        self.num_blocks = num_blocks
        self.layout = f"cuda-f16-{engine.block_size}-paired"
        shape = (config.num_layers, num_blocks, config.num_kv_heads, 2, engine.block_size, config.head_dim)
        try:
            self.data = torch.zeros(shape, dtype=torch.float16, device=device)
        except torch.OutOfMemoryError as error:
            size = 2 * int(np.prod(shape)) / 2**30
            free = torch.cuda.mem_get_info()[0] / 2**30
            raise BackendError(
                f"a KV cache of {num_blocks * engine.block_size:,} tokens takes {size:.1f} GiB; {free:.1f} GiB "
                "are free on the GPU; set kv_tokens lower"
            ) from error
        self.block_bytes = self.data[:, 0].numel() * 2

    def layer(self, index: int) -> torch.Tensor:
        return self.data[index]

    def copy_block(self, source: int, target: int) -> None:
        self.data[:, target] = self.data[:, source]

    def read_block(self, block: int) -> bytes:
        return self.data[:, block].contiguous().cpu().numpy().tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.float16).reshape(self.data[:, block].shape)
        self.data[:, block] = values.to(self.data.device)

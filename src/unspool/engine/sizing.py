"""How large the KV cache is: what the user says, else what the model and the free memory suggest."""

from __future__ import annotations

from unspool.config import EngineConfig, ModelConfig
from unspool.errors import RequestError
from unspool.machine import free_memory


def kv_bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """2 · layers · kv_heads · head_dim · bytes of a float; integers have a scale of 4 bytes for each key and value."""
    heads = model.num_layers * model.num_kv_heads
    if kv_dtype == "q8":
        return heads * (integer_key_bytes(model.head_dim) + model.head_dim + 2 * 4)
    return 2 * heads * model.head_dim * {"f32": 4, "f16": 2}[kv_dtype]


def integer_key_bytes(head_dim: int) -> int:
    """A byte for most channels, two for a quarter of them (native/kernels.h)."""
    narrow = head_dim * 3 // 16 * 4
    wide = head_dim - narrow
    return narrow + 2 * (wide + wide % 2)


def num_kv_blocks(model: ModelConfig, config: EngineConfig, room: int | None = None) -> int:
    """Unless told, room for four whole contexts or a quarter of the free memory, whichever is less, but one context
    at least where half of the free memory has room for it. Memory is taken as it is used, not now.

    A device with memory of its own says how many bytes of `room` it has: all of it is taken at once, up to what so many
    whole contexts as run together could fill.
    """
    if config.kv_tokens is not None:
        tokens = config.kv_tokens
    elif room is not None:
        most = config.max_running * model.context_length
        tokens = int(min(most, room / kv_bytes_per_token(model, config.kv_dtype)))
        tokens -= tokens % config.block_size
    else:
        per_token = kv_bytes_per_token(model, config.kv_dtype)
        free = free_memory()
        tokens = int(min(4 * model.context_length, free // 4 // per_token))
        tokens = max(tokens, int(min(model.context_length, free // 2 // per_token)))
    blocks = -(-tokens // config.block_size)
    if blocks < 1:
        raise RequestError("there is no free memory for a KV cache; set kv_tokens or use a smaller model", "kv_tokens")
    return blocks

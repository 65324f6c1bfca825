"""The size of the KV cache: the configured one, else one derived from the model and the free memory."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.config import EngineConfig
from unspool.errors import RequestError
from unspool.machine import free_memory
from unspool.ops.storage import Storage, kv_bytes_per_token, state_bytes

SNAPSHOTS = 32  # beside the states of running sequences, where memory has room


def num_kv_blocks(
    layers: Sequence[Storage],
    context_length: int,
    config: EngineConfig,
    room: int | None = None,
    *,
    keys_alone: bool = False,
) -> int:
    """`keys_alone`: see kv_bytes_per_token.

    Unless told, room for four whole contexts or a quarter of the free memory, whichever is less, but one context
    at least where half of the free memory has room for it. Memory is taken as it is used, not now.

    A device with memory of its own says how many bytes of `room` it has: all of it is taken at once, up to what so many
    whole contexts as run together could fill.
    """
    per_token = max(1, kv_bytes_per_token(layers, config.kv_dtype, keys_alone=keys_alone))
    if config.kv_tokens is not None:
        tokens = config.kv_tokens
    elif room is not None:
        most = config.max_running * context_length
        tokens = int(min(most, room / per_token))
        tokens -= tokens % config.block_size
    else:
        free = free_memory()
        tokens = int(min(4 * context_length, free // 4 // per_token))
        tokens = max(tokens, int(min(context_length, free // 2 // per_token)))
    blocks = -(-tokens // config.block_size)
    if blocks < 1:
        raise RequestError("there is no free memory for a KV cache; set kv_tokens or use a smaller model", "kv_tokens")
    return blocks


def num_states(layers: Sequence[Storage], config: EngineConfig, room: int | None = None) -> int:
    """How many slots there are for states of recurrent layers; 0 where there are none.

    Unless told, one for each request that may run and SNAPSHOTS more, as far as an eighth of the free memory goes.
    Memory is taken as it is used. A device with memory of its own says how many bytes of `room` it has; an eighth, too.
    """
    each = state_bytes(layers)
    if each == 0:
        return 0
    if config.state_bytes is not None:
        if config.state_bytes < each:
            raise RequestError(
                f"state_bytes is {config.state_bytes:,}; the states of one sequence take {each:,}", "state_bytes"
            )
        return int(config.state_bytes // each)
    memory = free_memory() if room is None else room
    return int(max(2, min(config.max_running + SNAPSHOTS, memory // 8 // each)))

"""What layers keep, in native memory."""

from __future__ import annotations

from collections.abc import Sequence

import unspool._native as _native
from unspool.config import EngineConfig
from unspool.errors import EngineError
from unspool.ops.storage import Storage, counts_of, describe, group_of_each_layer, groups_for


class CpuKV:
    """Keys, values and states in native memory. The system allocates its pages on first use."""

    def __init__(
        self,
        layers: Sequence[Storage],
        engine: EngineConfig,
        num_blocks: int | Sequence[int],
        num_states: int,
        isa: str,
    ) -> None:
        engine = engine.with_device_defaults("cpu")
        self.block_size, self.num_states = engine.block_size, num_states
        self.groups, self.num_blocks = groups_for(layers, num_blocks), counts_of(num_blocks)
        group_of = group_of_each_layer(self.groups)
        sizes = [(*_sizes(layer), group_of.get(index, 0)) for index, layer in enumerate(layers)]
        self.native = _native.KvCache(sizes, engine.block_size, self.num_blocks, num_states, engine.kv_dtype)
        # Byte offset of a state within the states of its layer.
        self.state_offsets = {
            (index, state.name): sum(each.nbytes for each in layer.states[:place])
            for index, layer in enumerate(layers)
            for place, state in enumerate(layer.states)
        }
        self.block_bytes: tuple[int, ...] = tuple(self.native.block_bytes)
        self.state_bytes: int = self.native.state_bytes
        # The model measures its own scales for integer keys, and their last bits differ between kernel sets.
        kind = f"{engine.kv_dtype}-{isa}" if engine.kv_dtype == "q8" else engine.kv_dtype
        self.layout = f"cpu-6-{kind}-{engine.block_size}-{describe(layers, self.groups)}"

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        self.native.copy_block(source, target, group)

    def read_block(self, block: int, group: int = 0) -> bytes:
        return self.native.read_block(block, group)

    def write_block(self, block: int, data: bytes, group: int = 0) -> None:
        if len(data) != self.block_bytes[group]:
            raise EngineError(
                f"a saved block has {len(data)} bytes; blocks of this cache have {self.block_bytes[group]}"
            )
        self.native.write_block(block, data, group)

    def clear_state(self, slot: int) -> None:
        self.native.clear_state(slot)

    def copy_state(self, source: int, target: int) -> None:
        self.native.copy_state(source, target)

    def read_state(self, slot: int) -> bytes:
        return self.native.read_state(slot)

    def write_state(self, slot: int, data: bytes) -> None:
        if len(data) != self.state_bytes:
            raise EngineError(f"a saved state has {len(data)} bytes; states of this model have {self.state_bytes}")
        self.native.write_state(slot, data)


def _sizes(layer: Storage) -> tuple[int, int, int, int]:
    """KV heads, channels of a key and of a value, bytes of the layer's states."""
    kv, states = layer.kv, sum(state.nbytes for state in layer.states)
    return (0, 0, 0, states) if kv is None else (kv.num_heads, kv.key_dim, kv.value_dim, states)

"""The size of the KV cache: the configured one, else one derived from the model and the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unspool.cache.blocks import Blocks, blocks_in_window
from unspool.config import EngineConfig
from unspool.errors import RequestError
from unspool.machine import free_memory
from unspool.ops.storage import LayerGroup, Storage, kv_bytes_per_token, layer_groups, state_bytes
from unspool.records import record

if TYPE_CHECKING:
    from unspool.models.decoder import Decoder

SNAPSHOTS = 32  # beside the states of running sequences, where memory has room
TYPICAL_TOKENS = 1024  # of a sequence, for the share of blocks that layers with a window get


class KvSizes:
    """How many blocks each group of a model's layers gets."""

    def __init__(
        self,
        layers: Sequence[Storage],
        context_length: int,
        config: EngineConfig,
        *,
        keys_alone: bool = False,
    ) -> None:
        self.groups: tuple[LayerGroup, ...] = layer_groups(layers)
        self._config, self._context = config, context_length
        self.bytes_per_token = tuple(
            kv_bytes_per_token([layers[index] for index in group.layers], config.kv_dtype, keys_alone=keys_alone)
            for group in self.groups
        )

    def blocks(self, room: int | None = None) -> tuple[int, ...]:
        """The blocks of each group.

        If `kv_tokens` is not set: room for four whole contexts or a quarter of the free memory, whichever is less, but
        one context at least where half of the free memory has room for it. Memory is taken as it is used, not now.

        A device with memory of its own says how many bytes of `room` it has: all of it is taken at once, up to what so
        many whole contexts as run together could fill.
        """
        if self._config.kv_tokens is not None:
            count = -(-self._config.kv_tokens // self._config.block_size)
        elif room is not None:
            count = self.most(self._config.max_running, room)
        else:
            free = free_memory()
            count = max(self.most(4, free // 4), self.most(1, free // 2))
        if count < 1:
            raise RequestError(
                "there is no free memory for a KV cache; set kv_tokens or use a smaller model", "kv_tokens"
            )
        return self.shares(count)

    def pools(self, blocks: Sequence[int]) -> list[Blocks]:
        """The same as pools of free blocks."""
        size = self._config.block_size
        return [Blocks(count, size, group.window) for group, count in zip(self.groups, blocks, strict=True)]

    def most(self, num_contexts: int, room: int) -> int:
        """The most blocks of the first group that so many contexts can fill and whose bytes, with those of the blocks
        that other groups get beside them, fit in `room`."""
        low, high = 0, -(-num_contexts * self._context // self._config.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(self.shares(middle)) <= room else (low, middle - 1)
        return low

    def nbytes(self, blocks: Sequence[int]) -> int:
        size = self._config.block_size
        return sum(count * size * each for count, each in zip(blocks, self.bytes_per_token, strict=True))

    def shares(self, count: int) -> tuple[int, ...]:
        """The blocks of each group if the first one has `count`.

        A further group has a window. It gets what the windows of typical sequences need that fill the first group, but
        no more bytes than the first group has, and at least what one sequence needs.
        """
        config, size = self._config, self._config.block_size
        sequences = min(config.max_running, -(-count * size // TYPICAL_TOKENS))
        blocks = [count]
        for group, each in zip(self.groups[1:], self.bytes_per_token[1:], strict=True):
            assert group.window is not None
            typical = sequences * blocks_in_window(group.window, size, 1) + config.step_tokens // size
            equal = count * self.bytes_per_token[0] // max(1, each)
            least = blocks_in_window(group.window, size, config.step_tokens)
            blocks.append(min(count, max(least, min(typical, equal))))
        return tuple(blocks)

    def context_length(self, blocks: Sequence[int]) -> int:
        """The tokens of the longest sequence that a cache with so many blocks can compute."""
        longest, size = self._context, self._config.block_size
        for group, count in zip(self.groups, blocks, strict=True):
            if group.window is None or count < blocks_in_window(group.window, size, 1):
                longest = min(longest, count * size)
        return longest

    def at_once(self, blocks: Sequence[int], length: int) -> int:
        """How many sequences of `length` tokens such a cache holds."""
        size, fitting = self._config.block_size, []
        for group, count in zip(self.groups, blocks, strict=True):
            needed = -(-length // size)
            if group.window is not None and count >= blocks_in_window(group.window, size, 1):
                needed = min(needed, blocks_in_window(group.window, size, 1))
            fitting.append(count // needed)
        return min(fitting)


def num_states(layers: Sequence[Storage], config: EngineConfig, room: int | None = None) -> int:
    """How many slots there are for states of recurrent layers; 0 where there are none.

    If `state_bytes` is not set: one for each request that may run and SNAPSHOTS more, as far as an eighth of the free
    memory goes. Memory is taken as it is used. A device with memory of its own says how many bytes of `room` it has; an
    eighth, too.
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


@record
class FittedCache:
    """The cache of a model, as large as the configuration or the memory allows."""

    sizes: KvSizes
    num_blocks: tuple[int, ...]  # of each group of layers
    num_states: int

    @property
    def context_length(self) -> int:
        return self.sizes.context_length(self.num_blocks)

    def pools(self) -> list[Blocks]:
        return self.sizes.pools(self.num_blocks)


def fit_cache(model: Decoder, config: EngineConfig, context_length: int) -> FittedCache:
    """Divide the memory between states and blocks: a device with memory of its own gives what the states leave."""
    ops, storage = model.ops, model.architecture.storage
    room = ops.kv_room(model.architecture.widths, config) if config.kv_tokens is None else None
    num_slots = num_states(storage, config, room)
    if room is not None and num_slots:
        room -= (num_slots + 1) * state_bytes(storage)
    sizes = KvSizes(storage, context_length, config, keys_alone=ops.name == "cuda")
    return FittedCache(sizes, sizes.blocks(room), num_slots)

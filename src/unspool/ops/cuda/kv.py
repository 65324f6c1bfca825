"""What layers keep, on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unspool.config import EngineConfig
from unspool.errors import BackendError, RequestError
from unspool.ops.cuda.steps import KEYS
from unspool.ops.storage import KeyValues, Storage, counts_of, describe, group_of_each_layer, groups_for, state_bytes


def kept_channels(key_dim: int, value_dim: int, *, latent: bool) -> int:
    """Channels that the cache stores for a key, and for a value. Latent layers store whole keys, whose last channels
    are the values. Other layers store the same number for both, and pad the narrower one with zeros."""
    return key_dim if latent else -(-max(key_dim, value_dim) // 16) * 16


Kind = tuple[int, int, int, int]  # group, heads, 2 for keys and values or 1 for keys alone, channels


class CudaKV:
    """f16 [layer, block, kv head, key or value, slot, channel]: a head's keys in a block are contiguous. Latent layers
    store keys only.

    Layers of a group with the same numbers of heads and channels share one tensor, so that one copy operation copies a
    block.
    Channels that rotate together lie 8 apart in every 16, the order in which the q, k and v projection writes them; a
    latent layer's channels keep the order of its rows. States are f32 [layer, slot, …], and share tensors as well.
    """

    def __init__(
        self,
        layers: Sequence[Storage],
        engine: EngineConfig,
        num_blocks: int | Sequence[int],
        num_states: int,
        device: torch.device,
    ) -> None:
        _check(layers, engine)
        self.engine = engine
        self.block_size, self.num_states = engine.block_size, num_states
        self.groups, self.num_blocks = groups_for(layers, num_blocks), counts_of(num_blocks)
        self.group_of = group_of_each_layer(self.groups)
        self.layout = f"cuda-f16-{engine.block_size}-paired-{describe(layers, self.groups)}"
        self.storage = tuple(layers)
        self._tensors: dict[Kind, Tensor] = {}
        self._places: dict[int, tuple[Kind, int]] = {}  # for each layer: the kind of its tensor, and its index in it
        self._states: dict[tuple[int, ...], Tensor] = {}  # by shape
        self._state_places: dict[tuple[int, str], tuple[tuple[int, ...], int]] = {}
        try:
            self._allocate(device)
        except torch.OutOfMemoryError as error:
            slots = [self._blocks_of(index) * engine.block_size for index in range(len(layers))]
            size = 2 * sum(count * _values(each.kv) for count, each in zip(slots, layers, strict=True))
            states = num_states * state_bytes(layers) / 2**30
            free = torch.cuda.mem_get_info()[0] / 2**30
            raise BackendError(
                f"a KV cache of {self.num_blocks[0] * engine.block_size:,} tokens takes {size / 2**30:.1f} GiB"
                + (f" and {num_states} states {states:.1f} GiB" if num_states else "")
                + f"; {free:.1f} GiB are free on the GPU; set kv_tokens lower"
            ) from error
        self.block_bytes = tuple(
            sum(tensor[:, 0].numel() * 2 for tensor in self._of_group(group)) for group in range(len(self.groups))
        )
        self.state_bytes = state_bytes(layers)

    def _blocks_of(self, layer: int) -> int:
        return self.num_blocks[self.group_of.get(layer, 0)]

    def _of_group(self, group: int) -> list[Tensor]:
        return [tensor for kind, tensor in self._tensors.items() if kind[0] == group]

    def _allocate(self, device: torch.device) -> None:
        counts: dict[Kind, int] = {}
        states: dict[tuple[int, ...], int] = {}
        for index, layer in enumerate(self.storage):
            if layer.kv is not None:
                kind = (self.group_of[index], *_kind(layer.kv))
                self._places[index] = kind, counts.get(kind, 0)
                counts[kind] = counts.get(kind, 0) + 1
            for state in layer.states:
                self._state_places[index, state.name] = state.shape, states.get(state.shape, 0)
                states[state.shape] = states.get(state.shape, 0) + 1
        for kind, count in counts.items():
            group, heads, parts, dim = kind
            sizes = (count, self.num_blocks[group], heads, parts, self.block_size, dim)
            self._tensors[kind] = torch.zeros(sizes, dtype=torch.float16, device=device)
        for shape, count in states.items():
            self._states[shape] = torch.zeros((count, self.num_states, *shape), device=device)

    def layer(self, index: int) -> Tensor:
        """Keys and values of a layer, as [block, kv head, key or value, slot, channel]."""
        kind, place = self._places[index]
        return self._tensors[kind][place]

    def state(self, layer: int, name: str) -> Tensor:
        """A layer's states of one name, as [slot, …]."""
        shape, place = self._state_places[layer, name]
        return self._states[shape][place]

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        for tensor in self._of_group(group):
            tensor[:, target] = tensor[:, source]

    def read_block(self, block: int, group: int = 0) -> bytes:
        return _read(tensor[:, block] for tensor in self._of_group(group))

    def write_block(self, block: int, data: bytes, group: int = 0) -> None:
        _write((tensor[:, block] for tensor in self._of_group(group)), data)

    def clear_state(self, slot: int) -> None:
        for tensor in self._states.values():
            tensor[:, slot] = 0

    def copy_state(self, source: int, target: int) -> None:
        for tensor in self._states.values():
            tensor[:, target] = tensor[:, source]

    def read_state(self, slot: int) -> bytes:
        return _read(tensor[:, slot] for tensor in self._states.values())

    def write_state(self, slot: int, data: bytes) -> None:
        _write((tensor[:, slot] for tensor in self._states.values()), data)


def _check(layers: Sequence[Storage], engine: EngineConfig) -> None:
    if engine.with_device_defaults("cuda").kv_dtype != "f16":
        raise RequestError(f"the CUDA backend keeps f16 keys and values, not {engine.kv_dtype}", "kv_dtype")
    if KEYS % engine.block_size and engine.block_size % KEYS:
        raise RequestError(
            f"block_size is {engine.block_size}; the CUDA backend needs a divisor or multiple of {KEYS}", "block_size"
        )
    for kv in (layer.kv for layer in layers):
        if kv is not None and kv.key_dim % 2:
            raise BackendError(f"keys of {kv.key_dim} channels: the CUDA backend needs an even number")


def _kind(kv: KeyValues) -> tuple[int, int, int]:
    return kv.num_heads, 1 if kv.latent else 2, kept_channels(kv.key_dim, kv.value_dim, latent=kv.latent)


def _values(kv: KeyValues | None) -> int:
    return 0 if kv is None else math.prod(_kind(kv))


def _read(tensors: Iterable[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().cpu().numpy().tobytes() for tensor in tensors)


def _write(tensors: Iterable[Tensor], data: bytes) -> None:
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        values = torch.frombuffer(bytearray(data[:size]), dtype=tensor.dtype).reshape(tensor.shape)
        tensor.copy_(values)
        data = data[size:]

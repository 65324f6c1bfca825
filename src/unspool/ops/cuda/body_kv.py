"""What layers keep, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unspool.config import EngineConfig
from unspool.errors import BackendError, RequestError
from unspool.ops.cuda.steps import KEYS
from unspool.ops.storage import KeyValues, State, Storage, describe, state_bytes


class CudaKV:
    """f16 [layer, block, kv head, key or value, slot, channel]: a head's keys in a block are contiguous.

    Layers with as many heads and channels as each other share one such tensor, so that a copy of a block is one copy.
    Channels that rotate together lie 8 apart in every 16, the order in which the q, k and v projection makes them.
    """

    def __init__(
        self,
        layers: Sequence[Storage],
        engine: EngineConfig,
        num_blocks: int,
        num_states: int,
        device: torch.device,
    ) -> None:
        _check(layers, engine)
        self.engine = engine
        self.block_size, self.num_blocks, self.num_states = engine.block_size, num_blocks, num_states
        self.layout = f"cuda-f16-{engine.block_size}-paired-{describe(layers)}"
        self.storage = tuple(layers)
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self._places: dict[int, tuple[tuple[int, int], int]] = {}  # of a layer: which tensor, and where in it
        self._states: dict[tuple[int, str], Tensor] = {}
        try:
            self._allocate(device)
        except torch.OutOfMemoryError as error:
            size = 2 * num_blocks * engine.block_size * sum(_values(each.kv) for each in layers) / 2**30
            free = torch.cuda.mem_get_info()[0] / 2**30
            raise BackendError(
                f"a KV cache of {num_blocks * engine.block_size:,} tokens takes {size:.1f} GiB; {free:.1f} GiB "
                "are free on the GPU; set kv_tokens lower"
            ) from error
        self.block_bytes = sum(tensor[:, 0].numel() * 2 for tensor in self._tensors.values())
        self.state_bytes = state_bytes(layers)

    def _allocate(self, device: torch.device) -> None:
        counts: dict[tuple[int, int], int] = {}
        for index, layer in enumerate(self.storage):
            if layer.kv is not None:
                shape = (layer.kv.num_heads, layer.kv.key_dim)
                self._places[index] = shape, counts.get(shape, 0)
                counts[shape] = counts.get(shape, 0) + 1
            for state in layer.states:
                self._states[index, state.name] = torch.zeros((self.num_states, *state.shape), device=device)
        for (heads, dim), count in counts.items():
            sizes = (count, self.num_blocks, heads, 2, self.block_size, dim)
            self._tensors[heads, dim] = torch.zeros(sizes, dtype=torch.float16, device=device)

    def layer(self, index: int) -> Tensor:
        """Keys and values of a layer, [block, kv head, key or value, slot, channel]."""
        shape, place = self._places[index]
        return self._tensors[shape][place]

    def state(self, layer: int, state: State) -> Tensor:
        """A layer's states, [slot, …]."""
        return self._states[layer, state.name]

    def copy_block(self, source: int, target: int) -> None:
        for tensor in self._tensors.values():
            tensor[:, target] = tensor[:, source]

    def read_block(self, block: int) -> bytes:
        return _read(tensor[:, block] for tensor in self._tensors.values())

    def write_block(self, block: int, data: bytes) -> None:
        _write((tensor[:, block] for tensor in self._tensors.values()), data)

    def clear_state(self, slot: int) -> None:
        for tensor in self._states.values():
            tensor[slot] = 0

    def copy_state(self, source: int, target: int) -> None:
        for tensor in self._states.values():
            tensor[target] = tensor[source]

    def read_state(self, slot: int) -> bytes:
        return _read(tensor[slot] for tensor in self._states.values())

    def write_state(self, slot: int, data: bytes) -> None:
        _write((tensor[slot] for tensor in self._states.values()), data)


def _check(layers: Sequence[Storage], engine: EngineConfig) -> None:
    if engine.with_device_defaults("cuda").kv_dtype != "f16":
        raise RequestError(f"the CUDA body keeps f16 keys and values, not {engine.kv_dtype}", "kv_dtype")
    if KEYS % engine.block_size and engine.block_size % KEYS:
        raise RequestError(
            f"block_size is {engine.block_size}; the CUDA body takes divisors and multiples of {KEYS}", "block_size"
        )
    for kv in (layer.kv for layer in layers):
        if kv is not None and kv.key_dim % 16:
            raise BackendError(
                f"heads of {kv.key_dim} channels are not supported by the CUDA body; multiples of 16 are"
            )
        if kv is not None and kv.value_dim != kv.key_dim:
            raise BackendError(
                f"keys of {kv.key_dim} and values of {kv.value_dim} channels are not supported by the CUDA body"
            )


def _values(kv: KeyValues | None) -> int:
    return 0 if kv is None else kv.values_per_token


def _read(tensors: Iterable[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().cpu().numpy().tobytes() for tensor in tensors)


def _write(tensors: Iterable[Tensor], data: bytes) -> None:
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        values = torch.frombuffer(bytearray(data[:size]), dtype=tensor.dtype).reshape(tensor.shape)
        tensor.copy_(values)
        data = data[size:]

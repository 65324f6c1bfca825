"""What layers keep of past tokens: declared by models, stored by each backend's cache, counted by memory plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from unspool.errors import EngineError
from unspool.records import record


@record(frozen=True)
class KeyValues:
    """A key and a value of every token, for each KV head."""

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # keys further back are never read again; None: all keys are read
    latent: bool = False  # values are the last channels of keys: a cache may keep the keys alone

    @property
    def values_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


@record(frozen=True)
class State:
    """An array per sequence whose size does not depend on the sequence's length. It begins as zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["f32"] = "f32"

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


@record(frozen=True)
class Storage:
    """What one layer keeps. A layer that reads another layer's keys and values keeps none itself."""

    kv: KeyValues | None = None
    states: tuple[State, ...] = ()


@record(frozen=True)
class LayerGroup:
    """Layers that keep keys and values equally long. They have blocks of their own, and each sequence has a table of
    them."""

    layers: tuple[int, ...]
    window: int | None  # blocks further back are released; None: none are


def layer_groups(layers: Sequence[Storage]) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers: those that see all keys first, then by window, the largest first.

    A sequence of a model with recurrent layers begins from a snapshot, which may be anywhere in it, so there all blocks
    are kept.
    """
    stored = [index for index, layer in enumerate(layers) if layer.kv is not None]
    windows = {kv.window for layer in layers if (kv := layer.kv) is not None}
    if not windows - {None} or state_bytes(layers):
        return (one_group(layers),)
    by_reach = sorted(windows, key=lambda window: math.inf if window is None else window, reverse=True)

    def window_of(index: int) -> int | None:
        kv = layers[index].kv
        return None if kv is None else kv.window

    return tuple(
        LayerGroup(tuple(index for index in stored if window_of(index) == window), window) for window in by_reach
    )


def one_group(layers: Sequence[Storage]) -> LayerGroup:
    """All layers together, nothing of which is released."""
    return LayerGroup(tuple(index for index, layer in enumerate(layers) if layer.kv is not None), None)


def groups_for(layers: Sequence[Storage], num_blocks: int | Sequence[int]) -> tuple[LayerGroup, ...]:
    """The groups of a cache with so many blocks: one number for each group, or one for all layers together."""
    if isinstance(num_blocks, int):
        return (one_group(layers),)
    groups = layer_groups(layers)
    if len(groups) != len(num_blocks):
        raise EngineError(f"a cache with {len(num_blocks)} numbers of blocks; its layers have {len(groups)} groups")
    return groups


def group_of_each_layer(groups: Sequence[LayerGroup]) -> dict[int, int]:
    """The number of the group that each layer belongs to, of those that store keys."""
    return {layer: number for number, group in enumerate(groups) for layer in group.layers}


def counts_of(num_blocks: int | Sequence[int]) -> tuple[int, ...]:
    """The blocks of each group, as `groups_for` counts groups."""
    return (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)


def describe(layers: Sequence[Storage], groups: Sequence[LayerGroup] = ()) -> str:
    """A short name of all layers' storage, such as 30x3x64: 30 layers of 3 KV heads of 64 channels. Groups that release
    blocks follow: w512x25 for 25 layers with a window of 512."""
    parts = []
    for storage, same in groupby(Storage(each.kv, each.states) for each in layers):
        kv = storage.kv
        sizes = [len(list(same)), *([] if kv is None else [kv.num_heads, kv.key_dim])]
        text = "x".join(map(str, sizes))
        if kv is not None and kv.value_dim != kv.key_dim:
            text += f"/{kv.value_dim}"
        parts.append(text + "".join(f"~{state.name}{'x'.join(map(str, state.shape))}" for state in storage.states))
    parts += [f"w{group.window}x{len(group.layers)}" for group in groups if group.window is not None]
    return "+".join(parts)


def state_bytes(layers: Sequence[Storage]) -> int:
    """Bytes of the states of one sequence."""
    return sum(state.nbytes for storage in layers for state in storage.states)


def kv_bytes_per_token(layers: Sequence[Storage], kv_dtype: str, *, keys_alone: bool = False) -> int:
    """Bytes of the keys and values of one token in all layers. With `keys_alone`, the cache stores only the keys of
    latent layers, as the CUDA backend does."""
    return sum(_bytes_per_token(layer.kv, kv_dtype, keys_alone) for layer in layers if layer.kv is not None)


def _bytes_per_token(kv: KeyValues, kv_dtype: str, keys_alone: bool) -> int:
    """Floats take 4 or 2 bytes; integers have a scale of 4 bytes per key and per value."""
    value_dim = 0 if kv.latent and keys_alone else kv.value_dim
    if kv_dtype == "q8":
        return kv.num_heads * (integer_key_bytes(kv.key_dim) + value_dim + 2 * 4)
    return kv.num_heads * (kv.key_dim + value_dim) * {"f32": 4, "f16": 2}[kv_dtype]


def integer_key_bytes(head_dim: int) -> int:
    """One byte for most channels, two for a quarter of them (native/kernels.h)."""
    narrow = head_dim * 3 // 16 * 4
    wide = head_dim - narrow
    return narrow + 2 * (wide + wide % 2)


@record(frozen=True)
class Widths:
    """The largest number of values in a row, by kind, from which memory plans size the buffers of a step."""

    hidden: int
    mixer: int
    feed_forward: int
    vocabulary: int

"""What layers keep of past tokens: declared by models, stored by each backend's cache, counted by memory plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

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


def describe(layers: Sequence[Storage]) -> str:
    """A short name of all layers' storage, such as 30x3x64: 30 layers of 3 KV heads of 64 channels."""
    parts = []
    for storage, same in groupby(Storage(each.kv, each.states) for each in layers):
        kv = storage.kv
        sizes = [len(list(same)), *([] if kv is None else [kv.num_heads, kv.key_dim])]
        text = "x".join(map(str, sizes))
        if kv is not None and kv.value_dim != kv.key_dim:
            text += f"/{kv.value_dim}"
        parts.append(text + "".join(f"~{state.name}{'x'.join(map(str, state.shape))}" for state in storage.states))
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

"""The order of a matrix's rows: values that a kernel combines must be held by one thread."""

from __future__ import annotations

import numpy as np

from unspool.errors import BackendError
from unspool.ops import AttentionSpec, Rope


def heads_order(spec: AttentionSpec) -> np.ndarray:
    """The order of the rows of q, k and v in which rows j and j + 8 of every 16 are a pair that rotates together."""
    pairs, half = spec.head_dim // 2, len(rope_of(spec).inv_freq)
    pair = np.arange(pairs)
    rest = 2 * pair
    if rope_of(spec).style == "interleaved":
        first, second = rest, rest + 1
    else:
        first = np.where(pair < half, pair, rest)
        second = np.where(pair < half, pair + half, rest + 1)
    head = np.empty(spec.head_dim, np.int64)
    place = pair // 8 * 16 + pair % 8
    head[place], head[place + 8] = first, second
    rotated = spec.num_heads + spec.num_kv_heads
    whole = np.arange((rotated + spec.num_kv_heads) * spec.head_dim)
    starts = np.arange(rotated)[:, None] * spec.head_dim
    whole[: rotated * spec.head_dim] = (starts + head).reshape(-1)
    return whole


def gated_order(features: int) -> np.ndarray:
    """The order in which rows j and j + 8 of every 16 are gate and up of one feature."""
    half = features // 2
    if half % 8:
        raise BackendError(
            f"a feed-forward layer of {half} features: the CUDA backend needs a multiple of 8"
        )
    index = np.arange(half)
    order = np.empty(features, np.int64)
    place = index // 8 * 16 + index % 8
    order[place], order[place + 8] = index, index + half
    return order


def rope_of(spec: AttentionSpec) -> Rope:
    if spec.rope is None:
        raise BackendError(f"layer {spec.layer} has no rotation, which the CUDA backend does not support")
    return spec.rope

"""What attention's kernels need to know about a layer's heads, and the rotations of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.ops import AttentionSpec, Rope
from unspool.ops.cuda import steps
from unspool.ops.cuda.kv import kept_channels
from unspool.ops.cuda.launch import Arena, Launch, next_power

Heads = tuple[int, int, int, int]  # heads, KV heads, channels of each in the cache, and channels that accumulate


def kept_of(spec: AttentionSpec) -> int:
    """Channels of a key in the cache, and of a query."""
    return kept_channels(spec.head_dim, spec.value_dim, latent=spec.latent)


def heads_of(spec: AttentionSpec) -> Heads:
    """The properties that layers must share to use the same work lists. If all heads read the same latents, groups of
    at most 16 heads act as KV heads."""
    kv_heads = spec.num_kv_heads
    if spec.latent:
        counts = (count for count in range(1, spec.num_heads + 1) if spec.num_heads % count == 0)
        kv_heads = next(count for count in counts if spec.num_heads // count <= 16)
    return spec.num_heads, kv_heads, kept_of(spec), depth_of(spec)


def pairs_of(spec: AttentionSpec) -> int:
    """The number of channel pairs of a head that are rotated."""
    return 0 if spec.rope is None else len(spec.rope.inv_freq)


def depth_of(spec: AttentionSpec) -> int:
    """A head's channels as the matrix unit processes them: keys and values are on its M side, which is at least 64
    wide."""
    return max(next_power(spec.value_dim if spec.latent else kept_of(spec)), 64)


def queries_of(spec: AttentionSpec) -> int:
    """Values in a row of queries."""
    return spec.num_heads * kept_of(spec)


def prompt_rows(spec: AttentionSpec) -> int:
    """Query rows of the prompt kernel's tile. The registers must hold the current split's results and the merged
    ones."""
    return 32 if spec.latent else 128 if depth_of(spec) <= 128 else 64


def programs_each(spec: AttentionSpec, rows: int) -> int:
    """Programs of the decode kernel that a multiprocessor runs at once, limited by the shared memory of their
    pipelines. All programs of the card must be resident, because programs that merge wait for others (handover.py)."""
    depth = depth_of(spec)
    each = 1 if spec.latent else 4 if depth <= 64 else 2 if depth <= 128 else 1
    return each if rows <= steps.DECODE_ROWS else max(each // 2, 1)


def is_fusable(spec: AttentionSpec) -> bool:
    """Whether q, k and v can be rotated and stored in their projection's kernel: the number of pairs must be a multiple
    of 8, and there must be no norm, because a norm over a head needs the whole head."""
    is_usual = spec.q_norm is None and spec.stores and spec.growth == 0
    is_even = spec.head_dim == spec.value_dim == kept_of(spec) and not spec.latent
    return is_usual and is_even and pairs_of(spec) > 0 and pairs_of(spec) % 8 == 0


class Rotations:
    """cos and sin of every row's position, for each rotation of a model. The embedding's kernel computes those with as
    many pairs as the first rotation; kernels of their own compute the others."""

    def __init__(self, ropes: Sequence[Rope], rows: int, arena: Arena) -> None:
        self.rows = rows
        sizes = dict.fromkeys(len(rope.inv_freq) for rope in ropes)
        self._tables = [_Table([each for each in ropes if len(each.inv_freq) == size], rows, arena) for size in sizes]

    def args(self) -> dict[str, Any]:
        """The arguments of the embedding's kernel."""
        if self._tables:
            return self._tables[0].args()
        names = ("inv_freq", "rope_scale", "cos", "sin")
        return dict.fromkeys(names) | {"ROPES": 0, "PAIRS": 1, "PAIRS_PADDED": 1}

    def launches(self, positions: Tensor) -> list[Launch]:
        """The kernels that compute the other rotations."""
        from unspool.ops.cuda.general import rotations_kernel

        beside = {"positions": positions, "num_rows": self.rows}
        return [Launch(rotations_kernel, (self.rows,), each.args() | beside, warps=1) for each in self._tables[1:]]

    def of(self, spec: AttentionSpec) -> dict[str, Any]:
        found = (each.of(spec.rope) for each in self._tables if spec.rope is not None)
        return next((each for each in found if each is not None), {"cos": None, "sin": None})


class _Table:
    """Rotations that have the same number of pairs."""

    def __init__(self, ropes: list[Rope], rows: int, arena: Arena) -> None:
        self.ropes, self.rows, self.pairs = ropes, rows, len(ropes[0].inv_freq)
        speeds = np.stack([rope.inv_freq for rope in ropes]).astype(np.float32)
        self.inv_freq = torch.from_numpy(speeds).to(arena.device)
        self.scale = torch.tensor([rope.scale for rope in ropes], dtype=torch.float32, device=arena.device)
        self.cos = arena.take(rows, len(ropes) * self.pairs, torch.float32)  # read as [ropes, rows, pairs]
        self.sin = arena.take(rows, len(ropes) * self.pairs, torch.float32)

    def args(self) -> dict[str, Any]:
        tensors = {"inv_freq": self.inv_freq, "rope_scale": self.scale, "cos": self.cos, "sin": self.sin}
        sizes = {"ROPES": len(self.ropes), "PAIRS": self.pairs, "PAIRS_PADDED": next_power(self.pairs)}
        return tensors | sizes

    def of(self, rope: Rope) -> dict[str, Any] | None:
        for index, each in enumerate(self.ropes):
            if each is rope:
                start = index * self.rows * self.pairs
                return {"cos": self.cos.view(-1)[start:], "sin": self.sin.view(-1)[start:]}
        return None

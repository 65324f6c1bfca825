"""Attention as data: heads, rotation, norms, and the other properties in which families differ."""

from __future__ import annotations

import math
from typing import Literal

from unspool.models.blocks import MixerFunction, Norm, Place, RmsNorm
from unspool.models.rotary import Rotary
from unspool.ops import AttentionSpec, Batch, KVCache, Part, Rows, Vector
from unspool.ops.storage import KeyValues, Storage
from unspool.records import record


@record(frozen=True)
class Attention:
    """W_o · attend(rotate(norm(W_qkv · x)))"""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # channels of a query and a key
    rotary: Rotary | None  # None: no rotation
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    window: int | None = None  # keys that a query sees, itself included; None: all
    softcap: float | None = None  # of scores
    value_dim: int | None = None  # channels of a value; None: head_dim
    kv_layer: int | None = None  # the layer whose keys and values are read; None: this layer stores its own
    keys_are_values: bool = False  # there is no value projection: values are the keys, before norm and rotation
    fused: bool = False  # one tensor, attn_qkv, has q, k and v
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None  # of q and k, applied before rotation
    # What this norm covers: each head with one weight for all, each head with its own weight, or a whole row of heads.
    norm_over: Literal["head", "each head", "row"] = "head"
    v_norm: Norm | None = None  # of each head of v
    sinks: bool = False  # a learned score per head that takes part in the softmax
    gate: bool = False  # each head's query is followed by a gate, whose sigmoid multiplies the result
    growth: float = 0.0  # queries are multiplied by 1 + growth · log(1 + ⌊position / period⌋)
    period: int = 1

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def width(self) -> int:
        return sum(width for _, width in self._projections())

    def storage(self) -> Storage:
        if self.kv_layer is not None:
            return Storage()
        return Storage(KeyValues(self.num_kv_heads, self.head_dim, self._value_dim, self.window))

    def _projections(self) -> list[tuple[str, int]]:
        parts = [("attn_q", self.num_heads * self.head_dim * (2 if self.gate else 1))]
        if self.kv_layer is None:
            parts.append(("attn_k", self.num_kv_heads * self.head_dim))
            if not self.keys_are_values:
                parts.append(("attn_v", self.num_kv_heads * self._value_dim))
        return [("attn_qkv", sum(width for _, width in parts))] if self.fused else parts

    def bind(self, place: Place) -> MixerFunction:
        ops, scale = place.ops, place.residual_scale
        projections = self._projections()
        qkv = place.matrix(*((name, width, place.hidden) for name, width in projections))
        bias = place.vector(*((f"{name}.bias", width) for name, width in projections)) if self.qkv_bias else None
        output = place.matrix(("attn_output", place.hidden, self.num_heads * self._value_dim))
        output_bias = place.vector(("attn_output.bias", place.hidden)) if self.output_bias else None
        spec = self._spec(place)
        parts, weight, eps = self._arrangement(place)
        gates = self._gates() if self.gate else None

        def forward(x: Rows, residual: Rows | None, batch: Batch, kv: KVCache) -> Rows:
            projected = ops.linear(x, qkv, bias)
            rows = projected if parts is None else ops.arrange(projected, parts, weight, eps)
            mixed = ops.attention(rows, spec, batch, kv)
            if gates is not None:
                mixed = ops.multiply(mixed, ops.arrange(projected, gates), "sigmoid")
            return ops.linear(mixed, output, output_bias, residual, scale=scale)

        return forward

    def _spec(self, place: Place) -> AttentionSpec:
        stores, norm = self.kv_layer is None, self.qk_norm if self._norms_in_place() else None
        assert norm is None or isinstance(norm, RmsNorm)
        return AttentionSpec(
            layer=place.layer if self.kv_layer is None else self.kv_layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale or 1 / math.sqrt(self.head_dim),
            rope=None if self.rotary is None else place.rope(self.rotary),
            window=self.window,
            softcap=self.softcap,
            q_norm=None if norm is None else place.vector((norm.tensor("attn_q_norm"), self.head_dim)),
            k_norm=None if norm is None or not stores else place.vector((norm.tensor("attn_k_norm"), self.head_dim)),
            norm_eps=1e-6 if norm is None else norm.eps,
            value_dim=self._value_dim,
            stores=stores,
            sinks=place.vector(("attn_sinks.weight", self.num_heads)) if self.sinks else None,
            growth=self.growth,
            period=self.period,
        )

    def _norms_in_place(self) -> bool:
        """Whether attention itself applies the norms, which it can for one kind only. Other norms are applied to rows
        before."""
        return isinstance(self.qk_norm, RmsNorm) and self.norm_over == "head"

    # Rows of q, k and v in the layout that attention reads, from projected rows
    # -----------------------------------------
    def _arrangement(self, place: Place) -> tuple[list[Part] | None, Vector | None, float]:
        """The parts of a row, the weights of the normed parts, and the norms' eps. None for the parts: rows need no
        change."""
        norms = [norm for norm in (None if self._norms_in_place() else self.qk_norm, self.v_norm) if norm is not None]
        if not norms and not self.gate and not self.keys_are_values:
            return None, None, 0.0
        if len({norm.eps for norm in norms}) > 1:
            raise ValueError("norms of q, k and v that differ in eps")
        parts, weights = self._part_of_queries()
        if self.kv_layer is None:
            keys = self.num_heads * self.head_dim * (2 if self.gate else 1)
            values = keys if self.keys_are_values else keys + self.num_kv_heads * self.head_dim
            for found, names in (self._part_of_keys(keys), self._part_of_values(values)):
                parts, weights = parts + found, weights + names
        return parts, place.vector(*weights) if weights else None, norms[0].eps if norms else 0.0

    def _part_of_queries(self) -> tuple[list[Part], list[tuple[str | None, int]]]:
        stride = self.head_dim * (2 if self.gate else 1)
        starts = [head * stride for head in range(self.num_heads)]
        return self._normed("attn_q_norm", starts, self.qk_norm)

    def _part_of_keys(self, start: int) -> tuple[list[Part], list[tuple[str | None, int]]]:
        starts = [start + head * self.head_dim for head in range(self.num_kv_heads)]
        return self._normed("attn_k_norm", starts, self.qk_norm)

    def _normed(
        self, name: str, starts: list[int], norm: Norm | None
    ) -> tuple[list[Part], list[tuple[str | None, int]]]:
        dim = self.head_dim
        if norm is None or self._norms_in_place():
            return [Part(start, dim) for start in starts], []
        tensor = norm.tensor(name)
        if self.norm_over == "row":
            if starts[-1] - starts[0] != (len(starts) - 1) * dim:
                raise ValueError("a norm over rows whose heads have gates between them")
            return [Part(starts[0], len(starts) * dim, norm.kind)], [(tensor, len(starts) * dim)]
        weights = [(tensor, dim)] * len(starts) if self.norm_over == "head" else [(tensor, len(starts) * dim)]
        return [Part(start, dim, norm.kind) for start in starts], weights

    def _part_of_values(self, start: int) -> tuple[list[Part], list[tuple[str | None, int]]]:
        dim, norm = self._value_dim, self.v_norm
        if norm is None:
            return [Part(start, self.num_kv_heads * dim)], []
        starts = [start + head * dim for head in range(self.num_kv_heads)]
        return [Part(each, dim, norm.kind) for each in starts], [(norm.tensor("attn_v_norm"), dim)] * len(starts)

    def _gates(self) -> list[Part]:
        return [Part((2 * head + 1) * self.head_dim, self.head_dim) for head in range(self.num_heads)]

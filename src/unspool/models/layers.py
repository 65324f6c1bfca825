"""The building blocks of models, as data. A family lists its layers; `Decoder` reads their tensors and runs them.

A block is a frozen dataclass of numbers. `bind` reads its tensors and returns the function that computes it. Tensors
have GGUF's names, whatever file they came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from unspool.config import Activation
from unspool.models.rotary import Rotary
from unspool.models.tensors import TensorReader
from unspool.ops import AttentionSpec, Batch, KVCache, Matrix, Ops, Rope, Rows, Vector
from unspool.ops.storage import KeyValues, Storage, Widths

# Residual streams: what a block computes is added to `residual`, where one is given.
NormFunction = Callable[[Rows, Rows | None], Rows]
MixerFunction = Callable[[Rows, Rows | None, Batch, KVCache], Rows]
FeedForwardFunction = Callable[[Rows, Rows | None], Rows]


@dataclass(frozen=True)
class Place:
    """Where a block is bound: a layer of a model, and the tensors of that layer."""

    reader: TensorReader
    layer: int
    hidden: int  # the width of the residual stream
    ropes: dict[Rotary, Rope] = field(default_factory=dict)  # equal rotations are one table for all layers

    @property
    def ops(self) -> Ops:
        return self.reader.ops

    def matrix(self, *parts: tuple[str, int, int]) -> Matrix:
        """One matrix of this layer's weights: (name, out_features, in_features), as in ("ffn_up", 96, 64)."""
        prefix = f"blk.{self.layer}."
        return self.reader.matrix(*((f"{prefix}{name}.weight", rows, columns) for name, rows, columns in parts))

    def vector(self, *parts: tuple[str, int]) -> Vector:
        """One vector of this layer: (name with its suffix, size), as in ("attn_q.bias", 64)."""
        return self.reader.vector(*((f"blk.{self.layer}.{name}", size) for name, size in parts))

    def rope(self, rotary: Rotary) -> Rope:
        if rotary not in self.ropes:
            name = rotary.factors
            factors = None if name is None else self.reader.optional_floats(name, rotary.dim // 2)
            self.ropes[rotary] = rotary.rope(factors)
        return self.ropes[rotary]


class Mixer(Protocol):
    """The part of a layer that looks at other positions."""

    @property
    def width(self) -> int:
        """The most values that it computes for a row at once, for memory plans."""

    def storage(self) -> Storage:
        """What it keeps of the tokens it has seen."""

    def bind(self, place: Place) -> MixerFunction: ...


class FeedForward(Protocol):
    """The part of a layer that looks at one position alone."""

    @property
    def width(self) -> int:
        """The most values that it computes for a row at once, for memory plans."""

    def bind(self, place: Place) -> FeedForwardFunction: ...


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) · weight"""

    eps: float

    def bind(self, reader: TensorReader, name: str, width: int) -> NormFunction:
        ops, weight, eps = reader.ops, reader.vector((f"{name}.weight", width)), self.eps
        return lambda x, residual: ops.norm(x, weight, eps, residual)


Norm = RmsNorm


@dataclass(frozen=True)
class Attention:
    """W_o · attend(rotate(W_qkv · x)), with what families vary."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    window: int | None = None  # keys that a query sees, itself included; None: all
    softcap: float | None = None
    qkv_bias: bool = False
    qk_norm: RmsNorm | None = None  # of each head of q and k, before they are rotated
    value_dim: int | None = None  # channels of a value; None: head_dim
    kv_layer: int | None = None  # the layer whose keys and values are read; None: this one has its own

    @property
    def width(self) -> int:
        return sum(width for _, width in self._projections())

    def storage(self) -> Storage:
        if self.kv_layer is not None:
            return Storage()
        return Storage(KeyValues(self.num_kv_heads, self.head_dim, self.value_dim or self.head_dim, self.window))

    def _projections(self) -> list[tuple[str, int]]:
        value_dim = self.value_dim or self.head_dim
        kept = [("attn_k", self.num_kv_heads * self.head_dim), ("attn_v", self.num_kv_heads * value_dim)]
        return [("attn_q", self.num_heads * self.head_dim), *(kept if self.kv_layer is None else [])]

    def bind(self, place: Place) -> MixerFunction:
        ops, hidden = place.ops, place.hidden
        parts = self._projections()
        qkv = place.matrix(*((name, width, hidden) for name, width in parts))
        bias = place.vector(*((f"{name}.bias", width) for name, width in parts)) if self.qkv_bias else None
        output = place.matrix(("attn_output", hidden, self.num_heads * (self.value_dim or self.head_dim)))
        spec = self._spec(place)

        def forward(x: Rows, residual: Rows | None, batch: Batch, kv: KVCache) -> Rows:
            mixed = ops.attention(ops.linear(x, qkv, bias), spec, batch, kv)
            return ops.linear(mixed, output, residual=residual)

        return forward

    def _spec(self, place: Place) -> AttentionSpec:
        norm, stores = self.qk_norm, self.kv_layer is None
        return AttentionSpec(
            layer=place.layer if self.kv_layer is None else self.kv_layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale or 1 / math.sqrt(self.head_dim),
            rope=place.rope(self.rotary),
            window=self.window,
            softcap=self.softcap,
            q_norm=None if norm is None else place.vector(("attn_q_norm.weight", self.head_dim)),
            k_norm=None if norm is None or not stores else place.vector(("attn_k_norm.weight", self.head_dim)),
            norm_eps=1e-6 if norm is None else norm.eps,
            value_dim=self.value_dim or self.head_dim,
            stores=stores,
        )


@dataclass(frozen=True)
class Glu:
    """A gated feed-forward: W_down · (activation(W_gate · x) · (W_up · x))"""

    width: int
    activation: Activation = "silu"

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, hidden, activation = place.ops, place.hidden, self.activation
        gate_up = place.matrix(("ffn_gate", self.width, hidden), ("ffn_up", self.width, hidden))
        down = place.matrix(("ffn_down", hidden, self.width))
        return lambda x, residual: ops.linear(ops.gated(x, gate_up, activation), down, residual=residual)


@dataclass(frozen=True)
class Layer:
    """A mixer, then a feed-forward; which norms there are says where they stand.

        before         x + mixer(norm(x))
        after          x + post_norm(mixer(x))
        both           x + post_norm(mixer(norm(x)))
        parallel       x + mixer(norm(x)) + ffn(ffn_norm(x)), where no ffn_norm means the mixer's
    """

    mixer: Mixer
    ffn: FeedForward | None
    norm: Norm | None = None
    post_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    parallel: bool = False

    def bind(self, place: Place) -> Callable[[Rows, Batch, KVCache], Rows]:
        def bound(norm: Norm | None, name: str) -> NormFunction | None:
            return None if norm is None else norm.bind(place.reader, f"blk.{place.layer}.{name}", place.hidden)

        norm, mixer = bound(self.norm, "attn_norm"), self.mixer.bind(place)
        post_norm = bound(self.post_norm, "post_attention_norm")
        ffn_norm = bound(self.ffn_norm, "ffn_norm")
        ffn = None if self.ffn is None else self.ffn.bind(place)
        ffn_post_norm = bound(self.ffn_post_norm, "post_ffw_norm")
        parallel = self.parallel

        def forward(x: Rows, batch: Batch, kv: KVCache) -> Rows:
            normed = x if norm is None else norm(x, None)
            mixed = mixer(normed, x, batch, kv) if post_norm is None else post_norm(mixer(normed, None, batch, kv), x)
            if ffn is None:
                return mixed
            if not parallel:
                normed = mixed if ffn_norm is None else ffn_norm(mixed, None)
            elif ffn_norm is not None:
                normed = ffn_norm(x, None)
            return ffn(normed, mixed) if ffn_post_norm is None else ffn_post_norm(ffn(normed, None), mixed)

        return forward


@dataclass(frozen=True)
class Architecture:
    """A whole model: embedding, layers, norm, head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied_embeddings: bool  # the head is the embedding
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def storage(self) -> tuple[Storage, ...]:
        """What each layer keeps."""
        return tuple(layer.mixer.storage() for layer in self.layers)

    @property
    def widths(self) -> Widths:
        mixer = max(layer.mixer.width for layer in self.layers)
        feed_forward = max((layer.ffn.width for layer in self.layers if layer.ffn is not None), default=0)
        return Widths(self.hidden_size, mixer, feed_forward, self.vocab_size)

"""The building blocks of models, as data. A family lists its layers; `Decoder` reads their tensors and runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Protocol

from unspool.config import Activation
from unspool.models.attention import Attention
from unspool.models.blocks import (
    FeedForward,
    FeedForwardFunction,
    LayerNorm,
    Mixer,
    MixerFunction,
    Norm,
    NormFunction,
    Place,
    RmsNorm,
)
from unspool.models.tensors import TensorReader
from unspool.ops import Batch, KVCache, Part, Rows
from unspool.ops.storage import Storage, Widths
from unspool.records import record

# The stream, the batch, the cache, and the model's TokenInputs, if it has them.
LayerFunction = Callable[[Rows, Batch, KVCache, tuple[Rows, Rows] | None], Rows]
TokenInputsFunction = Callable[[Rows, Batch], tuple[Rows, Rows]]
TokenInputFunction = Callable[[Rows, tuple[Rows, Rows], Rows | None], Rows]

__all__ = [
    "Architecture",
    "Attention",
    "FeedForward",
    "FeedForwardFunction",
    "Glu",
    "Layer",
    "LayerNorm",
    "Mixer",
    "MixerFunction",
    "Mlp",
    "Norm",
    "Place",
    "RmsNorm",
    "Streams",
    "TokenInput",
    "TokenInputs",
]


@record(frozen=True)
class Glu:
    """A gated feed-forward: W_down · (activation(W_gate · x) · (W_up · x))"""

    width: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False  # one tensor, ffn_up, holds the gate followed by the up projection
    suffix: str = ""  # of the tensors' names: "_shexp" for a shared expert
    routing: ClassVar[None] = None

    def row_width(self, hidden: int) -> int:
        return self.width

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, hidden, width, scale = place.ops, place.hidden, self.width, place.residual_scale
        gate, up, down_name = (f"ffn_{name}{self.suffix}" for name in ("gate", "up", "down"))
        parts = [(up, 2 * width)] if self.fused else [(gate, width), (up, width)]
        gate_up = place.matrix(*((name, rows, hidden) for name, rows in parts))
        bias = place.vector(*((f"{name}.bias", rows) for name, rows in parts)) if self.bias else None
        down = place.matrix((down_name, hidden, width))
        down_bias = place.vector((f"{down_name}.bias", hidden)) if self.bias else None

        def forward(x: Rows, residual: Rows | None) -> Rows:
            inner = ops.gated(x, gate_up, self.activation, bias)
            return ops.linear(inner, down, down_bias, residual, scale=scale)

        return forward


@record(frozen=True)
class Mlp:
    """A feed-forward without a gate: W_down · activation(W_up · x)"""

    width: int
    activation: Activation = "gelu"
    bias: bool = False
    suffix: str = ""  # as Glu's
    routing: ClassVar[None] = None

    def row_width(self, hidden: int) -> int:
        return self.width

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, hidden, width, scale = place.ops, place.hidden, self.width, place.residual_scale
        up_name, down_name = (f"ffn_{name}{self.suffix}" for name in ("up", "down"))
        up, down = place.matrix((up_name, width, hidden)), place.matrix((down_name, hidden, width))
        bias = place.vector((f"{up_name}.bias", width)) if self.bias else None
        down_bias = place.vector((f"{down_name}.bias", hidden)) if self.bias else None

        def forward(x: Rows, residual: Rows | None) -> Rows:
            inner = ops.linear(x, up, bias, activation=self.activation)
            return ops.linear(inner, down, down_bias, residual, scale=scale)

        return forward


@record(frozen=True)
class TokenInputs:
    """Per-layer inputs of each token, in addition to the stream: `width` values from a separate table, and as many
    projected from the embedding. `TokenInput` is the part of a layer that reads them."""

    width: int
    num_tokens: int | None = None  # rows of the table; further tokens share its first row. None: one row per token

    def bind(self, reader: TensorReader, vocabulary: int, hidden: int, num_layers: int) -> TokenInputsFunction:
        ops, values, embedding_scale = reader.ops, num_layers * self.width, math.sqrt(self.width)
        table = reader.matrix(("per_layer_token_embd.weight", self.num_tokens or vocabulary, values))
        projection = reader.matrix(("per_layer_model_proj.weight", values, hidden))
        scale = 1 / math.sqrt(hidden)

        def inputs(x: Rows, batch: Batch) -> tuple[Rows, Rows]:
            return ops.embed(batch, table, embedding_scale), ops.linear(x, projection, scale=scale)

        return inputs


@record(frozen=True)
class TokenInput:
    """The last part of a layer: x + norm(W_proj · (activation(W_gate · x) · (embedded + norm(projected)) / √2))"""

    width: int
    activation: Activation
    norm: Norm

    def bind(self, place: Place) -> TokenInputFunction:
        """The returned function takes the rows for the gate, the model's inputs, and optionally a residual."""
        ops, width, activation = place.ops, self.width, self.activation
        gate, projection = place.matrix(("inp_gate", width, place.hidden)), place.matrix(("proj", place.hidden, width))
        norm = self.norm.bind(place.reader, f"blk.{place.layer}.post_norm", place.hidden)
        input_norm = self.norm.bind(place.reader, "per_layer_proj_norm", width)
        own = [Part(place.layer * width, width)]

        def forward(x: Rows, inputs: tuple[Rows, Rows], residual: Rows | None) -> Rows:
            embedded, projected = (ops.arrange(each, own) for each in inputs)
            both = ops.multiply(input_norm(projected, embedded), ops.linear(x, gate), activation)
            return norm(ops.linear(both, projection, scale=math.sqrt(0.5)), residual)

        return forward


class Streams(Protocol):
    """A residual stream of several parts, each as wide as the embedding, concatenated in a row."""

    @property
    def count(self) -> int: ...

    def bind(self, reader: TensorReader, hidden: int) -> tuple[Callable[[Rows], Rows], Callable[[Rows], Rows]]:
        """Two functions: from an embedding to a row of parts, and from the parts back to one row."""


@record(frozen=True)
class Layer:
    """A mixer, then a feed-forward, or only one of them. Which norms exist determines their place:

        before         x + mixer(norm(x))
        after          x + post_norm(mixer(x))
        both           x + post_norm(mixer(norm(x)))
        parallel       x + mixer(norm(x)) + ffn(ffn_norm(x)); without ffn_norm, the mixer's norm is used
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    norm: Norm | None = None
    post_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0  # of what mixer and feed-forward add to the stream
    ffn_norm_name: str = "ffn_norm"  # of the tensor
    token_input: TokenInput | None = None  # after the feed-forward
    scaled: bool = False  # the layer's result is multiplied by a number of the file, if it has one

    def bind(self, place: Place) -> LayerFunction:
        def bound(norm: Norm | None, name: str) -> NormFunction | None:
            return None if norm is None else norm.bind(place.reader, f"blk.{place.layer}.{name}", place.hidden)

        if self.residual_scale != 1 and (self.post_norm is not None or self.ffn_post_norm is not None):
            raise ValueError("a norm after a block undoes the scale of its residual")
        place = replace(place, residual_scale=self.residual_scale)
        norm = bound(self.norm, "attn_norm")
        mixer = None if self.mixer is None else self.mixer.bind(place)
        post_norm = bound(self.post_norm, "post_attention_norm")
        ffn_norm = bound(self.ffn_norm, self.ffn_norm_name)
        ffn = None if self.ffn is None else self.ffn.bind(place)
        ffn_post_norm = bound(self.ffn_post_norm, "post_ffw_norm")
        parallel, finish = self.parallel, self._bind_end(place)

        def blocks(x: Rows, batch: Batch, kv: KVCache) -> Rows:
            normed = x if norm is None else norm(x, None)
            if mixer is None:
                mixed = x
            elif post_norm is None:
                mixed = mixer(normed, x, batch, kv)
            else:
                mixed = post_norm(mixer(normed, None, batch, kv), x)
            if ffn is None:
                return mixed
            if not parallel:
                normed = mixed if ffn_norm is None else ffn_norm(mixed, None)
            elif ffn_norm is not None:
                normed = ffn_norm(x, None)
            return ffn(normed, mixed) if ffn_post_norm is None else ffn_post_norm(ffn(normed, None), mixed)

        return lambda x, batch, kv, inputs: finish(blocks(x, batch, kv), inputs)

    def _bind_end(self, place: Place) -> Callable[[Rows, tuple[Rows, Rows] | None], Rows]:
        """The part of a layer after the feed-forward."""
        ops, whole = place.ops, [Part(0, place.hidden, "scaled")]
        take = None if self.token_input is None else self.token_input.bind(place)
        name = f"blk.{place.layer}.layer_output_scale.weight"
        scale = place.reader.repeated(name, place.hidden) if self.scaled else None

        def finish(x: Rows, inputs: tuple[Rows, Rows] | None) -> Rows:
            if take is not None and inputs is not None:
                x = take(x, inputs, x)
            return x if scale is None else ops.arrange(x, whole, scale)

        return finish


@record(frozen=True)
class Architecture:
    """A whole model: embedding, layers, norm, head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied_embeddings: bool  # the head is the embedding
    num_positions: int | None = None  # rows of a learned table of positions; None: there is none
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    token_inputs: TokenInputs | None = None
    streams: Streams | None = None
    norm_name: str = "output_norm"  # of the last norm's tensor

    @property
    def storage(self) -> tuple[Storage, ...]:
        """What each layer keeps of past tokens."""
        return tuple(Storage() if layer.mixer is None else layer.mixer.storage() for layer in self.layers)

    @property
    def widths(self) -> Widths:
        mixer = max((layer.mixer.width for layer in self.layers if layer.mixer is not None), default=0)
        feed_forward = max(
            (layer.ffn.row_width(self.hidden_size) for layer in self.layers if layer.ffn is not None), default=0
        )
        parts = 1 if self.streams is None else self.streams.count
        return Widths(parts * self.hidden_size, mixer, feed_forward, self.vocab_size)

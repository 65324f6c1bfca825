"""Alternating updates: a stream of several parts, of which each layer computes one and predicts the others.

A layer first predicts all parts from their current values. It then computes the active part like other layers, with an
additional learned residual of low rank. Then it corrects all predictions by the change of the active part. The mixing
coefficients of the parts are a function of the active part, per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from unspool.config import Activation
from unspool.models.blocks import FeedForwardFunction, Norm, Place, RmsNorm
from unspool.models.layers import Layer, LayerFunction
from unspool.models.tensors import TensorReader
from unspool.ops import Batch, KVCache, Part, Rows
from unspool.records import record

LEAST = 1e-5  # lower bound of a part's mean square when it is scaled to the size of another


@record(frozen=True)
class AltUp:
    """The number of parts of a stream, the active part, and a norm before the coefficients that mix parts."""

    count: int
    active: int
    norm: RmsNorm

    def bind(self, reader: TensorReader, hidden: int) -> tuple[Callable[[Rows], Rows], Callable[[Rows], Rows]]:
        ops, others, first = reader.ops, self.count - 1, [Part(0, hidden)]
        widen = reader.stacked("altup_proj.weight", others, hidden, hidden)
        narrow = reader.matrices("altup_unembd_proj.weight", others, hidden, hidden)

        def split(x: Rows) -> Rows:
            return ops.level(ops.linear(x, widen), x, LEAST)

        def merge(x: Rows) -> Rows:
            """The mean of the parts, each scaled to the root mean square of the first."""
            like = total = ops.arrange(x, first)
            for index, matrix in enumerate(narrow, 1):
                part = ops.linear(ops.arrange(x, [Part(index * hidden, hidden)]), matrix)
                leveled = ops.arrange(ops.level(part, like, LEAST), [Part(hidden, hidden)])
                scale = 1 / self.count if index == others else 1.0
                total = ops.add(total, leveled, scale, scale)
            return total

        return split, merge

    def bind_router(self, place: Place) -> Callable[[Rows], Rows]:
        """The logits of the coefficients that mix the parts, from a row of the active part."""
        ops, hidden = place.ops, place.hidden
        norm = self.norm.bind(place.reader, f"blk.{place.layer}.altup_router_norm", hidden)
        router = place.matrix(("altup_router", self.count, hidden))
        return lambda x: ops.linear(norm(x, None), router, scale=1 / hidden)


@record(frozen=True)
class Laurel:
    """A learned residual of low rank: x + norm(W_right · W_left · x)"""

    rank: int
    norm: Norm

    def bind(self, place: Place) -> Callable[[Rows], Rows]:
        ops, hidden = place.ops, place.hidden
        left, right = place.matrix(("laurel_l", self.rank, hidden)), place.matrix(("laurel_r", hidden, self.rank))
        norm = self.norm.bind(place.reader, f"blk.{place.layer}.laurel_post_norm", hidden)
        return lambda x: norm(ops.linear(ops.linear(x, left), right), x)


@record(frozen=True)
class CutGlu:
    """A gated feed-forward with a threshold: only gates `deviations` standard deviations above the mean remain."""

    width: int
    activation: Activation
    deviations: float
    routing: ClassVar[None] = None

    def row_width(self, hidden: int) -> int:
        return 2 * self.width

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, hidden, width = place.ops, place.hidden, self.width
        gate, up = (place.matrix((name, width, hidden)) for name in ("ffn_gate", "ffn_up"))
        down = place.matrix(("ffn_down", hidden, width))

        def forward(x: Rows, residual: Rows | None) -> Rows:
            gates = ops.cut(ops.linear(x, gate), self.deviations)
            return ops.linear(ops.multiply(ops.linear(x, up), gates, self.activation), down, None, residual)

        return forward


@record(frozen=True)
class AltUpLayer(Layer):
    """A layer of a stream of parts. It needs all norms of Layer, and its token_input."""

    streams: AltUp | None = None
    laurel: Laurel | None = None

    def bind(self, place: Place) -> LayerFunction:
        ops, hidden, streams = place.ops, place.hidden, self.streams
        if streams is None or self.laurel is None or self.token_input is None:
            raise ValueError("a layer of a stream of parts needs the streams, a laurel and a token_input")
        if self.mixer is None or self.ffn is None:
            raise ValueError("a layer of a stream of parts needs a mixer and a feed-forward")
        norms = zip(
            (self.norm, self.post_norm, self.ffn_norm, self.ffn_post_norm),
            ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
            strict=True,
        )
        norm, post_norm, ffn_norm, ffn_post_norm = (
            each.bind(place.reader, f"blk.{place.layer}.{name}", hidden) for each, name in norms if each is not None
        )
        mixer, ffn, laurel = self.mixer.bind(place), self.ffn.bind(place), self.laurel.bind(place)
        take, router, count = self.token_input.bind(place), streams.bind_router(place), streams.count
        predictions = place.table("altup_predict_coef.weight", count * count, count)
        corrections = place.table("altup_correct_coef.weight", count, count)
        input_scale = place.vector(("altup_correct_scale.weight", hidden))
        start, half = streams.active * hidden, math.sqrt(0.5)

        def forward(x: Rows, batch: Batch, kv: KVCache, inputs: tuple[Rows, Rows] | None) -> Rows:
            assert inputs is not None
            predicted = ops.mix(x, router(ops.arrange(x, [Part(start, hidden)])), predictions, 0.0, x)
            active = ops.arrange(predicted, [Part(start, hidden)])
            normed = norm(active, None)
            mixed = ops.add(post_norm(mixer(normed, None, batch, kv), active), laurel(normed), half, half)
            made = ffn_post_norm(ffn(ffn_norm(mixed, None), None), mixed)
            change = ops.add(made, active, 1.0, -1.0)
            corrected = ops.mix(change, router(made), corrections, 1.0, predicted)
            scaled = ops.arrange(corrected, [Part(start, hidden, "scaled")], input_scale)
            return ops.add(corrected, take(scaled, inputs, None), start=hidden)

        return forward

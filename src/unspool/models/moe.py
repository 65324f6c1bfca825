"""Mixtures of experts as data: a router, experts of which a row uses few, and experts that every row uses."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import Activation
from unspool.models.layers import FeedForwardFunction, Glu, Mlp, Place
from unspool.ops import ExpertWeights, Rows
from unspool.ops.routing import Routing
from unspool.records import record


@record(frozen=True)
class Moe:
    """Σ weight_e · expert_e(x) over the experts that `routing` chooses for a row, + shared(x) if there is a shared
    expert.

    An expert is a feed-forward of `width`, with or without a gate. With a `latent` width, experts read W_down · x, and
    W_up projects the sum of their results; the router and the shared expert read x.
    """

    routing: Routing
    width: int
    activation: Activation = "silu"
    router_bias: bool = False
    choice_bias: bool = False  # see Routing
    expert_bias: bool = False
    shared_width: int = 0  # width of the expert that every row uses; 0: there is none
    shared_gate: bool = False  # the shared expert's result is multiplied by sigmoid(gate · x)
    fused: bool = False  # one tensor, ffn_gate_up_exps, holds each expert's gate followed by its up projection
    gated: bool = True  # experts and the shared expert have gates
    latent: int = 0  # see above; 0: experts read x

    def row_width(self, hidden: int) -> int:
        """The number of values that the experts of a row read and write."""
        return max(self.routing.num_used * (self.width + (self.latent or hidden)), self.shared_width)

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, count = place.ops, self.routing.num_experts
        router = place.matrix(("ffn_gate_inp", count, place.hidden))
        router_bias = place.vector(("ffn_gate_inp.bias", count)) if self.router_bias else None
        routing = replace(self.routing, scale=self.routing.scale * place.residual_scale)
        if self.choice_bias:
            routing = replace(routing, choice_bias=place.vector(("exp_probs_b.bias", count)))
        shared, latent = self._bind_shared(place), self.latent
        experts = self.bind_experts(replace(place, hidden=latent) if latent else place)
        narrow = place.matrix(("ffn_latent_down", latent, place.hidden)) if latent else None
        widen = place.matrix(("ffn_latent_up", place.hidden, latent)) if latent else None

        def forward(x: Rows, residual: Rows | None) -> Rows:
            if shared is not None:
                residual = shared(x, residual)
            scores = ops.linear(x, router, router_bias)
            if narrow is None or widen is None:
                return ops.moe(x, scores, routing, experts, residual)
            return ops.linear(ops.moe(ops.linear(x, narrow), scores, routing, experts, None), widen, None, residual)

        return forward

    def bind_experts(self, place: Place) -> ExpertWeights:
        count, width, hidden = self.routing.num_experts, self.width, place.hidden
        gate_up_bias = down_bias = None
        parts = [("ffn_gate_exps", width), ("ffn_up_exps", width)] if self.gated else [("ffn_up_exps", width)]
        if self.fused or place.has("ffn_gate_up_exps.weight"):  # converters can fuse those of any family
            parts = [("ffn_gate_up_exps", 2 * width)]
        if self.expert_bias:
            gate_up_bias = place.expert_vectors(count, ("ffn_gate_exps.bias", width), ("ffn_up_exps.bias", width))
            down_bias = place.expert_vectors(count, ("ffn_down_exps.bias", hidden))
        return ExpertWeights(
            gate_up=place.experts(count, *((name, rows, hidden) for name, rows in parts)),
            down=place.experts(count, ("ffn_down_exps", hidden, width)),
            activation=self.activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            gated=self.gated,
        )

    def _bind_shared(self, place: Place) -> FeedForwardFunction | None:
        if not self.shared_width:
            return None
        kind = Glu if self.gated else Mlp
        ops, shared = place.ops, kind(self.shared_width, self.activation, suffix="_shexp").bind(place)
        if not self.shared_gate:
            return shared
        gate = place.reader.row(f"blk.{place.layer}.ffn_gate_inp_shexp.weight", place.hidden)
        return lambda x, residual: ops.scale_rows(shared(x, None), ops.linear(x, gate), residual)

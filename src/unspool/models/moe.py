"""Mixtures of experts as data: a router, experts of which a row uses few, and experts that every row uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unspool.config import Activation
from unspool.models.layers import FeedForwardFunction, Glu, Place
from unspool.ops import ExpertWeights, Rows
from unspool.ops.routing import Routing


@dataclass(frozen=True)
class Moe:
    """Σ weight_e · expert_e(x) over the experts that `routing` gives a row, + shared(x) where there is a shared one.

    An expert is a gated feed-forward of `width`.
    """

    routing: Routing
    width: int
    activation: Activation = "silu"
    router_bias: bool = False
    choice_bias: bool = False  # see Routing
    expert_bias: bool = False
    shared_width: int = 0  # of the expert that every row uses; 0: there is none
    shared_gate: bool = False  # the shared expert counts sigmoid(gate · x)
    fused: bool = False  # one tensor, ffn_gate_up_exps, has each expert's gate and then its up projection

    def row_width(self, hidden: int) -> int:
        """What the experts of a row read and write."""
        return max(self.routing.num_used * (self.width + hidden), self.shared_width)

    def bind(self, place: Place) -> FeedForwardFunction:
        ops, count = place.ops, self.routing.num_experts
        router = place.matrix(("ffn_gate_inp", count, place.hidden))
        router_bias = place.vector(("ffn_gate_inp.bias", count)) if self.router_bias else None
        routing = replace(self.routing, scale=self.routing.scale * place.residual_scale)
        if self.choice_bias:
            routing = replace(routing, choice_bias=place.vector(("exp_probs_b.bias", count)))
        experts, shared = self.bind_experts(place), self._bind_shared(place)

        def forward(x: Rows, residual: Rows | None) -> Rows:
            if shared is not None:
                residual = shared(x, residual)
            return ops.moe(x, ops.linear(x, router, router_bias), routing, experts, residual)

        return forward

    def bind_experts(self, place: Place) -> ExpertWeights:
        count, width, hidden = self.routing.num_experts, self.width, place.hidden
        gate_up_bias = down_bias = None
        parts = [("ffn_gate_exps", width), ("ffn_up_exps", width)]
        if self.fused:
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
        )

    def _bind_shared(self, place: Place) -> FeedForwardFunction | None:
        if not self.shared_width:
            return None
        ops, shared = place.ops, Glu(self.shared_width, self.activation, suffix="_shexp").bind(place)
        if not self.shared_gate:
            return shared
        gate = place.reader.row(f"blk.{place.layer}.ffn_gate_inp_shexp.weight", place.hidden)
        return lambda x, residual: ops.scale_rows(shared(x, None), ops.linear(x, gate), residual)

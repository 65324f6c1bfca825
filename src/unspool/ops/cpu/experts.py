"""Mixtures of experts on the CPU: a `Moe` node becomes a chain of native instructions (native/experts.cpp).

Between routing and gathering, each row of the step has one place per expert that it uses. So these nodes have rows of
`num_used` times the number of values that an expert reads or writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import unspool._native as _native
from unspool.errors import EngineError
from unspool.ops import Vector
from unspool.ops.cpu.lower import Form, Lowering, NativeNode, RowKind
from unspool.ops.cpu.matrix import CpuMatrix
from unspool.ops.graph import Moe, Node
from unspool.ops.routing import Routing
from unspool.records import record

if TYPE_CHECKING:
    from unspool.config import Activation
    from unspool.weights.weight import Weight


class CpuExperts:
    """One packed matrix for each expert, all of one shape and format."""

    def __init__(self, parts: Sequence[Sequence[Weight]]) -> None:
        self.matrices = [CpuMatrix(each) for each in parts]
        first = self.matrices[0]
        self.name, self.in_features, self.out_features = first.name, first.in_features, first.out_features
        kinds = {tuple((part.format, part.shape) for part in each) for each in parts}
        if len(kinds) != 1:
            raise EngineError(f"{self.name}: experts of one layer differ in shape or format")

    @property
    def count(self) -> int:
        return len(self.matrices)

    @property
    def wants_q8(self) -> bool:
        return bool(self.matrices[0].native.wants_q8)

    @property
    def wants_f32(self) -> bool:
        return bool(self.matrices[0].native.wants_f32)

    @property
    def rows(self) -> RowKind:
        """How rows are rounded for these experts."""
        return "whole" if self.matrices[0].native.whole else "coarse"


class ExpertNode(NativeNode):
    """A node of the chain of a mixture of experts."""

    def reads(self) -> list[tuple[Node, Form]]:
        """The nodes that this one reads, and the form of each."""
        return [(source, "f32") for source in self.inputs.values() if not isinstance(source, Route)]


@record(frozen=True, eq=False, repr=False)
class Route(ExpertNode):
    """Assigns places to each row. Its own rows are not kept: the native program keeps the routing."""

    scores: Node
    routing: Routing

    @property
    def width(self) -> int:
        return 0

    def emit(self, low: Lowering, program: Any) -> None:
        routing = self.routing
        low.routes[self] = program.route(
            scores=low.operand(self.scores, "f32"),
            experts=routing.num_experts,
            used=routing.num_used,
            scoring=routing.scoring,
            normalized=routing.normalized,
            scale=routing.scale,
            groups=routing.num_groups,
            used_groups=routing.num_used_groups,
            group_top=routing.group_top,
            choice_bias=routing.choice_bias,
            expert_scale=routing.expert_scale,
        )


@record(frozen=True, eq=False, repr=False)
class Spread(ExpertNode):
    """The rows that experts read, copied to places in 8 bits."""

    route: Route
    x: Node
    from_places: bool
    expert_width: int
    rows: RowKind

    @property
    def width(self) -> int:
        return self.route.routing.num_used * self.expert_width

    @property
    def rounded_bytes_per_row(self) -> int:
        return int(self.route.routing.num_used * _native.block_row_bytes(self.rows, self.expert_width))

    def emit(self, low: Lowering, program: Any) -> None:
        program.spread(
            routed=low.routes[self.route],
            x=low.operand(self.x, "f32"),
            from_places=self.from_places,
            width=self.expert_width,
            q8=low.operand(self, "q8"),
            rows=self.rows,
        )


@record(frozen=True, eq=False, repr=False)
class ExpertProduct(ExpertNode):
    route: Route
    x: Node
    spread: Spread | None
    experts: CpuExperts
    bias: Vector | None

    @property
    def matrices(self) -> list[CpuMatrix]:
        return self.experts.matrices

    def reads(self) -> list[tuple[Node, Form]]:
        floats: list[tuple[Node, Form]] = [(self.x, "f32")] if self.experts.wants_f32 else []
        return floats + ([] if self.spread is None else [(self.spread, "q8")])

    def _factors(self, low: Lowering) -> dict[str, Any]:
        return {
            "routed": low.routes[self.route],
            "f32": low.operand(self.x, "f32") if self.experts.wants_f32 else None,
            "q8": low.operand(self.spread, "q8"),
            "rows": self.experts.rows,
            "experts": [matrix.native for matrix in self.experts.matrices],
            "bias": self.bias,
            "out": low.operand(self, "f32"),
        }


@record(frozen=True, eq=False, repr=False)
class ExpertGate(ExpertProduct):
    activation: Activation

    @property
    def width(self) -> int:
        return self.route.routing.num_used * self.experts.out_features // 2

    def emit(self, low: Lowering, program: Any) -> None:
        program.expert_gate(activation=self.activation, **self._factors(low))


@record(frozen=True, eq=False, repr=False)
class ExpertUp(ExpertProduct):
    activation: Activation

    @property
    def width(self) -> int:
        return self.route.routing.num_used * self.experts.out_features

    def emit(self, low: Lowering, program: Any) -> None:
        program.expert_up(activation=self.activation, **self._factors(low))


@record(frozen=True, eq=False, repr=False)
class ExpertProject(ExpertProduct):
    @property
    def width(self) -> int:
        return self.route.routing.num_used * self.experts.out_features

    def emit(self, low: Lowering, program: Any) -> None:
        program.expert_project(**self._factors(low))


@record(frozen=True, eq=False, repr=False)
class Gather(ExpertNode):
    route: Route
    x: Node
    residual: Node | None

    @property
    def width(self) -> int:
        return self.x.width // self.route.routing.num_used

    def emit(self, low: Lowering, program: Any) -> None:
        program.gather_experts(
            routed=low.routes[self.route],
            x=low.operand(self.x, "f32"),
            residual=low.operand(self.residual, "f32"),
            width=self.width,
            out=low.operand(self, "f32"),
        )


def expand(node: Moe) -> Node:
    """The chain that computes a `Moe` node; returns its last node, which has the rows of the `Moe` node."""
    weights, narrow = node.experts, node.narrow
    gate_up, down = weights.gate_up, weights.down
    route = Route(node.scores, node.routing, narrow=narrow)
    read = _spread(route, node.x, gate_up, from_places=False)
    kind = ExpertGate if weights.gated else ExpertUp
    inner = kind(route, node.x, read, gate_up, weights.gate_up_bias, weights.activation, narrow=narrow)
    read_inner = _spread(route, inner, down, from_places=True)
    out = ExpertProject(route, inner, read_inner, down, weights.down_bias, narrow=narrow)
    return Gather(route, out, node.residual, narrow=narrow)


def _spread(route: Route, x: Node, experts: CpuExperts, *, from_places: bool) -> Spread | None:
    """The rows that experts read in 8 bits; None if they only read float32."""
    if not experts.wants_q8:
        return None
    return Spread(route, x, from_places, experts.in_features, experts.rows, narrow=route.narrow)

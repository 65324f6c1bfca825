"""A mixture of experts becomes kernels: route, sort where rows are many, gate, down, gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unspool.ops.cuda.device_experts import DeviceExperts
from unspool.ops.cuda.exact import GROUP
from unspool.ops.cuda.experts import expert_kernel, gather_kernel
from unspool.ops.cuda.launch import Launch, next_power
from unspool.ops.cuda.layout import Value
from unspool.ops.cuda.plane_layout import tile_columns
from unspool.ops.cuda.routing import count_kernel, place_kernel, route_kernel
from unspool.ops.graph import Moe
from unspool.ops.routing import Routing, expected_experts

if TYPE_CHECKING:
    from unspool.ops.cuda.lower import Lowering

FEW_ROWS = 64  # up to this number, rows are multiplied in their order; more are sorted by expert
AT_ONCE = 1024  # uses that a program counts per iteration


@dataclass(frozen=True)
class Plan:
    """How the uses of a number of rows are divided among programs. This does not change a result's bits."""

    rows: int
    num_experts: int
    num_used: int

    @property
    def uses(self) -> int:
        return self.rows * self.num_used

    @property
    def is_few(self) -> bool:
        return self.rows <= FEW_ROWS

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        if self.is_few:
            return max(next_power(self.rows), 16)
        return 64 if self.uses <= 64 * self.num_experts else 128

    @property
    def tiles(self) -> int:
        """The largest possible number of tiles: each expert's last tile may be partly filled."""
        most = min(self.num_experts, self.uses)
        return most if self.is_few else self.uses // self.tokens + most


class ExpertLowering:
    def __init__(self, low: Lowering, node: Moe) -> None:
        self.low, self.node, self.routing = low, node, node.routing
        self.plan = Plan(low.rows, node.routing.num_experts, node.routing.num_used)
        self._taken: list[Tensor] = []

    def launch(self, x: Value, scores: Tensor, residual: Tensor | None, out: Tensor, stream: dict[str, Any]) -> None:
        """`stream`: the next linear layer's input, which the last kernel also writes."""
        plan, experts, rows = self.plan, self.node.experts, self.low.rows
        gate_up, down = experts.gate_up, experts.down
        assert isinstance(gate_up, DeviceExperts)
        assert isinstance(down, DeviceExperts)
        if experts.gated:
            gate_up.join_gates()
        chosen, weights = self._take(rows, plan.num_used, torch.int32), self._take(rows, plan.num_used, torch.float32)
        self._route(scores, chosen, weights)
        work = self._sort(chosen)
        inner = self._take(plan.uses, gate_up.out_features // (2 if experts.gated else 1), torch.bfloat16)
        self._product(gate_up, x, inner, chosen, work, experts.gate_up_bias, experts.activation)
        y = self._take(plan.uses, down.out_features, torch.float32)
        self._product(down, Value(inner), y, chosen, work, experts.down_bias, None)
        size = down.out_features
        args = {"y": y, "weights": weights, "chosen": chosen, "residual": residual, "out": out, "num_rows": rows}
        args |= stream | {"USED": plan.num_used, "size": size, "D": max(next_power(size), GROUP.value)}
        cost = 4 * size * (plan.uses + 2 * rows)
        self._add(gather_kernel, (rows,), args, warps=4, label="gather", bytes=cost)
        self.low.release(*self._taken)

    def _take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        self._taken.append(self.low.arena.take(rows, columns, dtype))
        return self._taken[-1]

    def _add(self, kernel: Any, grid: tuple[int, ...], args: dict[str, Any], **options: Any) -> None:
        self.low.add(Launch(kernel, grid, args, **options))

    def _route(self, scores: Tensor, chosen: Tensor, weights: Tensor) -> None:
        routing: Routing = self.routing
        args: dict[str, Any] = {"scores": scores, "chosen": chosen, "weights": weights, "slots": self.low.row_slots()}
        args |= {"choice_bias": routing.choice_bias, "expert_scale": routing.expert_scale}
        args |= {"scale": float(routing.scale), "EXPERTS": routing.num_experts, "USED": routing.num_used}
        args |= {"SIGMOID": routing.scoring == "sigmoid", "NORMALIZED": routing.normalized}
        args |= {"GROUPS": routing.num_groups, "USED_GROUPS": routing.num_used_groups}
        args |= {"GROUP_TOP": min(routing.group_top, routing.num_experts // routing.num_groups)}
        args |= {"E": next_power(routing.num_experts), "G": next_power(routing.num_groups)}
        args |= {"U": next_power(routing.num_used)}
        self._add(route_kernel, (self.low.rows,), args, warps=1, label="route")

    def _sort(self, chosen: Tensor) -> dict[str, Any]:
        """The arguments that assign work to the programs of the products."""
        plan = self.plan
        if plan.is_few:
            return dict.fromkeys(("places", "owners", "num_tiles"))
        counts = self._take(1, plan.num_experts, torch.int32)
        places, owners = self._take(plan.tiles, plan.tokens, torch.int32), self._take(1, plan.tiles, torch.int32)
        num_tiles = self._take(1, 1, torch.int32)
        args = {"chosen": chosen, "counts": counts, "num_uses": plan.uses, "B": AT_ONCE}
        self._add(count_kernel, (plan.num_experts,), args, label="count")
        more = {"places": places, "owners": owners, "num_tiles": num_tiles, "T": plan.tokens}
        more |= {"EXPERTS": plan.num_experts, "E": next_power(plan.num_experts)}
        self._add(place_kernel, (plan.num_experts,), args | more, label="place")
        return {"places": places, "owners": owners, "num_tiles": num_tiles}

    def _product(
        self,
        experts: DeviceExperts,
        x: Value,
        out: Tensor,
        chosen: Tensor,
        work: dict[str, Any],
        bias: Tensor | None,
        activation: str | None,
    ) -> None:
        plan, planes = self.plan, experts.planes
        is_gate = activation is not None
        features, tokens = (64 if plan.is_few else 128), plan.tokens
        columns, at_once = experts.columns_at_once(tokens, is_few=plan.is_few)
        each_tile = -(-experts.out_features // features)
        args = experts.operands(features, at_once) | {"x": x.data, "parts": x.parts, "eps": x.eps}
        args["GATED"] = self.node.experts.gated
        args |= {"inverse_size": 1.0 / experts.in_features, "bias": experts.in_order(bias), "out": out}
        args |= work | {"chosen": chosen, "num_rows": self.low.rows, "features": experts.out_features}
        args |= {"each": experts.rows_each, "width": planes.width, "size": experts.in_features}
        args |= {"FORMAT": planes.format, "TILE": tile_columns(planes.width), "ACTIVATION": activation}
        parts = 0 if x.parts is None else -(-experts.in_features // GROUP.value)
        args |= {"FROM_USES": not is_gate, "PARTS": parts, "EXPERTS": plan.num_experts, "USED": plan.num_used}
        args |= {"FEW": plan.is_few, "EACH": plan.tiles == plan.num_experts, "F": features, "T": tokens, "K": columns}
        read = expected_experts(self.routing, self.low.rows) * experts.nbytes_each
        cost = {"bytes": int(read) + 2 * plan.uses * (experts.in_features + experts.out_features)}
        cost |= {"flops": 2 * plan.uses * experts.in_features * experts.out_features}
        room = {"warps": 4 if plan.is_few else 8, "stages": 4 if tokens <= 64 else 3}
        label = "expert-gate" if is_gate else "expert-down"
        self._add(expert_kernel, (plan.tiles * each_tile,), args, label=label, **room, **cost)

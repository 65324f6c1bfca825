"""What all layouts of one model share, and the order in which its nodes are laid out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unspool.ops import AttentionSpec
from unspool.ops.cuda import steps
from unspool.ops.cuda.geometry import Heads
from unspool.ops.cuda.kv import CudaKV
from unspool.ops.cuda.sources import Sources
from unspool.ops.graph import Arrange, Attention, Graph, LayerNorm, Node, Norm, Take


@dataclass(frozen=True)
class Value:
    """A node's result. If it has `parts` and `eps`, it must still be divided by its root mean square; `parts` has the
    sums of squares, [group, row]."""

    data: Tensor
    parts: Tensor | None = None
    eps: float = 0.0


@dataclass
class Shared:
    """What every layout of one model uses: the step's array, sampled tokens, rotations, buffers for partial sums."""

    kv: CudaKV
    step: Tensor  # int32, see steps.py
    sampled: Tensor  # int32: the tokens of the previous step
    partial: Tensor  # float32: linear layers' splits
    arrivals: Tensor  # int32
    shapes: list[steps.Shape]  # one per kind of heads
    attention_partial: list[Tensor]  # one per kind: float32 [kv heads, capacity, D + MORE], see handover.py
    kinds: dict[Heads, int]  # the index of each kind
    handed: dict[Node, Tensor]  # float32: rows that the body computes and of which the tail takes some
    queries: Tensor  # f16: the same for the last layer's queries

    sources: dict[Node, tuple[Sources, Tensor]] = field(default_factory=dict)  # sources of latent layers' rows
    tables: dict[Node, Tensor] = field(default_factory=dict)  # tables for Arrange nodes

    @property
    def stream(self) -> Tensor:
        return next(iter(self.handed.values()))

    def table_of(self, spec: AttentionSpec) -> int:
        """The place in the step's header of the tables of the layer's group."""
        return steps.tables_of(len(self.shapes), self.kv.group_of[spec.layer])

    def parts_of(self, node: Arrange) -> Tensor:
        """For each part: its first column, its width, its target column, its kind, and the first index of its
        weights."""
        if node not in self.tables:
            rows, target, weight = [], 0, 0
            for part in node.parts:
                kind = ("copy", "rms", "centered", "scaled").index(part.norm)
                rows.append((part.start, part.width, target, kind, weight))
                target += part.width
                weight += 0 if part.norm == "copy" else part.width
            self.tables[node] = torch.tensor(rows, dtype=torch.int32, device=self.step.device)
        return self.tables[node]


def body_first(graph: Graph) -> list[Node]:
    """The order of nodes: first all that is computed for every row, then the last attention, then the rest."""
    body = [node for node in graph.nodes if not node.narrow]
    late = [node for node in graph.nodes if node.narrow]
    last = [node for node in late if isinstance(node, Attention)]
    return body + last + [node for node in late if not isinstance(node, Attention)]


def norms_after_takes(graph: Graph) -> Graph:
    """The same step, in which taken rows of a normed stream become a norm of the stream's taken rows. The tail is then
    passed streams, and computes their norms itself."""
    taken: dict[Node, Node] = {}
    renamed: dict[Node, Node] = {}

    def take(node: Node) -> Node:
        if node not in taken:
            taken[node] = Take(node, narrow=True)
        return taken[node]

    for node in graph.nodes:
        if isinstance(node, Take):
            x = renamed[node.x]
            if isinstance(x, Norm | LayerNorm) and x.residual is None:
                renamed[node] = replace(x, x=take(x.x), narrow=True)
            else:
                renamed[node] = take(x)
            continue
        inputs: dict[str, Any] = {role: renamed[each] for role, each in node.inputs.items()}
        is_same = all(inputs[role] is each for role, each in node.inputs.items())
        renamed[node] = node if is_same else replace(node, **inputs)
    return Graph(renamed[graph.output])

"""A model's forward pass as it was recorded: what was asked for, before anyone decides which kernels do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from unspool.config import Activation
from unspool.ops import AttentionSpec
from unspool.ops.cuda.matrix import DeviceMatrix


@dataclass(frozen=True, eq=False)
class Node:
    """Rows that an operation will make. Nodes are compared by identity: two equal calls are two values."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        fields = (getattr(self, name) for name in ("x", "residual") if hasattr(self, name))
        return tuple(field for field in fields if field is not None)


@dataclass(frozen=True, eq=False)
class Embed(Node):
    matrix: DeviceMatrix
    scale: float


@dataclass(frozen=True, eq=False)
class Norm(Node):
    x: Node
    weight: Tensor
    eps: float
    residual: Node | None


@dataclass(frozen=True, eq=False)
class Linear(Node):
    x: Node
    matrix: DeviceMatrix
    bias: Tensor | None
    residual: Node | None


@dataclass(frozen=True, eq=False)
class Gated(Node):
    x: Node
    matrix: DeviceMatrix
    activation: Activation


@dataclass(frozen=True, eq=False)
class Attend(Node):
    x: Node
    spec: AttentionSpec


@dataclass(frozen=True, eq=False)
class Take(Node):
    x: Node


@dataclass(frozen=True, eq=False)
class Logits(Node):
    x: Node
    matrix: DeviceMatrix
    softcap: float | None


def late(order: Sequence[Node], users: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """What is needed of those rows alone whose logits are wanted: all from the last layer's attention on. (Of
    the others it needs keys and values, which are made before.)"""
    found: set[Node] = set()
    for node in reversed(order):
        if all(user in found and not isinstance(user, Attend) for user in users.get(node, ())):
            found.add(node)
    return found


def in_order(root: Node) -> list[Node]:
    """Every node after its inputs, the root last."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in reversed(node.inputs))
    return order

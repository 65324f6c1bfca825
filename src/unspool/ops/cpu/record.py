"""Recording: a model is called once with symbols for rows, and what it asks for is written down.

A `Graph` has its nodes in the order they were asked for; `narrow` then computes late what only wanted rows need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Value:
    """Rows to come: `width` numbers for each token, or for each wanted row of logits when `narrow`."""

    node: Node
    width: int
    narrow: bool = False


@dataclass(eq=False)
class Node:
    """One operation: what it reads by role (x, residual), its other arguments, and what it makes."""

    kind: str
    inputs: dict[str, Value]
    arguments: dict[str, Any]
    out: Value = field(init=False)


class Graph:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, kind: str, inputs: dict[str, Value | None], width: int, **arguments: Any) -> Value:
        present = {role: value for role, value in inputs.items() if value is not None}
        node = Node(kind, present, arguments)
        node.out = Value(node, width, any(value.narrow for value in present.values()) or kind == "take")
        self.nodes.append(node)
        return node.out

    def readers(self) -> dict[Value, list[Node]]:
        readers: dict[Value, list[Node]] = {node.out: [] for node in self.nodes}
        for node in self.nodes:
            for value in node.inputs.values():
                readers[value].append(node)
        return readers


BY_ROW = {"norm", "linear", "gated"}  # operations whose row of output needs only the same row of input


def narrow(graph: Graph) -> Graph:
    """Move `take` up: what is read by nothing but a take is computed for the wanted rows alone.

    The last layer's attention still stores every token's keys and values, but only wanted rows attend.
    """
    readers = graph.readers()
    movable: set[Node] = set()

    def wants_some_rows(reader: Node) -> bool:
        return reader.kind == "take" or (reader in movable and reader.kind != "attention")

    for node in reversed(graph.nodes):
        if node.kind in BY_ROW | {"attention"} and not node.out.narrow:
            reading = readers[node.out]
            if reading and all(map(wants_some_rows, reading)):
                movable.add(node)

    result = Graph()
    renamed: dict[Value, Value] = {}
    taken: dict[Value, Value] = {}

    def wanted_rows(value: Value) -> Value:
        new = renamed[value]
        if new.narrow:
            return new
        if new not in taken:
            taken[new] = result.add("take", {"x": new}, new.width)
        return taken[new]

    for node in graph.nodes:
        if node.kind == "take":
            renamed[node.out] = wanted_rows(node.inputs["x"])
            continue
        late = node in movable and node.kind != "attention"
        inputs: dict[str, Value | None] = {
            role: wanted_rows(value) if late else renamed[value] for role, value in node.inputs.items()
        }
        renamed[node.out] = out = result.add(node.kind, inputs, node.out.width, **node.arguments)
        out.narrow = out.narrow or node in movable
    return result

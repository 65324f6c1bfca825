"""A model's step as a graph of typed nodes: what compiled backends record, the passes they share, and then lower.

A backend that compiles derives from `RecordingOps`: calling the model once yields the node whose rows it returns, and
`Graph(node)` holds everything that node needs, in an order in which inputs come first. A node class is a frozen
record; fields that hold nodes are its inputs. CONTRIBUTING says how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

from unspool.config import Activation
from unspool.errors import EngineError
from unspool.ops import AttentionSpec, Batch, ConvSpec, ExpertWeights, KVCache, Part, RecurrenceSpec, Vector
from unspool.ops.routing import Routing
from unspool.records import record


class PreparedMatrix(Protocol):
    """What the graph needs to know about a weight that a backend has prepared: it maps rows of `in_features` values to
    rows of `out_features` values."""

    @property
    def name(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


# --- Nodes ------------------------------------------------------------------------------------------------------------


_field_names: dict[type, tuple[str, ...]] = {}  # of each class of nodes, once they were asked for


@record(frozen=True, eq=False, repr=False)
class Node:
    """Rows that one operation computes. Nodes are compared by identity: two equal calls are two values.

    A node has one row for every token of the step; a `narrow` node has one row for every logit row (Batch.logit_rows).
    """

    # Row r of the result also depends on other rows of its sequence, through a cache: all input rows must be computed.
    mixes_rows: ClassVar[bool] = False
    # Backends can compute this for the logit rows alone.
    can_narrow: ClassVar[bool] = True

    narrow: bool = field(default=False, kw_only=True)

    @property
    def width(self) -> int:
        """Values in a row."""
        raise NotImplementedError

    @cached_property
    def inputs(self) -> dict[str, Node]:
        """The nodes that this one reads, by field."""
        kind = type(self)
        if kind not in _field_names:
            _field_names[kind] = tuple(each.name for each in fields(kind))
        values = ((name, getattr(self, name)) for name in _field_names[kind])
        return {name: value for name, value in values if isinstance(value, Node)}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.width} values, {'wanted' if self.narrow else 'all'} rows>"


@record(frozen=True, eq=False, repr=False)
class Embed(Node):
    can_narrow: ClassVar[bool] = False

    matrix: PreparedMatrix
    scale: float
    positions: PreparedMatrix | None = None

    @property
    def width(self) -> int:
        return self.matrix.in_features


@record(frozen=True, eq=False, repr=False)
class Given(Node):
    """Rows that the batch carries."""

    can_narrow: ClassVar[bool] = False

    given_width: int

    @property
    def width(self) -> int:
        return self.given_width


@record(frozen=True, eq=False, repr=False)
class Norm(Node):
    x: Node
    weight: Vector
    eps: float
    residual: Node | None

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class LayerNorm(Node):
    x: Node
    weight: Vector
    bias: Vector | None
    eps: float
    residual: Node | None

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Multiply(Node):
    """x · activation(gate)"""

    x: Node
    gate: Node
    activation: Activation | None

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Arrange(Node):
    """Parts of x, concatenated, some of them normed."""

    x: Node
    parts: tuple[Part, ...]
    weight: Vector | None
    eps: float

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)


@record(frozen=True, eq=False, repr=False)
class Product(Node):
    """A product of rows and a matrix."""

    x: Node
    matrix: PreparedMatrix

    @property
    def width(self) -> int:
        return self.matrix.out_features


@record(frozen=True, eq=False, repr=False)
class Linear(Product):
    bias: Vector | None
    residual: Node | None
    activation: Activation | None = None
    scale: float = 1.0


@record(frozen=True, eq=False, repr=False)
class Gated(Product):
    activation: Activation
    bias: Vector | None = None

    @property
    def width(self) -> int:
        return self.matrix.out_features // 2


@record(frozen=True, eq=False, repr=False)
class Logits(Product):
    softcap: float | None
    bias: Vector | None = None
    scale: float = 1.0


@record(frozen=True, eq=False, repr=False)
class Moe(Node):
    x: Node
    scores: Node
    routing: Routing
    experts: ExpertWeights
    residual: Node | None

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Join(Node):
    """Each row of x, followed by the same row of y."""

    x: Node
    y: Node

    @property
    def width(self) -> int:
        return self.x.width + self.y.width


@record(frozen=True, eq=False, repr=False)
class Add(Node):
    """The sum of two scaled rows; y begins at a column of x, and is repeated to the end."""

    x: Node
    y: Node
    x_scale: float
    y_scale: float
    start: int

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Cut(Node):
    """max(0, x - mean - deviations · standard deviation), with the mean and deviation of each row."""

    x: Node
    deviations: float

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Level(Node):
    """Each row of `like`, followed by parts of x that are scaled to its root mean square."""

    x: Node
    like: Node
    least: float

    @property
    def width(self) -> int:
        return self.like.width + self.x.width


@record(frozen=True, eq=False, repr=False)
class Mix(Node):
    """Parts of a residual, plus weighted sums of x's parts; the row's logits determine the weights."""

    x: Node
    logits: Node
    table: Vector
    bias: float
    residual: Node

    @property
    def width(self) -> int:
        return self.residual.width

    @property
    def part(self) -> int:
        """Values in a part: the table has a row of each part of the residual and of x."""
        return math.isqrt(self.x.width * self.residual.width * self.logits.width // len(self.table))


class PreparedMatrices(PreparedMatrix, Protocol):
    """One matrix for each head; all have one shape."""

    @property
    def count(self) -> int: ...


@record(frozen=True, eq=False, repr=False)
class LinearHeads(Node):
    """Each head's part of a row, multiplied by that head's own matrix."""

    x: Node
    matrices: PreparedMatrices

    @property
    def width(self) -> int:
        return self.matrices.count * self.matrices.out_features


@record(frozen=True, eq=False, repr=False)
class ScaleRows(Node):
    x: Node
    logit: Node
    residual: Node | None

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Attention(Node):
    mixes_rows: ClassVar[bool] = True

    x: Node
    spec: AttentionSpec

    @property
    def width(self) -> int:
        return self.spec.num_heads * self.spec.value_dim


@record(frozen=True, eq=False, repr=False)
class ShortConv(Node):
    mixes_rows: ClassVar[bool] = True
    can_narrow: ClassVar[bool] = False

    x: Node
    spec: ConvSpec

    @property
    def width(self) -> int:
        return self.spec.channels


@record(frozen=True, eq=False, repr=False)
class Recurrence(Node):
    mixes_rows: ClassVar[bool] = True
    can_narrow: ClassVar[bool] = False

    x: Node
    gates: Node
    spec: RecurrenceSpec

    @property
    def width(self) -> int:
        return self.spec.num_heads * self.spec.value_dim


@record(frozen=True, eq=False, repr=False)
class Take(Node):
    """The logit rows of x."""

    x: Node

    @property
    def width(self) -> int:
        return self.x.width


@record(frozen=True, eq=False, repr=False)
class Keep(Node):
    """x as the output of a graph, which also keeps `rows`, one for every token."""

    can_narrow: ClassVar[bool] = False

    x: Node
    rows: Node

    @property
    def width(self) -> int:
        return self.x.width


# --- Graphs -----------------------------------------------------------------------------------------------------------


class Graph:
    """The nodes that `output` needs, each after its inputs, `output` last."""

    def __init__(self, output: Node) -> None:
        self.output = output
        self.nodes = _in_order(output)

    def readers(self) -> dict[Node, list[Node]]:
        """For every node, the nodes that read it; a node that reads it twice is listed twice."""
        readers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in node.inputs.values():
                readers[source].append(node)
        return readers

    def __str__(self) -> str:
        """One line per node: its number, its operation, its inputs."""
        number = {node: index for index, node in enumerate(self.nodes)}
        lines = []
        for node, index in number.items():
            reads = ", ".join(f"{name}=%{number[source]}" for name, source in node.inputs.items())
            rows = "wanted" if node.narrow else "all"
            lines.append(f"%{index} = {type(node).__name__}({reads}): {node.width} values, {rows} rows")
        return "\n".join(lines)


def _in_order(output: Node) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(output, False)]
    while stack:
        node, inputs_are_done = stack.pop()
        if inputs_are_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in reversed(node.inputs.values()))
    return order


# --- Passes -----------------------------------------------------------------------------------------------------------


def only_wanted_rows(graph: Graph) -> Graph:
    """The same step, where values that only the logit rows need are computed for those rows alone.

    `Take` moves up to the last node that needs all rows. That is the last layer's attention: it stores every token's
    keys and values, and attends for the logit rows.
    """
    late = _read_late(graph)
    renamed: dict[Node, Node] = {}
    taken: dict[Node, Node] = {}

    def wanted_rows(node: Node) -> Node:
        new = renamed[node]
        if new.narrow:
            return new
        if new not in taken:
            taken[new] = Take(new, narrow=True)
        return taken[new]

    for node in graph.nodes:
        if isinstance(node, Take):
            renamed[node] = wanted_rows(node.x)
            continue
        if isinstance(node, Keep):
            renamed[node] = replace(node, narrow=renamed[node.x].narrow, x=renamed[node.x], rows=renamed[node.rows])
            continue
        is_late = node in late and not node.mixes_rows
        inputs = {role: wanted_rows(each) if is_late else renamed[each] for role, each in node.inputs.items()}
        has_narrow = any(each.narrow for each in inputs.values())
        if has_narrow and (node.mixes_rows or not all(each.narrow for each in inputs.values())):
            raise EngineError(f"{node!r} needs all rows of an input of which only the wanted ones were taken")
        narrow = node in late or has_narrow
        is_same = narrow == node.narrow and all(inputs[role] is each for role, each in node.inputs.items())
        renamed[node] = node if is_same else replace(node, narrow=narrow, **inputs)
    return Graph(renamed[graph.output])


def _read_late(graph: Graph) -> set[Node]:
    """Nodes whose readers need only the logit rows."""
    readers = graph.readers()
    late: set[Node] = set()

    def reads_wanted_rows(reader: Node) -> bool:
        return isinstance(reader, Take) or (reader in late and not reader.mixes_rows)

    for node in reversed(graph.nodes):
        may_be_late = node.can_narrow and not isinstance(node, Take) and readers[node]
        if may_be_late and all(map(reads_wanted_rows, readers[node])):
            late.add(node)
    return late


# --- Recording --------------------------------------------------------------------------------------------------------

_nothing: Any = ()
SYMBOLIC_BATCH = Batch(_nothing, _nothing, _nothing, _nothing, _nothing, _nothing)


def record_step(forward: Callable[[Batch, KVCache], Any], kv: KVCache) -> Graph:
    """The graph of operations that a model requests when it is called once with `RecordingOps`."""
    output = forward(SYMBOLIC_BATCH, kv)
    if not isinstance(output, Node):
        raise EngineError(f"a model must return the rows of one operation, not {type(output).__name__}")
    return Graph(output)


class RecordingOps:
    """The computing half of `Ops`, for backends that compile: each operation checks its widths and creates its node."""

    def embed(
        self, batch: Batch, weight: PreparedMatrix, scale: float = 1.0, positions: PreparedMatrix | None = None
    ) -> Node:
        node = Embed(weight, scale, positions)
        if positions is not None:
            expect_width(node, positions.in_features, "a table of positions")
        return node

    def given(self, batch: Batch, width: int) -> Node:
        return Given(width)

    def norm(self, x: Node, weight: Vector, eps: float, residual: Node | None = None) -> Node:
        expect_width(x, len(weight), "a norm's weight")
        if residual is not None:
            expect_width(residual, x.width, "the residual of a norm")
        return Norm(x, weight, eps, residual)

    def layer_norm(
        self, x: Node, weight: Vector, bias: Vector | None, eps: float, residual: Node | None = None
    ) -> Node:
        expect_width(x, len(weight), "a norm's weight")
        if bias is not None:
            expect_width(x, len(bias), "a norm's bias")
        if residual is not None:
            expect_width(residual, x.width, "the residual of a norm")
        return LayerNorm(x, weight, bias, eps, residual)

    def linear(
        self,
        x: Node,
        weight: PreparedMatrix,
        bias: Vector | None = None,
        residual: Node | None = None,
        activation: Activation | None = None,
        scale: float = 1.0,
    ) -> Node:
        expect_width(x, weight.in_features, f"the input of {weight.name}")
        if residual is not None:
            expect_width(residual, weight.out_features, f"the residual of {weight.name}")
        return Linear(x, weight, bias, residual, activation, scale)

    def gated(self, x: Node, weight: PreparedMatrix, activation: Activation, bias: Vector | None = None) -> Node:
        expect_width(x, weight.in_features, f"the input of {weight.name}")
        if weight.out_features % 2:
            raise EngineError(f"{weight.name}: a gate and an up projection of one size are needed")
        return Gated(x, weight, activation, bias)

    def multiply(self, x: Node, gate: Node, activation: Activation | None = None) -> Node:
        expect_width(gate, x.width, "a gate")
        return Multiply(x, gate, activation)

    def arrange(self, x: Node, parts: Sequence[Part], weight: Vector | None = None, eps: float = 0.0) -> Node:
        normed = sum(part.width for part in parts if part.norm != "copy")
        if any(part.start < 0 or part.start + part.width > x.width for part in parts):
            raise EngineError(f"rows of {x.width} values have no such parts: {parts}")
        if normed != (0 if weight is None else len(weight)):
            raise EngineError(f"{normed} values need weights; {0 if weight is None else len(weight)} weights are given")
        return Arrange(x, tuple(parts), weight, eps)

    def join(self, x: Node, y: Node) -> Node:
        return Join(x, y)

    def add(self, x: Node, y: Node, x_scale: float = 1.0, y_scale: float = 1.0, start: int = 0) -> Node:
        if not 0 <= start < x.width or (x.width - start) % y.width:
            raise EngineError(f"rows of {y.width} values do not fill {x.width} from the one at {start} on")
        return Add(x, y, x_scale, y_scale, start)

    def cut(self, x: Node, deviations: float) -> Node:
        return Cut(x, deviations)

    def level(self, x: Node, like: Node, least: float) -> Node:
        if x.width % like.width:
            raise EngineError(f"rows of {x.width} values have no parts of {like.width}")
        return Level(x, like, least)

    def mix(self, x: Node, logits: Node, table: Vector, bias: float, residual: Node) -> Node:
        node = Mix(x, logits, table, bias, residual)
        made = node.part and x.width // node.part * (residual.width // node.part) * logits.width
        if made != len(table) or x.width % node.part or residual.width % node.part:
            sizes = f"{x.width}, {residual.width} and {logits.width}"
            raise EngineError(f"a table of {len(table)} numbers does not mix rows of {sizes} values")
        return node

    def linear_heads(self, x: Node, weight: PreparedMatrices) -> Node:
        expect_width(x, weight.count * weight.in_features, f"the input of {weight.name}")
        return LinearHeads(x, weight)

    def moe(
        self, x: Node, scores: Node, routing: Routing, experts: ExpertWeights, residual: Node | None = None
    ) -> Node:
        expect_width(x, experts.gate_up.in_features, f"the input of {experts.gate_up.name}")
        expect_width(scores, routing.num_experts, "the router's logits")
        if residual is not None:
            expect_width(residual, x.width, "the residual of experts")
        return Moe(x, scores, routing, experts, residual)

    def scale_rows(self, x: Node, logit: Node, residual: Node | None = None) -> Node:
        expect_width(logit, 1, "the logit that scales a row")
        if residual is not None:
            expect_width(residual, x.width, "the residual of scaled rows")
        return ScaleRows(x, logit, residual)

    def attention(self, qkv: Node, spec: AttentionSpec, batch: Batch, kv: KVCache) -> Node:
        expect_width(qkv, spec.row_width, f"layer {spec.layer}'s attention")
        return Attention(qkv, spec)

    def short_conv(self, x: Node, spec: ConvSpec, batch: Batch, kv: KVCache) -> Node:
        if x.width < spec.least_width:
            raise EngineError(f"layer {spec.layer}'s convolution needs {spec.least_width} values a row, not {x.width}")
        return ShortConv(x, spec)

    def recurrence(self, x: Node, gates: Node, spec: RecurrenceSpec, batch: Batch, kv: KVCache) -> Node:
        expect_width(x, spec.row_width, f"layer {spec.layer}'s recurrence")
        expect_width(gates, spec.gates_width, f"the gates of layer {spec.layer}'s recurrence")
        return Recurrence(x, gates, spec)

    def take(self, x: Node, batch: Batch) -> Node:
        return Take(x)

    def logits(
        self,
        x: Node,
        weight: PreparedMatrix,
        softcap: float | None = None,
        bias: Vector | None = None,
        scale: float = 1.0,
    ) -> Node:
        expect_width(x, weight.in_features, f"the input of {weight.name}")
        return Logits(x, weight, softcap, bias, scale)

    def keep(self, x: Node, rows: Node) -> Node:
        return Keep(x, rows)


def expect_width(node: Node, width: int, what: str) -> None:
    if node.width != width:
        raise EngineError(f"{what} has {width} values a row; {node.width} are given")

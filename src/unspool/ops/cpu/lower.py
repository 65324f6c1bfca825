"""Lowering: a graph becomes a native program.

An activation has up to two forms, float32 and 8-bit; each is made only if a node reads it. Forms live in slots of the
program's memory; a slot is reused when no node can still read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import unspool._native as _native
from unspool.errors import EngineError
from unspool.ops import Part
from unspool.ops.cpu.matrix import CpuMatrix
from unspool.ops.graph import (
    Add,
    Arrange,
    Attention,
    Cut,
    Embed,
    Gated,
    Given,
    Graph,
    Join,
    Keep,
    LayerNorm,
    Level,
    Linear,
    LinearHeads,
    Logits,
    Mix,
    Moe,
    Multiply,
    Node,
    Norm,
    Product,
    Recurrence,
    ScaleRows,
    ShortConv,
    Take,
)
from unspool.records import record

Form = Literal["f32", "q8"]
RowKind = Literal["coarse", "whole", "fine"]  # how rows are rounded for a product, see `rows_wanted`
Operand = tuple[int, bool, bool]  # slot, narrow, copied

NO_STATES: Mapping[tuple[int, str], int] = {}
BLOCK = 32  # activations that share one scale


class NativeNode(Node):
    """An instruction of the native program that does not correspond to one operation: it lists its inputs and emits
    itself."""

    @property
    def rounded_bytes_per_row(self) -> int:
        """Bytes of one of its rows in 8 bits, if it writes such rows."""
        raise EngineError(f"{self!r} writes no rounded rows")

    @property
    def matrices(self) -> list[CpuMatrix]:
        """The weights that this node multiplies by."""
        return []

    def reads(self) -> list[tuple[Node, Form]]:
        raise NotImplementedError

    def emit(self, low: Lowering, program: Any) -> None:
        raise NotImplementedError


@record(frozen=True, eq=False, repr=False)
class Quantize(Node):
    """Rounds x to rows of 8 or 16 bits, when the node that computes x cannot write such rows itself."""

    x: Node
    rows: RowKind

    @property
    def width(self) -> int:
        return self.x.width


WRITES_Q8 = (Norm, LayerNorm, Take, Attention, Quantize)  # can write rounded rows in addition to float32, or instead
COPIABLE = (Norm, LayerNorm, Quantize)  # for few rows, a copy per thread is cheaper than a barrier


@record(eq=False)
class Buffer:
    """Where one form of a node's rows lies, and the last step of the program that reads it."""

    bytes_per_row: int
    slot: int = -1
    last_read: int = -1
    late_read: int = -1  # the last step in which a thread may still copy from it


class Lowering:
    """`emit` writes the graph's instructions into a native program whose output is the rows of `graph.output`."""

    def __init__(self, graph: Graph, state_offsets: Mapping[tuple[int, str], int] = NO_STATES) -> None:
        self.state_offsets = state_offsets  # byte offset of a state within the states of its layer
        self.last = find_last(graph)
        self.routes: dict[Node, int] = {}  # the native program's numbers of routings
        self.rows: dict[Node, RowKind] = {}  # the kind of rounded rows that each node writes
        self.rounded: dict[Node, Node] = {}  # for each product: the node that writes its rounded rows
        self.output = graph.output.x if isinstance(graph.output, Keep) else graph.output
        self.kept = graph.output.rows if isinstance(graph.output, Keep) else None
        self.outputs = [self.output] if self.kept is None else [self.output, self.kept]  # read after the step
        self.nodes = self._insert_quantize(graph)
        self.reads = {node: self._reads_of(node) for node in self.nodes}
        self.copied = self._find_copied()
        self.forms = self._find_forms()
        self.slots: list[int] = []  # bytes per row
        self._find_lives()
        self._place()

    def _insert_quantize(self, graph: Graph) -> list[Node]:
        """Insert a `Quantize` node before each product that needs rounded rows, if its input cannot write them."""
        made: dict[tuple[Node, RowKind], Quantize] = {}
        nodes: list[Node] = []
        for node in graph.nodes:
            if isinstance(node, Keep):
                continue  # it computes nothing
            if isinstance(node, Product) and matrix_of(node).native.wants_q8:
                rows = self.rows_wanted(node)
                if self._writes(node.x, rows):
                    self.rounded[node] = node.x
                else:
                    if (node.x, rows) not in made:
                        made[node.x, rows] = quantize = Quantize(node.x, rows, narrow=node.x.narrow)
                        self.rows[quantize] = rows
                        nodes.append(quantize)
                    self.rounded[node] = made[node.x, rows]
            nodes.append(node)
        return nodes

    def _writes(self, node: Node, rows: RowKind) -> bool:
        """Whether a node can write such rows. It writes one kind only: the first that a reader needs."""
        if not isinstance(node, WRITES_Q8) or rows == "fine":
            return False
        if isinstance(node, Attention) and (rows == "whole" or node.spec.value_dim % BLOCK):
            return False  # it writes head by head, and the scales of a whole row are known last
        return self.rows.setdefault(node, rows) == rows

    def rows_wanted(self, node: Product) -> RowKind:
        """How rows are rounded for a product. The head and the product before it (`find_last`) read "fine" rows of 16
        bits: they read many weights for few rows. All others read rows of 8 bits, and matrices whose scales are
        integers read rows whose scales are integers too. A layer that is also the last one of another model keeps the
        kind that it was packed for.
        """
        weight = matrix_of(node).native
        keeps = weight.whole and not isinstance(node, Logits)
        if node in self.last and not weight.wants_f32 and not keeps:
            return "fine"
        return "whole" if weight.whole else "coarse"

    def _reads_of(self, node: Node) -> list[tuple[Node, Form]]:
        if isinstance(node, NativeNode):
            return node.reads()
        if not isinstance(node, Product):
            return [(source, "f32") for source in node.inputs.values()]
        reads: list[tuple[Node, Form]] = [(node.x, "f32")] if matrix_of(node).native.wants_f32 else []
        if node in self.rounded:
            reads.append((self.rounded[node], "q8"))
        return reads + [(source, "f32") for role, source in node.inputs.items() if role != "x"]

    def _find_copied(self) -> set[Node]:
        """The nodes that every thread computes for itself instead of waiting at a barrier. A copy is read only until
        the next barrier: a thread that computes it later may find its inputs overwritten, and must not need the copy
        any more.
        """
        copied: set[Node] = set()
        last_reader = {source: index for index, node in enumerate(self.nodes) for source, _ in self.reads[node]}
        wait = len(self.nodes)
        for index in range(wait - 1, -1, -1):
            node = self.nodes[index]
            if isinstance(node, COPIABLE) and node not in self.outputs and last_reader.get(node, index) <= wait:
                copied.add(node)
            else:
                wait = index
        return copied

    def _find_forms(self) -> dict[Node, dict[Form, Buffer]]:
        forms: dict[Node, dict[Form, Buffer]] = {node: {} for node in self.nodes}
        wanted = [read for node in self.nodes for read in self.reads[node]]
        results: list[tuple[Node, Form]] = [(node, "f32") for node in self.outputs]
        for node, form in [*wanted, *results]:
            size = node.width * 4
            if isinstance(node, NativeNode) and form == "q8":
                size = node.rounded_bytes_per_row
            elif form == "q8":
                size = _native.block_row_bytes(self.rows.get(node, "coarse"), node.width)
            forms[node].setdefault(form, Buffer(size))
        return forms

    def _find_lives(self) -> None:
        for index, node in enumerate(self.nodes):
            for source, form in self.reads[node]:
                buffer = self.forms[source][form]
                buffer.last_read = index
                if node in self.copied:
                    buffer.late_read = max(buffer.late_read, self._wait_after(index))
        for node in self.outputs:
            for buffer in self.forms[node].values():
                buffer.last_read = buffer.late_read = len(self.nodes)

    def _wait_after(self, index: int) -> int:
        """The index of the next node with a barrier for all threads."""
        while index < len(self.nodes) and self.nodes[index] in self.copied:
            index += 1
        return index

    def _place(self) -> None:
        """Assign slots in node order: free those that are no longer read, then take the free slot that fits best."""
        free: list[int] = []
        live: list[Buffer] = []
        for index, node in enumerate(self.nodes):
            for buffer in [each for each in live if max(each.last_read, each.late_read) < index]:
                live.remove(buffer)
                free.append(buffer.slot)
            for form, buffer in self.forms[node].items():
                buffer.last_read = max(buffer.last_read, index)
                reused = self._in_place(node, form, index)
                if reused is not None:
                    live.remove(reused)
                    buffer.slot = reused.slot
                else:
                    buffer.slot = self._take_slot(free, buffer, own=node in self.outputs)
                live.append(buffer)

    def _in_place(self, node: Node, form: Form, index: int) -> Buffer | None:
        """A linear layer may overwrite the residual that it adds, element by element, if no other node reads that
        residual."""
        if not isinstance(node, Linear) or node.residual is None or form != "f32" or node in self.outputs:
            return None
        if node.residual.narrow != node.narrow or node.residual in self.copied:
            return None
        buffer = self.forms[node.residual]["f32"]
        return buffer if buffer.last_read == index and buffer.late_read < index else None

    def _take_slot(self, free: list[int], buffer: Buffer, own: bool) -> int:
        # Only reuse slots with rows of the same size. Then a cache line always belongs to the same row, and stays with
        # the core that computes that row.
        fitting = [slot for slot in free if self.slots[slot] == buffer.bytes_per_row]
        if fitting and not own:
            free.remove(fitting[0])
            return fitting[0]
        self.slots.append(buffer.bytes_per_row)
        return len(self.slots) - 1

    # Instructions ----------------------------------------------------------------------------------------------------
    def emit(self, program: Any) -> None:
        for bytes_per_row in self.slots:
            program.add_slot(bytes_per_row)
        for node in self.nodes:
            if isinstance(node, NativeNode):
                node.emit(self, program)
                continue
            if type(node) not in EMIT:
                raise EngineError(f"the CPU backend has no kernel for {node!r}")
            EMIT[type(node)](self, program, node)
        program.set_output(self.operand(self.output, "f32"), self.output.width)
        if self.kept is not None:
            program.set_kept(self.operand(self.kept, "f32"), self.kept.width)

    def operand(self, node: Node | None, form: Form) -> Operand | None:
        """Where an instruction reads or writes that form; None: it does neither."""
        if node is None or form not in self.forms[node]:
            return None
        return (self.forms[node][form].slot, node.narrow, node in self.copied)

    def results(self, node: Node) -> dict[str, Any]:
        """The operands for the results of a node that can write rounded rows."""
        return {"f32": self.operand(node, "f32"), "q8": self.operand(node, "q8")}

    def factors(self, node: Product) -> dict[str, Any]:
        """The operands of a product."""
        weight = matrix_of(node).native
        return {
            "f32": self.operand(node.x, "f32") if weight.wants_f32 else None,
            "q8": self.operand(self.rounded.get(node), "q8"),
            "rows": self.rows_wanted(node),
            "weight": weight,
        }


def matrix_of(node: Embed | Product) -> CpuMatrix:
    assert isinstance(node.matrix, CpuMatrix)
    return node.matrix


def multiplied(node: Node) -> list[CpuMatrix]:
    """The weights that a node multiplies by, and that are packed for it."""
    if isinstance(node, Product):
        return [matrix_of(node)]
    if isinstance(node, LinearHeads):
        return list(node.matrices.matrices)  # type: ignore[attr-defined]
    return node.matrices if isinstance(node, NativeNode) else []


def expand_experts(graph: Graph) -> Graph:
    """The graph with every mixture of experts replaced by its chain."""
    if not any(isinstance(node, Moe) for node in graph.nodes):
        return graph
    from unspool.ops.cpu import experts

    renamed: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs: dict[str, Any] = {role: renamed[each] for role, each in node.inputs.items()}
        changed = any(inputs[role] is not each for role, each in node.inputs.items())
        same = replace(node, **inputs) if changed else node
        renamed[node] = experts.expand(same) if isinstance(same, Moe) else same
    return Graph(renamed[graph.output])


def expand_latents(graph: Graph) -> Graph:
    """The graph in which attention that reads values from keys gets separate values. Kernels read keys channel by
    channel and values token by token, so the cache stores a latent twice."""
    if not any(isinstance(node, Attention) and node.spec.latent for node in graph.nodes):
        return graph
    renamed: dict[Node, Node] = {}
    for node in graph.nodes:
        inputs: dict[str, Any] = {role: renamed[each] for role, each in node.inputs.items()}
        changed = any(inputs[role] is not each for role, each in node.inputs.items())
        same = replace(node, **inputs) if changed else node
        if isinstance(same, Attention) and same.spec.latent:
            width, values = same.x.width, same.spec.value_dim
            parts = (Part(0, width), Part(width - values, values)) if same.spec.stores else (Part(0, width),)
            rows = Arrange(same.x, parts, None, 0.0, narrow=same.x.narrow)
            same = replace(same, x=rows, spec=replace(same.spec, latent=False))
        renamed[node] = same
    return Graph(renamed[graph.output])


def find_last(graph: Graph) -> set[Product]:
    """The head, and the product before it with only norms between: their rounding errors directly reach the output. A
    graph of hidden rows ends with the norm before the head, so its rows are those that the head reads."""
    last: set[Product] = set()
    before = graph.output.x if isinstance(graph.output, Keep) else graph.output
    if not isinstance(before, Logits | Norm | LayerNorm):
        return last  # not a model's output
    if isinstance(before, Logits):
        last.add(before)
        before = before.x
    while isinstance(before, Norm | LayerNorm | Take):
        before = before.x
    if isinstance(before, Product):
        last.add(before)
    return last


def _embed(low: Lowering, program: Any, node: Embed) -> None:
    positions = None
    if node.positions is not None:
        assert isinstance(node.positions, CpuMatrix)
        positions = node.positions.native
    out = low.operand(node, "f32")
    program.embed(table=matrix_of(node).native, scale=node.scale, positions=positions, out=out)


def _given(low: Lowering, program: Any, node: Given) -> None:
    program.given(width=node.width, out=low.operand(node, "f32"))


def _norm(low: Lowering, program: Any, node: Norm | LayerNorm) -> None:
    program.norm(
        x=low.operand(node.x, "f32"),
        weight=node.weight,
        bias=node.bias if isinstance(node, LayerNorm) else None,
        eps=node.eps,
        centered=isinstance(node, LayerNorm),
        residual=low.operand(node.residual, "f32"),
        rows=low.rows.get(node, "coarse"),
        **low.results(node),
    )


def _linear(low: Lowering, program: Any, node: Linear) -> None:
    program.linear(
        bias=node.bias,
        residual=low.operand(node.residual, "f32"),
        softcap=0.0,
        activation=node.activation or "none",
        scale=node.scale,
        out=low.operand(node, "f32"),
        **low.factors(node),
    )


def _logits(low: Lowering, program: Any, node: Logits) -> None:
    out = low.operand(node, "f32")
    after = {"softcap": node.softcap or 0.0, "activation": "none", "scale": node.scale}
    program.linear(bias=node.bias, residual=None, out=out, **after, **low.factors(node))


def _gated(low: Lowering, program: Any, node: Gated) -> None:
    matrix = matrix_of(node)
    half, first = matrix.out_features // 2, matrix.parts[0].shape[0]
    if (len(matrix.parts) != 2 and half % 16) or first not in (half, 2 * half):
        raise EngineError(f"{matrix.name}: a gate and an up projection of one size are needed")
    program.gated(bias=node.bias, activation=node.activation, out=low.operand(node, "f32"), **low.factors(node))


def _multiply(low: Lowering, program: Any, node: Multiply) -> None:
    program.multiply(
        x=low.operand(node.x, "f32"),
        gate=low.operand(node.gate, "f32"),
        width=node.width,
        activation=node.activation or "none",
        out=low.operand(node, "f32"),
    )


def _join(low: Lowering, program: Any, node: Join) -> None:
    program.join(
        x=low.operand(node.x, "f32"),
        x_width=node.x.width,
        y=low.operand(node.y, "f32"),
        y_width=node.y.width,
        out=low.operand(node, "f32"),
    )


def _add(low: Lowering, program: Any, node: Add) -> None:
    program.add(
        x=low.operand(node.x, "f32"),
        width=node.width,
        y=low.operand(node.y, "f32"),
        y_width=node.y.width,
        x_scale=node.x_scale,
        y_scale=node.y_scale,
        start=node.start,
        out=low.operand(node, "f32"),
    )


def _cut(low: Lowering, program: Any, node: Cut) -> None:
    out = low.operand(node, "f32")
    program.cut(x=low.operand(node.x, "f32"), width=node.width, deviations=node.deviations, out=out)


def _level(low: Lowering, program: Any, node: Level) -> None:
    program.level(
        x=low.operand(node.x, "f32"),
        width=node.x.width,
        like=low.operand(node.like, "f32"),
        part=node.like.width,
        least=node.least,
        out=low.operand(node, "f32"),
    )


def _mix(low: Lowering, program: Any, node: Mix) -> None:
    program.mix(
        x=low.operand(node.x, "f32"),
        logits=low.operand(node.logits, "f32"),
        part=node.part,
        inputs=node.x.width // node.part,
        outputs=node.width // node.part,
        num_logits=node.logits.width,
        table=node.table,
        bias=node.bias,
        residual=low.operand(node.residual, "f32"),
        out=low.operand(node, "f32"),
    )


def _linear_heads(low: Lowering, program: Any, node: LinearHeads) -> None:
    program.linear_heads(
        x=low.operand(node.x, "f32"),
        heads=[matrix.native for matrix in multiplied(node)],
        out=low.operand(node, "f32"),
    )


def _arrange(low: Lowering, program: Any, node: Arrange) -> None:
    program.arrange(
        x=low.operand(node.x, "f32"),
        width=node.x.width,
        parts=[(part.start, part.width, part.norm) for part in node.parts],
        weight=node.weight,
        eps=node.eps,
        out=low.operand(node, "f32"),
    )


def _attention(low: Lowering, program: Any, node: Attention) -> None:
    spec, rope = node.spec, node.spec.rope
    if spec.window is not None and spec.window < 1:
        raise EngineError(f"layer {spec.layer} has a window of {spec.window} keys; it must be at least 1")
    program.attention(
        qkv=low.operand(node.x, "f32"),
        layer=spec.layer,
        stores=spec.stores,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        scale=spec.scale,
        rope=-1 if rope is None else program.add_rope(rope.inv_freq, rope.style == "interleaved", rope.scale),
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
        q_norm=spec.q_norm,
        k_norm=spec.k_norm,
        norm_eps=spec.norm_eps,
        sinks=spec.sinks,
        growth=spec.growth,
        period=spec.period,
        **low.results(node),
    )


def _short_conv(low: Lowering, program: Any, node: ShortConv) -> None:
    spec = node.spec
    program.short_conv(
        x=low.operand(node.x, "f32"),
        width=node.x.width,
        layer=spec.layer,
        offset=low.state_offsets[spec.layer, spec.state],
        channels=spec.channels,
        taps=spec.taps,
        weight=spec.weight,
        bias=spec.bias,
        activation=spec.activation or "none",
        start=spec.start,
        before=-1 if spec.before is None else spec.before,
        after=-1 if spec.after is None else spec.after,
        out=low.operand(node, "f32"),
    )


def _recurrence(low: Lowering, program: Any, node: Recurrence) -> None:
    spec = node.spec
    program.recurrence(
        x=low.operand(node.x, "f32"),
        gates=low.operand(node.gates, "f32"),
        is_delta=spec.kind == "delta",
        layer=spec.layer,
        offset=low.state_offsets[spec.layer, spec.state],
        heads=spec.num_heads,
        key_heads=spec.num_key_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        columns=spec.columns,
        tiled=spec.tiled,
        rate=spec.rate,
        bias=spec.bias,
        skip=spec.skip,
        eps=spec.eps,
        out=low.operand(node, "f32"),
    )


def _take(low: Lowering, program: Any, node: Take) -> None:
    rows = low.rows.get(node, "coarse")
    program.take(x=low.operand(node.x, "f32"), width=node.width, rows=rows, **low.results(node))


def _quantize(low: Lowering, program: Any, node: Quantize) -> None:
    program.quantize(x=low.operand(node.x, "f32"), width=node.width, q8=low.operand(node, "q8"), rows=node.rows)


def _scale_rows(low: Lowering, program: Any, node: ScaleRows) -> None:
    program.scale_rows(
        x=low.operand(node.x, "f32"),
        logit=low.operand(node.logit, "f32"),
        residual=low.operand(node.residual, "f32"),
        width=node.width,
        out=low.operand(node, "f32"),
    )


EMIT: dict[type[Node], Callable[[Lowering, Any, Any], None]] = {
    Embed: _embed,
    Given: _given,
    Norm: _norm,
    LayerNorm: _norm,
    Multiply: _multiply,
    Join: _join,
    Add: _add,
    Cut: _cut,
    Level: _level,
    Mix: _mix,
    LinearHeads: _linear_heads,
    Arrange: _arrange,
    Linear: _linear,
    Logits: _logits,
    Gated: _gated,
    Attention: _attention,
    Take: _take,
    Quantize: _quantize,
    Recurrence: _recurrence,
    ShortConv: _short_conv,
    ScaleRows: _scale_rows,
}

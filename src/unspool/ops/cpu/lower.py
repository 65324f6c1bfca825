"""Lowering: a recorded graph becomes a native program.

An activation has up to two forms, float32 and 8-bit, each made only where something reads it. Forms live in slots of
the program's memory; a slot is used again once nothing can still be reading it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import unspool._native as _native
from unspool.errors import EngineError
from unspool.ops.cpu.record import Graph, Node, Value

Form = Literal["f32", "q8"]
Operand = tuple[int, bool, bool]  # slot, narrow, copied

BLOCK = 32  # activations that share a scale
PRODUCTS = {"linear", "gated"}
WRITES_Q8 = {"norm", "take", "attention"}
COPIABLE = {"norm", "quantize"}


@dataclass(eq=False)
class Made:
    """A form of a value: where it lies, until which step of the graph it is read."""

    bytes_per_row: int
    slot: int = -1
    last_read: int = -1
    late_read: int = -1  # until here a thread may still be copying from it


@dataclass
class Lowering:
    graph: Graph
    output: Value
    forms: dict[Value, dict[Form, Made]] = field(default_factory=dict)
    copied: set[Value] = field(default_factory=set)  # few rows of these are made by every thread for itself
    slots: list[int] = field(default_factory=list)  # bytes per row

    def plan(self) -> None:
        self._insert_quantize()
        self._find_copied()
        self._find_forms()
        self._find_lives()
        self._place()

    def _insert_quantize(self) -> None:
        """A product that wants 8-bit rows reads them from a node of their own where their maker cannot write them."""
        made: dict[tuple[Value, str], Value] = {}
        nodes: list[Node] = []
        fresh = Graph()
        for node in self.graph.nodes:
            if node.kind in PRODUCTS and node.arguments["weight"].wants_q8:
                x = node.inputs["x"]
                rows = rows_wanted(node)
                if not writes_rows(x, rows):
                    if (x, rows) not in made:
                        made[x, rows] = fresh.add("quantize", {"x": x}, x.width, rows=rows)
                        nodes.append(made[x, rows].node)
                    node.inputs["x_q8"] = made[x, rows]
            nodes.append(node)
        self.graph.nodes = nodes

    def _find_copied(self) -> None:
        """Copies spare threads a wait, but only until the next one: a thread that comes late to a copy may find what it
        would read written over, and must not need it any more.
        """
        last_reader = {value: index for index, node in enumerate(self.graph.nodes) for value in node.inputs.values()}
        wait = len(self.graph.nodes)
        for index in range(wait - 1, -1, -1):
            node = self.graph.nodes[index]
            if node.kind in COPIABLE and node.out is not self.output and last_reader.get(node.out, index) <= wait:
                self.copied.add(node.out)
            else:
                wait = index

    def _find_forms(self) -> None:
        self.forms = {node.out: {} for node in self.graph.nodes}
        for node in self.graph.nodes:
            for role, value in node.inputs.items():
                for form in forms_read(node, role):
                    self._want(value, form)
        self._want(self.output, "f32")
        for node in self.graph.nodes:  # a value that nothing reads is still computed: attention stores keys
            if not self.forms[node.out]:
                self._want(node.out, "f32")

    def _want(self, value: Value, form: Form) -> None:
        size = value.width * 4
        if form == "q8":
            size = _native.block_row_bytes(rows_of(value.node), value.width)
        self.forms[value].setdefault(form, Made(size))

    def _find_lives(self) -> None:
        nodes = self.graph.nodes
        for index, node in enumerate(nodes):
            for role, value in node.inputs.items():
                for form in forms_read(node, role):
                    made = self.forms[value][form]
                    made.last_read = index
                    if node.out in self.copied:
                        made.late_read = max(made.late_read, self._wait_after(index))
        for made in self.forms[self.output].values():
            made.last_read = made.late_read = len(nodes)

    def _wait_after(self, index: int) -> int:
        """The next node that every thread waits for."""
        while index < len(self.graph.nodes) and self.graph.nodes[index].out in self.copied:
            index += 1
        return index

    def _place(self) -> None:
        """Slots by a walk over the nodes: free what is dead, then take the free slot that fits best."""
        free: list[int] = []
        live: list[Made] = []
        for index, node in enumerate(self.graph.nodes):
            for made in [m for m in live if max(m.last_read, m.late_read) < index]:
                live.remove(made)
                free.append(made.slot)
            for form, made in self.forms[node.out].items():
                made.last_read = max(made.last_read, index)
                reused = self._in_place(node, form, index)
                if reused is not None:
                    live.remove(reused)
                    made.slot = reused.slot
                else:
                    made.slot = self._take_slot(free, made, own=node.out is self.output)
                live.append(made)

    def _in_place(self, node: Node, form: Form, index: int) -> Made | None:
        """A linear layer may write over the residual that it adds, element by element, when nobody else reads that."""
        residual = node.inputs.get("residual")
        if node.kind != "linear" or residual is None or form != "f32" or node.out is self.output:
            return None
        if residual.narrow != node.out.narrow or residual in self.copied:
            return None
        made = self.forms[residual]["f32"]
        return made if made.last_read == index and made.late_read < index else None

    def _take_slot(self, free: list[int], made: Made, own: bool) -> int:
        # Only rows of the same size: a line of memory then belongs to one row always, and stays with the core that
        # computes that row.
        fitting = [slot for slot in free if self.slots[slot] == made.bytes_per_row]
        if fitting and not own:
            free.remove(fitting[0])
            return fitting[0]
        self.slots.append(made.bytes_per_row)
        return len(self.slots) - 1

    def operand(self, value: Value | None, form: Form) -> Operand | None:
        if value is None or form not in self.forms[value]:
            return None
        return (self.forms[value][form].slot, value.narrow, value in self.copied)

    def emit(self, program: Any) -> None:
        for bytes_per_row in self.slots:
            program.add_slot(bytes_per_row)
        for node in self.graph.nodes:
            EMIT[node.kind](self, program, node)
        output = self.operand(self.output, "f32")
        program.set_output(output, self.output.width)


def find_last(graph: Graph) -> list[Node]:
    """Heads, and the products that nothing but norms parts from them: what they round goes straight into the logits."""
    last: list[Node] = []
    for node in graph.nodes:
        if node.arguments.get("is_head"):
            last.append(node)
            before = node.inputs["x"].node
            while before.kind in ("norm", "take"):
                before = before.inputs["x"].node
            if before.kind in PRODUCTS:
                last.append(before)
    return last


def rows_wanted(node: Node) -> str:
    """A head's rows are fine ones, of 16 bits, and so are those of the product before it (`find_last`): they read many
    weights for few rows. Others are of 8 bits; matrices whose scales are whole numbers want them with such scales, too.
    A layer that is the last one of another model, too, keeps what it was packed for.
    """
    weight = node.arguments["weight"]
    keeps = weight.whole and not node.arguments.get("is_head")
    if node.arguments.get("is_last") and not weight.wants_f32 and not keeps:
        return "fine"
    return "whole" if weight.whole else "coarse"


def rows_of(node: Node) -> str:
    """How a node writes its rows of 8 or 16 bits, if anybody wants them."""
    rows: str = node.arguments.get("rows", "coarse")
    return rows


def writes_rows(value: Value, rows: str) -> bool:
    """Whether a value's maker can write such rows. It writes one kind: the first that was asked for."""
    node = value.node
    if node.kind not in WRITES_Q8 or rows == "fine":
        return False
    if node.kind == "attention" and (rows == "whole" or node.arguments["spec"].head_dim % BLOCK):
        return False  # it writes head by head, and the scales of a whole row come last
    return bool(node.arguments.setdefault("rows", rows) == rows)


def forms_read(node: Node, role: str) -> list[Form]:
    if node.kind not in PRODUCTS or role == "residual":
        return ["f32"]
    weight = node.arguments["weight"]
    if role == "x_q8":
        return ["q8"]
    forms: list[Form] = ["f32"] if weight.wants_f32 else []
    if weight.wants_q8 and "x_q8" not in node.inputs:
        forms.append("q8")
    return forms


# --- Instructions -----------------------------------------------------------------------------------------------------


def _embed(low: Lowering, program: Any, node: Node) -> None:
    program.embed(node.arguments["weight"], node.arguments["scale"], low.operand(node.out, "f32"))


def _norm(low: Lowering, program: Any, node: Node) -> None:
    program.norm(
        x=low.operand(node.inputs["x"], "f32"),
        weight=node.arguments["weight"],
        eps=node.arguments["eps"],
        residual=low.operand(node.inputs.get("residual"), "f32"),
        f32=low.operand(node.out, "f32"),
        q8=low.operand(node.out, "q8"),
        rows=rows_of(node),
    )


def _x(low: Lowering, node: Node) -> tuple[Operand | None, Operand | None]:
    weight = node.arguments["weight"]
    x = node.inputs["x"]
    f32 = low.operand(x, "f32") if weight.wants_f32 else None
    q8 = low.operand(node.inputs.get("x_q8", x), "q8") if weight.wants_q8 else None
    return f32, q8


def _linear(low: Lowering, program: Any, node: Node) -> None:
    f32, q8 = _x(low, node)
    program.linear(
        f32=f32,
        q8=q8,
        rows=rows_wanted(node),
        weight=node.arguments["weight"],
        bias=node.arguments["bias"],
        residual=low.operand(node.inputs.get("residual"), "f32"),
        softcap=node.arguments["softcap"] or 0.0,
        out=low.operand(node.out, "f32"),
    )


def _gated(low: Lowering, program: Any, node: Node) -> None:
    f32, q8 = _x(low, node)
    program.gated(
        f32=f32,
        q8=q8,
        rows=rows_wanted(node),
        weight=node.arguments["weight"],
        activation=node.arguments["activation"],
        out=low.operand(node.out, "f32"),
    )


def _attention(low: Lowering, program: Any, node: Node) -> None:
    spec = node.arguments["spec"]
    if spec.window is not None and spec.window < 1:
        raise EngineError(f"layer {spec.layer} has a window of {spec.window} keys; it must be at least 1")
    program.attention(
        qkv=low.operand(node.inputs["x"], "f32"),
        layer=spec.layer,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        rope=program.add_rope(spec.rope.inv_freq, spec.rope.style == "interleaved", spec.rope.scale),
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
        q_norm=spec.q_norm,
        k_norm=spec.k_norm,
        norm_eps=spec.norm_eps,
        f32=low.operand(node.out, "f32"),
        q8=low.operand(node.out, "q8"),
    )


def _take(low: Lowering, program: Any, node: Node) -> None:
    program.take(
        x=low.operand(node.inputs["x"], "f32"),
        width=node.out.width,
        f32=low.operand(node.out, "f32"),
        q8=low.operand(node.out, "q8"),
        rows=rows_of(node),
    )


def _quantize(low: Lowering, program: Any, node: Node) -> None:
    program.quantize(
        x=low.operand(node.inputs["x"], "f32"),
        width=node.out.width,
        q8=low.operand(node.out, "q8"),
        rows=rows_of(node),
    )


EMIT = {
    "embed": _embed,
    "norm": _norm,
    "linear": _linear,
    "gated": _gated,
    "attention": _attention,
    "take": _take,
    "quantize": _quantize,
}

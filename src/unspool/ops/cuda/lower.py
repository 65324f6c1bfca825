"""Lowering: a graph becomes kernels. Decides which operations are fused, and where intermediate results lie.

A layer of a plain decoder becomes five kernels: q, k and v with rotation and cache write; attention; the output
projection with residual, next norm's weight and sums of squares; gate and up with activation; down like the output.
A step has a body and a tail: in the last layer, from attention on, only rows whose logits are needed are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unspool.errors import BackendError
from unspool.ops import AttentionSpec, Rope
from unspool.ops.cuda import exact, general, row_parts, steps
from unspool.ops.cuda.attention import decode_attention_kernel, prompt_attention_kernel
from unspool.ops.cuda.geometry import (
    Rotations,
    depth_of,
    heads_of,
    is_fusable,
    kept_of,
    pairs_of,
    programs_each,
    prompt_rows,
    queries_of,
)
from unspool.ops.cuda.latent import join_rows_kernel
from unspool.ops.cuda.launch import Arena, Launch, descriptor, is_interpreted, multiprocessors, next_power
from unspool.ops.cuda.layout import Shared, Value, body_first
from unspool.ops.cuda.linear import squares_kernel
from unspool.ops.cuda.lower_experts import ExpertLowering
from unspool.ops.cuda.lower_latent import attention_launches, heads_launch, rows_launch
from unspool.ops.cuda.lower_states import conv_launch, recurrence_launch
from unspool.ops.cuda.matrix import DeviceMatrix
from unspool.ops.cuda.orders import gated_order, heads_order, rope_of
from unspool.ops.cuda.project import FEW, Projection, columns_left
from unspool.ops.cuda.rows import embed_kernel, heads_kernel, settle_kernel, take_kernel
from unspool.ops.graph import (
    Add,
    Arrange,
    Attention,
    Cut,
    Embed,
    Gated,
    Graph,
    Join,
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

REGISTERS = 65_536  # per multiprocessor
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GROUP = exact.GROUP.value
TAKEN = 16_384  # values of a row of queries that one kernel can copy together with a row of the stream
FUSED_ACTIVATIONS = ("silu", "gelu_tanh")  # of gated feed-forwards, fused with their product


class Lowering:
    """Lays out a step of one size: `body` for all rows, `tail` for the rows whose logits are needed. With `take_all`,
    logits are needed for every row, and the body contains all kernels."""

    def __init__(self, graph: Graph, shared: Shared, arena: Arena, rows: int, logits: int, *, take_all: bool) -> None:
        self.shared, self.arena, self.rows, self.logits, self.take_all = shared, arena, rows, logits, take_all
        self.body: list[Launch] = []
        self.tail: list[Launch] = []
        self._launches = self.body
        self._values: dict[Node, Value] = {}
        self._readers = graph.readers()
        self._reads_left = {node: len(readers) for node, readers in self._readers.items()}
        self._takes = [node for node in graph.nodes if isinstance(node, Take)]  # the tail also reads these
        self._ropes: list[Rope] = []
        for node in graph.nodes:
            rope = node.spec.rope if isinstance(node, Attention) else None
            if rope is not None and not any(rope is each for each in self._ropes):
                self._ropes.append(rope)
        self._halves: dict[Node, Tensor] = {}  # float32 rows, rounded to bf16 for the linear layers that read them
        self._released: list[Tensor] = []
        self._skipped = {node for sources, _ in shared.sources.values() for node in sources.skipped}
        at = steps.places(rows, len(shared.shapes), len(shared.kv.groups))
        self._at = {name: shared.step[place:] for name, place in at.items()}
        arena.reset()
        for node in body_first(graph):
            self._lower(node)
            while self._released:
                arena.give(self._released.pop())
        self.out = self._values[graph.output].data

    # Values and their memory ------------------------------------------------------------------------------------------
    def _next_norm(self, node: Node) -> Norm | None:
        """The norm through which a linear layer reads this node, if its producer can write what that layer needs."""
        for reader in self._readers[node]:
            if isinstance(reader, Norm) and reader.x is node and reader.residual is None:
                return reader
        return None

    def _use(self, node: Node) -> Value:
        """Read a value. After its last reader is lowered, its memory is free."""
        value = self._values[node]
        self._reads_left[node] -= 1
        if self._reads_left[node] == 0:
            shared = (*self.shared.handed.values(), self.shared.queries)
            made = (value.data, value.parts, self._halves.pop(node, None))
            served = [tensor for tensor in made if tensor is not None]
            self._released += [tensor for tensor in served if not any(tensor is each for each in shared)]
        return value

    def _use_half(self, node: Node) -> Value:
        """The value as the bf16 input of a linear layer."""
        value = self._values[node]
        if value.data.dtype == F32:
            if node not in self._halves:
                self._halves[node] = half = self.arena.take(self.rows, node.width, BF16)
                self._by_columns(general.combine_kernel, node.width, self._combining(value.data, half), label="round")
            value = replace(value, data=self._halves[node])
        self._use(node)
        return value

    def _feeds_products(self, node: Node) -> bool:
        """Whether only linear layers and experts read this node; they then get bf16."""
        kinds = Product | Moe | LinearHeads
        return all(isinstance(reader, kinds) and reader.x is node for reader in self._readers[node])

    def _rows(self, node: Node) -> Tensor:
        """The buffer for a node's float32 rows."""
        if node in self.shared.handed and not self.take_all:
            return self.shared.handed[node]
        return self.arena.take(self.rows, node.width, F32)

    def _result(self, node: Node) -> Tensor:
        """The buffer for a node's rows, in the dtype that its readers need."""
        out = self._rows(node) if not self._feeds_products(node) else self.arena.take(self.rows, node.width, BF16)
        self._values[node] = Value(out)
        return out

    def _by_columns(self, kernel: Any, width: int, args: dict[str, Any], label: str) -> None:
        block = min(next_power(width), 1024)
        grid, size = (self.rows, -(-width // block)), {"size": width, "B": block}
        self._add(kernel, grid, args | size, label=label, bytes=self.rows * width * 8)

    def _combining(self, x: Tensor, out: Tensor, **changes: Any) -> dict[str, Any]:
        nothing = {"residual": None, "factor": 1.0, "softcap": None, "ACTIVATION": None}
        return nothing | changes | {"x": x, "out": out}

    def _add(self, kernel: Any, grid: tuple[int, ...], args: dict[str, Any], **options: Any) -> None:
        self.add(Launch(kernel, grid, args, **options))

    # For nodes that other modules lower
    # ---------------------------------------------------------------------------------
    def add(self, launch: Launch) -> None:
        self._launches.append(launch)

    def release(self, *tensors: Tensor) -> None:
        """Free these tensors after this node."""
        self._released += tensors

    def row_slots(self) -> Tensor | None:
        """The slots of the rows' keys; -1 for padding rows. None in the tail, whose rows are taken rows."""
        return self._at["slots"] if self._launches is self.body else None

    # One node --------------------------------------------------------------------------------------------------------
    def _lower(self, node: Node) -> None:
        match node:
            case _ if node in self._skipped:
                return
            case Embed():
                self._embed(node)
            case Norm() if node in self._values:  # the producer of the stream has already written it
                self._use(node.x)
            case Norm() if node.residual is not None:
                self._settle(node)
            case Norm() | LayerNorm():
                self._norm(node)
            case Linear():
                self._linear(node)
            case Gated():
                self._gated(node)
            case Attention():
                self._attend(node)
            case Take():
                self._take(node)
            case Multiply():
                self._multiply(node)
            case Arrange():
                self._arrange(node)
            case Moe():
                self._experts(node)
            case ScaleRows():
                self._scale_rows(node)
            case Add() | Cut() | Level() | Mix():
                inputs = {role: self._use(source).data for role, source in node.inputs.items()}
                self.add(row_parts.launch_of(node, self.rows, inputs, self._result(node)))
            case Logits():
                self._logits(node)
            case LinearHeads():
                self._linear_heads(node)
            case Join():
                self._join(node)
            case ShortConv():
                self._short_conv(node)
            case Recurrence():
                self._recurrence(node)
            case _:
                raise BackendError(f"the CUDA backend has no kernel for {node!r}")

    def _stream_args(self, node: Node, size: int) -> dict[str, Any]:
        """What a producer of the stream also writes: the next linear layer's input, if a norm comes next."""
        norm = self._next_norm(node)
        if norm is None:
            return {"scaled": None, "next_weight": None, "next_parts": None}
        scaled = self.arena.take(self.rows, size, BF16)
        parts = self.arena.take(self.rows, -(-size // GROUP), F32)  # read as [group, row]
        self._values[norm] = Value(scaled, parts, norm.eps)
        return {"scaled": scaled, "next_weight": norm.weight, "next_parts": parts}

    def _embed(self, node: Embed) -> None:
        matrix, size = matrix_of(node), node.width
        out = self._stream(node, size)
        self.rotations = Rotations(self._ropes, self.rows, self.arena)
        args = {
            "ids": self._at["ids"],
            "sources": self._at["sources"],
            "sampled": self.shared.sampled,
            "positions": self._at["positions"],
            "codes": matrix.planes.codes,
            "scales": matrix.planes.scales,
            "offsets": matrix.planes.offsets,
            "factor": float(node.scale),
            "out": out,
            "num_rows": self.rows,
            "vocab_size": matrix.out_features,
            "FORMAT": matrix.format,
            "WIDTH": matrix.planes.width,
            "size": size,
            "D": max(next_power(size), GROUP),
        }
        has_positions = node.positions is not None
        nothing = dict.fromkeys(("scaled", "next_weight", "next_parts"))
        args |= self.rotations.args() | (nothing if has_positions else self._stream_args(node, size))
        self._add(embed_kernel, (self.rows, 2), args, label="embed", bytes=self.rows * size * 8)
        self._launches += self.rotations.launches(self._at["positions"])
        if has_positions:
            self._add_positions(node, out)

    def _add_positions(self, node: Embed, out: Tensor) -> None:
        assert isinstance(node.positions, DeviceMatrix)
        planes, size = node.positions.planes, node.width
        args = {"x": out, "out": out, "positions": self._at["positions"], "num_positions": node.positions.out_features}
        args |= {"codes": planes.codes, "scales": planes.scales, "offsets": planes.offsets}
        args |= {"FORMAT": node.positions.format, "WIDTH": planes.width, "size": size}
        self._add(general.positions_kernel, (self.rows,), args | {"D": max(next_power(size), GROUP)}, label="positions")

    def _stream(self, node: Node, size: int) -> Tensor:
        out = self._rows(node)
        self._values[node] = Value(out)
        return out

    def _is_for_tail(self, node: Node) -> bool:
        """Whether the tail reads this node of the body. The tail is laid out separately and needs a fixed address."""
        if self.take_all or node.narrow:
            return False
        return any(reader.narrow for reader in self._readers[node])

    def _settle(self, node: Norm) -> None:
        """A norm of a block's own output, before it is added to the stream."""
        assert node.residual is not None
        x, residual = self._use(node.x).data, self._use(node.residual).data
        size = x.shape[1]
        args = {"x": x, "eps": node.eps, "weight": node.weight, "residual": residual, "out": self._stream(node, size)}
        args |= self._stream_args(node, size)
        args |= {"num_rows": self.rows, "size": size, "D": max(next_power(size), GROUP)}
        self._add(settle_kernel, (self.rows,), args, label="norm", bytes=self.rows * size * 12)

    def _norm(self, node: Norm | LayerNorm) -> None:
        """A norm that is not fused with a linear layer."""
        x, size = self._use(node.x).data, node.width
        residual = None if node.residual is None else self._use(node.residual).data
        args = {"x": x, "weight": node.weight, "eps": node.eps, "residual": residual, "out": self._result(node)}
        args |= {"bias": node.bias if isinstance(node, LayerNorm) else None, "CENTERED": isinstance(node, LayerNorm)}
        args |= {"size": size, "D": max(next_power(size), GROUP)}
        self._add(general.norm_kernel, (self.rows,), args, label="norm", bytes=self.rows * size * 8)

    def _multiply(self, node: Multiply) -> None:
        x, gate, size = self._use(node.x).data, self._use(node.gate).data, node.width
        args = {"x": x, "gate": gate, "out": self._result(node), "X_STRIDE": size, "GATE_STRIDE": size}
        self._by_columns(general.join_kernel, size, args | {"ACTIVATION": node.activation}, label="multiply")

    def _arrange(self, node: Arrange) -> None:
        args = {"x": self._use(node.x).data, "weight": node.weight, "eps": node.eps, "out": self._result(node)}
        args |= {"table": self.shared.parts_of(node), "X_SIZE": node.x.width, "OUT_SIZE": node.width}
        depth = max(next_power(max(part.width for part in node.parts)), GROUP)
        self._add(general.arrange_kernel, (self.rows, len(node.parts)), args | {"D": depth}, label="arrange")

    def _experts(self, node: Moe) -> None:
        x, scores = self._use_half(node.x), self._use(node.scores).data
        residual = None if node.residual is None else self._values[node.residual].data
        out = self._stream(node, node.width)
        ExpertLowering(self, node).launch(x, scores, residual, out, self._stream_args(node, node.width))
        if node.residual is not None:
            self._use(node.residual)

    def _scale_rows(self, node: ScaleRows) -> None:
        residual = None if node.residual is None else self._use(node.residual).data
        args = {"x": self._use(node.x).data, "logit": self._use(node.logit).data, "residual": residual}
        self._by_columns(general.scale_rows_kernel, node.width, args | {"out": self._result(node)}, label="scale-rows")

    def _logits(self, node: Logits) -> None:
        out, is_scaled = self.arena.take(self.logits, node.width, F32), node.scale != 1
        self._values[node] = Value(out)
        softcap = None if is_scaled else node.softcap
        x = self._use_half(node.x)
        self._project(matrix_of(node), x, out, "plain", bias=node.bias, softcap=softcap, label="head")
        if is_scaled:
            args = self._combining(out, out, factor=float(node.scale), softcap=node.softcap)
            self._by_columns(general.combine_kernel, node.width, args, label="scale")

    def _take(self, node: Take) -> None:
        if self.take_all:  # an alias: readers of this node read that one
            self._values[node] = self._values[node.x]
            self._reads_left[node.x] += self._reads_left[node] - 1
        elif node not in self._values:  # the last layer has no attention
            self._enter_tail()
            self._take_handed(self._takes)

    def _linear(self, node: Linear) -> None:
        readers = self._readers[node]
        is_usual = node.activation is None and node.scale == 1
        if node.residual is not None and is_usual:
            self._add_to_stream(node, node.residual)
        elif is_usual and len(readers) == 1 and isinstance(readers[0], Attention) and is_fusable(readers[0].spec):
            self._heads(node, readers[0].spec, self._use_half(node.x))
        else:
            self._plain(node)

    def _add_to_stream(self, node: Linear, stream: Node) -> None:
        x, residual = self._use_half(node.x), self._values[stream].data
        out = self._stream(node, node.width)
        more = self._stream_args(node, node.width)
        norm = self._next_norm(node)
        is_output = norm is not None and any(isinstance(reader, Gated) for reader in self._readers[norm])
        left = columns_left("output" if is_output else "down", self.rows)
        self._project(matrix_of(node), x, out, "stream", bias=node.bias, residual=residual, more=more, left=left)
        self._use(stream)

    def _plain(self, node: Linear) -> None:
        """A linear layer, followed by its activation or other scaling in a separate kernel."""
        x, is_usual = self._use_half(node.x), node.activation is None and node.scale == 1
        out = self._rows(node) if is_usual else self.arena.take(self.rows, node.width, F32)
        self._project(matrix_of(node), x, out, "plain", bias=node.bias)
        if is_usual:
            self._values[node] = Value(out)
            return
        residual = None if node.residual is None else self._use(node.residual).data
        changes = {"residual": residual, "factor": float(node.scale), "ACTIVATION": node.activation}
        args = self._combining(out, self._result(node), **changes)
        self._by_columns(general.combine_kernel, node.width, args, label="after")
        self._released.append(out)

    def _heads(self, node: Linear, spec: AttentionSpec, x: Value) -> None:
        order, matrix = heads_order(spec), matrix_of(node)
        matrix.arrange(f"heads-{spec.head_dim}-{rope_of(spec).style}-{pairs_of(spec)}", order)
        bias = node.bias
        if bias is not None:
            bias = bias[torch.from_numpy(order).to(bias.device)].contiguous()
        q = self._queries(spec, for_tail=self._is_for_tail(node))
        self._values[node] = Value(q)
        kv = self.shared.kv
        detail = (*heads_of(spec)[:3], pairs_of(spec), kv.block_size)
        more = self.rotations.of(spec) | {"slots": self._slots_of(spec), "kv": kv.layer(spec.layer)}
        self._project(matrix, x, q, "heads", bias=bias, detail=detail, more=more, left=columns_left("heads", self.rows))

    def _slots_of(self, spec: AttentionSpec) -> Tensor:
        """The rows' slots in the blocks of the layer's group."""
        return self._at[steps.slots_of(self.shared.kv.group_of[spec.layer])]

    def _queries(self, spec: AttentionSpec, *, for_tail: bool) -> Tensor:
        return self.shared.queries if for_tail else self.arena.take(self.rows, queries_of(spec), F16)

    def _gated(self, node: Gated) -> None:
        matrix, features = matrix_of(node), 2 * node.width
        if node.bias is not None or node.activation not in FUSED_ACTIVATIONS:
            return self._gate_apart(node)
        matrix.arrange("gated", gated_order(features))
        out = self.arena.take(self.rows, node.width, BF16)
        has_rest = features > 128 * multiprocessors()  # some programs start only after others have ended
        left = columns_left("gated", self.rows) if has_rest else 0
        self._project(matrix, self._use_half(node.x), out, "gated", detail=node.activation, left=left)
        self._values[node] = Value(out)
        return None

    def _gate_apart(self, node: Gated) -> None:
        """Compute gate and up projection into one tensor, then join them in a separate kernel."""
        both = self.arena.take(self.rows, 2 * node.width, F32)
        self._project(matrix_of(node), self._use_half(node.x), both, "plain", bias=node.bias)
        args = {"x": both.view(-1)[node.width :], "gate": both, "out": self._result(node)}
        args |= {"X_STRIDE": 2 * node.width, "GATE_STRIDE": 2 * node.width, "ACTIVATION": node.activation}
        self._by_columns(general.join_kernel, node.width, args, label="gate")
        self._released.append(both)

    def _project(
        self,
        matrix: DeviceMatrix,
        x: Value,
        out: Tensor,
        epilogue: str,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        softcap: float | None = None,
        detail: Any = None,
        more: dict[str, Any] | None = None,
        left: int = 0,
        label: str = "",
    ) -> None:
        """One linear layer and its epilogue. `left`: see LEFT; 0: the next kernel may start at the end."""
        layer = Projection(matrix, self.rows)
        parts = 0 if x.parts is None else -(-matrix.in_features // GROUP)
        if parts and layer.is_many:
            x, parts = replace(x, parts=self._squares(x, parts)), 1
        names = ("scaled", "next_weight", "next_parts", "cos", "sin", "slots", "kv")
        after: dict[str, Any] = dict.fromkeys(names) | (more or {})
        after |= {"parts": x.parts, "inverse_size": 1.0 / matrix.in_features, "eps": x.eps, "softcap": softcap}
        after |= {"bias": bias, "residual": residual, "out": out, "EPILOGUE": epilogue, "DETAIL": detail}
        room = (self.shared.partial, self.shared.arrivals)
        self._launches.append(layer.launch(x.data, parts, *room, after, left, label or epilogue))

    def _squares(self, x: Value, parts: int) -> Tensor:
        """Each row's sum of squares, for kernels of many tokens; otherwise each of their tiles would add the groups'
        sums."""
        out = self.arena.take(self.rows, 1, F32)
        self._released.append(out)
        args = {"parts": x.parts, "out": out, "num_tokens": self.rows, "PARTS": parts, "T": 128}
        self._add(squares_kernel, (-(-self.rows // 128),), args, label="squares", bytes=4 * parts * self.rows)
        return out

    def _attend(self, node: Attention) -> None:
        spec, shared = node.spec, self.shared
        kv, x = shared.kv, None if spec.latent else self._use(node.x).data
        q, is_late = x, node.narrow and not self.take_all
        if q is None or q.dtype != F16:
            q = self._queries(spec, for_tail=is_late)
            if spec.latent:
                self._latent_rows(node, q)
            else:
                self._norm_heads(spec, x, q)
            if not is_late:
                self._released.append(q)
        if is_late:
            self._enter_tail()
            q = self._take_queries()
            self._released.append(q)
        out = self.arena.take(self.rows, node.width, BF16)
        self._values[node] = Value(out)
        has_prompts = not self.take_all and not is_late
        has_prompts = has_prompts and self.rows * (spec.num_heads // heads_of(spec)[1]) > steps.FEW_ROWS
        if spec.latent:
            self._launches += attention_launches(
                spec, q, out, shared, self.rows, is_late=is_late, has_prompts=has_prompts
            )
            return
        depth, kind, kept = depth_of(spec), shared.kinds[heads_of(spec)], kept_of(spec)
        layer, decode_rows, items = kv.layer(spec.layer), shared.shapes[kind].decode_rows, steps.HEADER * kind
        tiles = None
        if kv.block_size % steps.KEYS == 0 and depth == kept:
            tiles = descriptor(layer.view(-1, kept), steps.KEYS, kept)
        args = {"q": q, "kv": layer, "kv_tiles": tiles, "out": out, "step": shared.step}
        args |= {"scale": float(spec.scale), "softcap": spec.softcap, "sinks": spec.sinks}
        args |= {"HEADS": spec.num_heads, "KV_HEADS": spec.num_kv_heads, "HEAD_DIM": kept, "D": depth}
        args |= {"BLOCK_SIZE": kv.block_size, "WINDOW": spec.window or 0, "N": steps.KEYS, "SPLIT": steps.SPLIT}
        args |= {"VALUE_DIM": spec.value_dim, "TABLE": shared.table_of(spec)}
        partial = shared.attention_partial[kind]
        few = {"partial": partial, "capacity": partial.shape[1], "T": decode_rows, "THREADS": 128}
        few["header"] = shared.step[items + (steps.LAST_ITEMS if is_late else steps.FEW_ITEMS) :]
        few |= {"BEFORE": 0, "BATCH": 1, "kv_pairs": None, "ALONE": is_interpreted()}
        # With so few rows most multiprocessors are idle, and the next kernel's programs would occupy them at once, two
        # on each of some. When all idle ones are free they spread evenly: with one row early, with more rows after the
        # tiles.
        few["LET"] = 0 if depth <= 64 or self.rows > 4 else 1 if self.rows == 1 else 2
        each, stages = programs_each(spec, decode_rows), 3 if depth <= 128 else 2
        if self.rows <= FEW and tiles is not None and depth <= 128 and decode_rows <= 32:
            few["BEFORE"] = stages - 1
            # Two tiles at once need twice the memory, so half as many programs fit, which is enough for so few rows.
            if kv.block_size % (2 * steps.KEYS) == 0 and (depth <= 64 or self.rows <= 2):
                few |= {"BATCH": 2, "kv_pairs": descriptor(layer.view(-1, depth), 2 * steps.KEYS, depth)}
                each = max(each // 2, 1)
        programs = 1 if few["ALONE"] else multiprocessors() * each
        room = {"warps": 4, "stages": stages, "registers": min(REGISTERS // (128 * each), 255)}
        self._add(decode_attention_kernel, (programs,), args | few, **room, label="attention")
        if has_prompts:
            many = {"M": prompt_rows(spec), "header": shared.step[items + steps.MANY_ITEMS :]}
            programs = multiprocessors() * (1 if depth > 64 else 2)
            self._add(
                prompt_attention_kernel, (programs,), args | many, warps=8, stages=stages, label="attention-prompt"
            )

    def _enter_tail(self) -> None:
        """Continue with only the rows whose logits are needed."""
        if not self._takes or self._launches is self.tail:
            raise BackendError("the CUDA backend runs models whose last layer has no more than one attention")
        self._launches, self.rows = self.tail, self.logits

    def _take_handed(self, takes: Sequence[Take]) -> None:
        """Copy the needed rows from the tensors that the body has written for the tail."""
        for take in takes:
            self._values[take] = Value(self.arena.take(self.rows, take.width, F32))
            self._take_rows(self.shared.handed[take.x], self._values[take].data)

    def _take_queries(self) -> Tensor:
        """The same, together with the needed rows of the last layer's queries."""
        queries, takes = self.shared.queries, self._takes
        q = self.arena.take(self.rows, queries.shape[1], F16)
        if queries.shape[1] > TAKEN:
            self._take_rows(queries, q)
            self._take_handed(takes)
            return q
        first, *others = takes
        self._values[first] = Value(self.arena.take(self.rows, first.width, F32))
        sizes = {"Q_SIZE": queries.shape[1], "SIZE": first.width}
        args = {"step": self.shared.step, "q": queries, "x": self.shared.handed[first.x]}
        args |= {"q_taken": q, "x_taken": self._values[first].data, "LOGIT_ROWS": steps.LOGIT_ROWS}
        cost = self.rows * (8 * first.width + 4 * queries.shape[1])
        args |= sizes | {"D": next_power(max(sizes.values()))}
        self._add(take_kernel, (self.rows,), args, label="take", bytes=cost)
        self._take_handed(others)
        return q

    def _take_rows(self, x: Tensor, out: Tensor) -> None:
        args = {"step": self.shared.step, "x": x, "out": out, "LOGIT_ROWS": steps.LOGIT_ROWS}
        self._by_columns(general.take_rows_kernel, x.shape[1], args, label="take")

    def _latent_rows(self, node: Attention, q: Tensor) -> None:
        sources, table = self.shared.sources[node]
        values = [self._use(each).data for each in sources.nodes]
        more = self.rotations.of(node.spec) | {"slots": self._slots_of(node.spec), "positions": self._at["positions"]}
        self.add(rows_launch(node.spec, sources, values, table, q, self.shared, more, self.rows))

    def _linear_heads(self, node: LinearHeads) -> None:
        x = self._use_half(node.x).data
        self.add(heads_launch(node, x, self._result(node), self.rows))

    def _join(self, node: Join) -> None:
        args = {"x": self._use(node.x).data, "y": self._use(node.y).data, "out": self._result(node)}
        self._by_columns(join_rows_kernel, node.width, args | {"X": node.x.width, "Y": node.y.width}, label="join")

    def _short_conv(self, node: ShortConv) -> None:
        x, states = self._use(node.x).data, self.shared.kv.state(node.spec.layer, node.spec.state)
        self.add(conv_launch(node.spec, x, states, self._result(node), self.shared.step, self.rows))

    def _recurrence(self, node: Recurrence) -> None:
        x, gates = self._use(node.x).data, self._use(node.gates).data
        states = self.shared.kv.state(node.spec.layer, node.spec.state)
        self.add(recurrence_launch(node.spec, x, gates, states, self._result(node), self.shared.step, self.rows))

    def _norm_heads(self, spec: AttentionSpec, qkv: Tensor, q: Tensor) -> None:
        kv = self.shared.kv
        k_norm = spec.k_norm if spec.stores else spec.q_norm  # unused without keys, but it must be a pointer
        args = {"qkv": qkv, "q_norm": spec.q_norm, "k_norm": k_norm, "eps": spec.norm_eps, "q": q}
        args |= self.rotations.of(spec) | {"slots": self._slots_of(spec), "kv": kv.layer(spec.layer)}
        args |= {"HEADS": spec.num_heads, "KV_HEADS": spec.num_kv_heads, "HEAD_DIM": spec.head_dim}
        args |= {"VALUE_DIM": spec.value_dim, "KEPT": kept_of(spec)}
        args |= {"ROPE_PAIRS": pairs_of(spec), "BLOCK_SIZE": kv.block_size, "ROW": spec.row_width}
        args |= {"INTERLEAVED": spec.rope is not None and spec.rope.style == "interleaved"}
        args |= {"positions": self._at["positions"], "GROWTH": float(spec.growth), "PERIOD": spec.period}
        grid = (self.rows, spec.num_heads + (2 * spec.num_kv_heads if spec.stores else 0))
        self._add(heads_kernel, grid, args | {"D": next_power(kept_of(spec))}, warps=1, label="heads")


def matrix_of(node: Embed | Product) -> DeviceMatrix:
    assert isinstance(node.matrix, DeviceMatrix)
    return node.matrix

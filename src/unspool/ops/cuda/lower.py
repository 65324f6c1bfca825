"""Lowering: a graph becomes kernels. What is fused with what, and where results lie in between.

A layer of a plain decoder becomes five kernels: q, k and v with rotation and cache write; attention; the output
projection with residual, next norm's weight and sums of squares; gate and up with activation; down like the output.
A step has a body and a tail: in the last layer, from attention on, rows whose logits nobody wants are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.errors import BackendError
from unspool.ops import AttentionSpec
from unspool.ops.cuda import exact, steps
from unspool.ops.cuda.attention import decode_attention_kernel, prompt_attention_kernel
from unspool.ops.cuda.body_kv import CudaKV
from unspool.ops.cuda.launch import Arena, Launch, descriptor, is_interpreted, multiprocessors, next_power
from unspool.ops.cuda.linear import squares_kernel
from unspool.ops.cuda.matrix import DeviceMatrix
from unspool.ops.cuda.orders import gated_order, heads_order, rope_of
from unspool.ops.cuda.project import Projection
from unspool.ops.cuda.rows import embed_kernel, heads_kernel, settle_kernel, take_kernel
from unspool.ops.graph import Attention, Embed, Gated, Graph, Linear, Logits, Node, Norm, Product, Take

FEW, SOME = 8, 32  # rows: up to the first what lies between kernels counts
# Columns that a linear layer, of few rows, of some or of more, has yet to come when it lets the next kernel in. Later,
# and that one's first weights come late; earlier, and its programs take the free multiprocessors two to a pair, which
# shares its way to memory.
LEFT = {"heads": 2560, "output": 1536, "gated": 256, "down": 1536}
LEFT_OF_SOME = {"heads": 1536, "output": 768, "gated": 0, "down": 768}
LEFT_OF_MORE = {"heads": 1024, "output": 1536, "gated": 0, "down": 0}
REGISTERS = 65_536  # of a multiprocessor
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GROUP = exact.GROUP.value


@dataclass(frozen=True)
class Value:
    """A node's result. `parts` and `eps` come with an input that is yet to be divided by its root mean square:
    sums of squares, [group, row]."""

    data: Tensor
    parts: Tensor | None = None
    eps: float = 0.0


@dataclass
class Shared:
    """What every layout of one model uses: the step's array, sampled tokens, rotations, room for partial sums."""

    kv: CudaKV
    step: Tensor  # int32, see steps.py
    sampled: Tensor  # int32: the last step's tokens
    partial: Tensor  # float32: linear layers' splits
    arrivals: Tensor  # int32
    attention_partial: Tensor  # float32 [kv heads, capacity, D + MORE]: attention's splits (handover.py)
    decode_rows: int  # query rows of an item of few
    stream: Tensor  # float32: where a body leaves the stream for the tail, which takes some rows of it
    queries: Tensor  # f16: and the last layer's queries


class Lowering:
    """Lays out one number of rows: `body` for all of them, `tail` for those whose logits are wanted. With `take_all`
    that is every row, and the body goes on to the end."""

    def __init__(self, graph: Graph, shared: Shared, arena: Arena, rows: int, logits: int, *, take_all: bool) -> None:
        self.shared, self.arena, self.rows, self.logits, self.take_all = shared, arena, rows, logits, take_all
        self.body: list[Launch] = []
        self.tail: list[Launch] = []
        self._launches = self.body
        self._values: dict[Node, Value] = {}
        self._readers = graph.readers()
        self._reads_left = {node: len(readers) for node, readers in self._readers.items()}
        self._takes = [node for node in graph.nodes if isinstance(node, Take)]  # what the last attention has beside it
        self._ropes: list[Any] = []
        for node in graph.nodes:
            if isinstance(node, Attention) and not any(node.spec.rope is rope for rope in self._ropes):
                self._ropes.append(node.spec.rope)
        self._released: list[Tensor] = []
        at = steps.places(rows)
        self._at = {name: shared.step[place:] for name, place in at.items()}
        arena.reset()
        for node in graph.nodes:
            self._lower(node)
            while self._released:
                arena.give(self._released.pop())
        self.out = self._values[graph.output].data

    # Looking ---------------------------------------------------------------------------------------------------------
    def _next_norm(self, node: Node) -> Norm | None:
        """The norm that a linear layer reads this through, if its producer can write what that layer needs."""
        for reader in self._readers[node]:
            if isinstance(reader, Norm) and reader.x is node and reader.residual is None:
                return reader
        return None

    def _use(self, node: Node) -> Value:
        """A value, for the last or an earlier time; after the last, and after this node, its memory is free again."""
        value = self._values[node]
        self._reads_left[node] -= 1
        if self._reads_left[node] == 0:
            shared = (self.shared.stream, self.shared.queries)
            served = [tensor for tensor in (value.data, value.parts) if tensor is not None]
            self._released += [tensor for tensor in served if not any(tensor is each for each in shared)]
        return value

    def _add(self, kernel: Any, grid: tuple[int, ...], args: dict[str, Any], **options: Any) -> None:
        self._launches.append(Launch(kernel, grid, args, **options))

    # One node --------------------------------------------------------------------------------------------------------
    def _lower(self, node: Node) -> None:
        match node:
            case Embed():
                self._embed(node)
            case Norm():
                if node in self._values:  # whoever made the stream made this too
                    self._use(node.x)
                else:
                    self._settle(node)
            case Linear():
                self._linear(node)
            case Gated():
                self._gated(node)
            case Attention():
                self._attend(node)
            case Take():
                self._take(node)
            case Logits():
                out = self.arena.take(self.logits, node.width, F32)
                self._project(matrix_of(node), self._use(node.x), out, "plain", softcap=node.softcap, label="head")
                self._values[node] = Value(out)
            case _:
                raise BackendError(f"the CUDA backend has no kernel for {node!r}")

    def _stream_args(self, node: Node, size: int) -> dict[str, Any]:
        """What a producer of the stream writes besides it: the next linear layer's input, if a norm comes next."""
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
        self.rotations = _Rotations(self._ropes, self.rows, self.arena)
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
        args |= self.rotations.args() | self._stream_args(node, size)
        self._add(embed_kernel, (self.rows, 2), args, label="embed", bytes=self.rows * size * 8)

    def _stream(self, node: Node, size: int) -> Tensor:
        out = self.shared.stream if self._is_for_tail(node) else self.arena.take(self.rows, size, F32)
        self._values[node] = Value(out)
        return out

    def _is_for_tail(self, node: Node) -> bool:
        """Whether the body makes this for the tail, which is laid out by itself and must know where it is."""
        if self.take_all or node.narrow:
            return False
        return any(reader.narrow for reader in self._readers[node])

    def _settle(self, node: Norm) -> None:
        """A norm of a block's own output, before the stream is added."""
        if node.residual is None:
            raise BackendError("the CUDA body norms a stream once, or what is added to one")
        x, residual = self._use(node.x).data, self._use(node.residual).data
        size = x.shape[1]
        args = {"x": x, "eps": node.eps, "weight": node.weight, "residual": residual, "out": self._stream(node, size)}
        args |= self._stream_args(node, size)
        args |= {"num_rows": self.rows, "size": size, "D": max(next_power(size), GROUP)}
        self._add(settle_kernel, (self.rows,), args, label="norm", bytes=self.rows * size * 12)

    def _take(self, node: Take) -> None:
        if self.take_all:  # an alias: whoever reads this reads that
            self._values[node] = self._values[node.x]
            self._reads_left[node.x] += self._reads_left[node] - 1
        elif node not in self._values:
            raise BackendError("the CUDA body takes wanted rows at the last layer's attention, and nowhere before")

    def _linear(self, node: Linear) -> None:
        x = self._use(node.x)
        matrix, features = matrix_of(node), node.width
        readers = self._readers[node]
        if node.residual is not None:
            residual = self._values[node.residual].data
            out = self._stream(node, features)
            more = self._stream_args(node, features)
            norm = self._next_norm(node)
            is_output = norm is not None and any(isinstance(reader, Gated) for reader in self._readers[norm])
            left = self._columns_left("output" if is_output else "down")
            self._project(matrix, x, out, "stream", bias=node.bias, residual=residual, more=more, left=left)
            self._use(node.residual)
        elif len(readers) == 1 and isinstance(readers[0], Attention) and is_fusable(readers[0].spec):
            self._heads(node, readers[0].spec, x)
        else:
            out = self.arena.take(self.rows, features, F32)
            self._values[node] = Value(out)
            self._project(matrix, x, out, "plain", bias=node.bias)

    def _heads(self, node: Linear, spec: AttentionSpec, x: Value) -> None:
        order, matrix = heads_order(spec), matrix_of(node)
        matrix.arrange(f"heads-{spec.head_dim}-{rope_of(spec).style}-{len(rope_of(spec).inv_freq)}", order)
        bias = node.bias
        if bias is not None:
            bias = bias[torch.from_numpy(order).to(bias.device)].contiguous()
        q = self._queries(spec, for_tail=self._is_for_tail(node))
        self._values[node] = Value(q)
        kv = self.shared.kv
        detail = (spec.num_heads, spec.num_kv_heads, spec.head_dim, len(rope_of(spec).inv_freq), kv.block_size)
        more = self.rotations.of(spec) | {"slots": self._at["slots"], "kv": kv.layer(spec.layer)}
        self._project(matrix, x, q, "heads", bias=bias, detail=detail, more=more, left=self._columns_left("heads"))

    def _queries(self, spec: AttentionSpec, *, for_tail: bool) -> Tensor:
        return self.shared.queries if for_tail else self.arena.take(self.rows, spec.num_heads * spec.head_dim, F16)

    def _gated(self, node: Gated) -> None:
        matrix, features = matrix_of(node), 2 * node.width
        matrix.arrange("gated", gated_order(features))
        out = self.arena.take(self.rows, node.width, BF16)
        has_rest = features > 128 * multiprocessors()  # some programs start when others have ended
        left = self._columns_left("gated") if has_rest else 0
        self._project(matrix, self._use(node.x), out, "gated", detail=node.activation, left=left)
        self._values[node] = Value(out)

    def _columns_left(self, kind: str) -> int:
        return (LEFT if self.rows <= FEW else LEFT_OF_SOME if self.rows <= SOME else LEFT_OF_MORE)[kind]

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
        """One linear layer and what follows. `left`: see LEFT; 0: the next kernel is let in at the end."""
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
        """Each row's sum of squares, for kernels of many tokens: every tile of theirs would add its groups' sums."""
        out = self.arena.take(self.rows, 1, F32)
        self._released.append(out)
        args = {"parts": x.parts, "out": out, "num_tokens": self.rows, "PARTS": parts, "T": 128}
        self._add(squares_kernel, (-(-self.rows // 128),), args, label="squares", bytes=4 * parts * self.rows)
        return out

    def _attend(self, node: Attention) -> None:
        spec, shared = node.spec, self.shared
        kv, x = shared.kv, self._use(node.x).data
        q, is_late = x, node.narrow and not self.take_all
        if x.dtype == F32:
            q = self._queries(spec, for_tail=is_late)
            self._norm_heads(spec, x, q)
            if not is_late:
                self._released.append(q)
        if is_late:
            q = self._narrow(node)
            self._released.append(q)
        out = self.arena.take(self.rows, spec.num_heads * spec.head_dim, BF16)
        self._values[node] = Value(out)
        depth = depth_of(spec)
        layer = kv.layer(spec.layer)
        tiles = None
        if kv.block_size % steps.KEYS == 0 and depth == spec.head_dim:
            tiles = descriptor(layer.view(-1, spec.head_dim), steps.KEYS, spec.head_dim)
        args = {"q": q, "kv": layer, "kv_tiles": tiles, "out": out, "step": shared.step}
        args |= {"scale": float(spec.scale), "softcap": spec.softcap}
        args |= {"HEADS": spec.num_heads, "KV_HEADS": spec.num_kv_heads, "HEAD_DIM": spec.head_dim, "D": depth}
        args |= {"BLOCK_SIZE": kv.block_size, "WINDOW": spec.window or 0, "N": steps.KEYS, "SPLIT": steps.SPLIT}
        args |= {"TABLE": steps.TABLES}
        partial = shared.attention_partial
        few = {"partial": partial, "capacity": partial.shape[1], "T": shared.decode_rows, "THREADS": 128}
        few["told"] = shared.step[steps.LAST_ITEMS if is_late else steps.FEW_ITEMS :]
        few |= {"BEFORE": 0, "BATCH": 1, "kv_pairs": None, "ALONE": is_interpreted()}
        # With so few rows most multiprocessors have nothing to do, and the next kernel's programs would come to them at
        # once, two to a pair; when all of those are free, they spread: with one row soon, with more after the tiles.
        few["LET"] = 0 if depth <= 64 or self.rows > 4 else 1 if self.rows == 1 else 2
        each, stages = programs_each(depth, shared.decode_rows), 3 if depth <= 128 else 2
        if self.rows <= FEW and tiles is not None and depth <= 128 and shared.decode_rows <= 32:
            few["BEFORE"] = stages - 1
            # Two tiles at once take twice the memory: for so few rows that half of the programs will do.
            if kv.block_size % (2 * steps.KEYS) == 0 and (depth <= 64 or self.rows <= 2):
                few |= {"BATCH": 2, "kv_pairs": descriptor(layer.view(-1, depth), 2 * steps.KEYS, depth)}
                each = max(each // 2, 1)
        programs = 1 if few["ALONE"] else multiprocessors() * each
        room = {"warps": 4, "stages": stages, "registers": min(REGISTERS // (128 * each), 255)}
        self._add(decode_attention_kernel, (programs,), args | few, **room, label="attention")
        if not self.take_all and not is_late and self.rows * (spec.num_heads // spec.num_kv_heads) > steps.FEW_ROWS:
            many = {"M": prompt_rows(depth), "told": shared.step[steps.MANY_ITEMS :]}
            programs = multiprocessors() * (1 if depth > 64 else 2)
            self._add(
                prompt_attention_kernel, (programs,), args | many, warps=8, stages=stages, label="attention-prompt"
            )

    def _narrow(self, node: Attention) -> Tensor:
        """From here on the tail: the wanted rows' queries come back, and the stream to add to is theirs."""
        if len(self._takes) != 1 or self._launches is self.tail:
            raise BackendError("the CUDA body runs models whose last layer has one attention and one stream beside it")
        self._launches, self.rows = self.tail, self.logits
        size, q_size = self.shared.stream.shape[1], self.shared.queries.shape[1]
        q, x = self.arena.take(self.rows, q_size, F16), self.arena.take(self.rows, size, F32)
        self._values[self._takes[0]] = Value(x)
        args = {"step": self.shared.step, "q": self.shared.queries, "x": self.shared.stream}
        args |= {"q_taken": q, "x_taken": x, "Q_SIZE": q_size, "SIZE": size}
        args |= {"D": next_power(max(size, q_size)), "LOGIT_ROWS": steps.LOGIT_ROWS}
        self._add(take_kernel, (self.rows,), args, label="take", bytes=self.rows * (8 * size + 4 * q_size))
        return q

    def _norm_heads(self, spec: AttentionSpec, qkv: Tensor, q: Tensor) -> None:
        kv = self.shared.kv
        args = {"qkv": qkv, "q_norm": spec.q_norm, "k_norm": spec.k_norm, "eps": spec.norm_eps, "q": q}
        args |= self.rotations.of(spec) | {"slots": self._at["slots"], "kv": kv.layer(spec.layer)}
        args |= {"HEADS": spec.num_heads, "KV_HEADS": spec.num_kv_heads, "HEAD_DIM": spec.head_dim}
        args |= {"ROPE_PAIRS": len(rope_of(spec).inv_freq), "BLOCK_SIZE": kv.block_size}
        args |= {"INTERLEAVED": rope_of(spec).style == "interleaved", "D": next_power(spec.head_dim)}
        grid = (self.rows, spec.num_heads + 2 * spec.num_kv_heads)
        self._add(heads_kernel, grid, args, warps=1, label="heads")


class _Rotations:
    """cos and sin of every row's position, for each kind of rotation a model has; made with the embedding."""

    def __init__(self, ropes: list[Any], rows: int, arena: Arena) -> None:
        self.ropes, self.rows = ropes, rows
        self.pairs = len(ropes[0].inv_freq)
        if any(len(rope.inv_freq) != self.pairs for rope in ropes):
            raise BackendError("layers that rotate different numbers of channels are not supported by the CUDA body")
        device = arena.device
        self.inv_freq = torch.from_numpy(np.stack([rope.inv_freq for rope in ropes]).astype(np.float32)).to(device)
        self.scale = torch.tensor([rope.scale for rope in ropes], dtype=F32, device=device)
        self.cos = arena.take(rows, len(ropes) * self.pairs, F32)  # read as [ropes, rows, pairs]
        self.sin = arena.take(rows, len(ropes) * self.pairs, F32)

    def args(self) -> dict[str, Any]:
        padded = next_power(self.pairs)
        tensors = {"inv_freq": self.inv_freq, "rope_scale": self.scale, "cos": self.cos, "sin": self.sin}
        return tensors | {"ROPES": len(self.ropes), "PAIRS": self.pairs, "PAIRS_PADDED": padded}

    def of(self, spec: AttentionSpec) -> dict[str, Any]:
        index = next(i for i, rope in enumerate(self.ropes) if rope is spec.rope)
        start = index * self.rows * self.pairs
        return {"cos": self.cos.view(-1)[start:], "sin": self.sin.view(-1)[start:]}


def matrix_of(node: Embed | Product) -> DeviceMatrix:
    assert isinstance(node.matrix, DeviceMatrix)
    return node.matrix


def depth_of(spec: AttentionSpec) -> int:
    """A head's channels as the matrix unit takes them: keys and values stand on its M side, 64 wide at least."""
    return max(next_power(spec.head_dim), 64)


def prompt_rows(depth: int) -> int:
    """Query rows of the prompt kernel's tile: the registers hold results of a split and of all before it."""
    return 128 if depth <= 128 else 64


def programs_each(depth: int, rows: int) -> int:
    """Programs of the decode kernel for so many query rows that a multiprocessor runs at once, by the shared memory
    that their pipelines take. All of the card's must have room: whoever merges waits for others (handover.py)."""
    each = 4 if depth <= 64 else 2 if depth <= 128 else 1
    return each if rows <= steps.DECODE_ROWS else max(each // 2, 1)


def is_fusable(spec: AttentionSpec) -> bool:
    """Whether q, k and v can be rotated and stored where they are computed: pairs must come in eights, and a norm over
    a head needs the whole head."""
    return spec.q_norm is None and len(rope_of(spec).inv_freq) % 8 == 0 and spec.head_dim % 16 == 0

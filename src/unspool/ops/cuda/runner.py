"""Steps on the device: every number of rows has a bucket, every bucket one CUDA graph, made when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unspool.ops import Batch
from unspool.ops.cuda import steps
from unspool.ops.cuda.body_kv import CudaKV
from unspool.ops.cuda.choose import Chooser, CudaFlight
from unspool.ops.cuda.launch import Arena, Launch, is_interpreted, multiprocessors, next_power
from unspool.ops.cuda.lower import Lowering, Shared
from unspool.ops.cuda.record import Attend, Logits, in_order

if TYPE_CHECKING:
    from unspool.engine.ahead import Draw

# Rows of partial attention results, and room for linear layers' partial sums (float32).
ATTENTION_ROWS = 16384
PARTIAL_SUMS = 1 << 24
ARRIVALS = 1 << 14
RING = 4  # steps whose description the host may have under way


def bucket_of(rows: int) -> int:
    """The number of rows that is laid out for so many: close enough that padding costs little, few enough to keep."""
    if rows <= 8:
        return next_power(rows)
    if rows <= 32:
        return -(-rows // 8) * 8
    if rows <= 128:
        return -(-rows // 16) * 16
    step = max(32, next_power(rows) // 16)
    return -(-rows // step) * step


class Graph:
    """Launches, captured once and replayed; under the interpreter they just run."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = launches
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        if is_interpreted():
            for launch in self.launches:
                launch.run()
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()

    def _capture(self) -> None:
        for launch in self.launches:  # compiles whatever is new; what it computes is overwritten
            launch.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in self.launches:
                launch.run()
        self._graph = graph


class CudaRunner:
    """Runs one model over one KV cache."""

    def __init__(self, root: Logits, kv: CudaKV, device: torch.device) -> None:
        self.root, self.kv, self.device = root, kv, device
        self.vocab_size = root.matrix.features
        specs = [node.spec for node in in_order(root) if isinstance(node, Attend)]
        self.shape = steps.Shape(specs[0].num_heads, specs[0].num_kv_heads, 2 * multiprocessors(), ATTENTION_ROWS)
        self._arena = Arena(device)
        self._graphs: dict[tuple[str, int], tuple[Graph, Tensor]] = {}
        self._shared = self._make_shared(1 << 16, kv.engine.step_tokens)
        self._host: list[Tensor] = []
        self._sent: dict[int, torch.cuda.Event] = {}
        self._turn = 0
        self._chooser: Chooser | None = None

    def _make_shared(self, step_size: int, max_rows: int) -> Shared:
        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        spec = next(node.spec for node in in_order(self.root) if isinstance(node, Attend))
        heads, depth = spec.num_kv_heads, next_power(spec.head_dim)
        interpreted = is_interpreted()
        capacity = self.shape.capacity if not interpreted else 256
        self.shape = steps.Shape(self.shape.num_heads, heads, self.shape.programs, capacity)
        return Shared(
            kv=self.kv,
            step=room(step_size, dtype=torch.int32),
            sampled=room(max(max_rows, 1024), dtype=torch.int32),
            partial=room(PARTIAL_SUMS if not interpreted else 1 << 18),
            arrivals=room(ARRIVALS, dtype=torch.int32),
            attention_partial=room(heads, capacity, depth),
            attention_m=room(heads, capacity),
            attention_l=room(heads, capacity),
            attention_arrivals=room(heads, capacity, dtype=torch.int32),
            handoff=room(max(bucket_of(max_rows), 16), self.root.matrix.width),
        )

    # Steps ----------------------------------------------------------------------------------------------------------
    def __call__(self, batch: Batch) -> np.ndarray:
        """The step as Ops.compile promises it: float32 logits of the batch's logit rows, on the host."""
        if len(batch.logit_rows) == 0:
            self.forward(batch)
            return np.zeros((0, self.vocab_size), np.float32)
        out = self.forward(batch)
        return out[: len(batch.logit_rows)].cpu().numpy()

    def launch(self, batch: Batch, draws: Sequence[Draw], sources: np.ndarray) -> CudaFlight:
        """Queue a step and the draws from its logits; a row with a source takes that draw of the last launch."""
        logits = self.forward(batch, sources)
        if self._chooser is None or self._chooser.sampled is not self._shared.sampled:
            self._chooser = Chooser(self._shared.sampled, self.vocab_size, self.device)
        return self._chooser.choose(logits, draws)

    def forward(self, batch: Batch, sources: np.ndarray | None = None) -> Tensor:
        """Queue a step; the logits' buffer comes back, valid until the next step."""
        rows, logits = bucket_of(len(batch.ids)), bucket_of(max(len(batch.logit_rows), 1))
        take_all = len(batch.logit_rows) == len(batch.ids) and bool((np.diff(batch.logit_rows) == 1).all())
        self._make_room(steps.size_of(batch, rows, logits), rows)
        self._send(batch, rows, logits, sources)
        if take_all:
            graph, out = self._layout("all", rows, rows)
            graph.run()
            return out
        self._layout("body", rows, logits)[0].run()
        if len(batch.logit_rows) == 0:
            return self._shared.handoff
        graph, out = self._layout("tail", rows, logits)
        graph.run()
        return out

    def _layout(self, part: str, rows: int, logits: int) -> tuple[Graph, Tensor]:
        key = (part, logits if part == "tail" else rows)
        if key not in self._graphs:
            made = Lowering(self.root, self._shared, self._arena, rows, logits, take_all=part == "all")
            self._graphs[key] = (Graph(made.tail if part == "tail" else made.body), made.out)
        return self._graphs[key]

    def _make_room(self, size: int, rows: int) -> None:
        if size <= len(self._shared.step) and rows <= len(self._shared.handoff):
            return
        if not is_interpreted():
            torch.cuda.synchronize()
        self._graphs.clear()  # they know the old places
        self._host.clear()
        largest = next_power(max(size, len(self._shared.step)))
        self._shared = self._make_shared(largest, max(rows, len(self._shared.handoff)))

    def _send(self, batch: Batch, rows: int, logits: int, sources: np.ndarray | None) -> None:
        step = self._shared.step
        if not self._host:
            pinned = not is_interpreted()
            self._host = [torch.zeros(len(step), dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        turn = self._turn % RING
        self._turn += 1
        if turn in self._sent:
            self._sent[turn].synchronize()  # the step that used this buffer has left it
        size = steps.describe(self._host[turn].numpy(), batch, rows, logits, self.shape, sources)
        step[:size].copy_(self._host[turn][:size], non_blocking=True)
        if not is_interpreted():
            self._sent.setdefault(turn, torch.cuda.Event()).record()



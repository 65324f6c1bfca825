"""Steps on the device: each number of rows belongs to a bucket, and each bucket has one CUDA graph, made on first use.

    step.run(batch)                        one step, its logits on the host
    launched = step.launch(batch, draws)   one step and the draws from its logits, queued
    launched.tokens()                      waits for it

A row with a source takes that draw of the previous launch as its token. So the host plans one step ahead and reads one
step behind, and a token stays on the device between two steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unspool.errors import BackendError
from unspool.ops import ArrayBatch, AttentionSpec, Batch, Draws
from unspool.ops.cuda import steps
from unspool.ops.cuda.geometry import depth_of, heads_of, programs_each, prompt_rows, queries_of
from unspool.ops.cuda.handover import ABSENT, MORE
from unspool.ops.cuda.kv import CudaKV
from unspool.ops.cuda.launch import Arena, Launch, has_room_for_all, is_interpreted, multiprocessors, next_power
from unspool.ops.cuda.layout import Shared
from unspool.ops.cuda.lower import Lowering
from unspool.ops.cuda.sampler import Rows, Sampled, SamplingRoom, can_draw, results_room
from unspool.ops.cuda.sampling import RESULT
from unspool.ops.cuda.sources import all_sources
from unspool.ops.graph import Attention, Graph, Logits, Take

if TYPE_CHECKING:
    from unspool.params import ResolvedParams
    from unspool.sampling.pipeline import Sampler

# Rows of partial attention results, and the size of the buffer for linear layers' partial sums (float32).
ATTENTION_ROWS = 16384
PARTIAL_SUMS = 1 << 24
ARRIVALS = 1 << 14
STEP_WORDS = 1 << 20  # initial size of a step's description: enough for a long prompt, or for hundreds of long tables
RING = 4  # steps that may be in flight


def _shape_of(spec: AttentionSpec) -> steps.Shape:
    """The numbers by which a layer's attention work is divided."""
    capacity = 256 if is_interpreted() else ATTENTION_ROWS
    shape = steps.Shape(*heads_of(spec)[:2], multiprocessors(), capacity, prompt_rows(spec), has_room_for_all())
    return replace(shape, programs=shape.programs * programs_each(spec, shape.decode_rows))


def bucket_of(rows: int) -> int:
    """The number of rows that a step is padded to: little padding, but few different numbers."""
    if rows <= 8:
        return next_power(rows)
    if rows <= 32:
        return -(-rows // 8) * 8
    if rows <= 128:
        return -(-rows // 16) * 16
    step = max(32, next_power(rows) // 16)
    return -(-rows // step) * step


class LaunchGraph:
    """Launches that are captured once and replayed; under the interpreter they run directly."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = launches
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        if not is_interpreted():
            torch.cuda.synchronize()  # weights may just have been rearranged, and kernels prefetch them
        for launch in self.launches:  # compiles new kernels
            launch.run()
        if is_interpreted():
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph):
            for launch in self.launches:
                launch.run()
        self._graph = graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector: freeing another engine's graph during a capture would invalidate the
    capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaLaunched:
    """A launched step. It must be read before RING more steps are launched."""

    def __init__(self, words: Tensor, done: torch.cuda.Event | None) -> None:
        self._words, self._done = words, done
        self._result: Sampled | None = None

    def result(self) -> Sampled:
        """All results of the draws; waits for the device."""
        if self._result is None:
            if self._done is not None:
                self._done.synchronize()
            self._result = Sampled(self._words.numpy().reshape(-1, RESULT).copy())
        return self._result

    def tokens(self) -> list[int]:
        return self.result().tokens

    def logprobs(self, draw: int, count: int) -> tuple[float, tuple[tuple[int, float], ...], int]:
        return self.result().logprobs(draw, count)


class CudaStep:
    """One model over one KV cache. Not thread-safe, like the engine that uses it."""

    def __init__(self, graph: Graph, kv: CudaKV, device: torch.device) -> None:
        self.graph, self.kv, self.device = graph, kv, device
        if not isinstance(graph.output, Logits):
            raise BackendError("a model must end in logits to run on the CUDA backend")
        self.vocab_size = graph.output.width
        self._releases = any(group.window is not None for group in kv.groups)
        self._specs = [node.spec for node in graph.nodes if isinstance(node, Attention)]
        self._kinds = {heads_of(spec): spec for spec in self._specs}  # layers with equal heads share work lists
        self.shapes = [_shape_of(spec) for spec in self._kinds.values()]
        self._arena = Arena(device)
        self._sources = all_sources(graph, device)
        self._graphs: dict[tuple[object, ...], tuple[LaunchGraph, Tensor]] = {}
        self._shared = self._make_shared(1 << 16 if is_interpreted() else STEP_WORDS, kv.engine.step_tokens)
        self._rows = Rows(self.vocab_size, device)
        self._planes = self._rows.slots.planes
        self._room: SamplingRoom | None = None
        self._results = torch.zeros(0, dtype=torch.int32, device=device)
        self._host: list[Tensor] = []
        self._host_results: list[Tensor] = []
        self._queued: dict[int, torch.cuda.Event] = {}  # by buffer index: the event after the step that uses the buffer
        self._copying = None if is_interpreted() else torch.cuda.Stream()
        self._turn = 0

    def _make_shared(self, step_size: int, max_rows: int) -> Shared:
        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        def absent(shape: steps.Shape, spec: AttentionSpec) -> Tensor:
            kept = (shape.num_kv_heads, shape.capacity, depth_of(spec) + MORE.value)
            return torch.full(kept, ABSENT.value, dtype=torch.int32, device=self.device).view(torch.float32)

        most = max(bucket_of(max_rows), 16)
        takes = [node for node in self.graph.nodes if isinstance(node, Take)]
        return Shared(
            kv=self.kv,
            sources=self._sources,
            step=room(step_size, dtype=torch.int32),
            sampled=room(max(bucket_of(max_rows), 1024), dtype=torch.int32),
            partial=room(1 << 18 if is_interpreted() else PARTIAL_SUMS),
            arrivals=room(ARRIVALS, dtype=torch.int32),
            shapes=self.shapes,
            attention_partial=[absent(*each) for each in zip(self.shapes, self._kinds.values(), strict=True)],
            kinds={heads: kind for kind, heads in enumerate(self._kinds)},
            handed={take.x: room(most, take.width) for take in takes},
            queries=room(most, queries_of(self._specs[-1]) if self._specs else 1, dtype=torch.float16),
        )

    # Steps -----------------------------------------------------------------------------------------------------------
    @property
    def sampling(self) -> CudaStep:
        return self

    def run(self, batch: Batch) -> np.ndarray:
        """Float32 logits of the batch's logit rows, on the host."""
        out = self._step(batch.arrays())
        if len(batch.logit_rows) == 0:
            return np.zeros((0, self.vocab_size), np.float32)
        return out[: len(batch.logit_rows)].cpu().numpy()

    def kept(self) -> np.ndarray:
        raise BackendError("the CUDA backend keeps no rows in addition to the logits")

    def can_draw(self, params: ResolvedParams) -> bool:
        return can_draw(params)

    def add_sampler(self, number: int, sampler: Sampler) -> None:
        self._rows.add(number, sampler)

    def remove_sampler(self, number: int) -> None:
        self._rows.remove(number)

    def launch(self, batch: Batch, draws: Draws) -> CudaLaunched:
        """Queue a step and its draws."""
        words, mode = self._rows.words(draws.samplers, draws.positions)
        if self._rows.slots.planes is not self._planes:  # the graphs contain the old address
            if not is_interpreted():
                torch.cuda.synchronize()
            self._planes = self._rows.slots.planes
            self._graphs.clear()
        return self.launch_words(batch.arrays(), words, mode, np.asarray(draws.sources))

    def launch_words(
        self, batch: ArrayBatch, words: np.ndarray, mode: tuple[bool, bool], sources: np.ndarray | None = None
    ) -> CudaLaunched:
        """Queue a step and draws that are already packed, see SampleRows."""
        self._step(batch, words, mode, sources)
        turn, size = (self._turn - 1) % RING, len(words) * RESULT
        start = turn * (len(self._results) // RING)
        source, target = self._results[start : start + size], self._host_results[turn][:size]
        if self._copying is None:
            target.copy_(source)
            return CudaLaunched(target, None)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copying):  # concurrently with the next step
            self._copying.wait_event(self._queued[turn])
            target.copy_(source, non_blocking=True)
            done.record()
        return CudaLaunched(target, done)

    def _step(
        self,
        batch: ArrayBatch,
        words: np.ndarray | None = None,
        mode: tuple[bool, bool] | None = None,
        sources: np.ndarray | None = None,
    ) -> Tensor:
        """Queue a step, with sampling if there are words. Returns the logits' buffer, valid until the next step."""
        try:
            out = self._queue(batch, words, mode, sources)
            if not is_interpreted():
                self._queued.setdefault((self._turn - 1) % RING, torch.cuda.Event()).record()
            return out
        except BaseException:  # some kernels may have run without those that reset their buffers
            self._clean()
            raise

    def _clean(self) -> None:
        """Reset the buffers that every step expects, and leaves, in their initial state."""
        if not is_interpreted():
            torch.cuda.synchronize()
        self._shared.arrivals.zero_()
        for partial in self._shared.attention_partial:
            partial.view(torch.int32).fill_(ABSENT.value)
        if self._room is not None:
            self._room.state.zero_()

    def _queue(
        self, batch: ArrayBatch, words: np.ndarray | None, mode: tuple[bool, bool] | None, sources: np.ndarray | None
    ) -> Tensor:
        rows, logits = bucket_of(len(batch.ids)), bucket_of(max(len(batch.logit_rows), 1))
        take_all = len(batch.logit_rows) == len(batch.ids) and bool((np.diff(batch.logit_rows) == 1).all())
        if take_all:
            logits = rows
        size = steps.size_of(batch, rows, logits, self.shapes, len(self.kv.groups))
        self._make_room(size, rows, 0 if words is None else logits)
        self._send(batch, rows, logits, words, sources, take_all=take_all)
        if take_all:
            graph, out = self._layout("all", rows, rows, mode)
            graph.run()
            return out
        self._layout("body", rows, logits, None)[0].run()
        if len(batch.logit_rows) == 0:
            return self._shared.stream
        graph, out = self._layout("tail", rows, logits, mode)
        graph.run()
        return out

    def _layout(self, part: str, rows: int, logits: int, mode: tuple[bool, bool] | None) -> tuple[LaunchGraph, Tensor]:
        key = (part, logits if part == "tail" else rows, mode)
        if key not in self._graphs:
            made = Lowering(self.graph, self._shared, self._arena, rows, logits, take_all=part == "all")
            launches = list(made.tail if part == "tail" else made.body)
            if mode is not None:
                assert self._room is not None
                sampled = (self._shared.sampled, self._results)
                args = (made.out, logits, self._shared.step, self._planes, *sampled)
                launches += self._room.launches(*args, filtered=mode[0], wants_logprobs=mode[1])
            self._graphs[key] = (LaunchGraph(launches), made.out)
        return self._graphs[key]

    def launches_of(self, rows: int) -> list[Launch]:
        """The kernels of a step with this many rows that computes logits without sampling, for benchmarks."""
        whole: tuple[object, ...] = ("all", bucket_of(rows), None)
        keys = [whole] if whole in self._graphs else [("body", bucket_of(rows), None), ("tail", 1, None)]
        return [launch for key in keys for launch in self._graphs[key][0].launches]

    # Memory ----------------------------------------------------------------------------------------------------------
    def _make_room(self, size: int, rows: int, sampled: int) -> None:
        """Enlarge the buffers if a step needs it. Graphs contain the old addresses and are made again, so enlarging
        must be rare: at first there is room for as many draws as the engine has requests, and later growth at least
        doubles it. Otherwise a server that fills up would make its graphs again at every step."""
        old = self._shared
        fits = size <= len(old.step) and rows <= len(old.stream)
        if fits and (sampled == 0 or (self._room is not None and sampled <= self._room.rows)):
            return
        if not is_interpreted():
            torch.cuda.synchronize()
        self._graphs.clear()
        self._host.clear()
        if not fits:
            last = old.sampled
            self._shared = self._make_shared(next_power(max(size, len(old.step))), max(rows, len(old.stream)))
            self._shared.sampled[: len(last)] = last  # the next step may read them
        if sampled and (self._room is None or sampled > self._room.rows):
            most = bucket_of(self.kv.engine.max_running)
            sampled = max(sampled, most) if self._room is None else next_power(sampled)
            self._room = SamplingRoom(sampled, self.vocab_size, self.device)
            self._results = results_room(sampled, RING, self.device)
            pinned = not is_interpreted()
            self._host_results = [
                torch.zeros(sampled * RESULT, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)
            ]

    def _send(
        self,
        batch: ArrayBatch,
        rows: int,
        logits: int,
        words: np.ndarray | None,
        sources: np.ndarray | None,
        *,
        take_all: bool,
    ) -> None:
        step = self._shared.step
        if not self._host:
            pinned = not is_interpreted()
            self._host = [torch.zeros(len(step), dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
            self._queued.clear()
        turn = self._turn % RING
        self._turn += 1
        if turn in self._queued:
            self._queued[turn].synchronize()  # wait until the step that used this buffer has ended
        size = steps.describe(
            self._host[turn].numpy(),
            batch,
            rows,
            logits,
            self.shapes,
            take_all=take_all,
            sources=sources,
            params=words,
            results=turn * (len(self._results) // RING),
            groups=len(self.kv.groups),
            releases=self._releases,
        )
        step[:size].copy_(self._host[turn][:size], non_blocking=True)

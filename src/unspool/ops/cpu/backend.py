"""`CpuOps`: a model is recorded as a graph, lowered by lower.py, and run by the native extension."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import unspool._native as _native
from unspool.config import EngineConfig
from unspool.errors import BackendError, EngineError, ModelError, RequestError
from unspool.machine import num_cores
from unspool.ops import Batch, KVCache
from unspool.ops.cpu.float_rows import FloatRows
from unspool.ops.cpu.kv import CpuKV
from unspool.ops.cpu.lower import Lowering, expand_experts, expand_latents, find_last, matrix_of, multiplied
from unspool.ops.cpu.matrix import CpuMatrix
from unspool.ops.graph import Embed, Keep, Product, RecordingOps, only_wanted_rows, record_step
from unspool.ops.step import NO_FLOATS, NO_INTEGERS
from unspool.ops.storage import Storage, Widths, counts_of
from unspool.weights.mapping import mapping_of, release, require_whole, span_of

if TYPE_CHECKING:
    from unspool.ops.cpu.experts import CpuExperts
    from unspool.weights.weight import Weight

ISAS = ("avx512", "avx2", "plain")  # best first


class CpuOps(RecordingOps):
    name = "cpu"
    loads_late = True

    def __init__(self, threads: int | None = None, isa: str = "auto") -> None:
        if isa == "auto":
            isa = next(name for name in ISAS if _native.supports(name))
        elif isa not in ISAS:
            raise BackendError(f"unknown kernel set {isa!r}; there are auto, {', '.join(ISAS)}")
        elif not _native.supports(isa):
            usable = ", ".join(name for name in ISAS if _native.supports(name))
            raise BackendError(f"this processor cannot run the {isa} kernels; it can run: {usable}")
        self.isa = isa
        self.threads = threads or num_cores()
        self.kernel_set = f"cpu-{isa}"
        try:
            self._pool = _native.shared_pool(self.threads)
        except RuntimeError as error:
            raise BackendError(f"threads is {self.threads:,}, but {error}") from error
        self._arena = _native.Arena()
        self._packing: Any = None  # the packing that runs in the background, until a step needs it

    # Preparing a model -------------------------------------------------------------------------------------------
    def matrix(self, parts: Sequence[Weight]) -> CpuMatrix:
        return CpuMatrix(parts)

    def vector(self, parts: Sequence[Weight]) -> array[float]:
        joined = array("f")
        for part in parts:
            joined += part.floats()
        return joined

    def experts(self, parts: Sequence[Sequence[Weight]]) -> CpuExperts:
        from unspool.ops.cpu.experts import CpuExperts

        return CpuExperts(parts)

    def kv_cache(
        self, layers: Sequence[Storage], engine: EngineConfig, num_blocks: int | Sequence[int], num_states: int = 0
    ) -> CpuKV:
        if min(counts_of(num_blocks)) < 1:
            raise RequestError(f"a cache of {num_blocks} blocks; it must have at least 1", "kv_tokens")
        return CpuKV(layers, engine, num_blocks, num_states, self.isa)

    def kv_room(self, widths: Widths, engine: EngineConfig) -> None:
        return None

    def compile(self, forward: Callable[[Batch, KVCache], Any], kv: KVCache) -> CpuStep:
        assert isinstance(kv, CpuKV)
        graph = expand_latents(expand_experts(only_wanted_rows(record_step(forward, kv))))
        last = find_last(graph)
        for node in graph.nodes:
            if isinstance(node, Embed) or (isinstance(node, Product) and node in last):
                matrix_of(node).keep_exact()
            if isinstance(node, Embed) and isinstance(node.positions, CpuMatrix):
                node.positions.keep_exact()
        self._pack([matrix for node in graph.nodes for matrix in multiplied(node)])
        program = _native.Program(self._pool, self.isa, kv.native)
        Lowering(graph, kv.state_offsets).emit(program)
        kept_width = graph.output.rows.width if isinstance(graph.output, Keep) else 1
        return CpuStep(program, self.finish_loading, kept_width)

    def _pack(self, matrices: Sequence[CpuMatrix]) -> None:
        """Start to pack the matrices that are not packed yet. Another core packs them while this thread continues."""
        new = [matrix for matrix in dict.fromkeys(matrices) if not matrix.native.packed]
        if not new:
            return
        self.finish_loading()
        self._arena.reserve(sum(matrix.native.packed_bytes for matrix in new))
        packing = _native.Packing(self._arena)
        for matrix in new:
            packing.add(matrix.native, [span_of(mapping_of(part.raw)) for part in matrix.parts])
        if self.threads > 1:
            packing.start()
        self._packing = packing, [part.raw for matrix in new for part in matrix.parts]

    def finish_loading(self, progress: Callable[[float], None] | None = None) -> None:
        if self._packing is not None:
            packing, sources = self._packing
            while (share := packing.advance(self._pool)) < 1.0:
                if progress is not None:  # other models compute their steps meanwhile
                    progress(share)
            if not packing.finish():  # some pages of the file had been released before they were packed
                for source in sources:
                    require_whole(source)
                raise ModelError("a model's file cannot be read any more: its weights were not all packed")
            self._packing = None
            release(sources)


class CpuStep:
    """A compiled model. The rows that a run returns belong to the program and are valid until the next run."""

    sampling = None

    def __init__(self, program: Any, prepare: Callable[[], None], kept_width: int) -> None:
        self._program, self._kept_width = program, kept_width
        self._prepare: Callable[[], None] | None = prepare  # called before the first step

    def run(self, batch: Batch) -> FloatRows:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        rows = (batch.ids, batch.positions, batch.slots, batch.starts, batch.tables, batch.logit_rows)
        try:
            # The native call converts arrays of other types or memory layouts: the fewer of them, the sooner it runs.
            if batch.states is NO_INTEGERS and batch.saves is NO_INTEGERS and batch.given is NO_FLOATS:
                found = self._program.run(*rows)
            else:
                given = batch.given if len(batch.given) else None
                found = self._program.run(*rows, batch.states, batch.saves, given)
        except (ValueError, RuntimeError) as error:
            raise EngineError(f"the step cannot be run: {error}") from error
        return FloatRows(found, self._program.output_width)

    def kept(self) -> FloatRows:
        return FloatRows(self._program.kept(), self._kept_width)

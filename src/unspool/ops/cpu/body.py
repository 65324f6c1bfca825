"""`CpuOps`: the vocabulary of ops, recorded by record.py, lowered by lower.py, run by the native extension."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import unspool._native as _native
from unspool.config import Activation, EngineConfig, ModelConfig
from unspool.errors import BackendError, EngineError, ModelError, RequestError
from unspool.lazy import np
from unspool.machine import num_cores
from unspool.ops import AttentionSpec, Batch, KVCache
from unspool.ops.cpu.logits import Logits
from unspool.ops.cpu.lower import PRODUCTS, Lowering, find_last
from unspool.ops.cpu.record import Graph, Value, narrow
from unspool.weights.mapping import mapping_of, release, require_whole, span_of

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

ISAS = ("avx512", "avx2", "plain")  # best first


class CpuKV:
    """Keys and values in native memory, which is taken from the system as blocks are first used."""

    def __init__(self, config: ModelConfig, engine: EngineConfig, num_blocks: int, isa: str) -> None:
        engine = engine.suited("cpu")
        self.block_size = engine.block_size
        self.num_blocks = num_blocks
        self.native = _native.KvCache(
            config.num_layers, config.num_kv_heads, config.head_dim, engine.block_size, num_blocks, engine.kv_dtype
        )
        self.block_bytes: int = self.native.block_bytes
        shape = f"{config.num_layers}x{config.num_kv_heads}x{config.head_dim}"
        # How keys become integers is measured by the model itself, whose last bits are others in other kernels.
        kind = f"{engine.kv_dtype}-{isa}" if engine.kv_dtype == "q8" else engine.kv_dtype
        self.layout = f"cpu-6-{kind}-{engine.block_size}-{shape}"

    def copy_block(self, source: int, target: int) -> None:
        self.native.copy_block(source, target)

    def read_block(self, block: int) -> bytes:
        return self.native.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        if len(data) != self.block_bytes:
            raise EngineError(f"a saved block has {len(data)} bytes; blocks of this cache have {self.block_bytes}")
        self.native.write_block(block, data)


class CpuMatrix:
    """Weights that share their input. They are packed into tiles once a program multiplies by them."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        columns = {part.shape[-1] for part in parts}
        if len(columns) != 1 or any(len(part.shape) != 2 for part in parts):
            shapes = ", ".join(f"{part.name} {part.shape}" for part in parts)
            raise EngineError(f"weights that do not share their input: {shapes}")
        if any(part.format in ("fp8", "f8_e4m3") for part in parts):  # the kernels have no 8-bit floats
            from unspool.weights.fp8_scales import widened

            parts = [widened(part) for part in parts]
        self.parts = parts
        self.native = _native.Matrix([(part.format, part.raw, part.shape[0]) for part in parts], columns.pop())

    def keep_exact(self) -> None:
        """Its tiles are to have the file's own values: rows are looked up in them, or logits come straight from them.

        Those that another program has packed stay as they are.
        """
        if not self.native.packed:
            self.native.keep_exact()


class CpuOps:
    name = "cpu"

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
        self._packing: Any = None  # what is being packed, until somebody needs it
        self._graph: Graph | None = None

    # Preparing a model -------------------------------------------------------------------------------------------
    def matrix(self, parts: Sequence[Weight]) -> CpuMatrix:
        return CpuMatrix(parts)

    def vector(self, parts: Sequence[Weight]) -> array[float]:
        joined = array("f")
        for part in parts:
            joined += part.floats()
        return joined

    def kv_cache(self, config: ModelConfig, engine: EngineConfig, num_blocks: int) -> CpuKV:
        if num_blocks < 1:
            raise RequestError(f"a cache of {num_blocks} blocks; it must have at least 1", "kv_tokens")
        return CpuKV(config, engine, num_blocks, self.isa)

    def compile(self, forward: Callable[[Batch, KVCache], Any], kv: KVCache) -> Callable[[Batch], np.ndarray]:
        assert isinstance(kv, CpuKV)
        self._graph = Graph()
        try:
            output = forward(SYMBOLIC_BATCH, kv)
            graph = self._graph
        finally:
            self._graph = None
        graph.add("output", {"x": output}, output.width)
        graph = narrow(graph)
        end = graph.nodes.pop()
        for node in find_last(graph):
            node.arguments["is_last"] = True
        for node in graph.nodes:
            if node.kind == "embed" or node.arguments.get("is_last"):
                node.arguments["weight"].keep_exact()
        self._pack([node.arguments["weight"] for node in graph.nodes if node.kind in PRODUCTS])
        for node in graph.nodes:
            if isinstance(node.arguments.get("weight"), CpuMatrix):
                node.arguments["weight"] = node.arguments["weight"].native
        lowering = Lowering(graph, end.inputs["x"])
        lowering.plan()
        program = _native.Program(self._pool, self.isa, kv.native)
        lowering.emit(program)
        return Step(program, self.finish_packing)

    def _pack(self, matrices: Sequence[CpuMatrix]) -> None:
        """Begin to pack what is not packed yet. Another core does it while this one goes on with the start."""
        new = [matrix for matrix in dict.fromkeys(matrices) if not matrix.native.packed]
        if not new:
            return
        self.finish_packing()
        self._arena.reserve(sum(matrix.native.packed_bytes for matrix in new))
        packing = _native.Packing(self._arena)
        for matrix in new:
            packing.add(matrix.native, [span_of(mapping_of(part.raw)) for part in matrix.parts])
        if self.threads > 1:
            packing.start()
        self._packing = packing, [part.raw for matrix in new for part in matrix.parts]

    def finish_packing(self) -> None:
        """Wait until all weights are packed, and help."""
        if self._packing is not None:
            packing, sources = self._packing
            if not packing.finish(self._pool):  # some pages were gone when they were to be packed
                for source in sources:
                    require_whole(source)
                raise ModelError("a model's file cannot be read any more: its weights were not all packed")
            self._packing = None
            release(sources)

    # Computing: recording --------------------------------------------------------------------------------------------
    def _record(self, kind: str, inputs: dict[str, Value | None], width: int, **arguments: Any) -> Value:
        if self._graph is None:
            raise EngineError(f"{kind} was called outside compile: the CPU body records a model, then runs it")
        return self._graph.add(kind, inputs, width, **arguments)

    def embed(self, batch: Batch, weight: CpuMatrix, scale: float = 1.0) -> Value:
        return self._record("embed", {}, weight.native.columns, weight=weight, scale=scale)

    def norm(self, x: Value, weight: array[float], eps: float, residual: Value | None = None) -> Value:
        expect_width(x, len(weight), "a norm's weight")
        return self._record("norm", {"x": x, "residual": residual}, x.width, weight=weight, eps=eps)

    def linear(
        self, x: Value, weight: CpuMatrix, bias: array[float] | None = None, residual: Value | None = None
    ) -> Value:
        return self._product(x, weight, bias, residual)

    def logits(self, x: Value, weight: CpuMatrix, softcap: float | None = None) -> Value:
        return self._product(x, weight, softcap=softcap, is_head=True)

    def _product(
        self,
        x: Value,
        weight: CpuMatrix,
        bias: array[float] | None = None,
        residual: Value | None = None,
        *,
        softcap: float | None = None,
        is_head: bool = False,
    ) -> Value:
        expect_width(x, weight.native.columns, f"the input of {weight.parts[0].name}")
        if residual is not None:
            expect_width(residual, weight.native.rows, f"the residual of {weight.parts[0].name}")
        inputs = {"x": x, "residual": residual}
        arguments = {"weight": weight, "bias": bias, "softcap": softcap, "is_head": is_head}
        return self._record("linear", inputs, weight.native.rows, **arguments)

    def gated(self, x: Value, weight: CpuMatrix, activation: Activation) -> Value:
        expect_width(x, weight.native.columns, f"the input of {weight.parts[0].name}")
        half, rest = divmod(weight.native.rows, 2)
        if rest or (len(weight.parts) != 2 and half % 16) or weight.parts[0].shape[0] not in (half, 2 * half):
            raise EngineError(f"{weight.parts[0].name}: a gate and an up projection of one size are needed")
        return self._record("gated", {"x": x}, half, weight=weight, activation=activation)

    def attention(self, qkv: Value, spec: AttentionSpec, batch: Batch, kv: KVCache) -> Value:
        expect_width(qkv, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, f"layer {spec.layer}'s attention")
        return self._record("attention", {"x": qkv}, spec.num_heads * spec.head_dim, spec=spec)

    def take(self, x: Value, batch: Batch) -> Value:
        return self._record("take", {"x": x}, x.width)


class Step:
    """A compiled model: batch in, logits out. What it returns is the program's own, until the next step."""

    def __init__(self, program: Any, prepare: Callable[[], None]) -> None:
        self._program = program
        self._prepare: Callable[[], None] | None = prepare  # before the first step

    def __call__(self, batch: Batch) -> np.ndarray:
        return self.plainly(batch).array

    def plainly(self, batch: Batch) -> Logits:
        """The same without numpy, neither in nor out."""
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        try:
            # Arrays of other types or shapes in memory are converted there.
            found = self._program.run(
                batch.ids, batch.positions, batch.slots, batch.starts, batch.tables, batch.logit_rows
            )
        except (ValueError, RuntimeError) as error:
            raise EngineError(f"a step that cannot be run: {error}") from error
        return Logits(found, self._program.output_width)


def expect_width(value: Value, width: int, what: str) -> None:
    if value.width != width:
        raise EngineError(f"{what} has {width} values a row; {value.width} are given")


EMPTY: Any = array("i")
SYMBOLIC_BATCH = Batch(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)

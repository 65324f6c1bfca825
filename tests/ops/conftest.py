"""A bench for one operation: a backend, a batch, and rows that go in as a table of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from unspool.config import EngineConfig, ModelConfig
from unspool.models.registry import architecture_of
from unspool.models.shapes import TINY
from unspool.ops import Batch, Ops
from unspool.ops.reference import ReferenceOps
from unspool.weights.weight import Weight, encode_weight

try:
    import unspool._native as _native

    from unspool.ops.cpu import CpuOps

    ISAS = [name for name in ("plain", "avx2", "avx512") if _native.supports(name)]
except ImportError:  # not built: where there is a GPU, its tests run without
    ISAS = []


def make_batch(
    sequences: Sequence[tuple[int, int, Sequence[int]]], block_size: int, logit_rows: Sequence[int] | None = None
) -> Batch:
    """Sequences as (first position, rows, blocks); row r of the batch has token id r."""
    width = max(len(blocks) for _, _, blocks in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    positions, slots, starts = [], [], [0]
    for table, (start, count, blocks) in zip(tables, sequences, strict=True):
        table[: len(blocks)] = blocks
        position = np.arange(start, start + count)
        positions.append(position)
        slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(starts[-1] + count)
    rows = starts[-1]
    return Batch(
        ids=np.arange(rows, dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int64),
        starts=np.array(starts, np.int32),
        tables=tables,
        logit_rows=np.array(range(rows) if logit_rows is None else logit_rows, np.int32),
        states=np.arange(len(sequences), dtype=np.int32),
    )


def plain_batch(rows: int, logit_rows: Sequence[int] | None = None) -> Batch:
    return make_batch([(0, rows, range((rows + 31) // 32))], 32, logit_rows)


Forward = Callable[[Ops, Any, Batch, Any], Any]  # (ops, rows, batch, kv) -> rows


class Bench:
    """Runs one operation of a backend on given rows."""

    def __init__(
        self, ops: Ops, config: ModelConfig = TINY, engine: EngineConfig | None = None, blocks: int = 64
    ) -> None:
        self.ops = ops
        engine = engine or EngineConfig().with_device_defaults(ops.name)
        self.kv = ops.kv_cache(architecture_of(config).storage, engine, blocks)

    def run(self, forward: Forward, rows: np.ndarray, batch: Batch | None = None) -> np.ndarray:
        """forward(rows), where the rows of the batch are those of the array that its ids name."""
        table = self.ops.matrix([encode_weight("rows", rows, "f32")])
        step = self.ops.compile(lambda b, kv: forward(self.ops, self.ops.embed(b, table), b, kv), self.kv)
        return np.array(step.run(batch or plain_batch(len(rows))))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(isa: str) -> Bench:
    return Bench(CpuOps(threads=1, isa=isa))


@pytest.fixture
def reference() -> Bench:
    return Bench(ReferenceOps())


def random_weight(rng: np.random.Generator, rows: int, columns: int, format: str, name: str = "w") -> Weight:
    return encode_weight(name, rng.standard_normal((rows, columns)).astype(np.float32), format)


def vector(values: np.ndarray) -> Weight:
    return encode_weight("v", values.astype(np.float32), "f32")


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The relative error of all of a against all of b."""
    b = b.astype(np.float64)
    return float(np.linalg.norm(a.astype(np.float64) - b) / max(np.linalg.norm(b), 1e-30))

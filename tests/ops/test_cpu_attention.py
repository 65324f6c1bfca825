"""Attention over paged keys and values, against the reference, and the same bits whoever else looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.ops.conftest import Bench, distance, make_batch, vector
from unspool.config import EngineConfig
from unspool.ops import AttentionSpec, Batch, Ops, Rope
from unspool.ops.cpu import CpuOps
from unspool.ops.reference import ReferenceOps
from unspool.weights.shapes import TINY


def rope(dim: int, style: Any = "half", scale: float = 1.0) -> Rope:
    return Rope((1 / 10_000 ** (np.arange(dim // 2) * 2 / dim)).astype(np.float32), style, scale)


def spec_of(heads: int, kv_heads: int, dim: int, **changes: Any) -> AttentionSpec:
    base = AttentionSpec(0, heads, kv_heads, dim, dim**-0.5, rope(dim))
    return replace(base, **changes)


def bench_for(ops: Ops, spec: AttentionSpec, block_size: int = 32, kv_dtype: Any = "f32", blocks: int = 64) -> Bench:
    config = replace(TINY, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
    bench = Bench(ops, config, EngineConfig(block_size=block_size, kv_dtype=kv_dtype), blocks)
    if isinstance(ops, CpuOps):  # what was never written must never be seen: all ones is not a number
        for block in range(blocks):
            bench.kv.write_block(block, b"\xff" * bench.kv.block_bytes)
    return bench


def rows_for(spec: AttentionSpec, count: int, seed: int = 0) -> np.ndarray:
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def attend(bench: Bench, spec: AttentionSpec, rows: np.ndarray, batch: Batch) -> np.ndarray:
    def forward(ops: Any, x: Any, b: Batch, kv: Any) -> Any:
        norms = {name: ops.vector([getattr(spec, name)]) for name in ("q_norm", "k_norm") if getattr(spec, name)}
        return ops.attention(x, replace(spec, **norms), b, kv)

    return bench.run(forward, rows, batch)


def compare(isa: str, spec: AttentionSpec, batch: Batch, block_size: int = 32, kv_dtype: Any = "f32") -> float:
    rows = rows_for(spec, len(batch.ids))
    ours = attend(bench_for(CpuOps(threads=2, isa=isa), spec, block_size, kv_dtype), spec, rows, batch)
    kept = "f32" if kv_dtype == "q8" else kv_dtype
    return distance(ours, attend(bench_for(ReferenceOps(), spec, block_size, kept), spec, rows, batch))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (4, 2, 16), (9, 3, 64), (8, 1, 80), (3, 3, 24), (16, 1, 32), (2, 1, 256)]
)
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 2e-6), ("q8", 0.02)])
def test_shapes(isa: str, heads: int, kv_heads: int, dim: int, kv_dtype: str, limit: float) -> None:
    spec = spec_of(heads, kv_heads, dim)
    batch = make_batch([(0, 50, [5, 3]), (0, 1, [9]), (0, 7, [1])], 32)
    assert compare(isa, spec, batch, kv_dtype=kv_dtype) < limit


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 24, 32, 64])
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 2e-6), ("f16", 2e-6), ("q8", 0.02)])
def test_blocks_and_types(isa: str, block_size: int, kv_dtype: str, limit: float) -> None:
    blocks = np.random.default_rng(1).permutation(64)
    count = min(40, 50 * block_size)
    needed = -(-count // block_size)
    batch = make_batch([(0, count, blocks[:needed]), (0, 3, blocks[needed : needed + 3])], block_size)
    assert compare(isa, spec_of(6, 2, 32), batch, block_size, kv_dtype) < limit


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 1},
        {"window": 5},
        {"window": 130},
        {"softcap": 5.0},
        {"rope": rope(32, "interleaved")},
        {"rope": rope(16)},
        {"rope": rope(16, "interleaved", 1.3)},
        {"q_norm": vector(np.linspace(-1, 2, 32)), "k_norm": vector(np.linspace(2, -1, 32)), "norm_eps": 1e-3},
    ],
)
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 3e-6), ("q8", 0.02)])
def test_variants(isa: str, changes: dict[str, Any], kv_dtype: str, limit: float) -> None:
    batch = make_batch([(0, 300, range(10)), (0, 20, [20])], 32)
    assert compare(isa, spec_of(6, 2, 32, **changes), batch, kv_dtype=kv_dtype) < limit


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("kv_dtype", "block_size"), [("q8", 32), ("q8", 4), ("q8", 16), ("q8", 48), ("f16", 32), ("f16", 4)]
)
def test_pieces_and_crowds_have_the_same_bits(isa: str, window: int | None, kv_dtype: str, block_size: int) -> None:
    spec = spec_of(6, 2, 32, window=window)
    length = 400 if block_size == 32 else 200
    rows = rows_for(spec, length)
    table = np.random.default_rng(2).permutation(64)[: -(-length // block_size)]
    whole = None
    for threads in (1, 2):
        bench = bench_for(CpuOps(threads=threads, isa=isa), spec, block_size, kv_dtype)
        y = attend(bench, spec, rows, make_batch([(0, length, table)], block_size))
        whole = y if whole is None else whole
        assert np.array_equal(y, whole)
        bench = bench_for(CpuOps(threads=threads, isa=isa), spec, block_size, kv_dtype)
        start = 0
        for count in (1, 100, 37, 1, 1, 2, 5, length - 147):
            y = attend(bench, spec, rows[start : start + count], make_batch([(start, count, table)], block_size))
            assert np.array_equal(y, whole[start : start + count])
            start += count


def test_neighbours_change_nothing(isa: str) -> None:
    spec = spec_of(6, 2, 32)
    bench = bench_for(CpuOps(threads=2, isa=isa), spec)
    rows = rows_for(spec, 200)
    alone = attend(bench, spec, rows, make_batch([(0, 200, range(7))], 32))
    last = attend(bench, spec, rows[199:], make_batch([(199, 1, range(7))], 32))
    assert np.array_equal(last[0], alone[199])
    crowd = np.concatenate([rows_for(spec, 60, 5), rows[199:], rows_for(spec, 3, 6)])
    y = attend(bench, spec, crowd, make_batch([(0, 60, [20, 21]), (199, 1, range(7)), (64, 3, [30, 31, 32])], 32))
    assert np.array_equal(y[60], alone[199])


@pytest.mark.parametrize("kv_dtype", ["f32", "q8"])
def test_a_row_never_sees_what_comes_after_it(isa: str, kv_dtype: str) -> None:
    spec = spec_of(6, 2, 32)
    bench = bench_for(CpuOps(threads=1, isa=isa), spec, kv_dtype=kv_dtype)
    rows = rows_for(spec, 40)
    clean = attend(bench, spec, rows, make_batch([(0, 40, [0, 1])], 32))
    rows[30:] = np.inf
    spoiled = attend(bench, spec, rows, make_batch([(0, 40, [2, 3])], 32))
    assert np.array_equal(spoiled[:30], clean[:30])
    assert np.isnan(spoiled[30:]).all()  # what it does see, it tells


def test_integers_lose_nothing_to_the_largest_they_can_be(isa: str) -> None:
    """Equal magnitudes everywhere are the largest sums there can be: none may wrap around."""
    spec = spec_of(2, 1, 128, rope=rope(0))
    signs = np.random.default_rng(3).choice([-1.0, 1.0], 128)
    rows = np.tile(signs, (300, 4)).astype(np.float32)
    rows[:, 384:] = 1.0
    y = attend(bench_for(CpuOps(threads=2, isa=isa), spec, kv_dtype="q8"), spec, rows, plain(300))
    assert np.abs(y - 1).max() < 1e-3


def plain(rows: int) -> Batch:
    return make_batch([(0, rows, range(-(-rows // 32)))], 32)


def test_a_block_written_in_this_step_can_be_read_by_another_sequence(isa: str) -> None:
    """As in the reference: every key is stored before any query looks."""
    spec = spec_of(4, 2, 16)
    rows = rows_for(spec, 2)
    batch = make_batch([(0, 1, [3]), (1, 1, [3])], 32)
    for threads in (1, 2):
        ours = attend(bench_for(CpuOps(threads=threads, isa=isa), spec), spec, rows, batch)
        theirs = attend(bench_for(ReferenceOps(), spec), spec, rows, batch)
        assert distance(ours, theirs) < 2e-6


def test_blocks_are_copied_saved_and_restored(isa: str) -> None:
    spec = spec_of(4, 2, 16)
    bench = bench_for(CpuOps(threads=1, isa=isa), spec)
    rows = rows_for(spec, 40)
    whole = attend(bench, spec, rows, make_batch([(0, 40, [0, 1])], 32))
    attend(bench, spec, rows[:32], make_batch([(0, 32, [4])], 32))
    bench.kv.copy_block(4, 9)
    data = bench.kv.read_block(9)
    assert len(data) == bench.kv.block_bytes
    bench.kv.write_block(12, data)
    for block in (4, 9, 12):
        y = attend(bench, spec, rows[32:], make_batch([(32, 8, [block, 20])], 32))
        assert np.array_equal(y, whole[32:])

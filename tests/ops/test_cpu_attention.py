"""Attention over paged keys and values, against the reference, and the same bits whoever else looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.ops.conftest import ISAS, Bench, distance, make_batch, vector
from unspool.config import EngineConfig, ModelConfig
from unspool.errors import EngineError
from unspool.models.registry import architecture_of
from unspool.models.shapes import TINY
from unspool.ops import AttentionSpec, Batch, Ops, Rope
from unspool.ops.cpu import CpuOps
from unspool.ops.reference import ReferenceOps
from unspool.ops.storage import kv_bytes_per_token


def rope(dim: int, style: Any = "half", scale: float = 1.0) -> Rope:
    return Rope((1 / 10_000 ** (np.arange(dim // 2) * 2 / dim)).astype(np.float32), style, scale)


def spec_of(heads: int, kv_heads: int, dim: int, **changes: Any) -> AttentionSpec:
    base = AttentionSpec(0, heads, kv_heads, dim, dim**-0.5, rope(dim))
    return replace(base, **changes)


def config_of(spec: AttentionSpec) -> ModelConfig:
    return replace(TINY, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)


def measuring_bench(ops: Ops, spec: AttentionSpec) -> Bench:
    return Bench(ops, config_of(spec), EngineConfig(block_size=32, kv_dtype="q8"), 10)


def bench_for(ops: Ops, spec: AttentionSpec, block_size: int = 32, kv_dtype: Any = "f32", blocks: int = 64) -> Bench:
    bench = Bench(ops, config_of(spec), EngineConfig(block_size=block_size, kv_dtype=kv_dtype), blocks)
    if isinstance(ops, CpuOps):  # what was never written must never be seen: all ones is not a number
        for block in range(blocks):
            bench.kv.write_block(block, b"\xff" * bench.kv.block_bytes[0])
        if kv_dtype == "q8":  # rows differ from run to run here, so there is nothing to measure
            bench.kv.native.set_channels(0, *some_channels(spec))
    return bench


def some_channels(spec: AttentionSpec, seed: int = 7) -> tuple[list[int], list[float]]:
    """Any order of the channels will do, and any factors: products stay what they are."""
    generator = np.random.default_rng(seed)
    order = [channel for _ in range(spec.num_kv_heads) for channel in generator.permutation(spec.head_dim).tolist()]
    return order, generator.uniform(0.8, 1.25, len(order)).tolist()


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


SHAPES = [(1, 1, 8), (2, 1, 10), (4, 2, 16), (9, 3, 64), (8, 1, 80), (4, 1, 96), (4, 2, 128), (3, 3, 24), (16, 1, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [*SHAPES, (2, 1, 256)])
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 2e-6), ("q8", 0.01)])
def test_shapes(isa: str, heads: int, kv_heads: int, dim: int, kv_dtype: str, limit: float) -> None:
    spec = spec_of(heads, kv_heads, dim)
    batch = make_batch([(0, 50, [5, 3]), (0, 1, [9]), (0, 7, [1])], 32)
    assert compare(isa, spec, batch, kv_dtype=kv_dtype) < limit


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 24, 32, 64])
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 2e-6), ("f16", 2e-6), ("q8", 0.01)])
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
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 3e-6), ("q8", 0.011)])
def test_variants(isa: str, changes: dict[str, Any], kv_dtype: str, limit: float) -> None:
    batch = make_batch([(0, 300, range(10)), (0, 20, [20])], 32)
    assert compare(isa, spec_of(6, 2, 32, **changes), batch, kv_dtype=kv_dtype) < limit


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("kv_dtype", "block_size"),
    [*(("q8", size) for size in (32, 4, 16, 48)), ("f16", 32), ("f16", 4)],
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


@pytest.mark.parametrize("changes", [{}, {"window": 130}, {"softcap": 5.0}])
@pytest.mark.parametrize("dim", [10, 64, 80])
def test_integers_have_the_same_bits_in_blocks_of_any_size(isa: str, dim: int, changes: dict[str, Any]) -> None:
    """Gathered or not, and whatever the last block's unwritten bytes are."""
    spec = spec_of(6, 2, dim, **changes)
    rows = rows_for(spec, 300)
    found = []
    for size in (4, 16, 32, 48):
        table = np.random.default_rng(size).permutation(80)[: -(-300 // size)]
        bench = bench_for(CpuOps(threads=2, isa=isa), spec, size, "q8", 80)
        found.append(attend(bench, spec, rows, make_batch([(0, 300, table)], size)))
    for other in found[1:]:
        assert np.array_equal(other, found[0])


@pytest.mark.skipif(len(ISAS) < 2, reason="one set of kernels alone")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [*SHAPES, (2, 1, 256)])
@pytest.mark.parametrize("block_size", [4, 32])
def test_integers_have_the_same_bits_in_all_sets_of_kernels(
    heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    """What is stored, in all of them. What is computed of it, where multiplying and adding are one operation."""
    spec = spec_of(heads, kv_heads, dim, window=270)
    rows = rows_for(spec, 290)
    stored, found = {}, {}
    for isa in ISAS:
        bench = bench_for(CpuOps(threads=2, isa=isa), spec, block_size, "q8", 80)
        found[isa] = attend(bench, spec, rows, make_batch([(0, 290, range(-(-290 // block_size)))], block_size))
        stored[isa] = b"".join(bench.kv.read_block(block) for block in range(290 // block_size))
    assert len(set(stored.values())) == 1
    fused = [found[isa] for isa in ISAS if isa != "plain"]
    assert all(np.array_equal(y, fused[0]) for y in fused)
    assert distance(found["plain"], fused[0]) < 1e-4


@pytest.mark.parametrize("kv_dtype", ["f32", "q8"])
def test_neighbours_change_nothing(isa: str, kv_dtype: str) -> None:
    spec = spec_of(6, 2, 32)
    bench = bench_for(CpuOps(threads=2, isa=isa), spec, kv_dtype=kv_dtype)
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


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_spoils_those_who_see_it_alone(isa: str, bad: float, place: str, block_size: int) -> None:
    """One channel of one row: of a query, its own answer; of a key or a value, those of the rows that see it."""
    spec = spec_of(2, 1, 32, window=40)
    rows = rows_for(spec, 120)
    batch = make_batch([(0, 120, range(-(-120 // block_size)))], block_size)
    bench = bench_for(CpuOps(threads=1, isa=isa), spec, block_size, "q8")
    clean = attend(bench, spec, rows, batch).reshape(120, 2, 32)
    rows[50, {"q": 40, "k": 70, "v": 100}[place]] = bad
    y = attend(bench, spec, rows, batch).reshape(120, 2, 32)
    seen = np.zeros((120, 2), bool)
    seen[50:90] = True
    if place == "q":
        seen[:] = False
        seen[50, 1] = True  # the second head's
    assert np.isnan(y[seen]).all()
    assert np.array_equal(y[~seen], clean[~seen])


@pytest.mark.parametrize("dim", [64, 128, 256, 640])
@pytest.mark.parametrize("large", [1.0, 5.0, 100.0])
def test_integers_lose_nothing_to_the_largest_they_can_be(isa: str, dim: int, large: float) -> None:
    """Equal magnitudes everywhere are the largest sums there can be, more so where wide channels (the last) are larger
    than the others: none may wrap around, nor may its opposite."""
    spec = spec_of(2, 1, dim, rope=rope(0))
    rows = np.tile(np.random.default_rng(3).choice([-1.0, 1.0], dim), (300, 4)).astype(np.float32)
    rows.reshape(300, 4, dim)[:, :, dim * 3 // 16 * 4 :] *= large
    rows[:, 3 * dim :] = 1.0
    rows[1::2, 2 * dim :] *= -1
    bench = bench_for(CpuOps(threads=2, isa=isa), spec, kv_dtype="q8")
    bench.kv.native.set_channels(0, list(range(dim)), [1.0] * dim)
    assert np.abs(attend(bench, spec, rows, plain(300)) - 1).max() < 1e-3


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_heads_are_rotated_before_they_are_arranged(isa: str, dim: int, style: str) -> None:
    """Some sizes of heads have ways of their own to do both at once. Rounding is 0.011 here, a wrong rotation 0.5."""
    spec = spec_of(2, 1, dim, rope=rope(dim, style))
    rows, rng = rows_for(spec, 100), np.random.default_rng(4)
    bench = bench_for(CpuOps(threads=2, isa=isa), spec, kv_dtype="q8")
    bench.kv.native.set_channels(0, rng.permutation(dim).tolist(), rng.uniform(0.8, 1.25, dim).tolist())
    expected = attend(bench_for(ReferenceOps(), spec), spec, rows, plain(100))
    assert distance(attend(bench, spec, rows, plain(100)), expected) < 0.02


def test_large_channels_leave_the_others_their_bits(isa: str) -> None:
    """One channel of the keys is thirty times the others, as models have it. Where that is measured it does no harm;
    left among the narrow ones it takes their bits."""
    spec = spec_of(6, 2, 64, rope=rope(0))
    rows = rows_for(spec, 300).reshape(300, 10, 64)
    rows[:, 6:8, 5] *= 30
    rows[:, :6, 5] *= 0.1
    rows = rows.reshape(300, 640)
    expected = attend(bench_for(ReferenceOps(), spec), spec, rows, plain(300))
    measured = measuring_bench(CpuOps(threads=2, isa=isa), spec)
    left = bench_for(CpuOps(threads=2, isa=isa), spec, kv_dtype="q8")
    left.kv.native.set_channels(0, list(range(64)) * 2, [1.0] * 128)
    assert distance(attend(measured, spec, rows, plain(300)), expected) < 0.01
    assert distance(attend(left, spec, rows, plain(300)), expected) > 0.02


def test_channels_are_measured_by_the_model(isa: str) -> None:
    """Those with large products come last, and what is large in keys alone is shared out between keys and queries."""
    spec = spec_of(4, 2, 32, rope=rope(16))
    rows = rows_for(spec, 64).reshape(64, 8, 32)
    rows[:, 4, 3] *= 100  # a key's; it is turned together with channel 11
    rows[:, 2:4, 20] *= 10  # of the second head's queries
    rows[:, 5, 20] *= 10
    rows = rows.reshape(64, 256)
    kept = []
    for threads, first in ((1, 40), (2, 5)):
        bench = measuring_bench(CpuOps(threads=threads, isa=isa), spec)
        bench.kv.write_block(3, b"\x55" * bench.kv.block_bytes[0])
        assert bench.kv.native.channels(0) is None
        attend(bench, spec, rows, make_batch([(0, first, [0, 1])], 32))
        assert bench.kv.read_block(3) == b"\x55" * bench.kv.block_bytes[0]  # measuring leaves the cache alone
        kept.append(bench.kv.native.channels(0))
        attend(bench, spec, rows_for(spec, 64, 9), make_batch([(0, 9, [0])], 32))
        assert bench.kv.native.channels(0) == kept[-1]  # by the first model that has it, once
    assert kept[0] == kept[1]  # whatever the first step is
    order, of_keys = kept[0]
    assert sorted(order[:32]) == sorted(order[32:]) == list(range(32))
    assert set(order[30:32]) == {3, 11}
    assert order[63] == 20
    factors = dict(zip(order[:32], of_keys[:32], strict=True))
    assert factors[3] == factors[11] == pytest.approx(0.12, rel=0.5)  # of a size between queries and keys
    assert factors[25] == pytest.approx(1.0, rel=0.5)


@pytest.mark.parametrize("kv_dtype", ["q8", "f16", "f32"])
@pytest.mark.parametrize("dim", [1, 8, 33, 64, 80, 96, 256])
def test_a_cache_is_as_large_as_plan_says(kv_dtype: str, dim: int) -> None:
    """But for values that are padded to sixteen, and parts of a block to whole lines of memory."""
    spec = spec_of(2, 2, dim)
    said = 64 * kv_bytes_per_token(architecture_of(config_of(spec)).storage, kv_dtype)
    found = bench_for(CpuOps(threads=1), spec, 64, kv_dtype, blocks=1).kv.block_bytes[0]
    padding = -dim % 16 * {"q8": 1, "f16": 2, "f32": 4}[kv_dtype] * 64
    heads = TINY.num_layers * spec.num_kv_heads
    assert said <= found - heads * padding < said + heads * 2 * 64


def test_channels_that_cannot_be_are_refused() -> None:
    spec = spec_of(2, 1, 8)
    kv = bench_for(CpuOps(threads=1), spec, kv_dtype="q8").kv.native
    for order, factors in (
        ([0] * 8, [1.0] * 8),
        ([*range(7), 8], [1.0] * 8),
        (list(range(7)), [1.0] * 7),
        (list(range(8)), [0.0] * 8),
        (list(range(8)), [float("nan")] * 8),
    ):
        with pytest.raises(ValueError, match=r"channel|above 0"):
            kv.set_channels(0, order, factors)
    with pytest.raises(IndexError, match="layer"):
        kv.channels(99)
    with pytest.raises(ValueError, match="only integer keys"):
        bench_for(CpuOps(threads=1), spec, kv_dtype="f16").kv.native.channels(0)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-12, 1e12])
def test_8_bit_values_of_any_size(isa: str, size: float) -> None:
    spec = spec_of(2, 1, 32)
    rows = rows_for(spec, 300)
    bench = bench_for(CpuOps(threads=2, isa=isa), spec, kv_dtype="q8")
    usual = attend(bench, spec, rows, plain(300))
    rows[:, 96:] *= np.float32(size)
    y = attend(bench, spec, rows, plain(300))
    assert np.isfinite(y).all()
    assert distance(y, usual * np.float64(size)) < (1e-3 if size > 1e-31 else 1.1)  # nothing, where there is no scale


def plain(rows: int) -> Batch:
    return make_batch([(0, rows, range(-(-rows // 32)))], 32)


@pytest.mark.parametrize("window", [5, 40])
@pytest.mark.parametrize(
    ("kv_dtype", "block_size"), [("f32", 1), ("f32", 4), ("f16", 32), ("q8", 4), ("q8", 16), ("q8", 48)]
)
def test_blocks_behind_the_window_are_not_read(isa: str, window: int, kv_dtype: str, block_size: int) -> None:
    """They may be missing from the table, whatever is in them now; one that a row sees may not."""
    spec, count = spec_of(4, 2, 16, window=window), min(300, 60 * block_size)
    bench = bench_for(CpuOps(threads=2, isa=isa), spec, block_size, kv_dtype)
    rows, blocks = rows_for(spec, count + 3), np.random.default_rng(2).permutation(64)
    blocks = blocks[: -(-(count + 3) // block_size)]
    attend(bench, spec, rows[:count], make_batch([(0, count, blocks)], block_size))
    batch = make_batch([(count, 3, blocks)], block_size)
    expected = attend(bench, spec, rows[count:], batch)
    first = (count + 1 - window) // 16 * 16 // block_size
    batch.tables[0, :first] = -1
    for block in blocks[:first]:
        bench.kv.write_block(block, b"\xff" * bench.kv.block_bytes[0])
    assert np.array_equal(attend(bench, spec, rows[count:], batch), expected)
    batch.tables[0, first] = -1
    with pytest.raises(EngineError, match="block -1 is outside"):
        attend(bench, spec, rows[count:], batch)


def test_a_block_written_in_this_step_can_be_read_by_another_sequence(isa: str) -> None:
    """As in the reference: every key is stored before any query looks."""
    spec = spec_of(4, 2, 16)
    rows = rows_for(spec, 2)
    batch = make_batch([(0, 1, [3]), (1, 1, [3])], 32)
    for threads in (1, 2):
        ours = attend(bench_for(CpuOps(threads=threads, isa=isa), spec), spec, rows, batch)
        theirs = attend(bench_for(ReferenceOps(), spec), spec, rows, batch)
        assert distance(ours, theirs) < 2e-6


@pytest.mark.parametrize("kv_dtype", ["f32", "q8"])
def test_blocks_are_copied_saved_and_restored(isa: str, kv_dtype: str) -> None:
    spec = spec_of(4, 2, 16)
    bench = bench_for(CpuOps(threads=1, isa=isa), spec, kv_dtype=kv_dtype)
    rows = rows_for(spec, 40)
    whole = attend(bench, spec, rows, make_batch([(0, 40, [0, 1])], 32))
    attend(bench, spec, rows[:32], make_batch([(0, 32, [4])], 32))
    bench.kv.copy_block(4, 9)
    data = bench.kv.read_block(9)
    assert len(data) == bench.kv.block_bytes[0]
    bench.kv.write_block(12, data)
    for block in (4, 9, 12):
        y = attend(bench, spec, rows[32:], make_batch([(32, 8, [block, 20])], 32))
        assert np.array_equal(y, whole[32:])

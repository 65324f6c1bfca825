"""Products with weights of every format, against float64, and the same bits for a row wherever it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.conftest import ISAS, Bench, distance, plain_batch, random_weight, vector
from unspool.ops import Batch
from unspool.ops.cpu import CpuOps
from unspool.weights.formats import FORMATS
from unspool.weights.weight import Weight

ROWS = [1, 2, 3, 7, 8, 33, 200]
FLOATS = ("f32", "f16", "bf16")


def tolerance(format: str) -> float:
    return 1e-5 if format in FLOATS else 0.008  # 8-bit activations: a 127th of a block's largest, uniformly off


@pytest.mark.parametrize("format", FORMATS)
def test_products_agree_with_float64(bench: Bench, format: str) -> None:
    rng = np.random.default_rng(1)
    for rows in ROWS:
        weight = random_weight(rng, 50, 512, format)
        x = rng.standard_normal((rows, 512)).astype(np.float32)
        matrix = bench.ops.matrix([weight])
        y = bench.run(lambda ops, x, b, kv, m=matrix: ops.linear(x, m), x)
        assert distance(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T) < tolerance(format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_any_company(isa: str, format: str) -> None:
    rng = np.random.default_rng(2)
    weight = random_weight(rng, 80, 256, format)
    x = rng.standard_normal((40, 256)).astype(np.float32)
    x[:, 17] *= 30  # outliers take another path
    x[7, 100] = 200
    whole = None
    for threads in (1, 2, 3):
        bench = Bench(CpuOps(threads=threads, isa=isa))
        matrix = bench.ops.matrix([weight])

        def product(rows: np.ndarray, bench: Bench = bench, matrix: object = matrix) -> np.ndarray:
            return bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), rows)

        y = product(x)
        whole = y if whole is None else whole
        assert np.array_equal(y, whole)
        for row in (0, 7, 39):
            assert np.array_equal(product(x[row : row + 1])[0], whole[row])
        for order in (np.roll(np.arange(40), 5), np.arange(40)[::-1], np.arange(13)):
            assert np.array_equal(product(x[order]), whole[order])


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 3), (5, 31), (33, 100)])
def test_odd_shapes(bench: Bench, format: str, rows: int, columns: int) -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, rows, columns, format)
    x = rng.standard_normal((9, columns)).astype(np.float32)
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    assert distance(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T) < 1e-5


@pytest.mark.parametrize("format", [name for name, kind in FORMATS.items() if kind.block == 32])
def test_a_row_is_any_number_of_blocks(bench: Bench, format: str) -> None:
    rng = np.random.default_rng(6)
    for columns in (32, 96, 160):
        weight = random_weight(rng, 20, columns, format)
        x = rng.standard_normal((9, columns)).astype(np.float32)
        matrix = bench.ops.matrix([weight])
        y = bench.run(lambda ops, x, b, kv, m=matrix: ops.linear(x, m), x)
        expected = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
        assert distance(y, expected) < tolerance(format)


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_integers_are_exact(bench: Bench, format: str) -> None:
    """Where activations are whole numbers up to 127 and scales powers of two, nothing rounds."""
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (24 * 4, FORMATS[format].bytes_per_block), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    if format in ("q4_1", "q5_1"):
        blocks[:, 2:4] = np.frombuffer(np.float16(-4.25).tobytes(), np.uint8)
    weight = Weight("w", format, (24, 128), blocks.reshape(-1))
    x = rng.integers(-127, 128, (15, 128)).astype(np.float32)
    x[:, ::32] = 127
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    assert np.array_equal(y, (x.astype(np.float64) @ weight.dequantize().astype(np.float64).T).astype(np.float32))


@pytest.mark.parametrize("columns", [32, 96, 128, 192])
def test_mxfp4_has_any_code_and_scale(bench: Bench, columns: int) -> None:
    """Also scales that float16 does not have, and numbers of blocks that do not fill the tile's last unit."""
    rng = np.random.default_rng(17)
    blocks = rng.integers(0, 256, (24, columns // 32, 17), dtype=np.uint8)
    blocks[:, :, 0] = rng.integers(30, 200, (24, 1))  # one for each row: sums of its products are then exact
    blocks[7, :, 0] = 0
    weight = Weight("w", "mxfp4", (24, columns), blocks.reshape(-1))
    x = rng.integers(-127, 128, (15, columns)).astype(np.float32)
    x[:, ::32] = 127
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    wanted = (x.astype(np.float64) @ weight.dequantize().astype(np.float64).T).astype(np.float32)
    assert np.abs(y[:, 7]).max() < 1e-33  # about 2⁻¹²⁷, or zero
    assert np.array_equal(np.delete(y, 7, axis=1), np.delete(wanted, 7, axis=1))


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_any_bytes_of_a_k_quant(bench: Bench, format: str) -> None:
    """Random bytes reach every code, scale and minimum; exact activations leave only float rounding."""
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (20 * 2, FORMATS[format].bytes_per_block), dtype=np.uint8)
    halves = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}[format]
    for start in halves:
        scales = rng.uniform(0.001, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    weight = Weight("w", format, (20, 512), blocks.reshape(-1))
    x = rng.integers(-127, 128, (7, 512)).astype(np.float32)
    x[:, ::32] = -127
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    assert distance(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T) < 1e-6


def test_outliers_do_not_spoil_their_block(bench: Bench) -> None:
    rng = np.random.default_rng(6)
    weight = random_weight(rng, 64, 512, "q4_1")
    x = rng.standard_normal((5, 512)).astype(np.float32)
    x[:, [40, 41, 300]] = [500, -300, 400]
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    wanted = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    assert np.abs(y - wanted).max() < 1.0  # 8 bits of the whole block would be off by tens


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0", "q4_k"])
def test_rows_with_many_outliers_each_in_another_place(bench: Bench, format: str) -> None:
    """More columns than are multiplied at once, most of them zero in most rows; and a row with more than there is room
    for (one a block), of which the last block keeps its own."""
    rng = np.random.default_rng(14)
    weight = random_weight(rng, 64, 512, format)
    x = rng.standard_normal((30, 512)).astype(np.float32)
    for row in range(30):
        x[row, (7 * row + 37 * np.arange(6)) % 512] *= 60
    x[4] = rng.standard_normal(512)
    x[4, 64:76] = x[4, 480:492] = 300
    x[5] = 0
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    wanted = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    for row in range(30):
        assert distance(y[row], wanted[row]) < tolerance(format) or row == 5
        assert np.array_equal(bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x[row : row + 1])[0], y[row])
    assert not y[5].any()


def test_the_largest_outliers_that_there_is_room_for(bench: Bench) -> None:
    """Four in every fourth block, all times the largest weight: the sum is as large as its integers allow."""
    rng = np.random.default_rng(15)
    block = np.concatenate([np.frombuffer(np.float16([1, 0]).tobytes(), np.uint8), np.full(16, 255, np.uint8)])
    weight = Weight("w", "q4_1", (16, 4096), np.tile(block, 16 * 128))
    assert (weight.dequantize() == 15).all()
    x = rng.standard_normal((13, 4096)).astype(np.float32)
    x.reshape(13, 128, 32)[:, ::4, :4] = [1e4, 9e3, 1e4, 8e3]
    x[1] *= -1
    x[2] *= 1e-36
    x[3] *= 1e-42
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    wanted = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    for row in (0, 1, 4, 12):
        assert distance(y[row], wanted[row]) < 2e-4
    assert np.abs(y[2:4]).max() < 1e-25  # too small to be told from nothing, but numbers


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_the_product_before_a_head_is_of_16_bits(bench: Bench, format: str) -> None:
    """What it rounds would go straight into the logits. Where it is packed for 8 bits already it stays so."""
    rng = np.random.default_rng(16)
    weight, head = random_weight(rng, 64, 512, format), random_weight(rng, 40, 64, "f32")
    x, ones = rng.standard_normal((5, 512)).astype(np.float32), vector(np.ones(64))
    product = x[[1, 4]].astype(np.float64) @ weight.dequantize().astype(np.float64).T
    product /= np.sqrt((product**2).mean(axis=1, keepdims=True))
    wanted = product @ head.dequantize().astype(np.float64).T

    def logits(matrix: Any) -> np.ndarray:
        def forward(ops: Any, x: Any, b: Batch, kv: Any) -> Any:
            normed = ops.norm(ops.take(ops.linear(x, matrix), b), ops.vector([ones]), 0.0)
            return ops.logits(normed, ops.matrix([head]))

        return bench.run(forward, x, plain_batch(5, [1, 4]))

    matrix = bench.ops.matrix([weight])
    assert distance(logits(matrix), wanted) < 5e-5
    if format in ("q4_0", "q4_1"):
        matrix = bench.ops.matrix([weight])
        bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
        assert 5e-4 < distance(logits(matrix), wanted) < tolerance(format)


@pytest.mark.parametrize("format", ["q4_0", "q4_1"])
@pytest.mark.parametrize("columns", [32, 96, 1024, 1056, 2080])
def test_whole_scales_of_odd_and_many_blocks(bench: Bench, format: str, columns: int) -> None:
    """Blocks go in pairs, and sums become floats after 32 of them. Scales that differ by far keep their weight."""
    rng = np.random.default_rng(11)
    weight = random_weight(rng, 33, columns, format)
    x = rng.standard_normal((14, columns)).astype(np.float32)
    x[:, : columns // 2] *= 0.01
    matrix = bench.ops.matrix([weight])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    assert distance(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T) < 0.008
    assert np.array_equal(bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x[13:])[0], y[13])


@pytest.mark.skipif(len(ISAS) < 3, reason="one set of kernels with fused operations at most")
@pytest.mark.parametrize("format", FORMATS)
def test_sets_of_kernels_agree_to_the_bit(format: str) -> None:
    rng = np.random.default_rng(12)
    weight = random_weight(rng, 40, 512, format)
    x = rng.standard_normal((29, 512)).astype(np.float32)
    x[:, 100] *= 30
    x[3, 64:76] = x[3, 480:492] = 300  # more than there is room for
    found = []
    for isa in ISAS:
        bench = Bench(CpuOps(threads=2, isa=isa))
        matrix = bench.ops.matrix([weight])
        found.append(bench.run(lambda ops, x, b, kv, m=matrix: ops.linear(x, m), x))
    fused = [y for y, isa in zip(found, ISAS, strict=True) if isa != "plain"]
    assert np.array_equal(fused[0], fused[1])
    assert all(distance(y, fused[0]) < 2e-6 for y in found)


@pytest.mark.skipif(len(ISAS) < 3, reason="one set of kernels with fused operations at most")
@pytest.mark.parametrize("columns", [32, 480, 544, 576, 1056])
def test_rows_of_8_bits_are_the_same_in_sixteens_of_blocks_and_one_by_one(columns: int) -> None:
    """AVX-512 takes 16 blocks and 4 rows at once. Among them are rows of zeros, of a NaN, and of outliers alone."""
    rng = np.random.default_rng(14)
    weight = random_weight(rng, 20, columns, "q4_1")
    x = rng.standard_normal((17, columns)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 20
    x[1], x[2, columns // 2], x[6, ::32] = 0, np.nan, 1e4
    found = []
    for isa in ("avx512", "avx2"):
        bench = Bench(CpuOps(threads=2, isa=isa))
        matrix = bench.ops.matrix([weight])
        found.append(bench.run(lambda ops, x, b, kv, m=matrix: ops.linear(x, m), x))
        alone = bench.run(lambda ops, x, b, kv, m=matrix: ops.linear(x, m), x[5:6])
        assert np.array_equal(alone[0], found[-1][5])
    assert np.array_equal(found[0], found[1], equal_nan=True)
    assert (found[0][1] == 0).all()
    assert np.isnan(found[0][2]).all()
    assert np.isfinite(np.delete(found[0], 2, axis=0)).all()


@pytest.mark.parametrize("format", ["q4_0", "q4_1"])
def test_scales_without_measure(bench: Bench, format: str) -> None:
    """A row of weights without a scale, or with one that is no number, is none; its neighbours are as they were."""
    rng = np.random.default_rng(13)
    weight = random_weight(rng, 20, 128, format)
    blocks = np.frombuffer(weight.raw, np.uint8).reshape(20, 4, -1).copy()
    blocks[3, :, : 2 if format == "q4_0" else 4] = 0
    blocks[5, 2, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    blocks[7, 1, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    x = rng.standard_normal((9, 128)).astype(np.float32)

    def product(weight: Weight) -> np.ndarray:
        matrix = bench.ops.matrix([weight])
        return bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)

    y, usual = product(Weight("w", format, (20, 128), blocks.reshape(-1))), product(weight)
    assert (y[:, 3] == 0).all()
    assert np.isnan(y[:, [5, 7]]).all()
    kept = [i for i in range(20) if i not in (3, 5, 7)]
    assert np.array_equal(y[:, kept], usual[:, kept])


def test_a_matrix_is_packed_for_one_kind_of_rows(bench: Bench) -> None:
    """Whoever looks rows up, or has a head, says so before it is packed: nobody gets rounded values in silence."""
    rng = np.random.default_rng(14)
    x = rng.standard_normal((2, 64)).astype(np.float32)
    matrix = bench.ops.matrix([random_weight(rng, 64, 64, "q4_1")])
    bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    with pytest.raises(ValueError, match="not packed for such rows"):
        bench.run(lambda ops, x, b, kv: ops.logits(ops.take(x, b), matrix), x, plain_batch(2, [1]))
    with pytest.raises(ValueError, match="not packed for looking up rows"):
        bench.ops.compile(lambda b, kv: bench.ops.embed(b, matrix), bench.kv)


@pytest.mark.parametrize(
    "formats", [("q4_k", "f16", "q6_k", "q5_0"), ("q4_1", "f16", "q4_0", "q4_1"), ("q4_1", "q8_0", "q4_0", "f32")]
)
def test_bias_residual_and_mixed_parts(bench: Bench, formats: tuple[str, ...]) -> None:
    rng = np.random.default_rng(7)
    parts = [random_weight(rng, n, 256, f) for n, f in zip((40, 16, 9, 191), formats, strict=True)]
    x = rng.standard_normal((11, 256)).astype(np.float32)
    bias = rng.standard_normal(256).astype(np.float32)
    matrix, shift = bench.ops.matrix(parts), bench.ops.vector([vector(bias)])
    y = bench.run(lambda ops, x, b, kv: ops.linear(x, matrix, shift, residual=x), x)
    weight = np.concatenate([part.dequantize() for part in parts]).astype(np.float64)
    assert distance(y, x + x.astype(np.float64) @ weight.T + bias) < 0.008


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("format", ["q8_0", "q6_k", "f16"])
def test_the_head_is_nearly_exact(bench: Bench, format: str, softcap: float | None) -> None:
    rng = np.random.default_rng(8)
    weight = random_weight(rng, 100, 256, format)
    x = rng.standard_normal((9, 256)).astype(np.float32)
    matrix = bench.ops.matrix([weight])
    for wanted in ([8], [3, 1], [0, 2, 4, 6, 7], list(range(9))):
        y = bench.run(lambda ops, x, b, kv: ops.logits(ops.take(x, b), matrix, softcap), x, plain_batch(9, wanted))
        exact = x[wanted].astype(np.float64) @ weight.dequantize().astype(np.float64).T
        if softcap is not None:
            exact = softcap * np.tanh(exact / softcap)
        assert y.shape == (len(wanted), 100)
        assert distance(y, exact) < 5e-5
    none = bench.run(lambda ops, x, b, kv: ops.logits(ops.take(x, b), matrix, softcap), x, plain_batch(9, []))
    assert none.shape == (0, 100)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 1e-42])
def test_strange_numbers_do_not_crash(bench: Bench, bad: float) -> None:
    """Nor do they vanish: a row with one that is not finite has no result that is."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((6, 256)).astype(np.float32)
    x[2, 33] = bad
    for format in FORMATS:
        weight = random_weight(rng, 20, 256, format)
        for product in ("linear", "logits"):  # rows of 8 bits and of 16
            matrix = bench.ops.matrix([weight])
            y = bench.run(lambda ops, x, b, kv, m=matrix, p=product: getattr(ops, p)(x, m), x)
            assert np.isfinite(y[[0, 1, 3, 4, 5]]).all()
            assert np.isfinite(bad) or not np.isfinite(y[2]).any()

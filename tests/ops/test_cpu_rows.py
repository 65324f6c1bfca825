"""Embeddings, norms, gates and taking rows, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.conftest import Bench, distance, plain_batch, random_weight, vector
from unspool.errors import EngineError
from unspool.ops import Batch
from unspool.weights.formats import FORMATS
from unspool.weights.fp8_scales import widened


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_rows_are_the_formats_own_values(bench: Bench, format: str, tied: bool) -> None:
    """From the file's bytes, or from the tiles where the same matrix is also the head. Of 8-bit floats, which these
    kernels do not have, the values in bf16."""
    rng = np.random.default_rng(1)
    weight = random_weight(rng, 37, 256, format)
    table = bench.ops.matrix([weight])
    if tied:
        bench.run(lambda ops, x, b, kv: ops.logits(x, table), np.ones((1, 256), np.float32))
        assert table.native.packed
    ids = np.array([0, 36, 16, 15, 36, 7], np.int32)
    batch = plain_batch(6)
    batch = Batch(ids, batch.positions, batch.slots, batch.starts, batch.tables, batch.logit_rows)
    step = bench.ops.compile(lambda b, kv: bench.ops.embed(b, table, 0.5), bench.kv)
    assert np.array_equal(step.run(batch), widened(weight).dequantize()[ids] * np.float32(0.5))


@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 5, 40])
def test_norm(bench: Bench, reference: Bench, width: int, rows: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    weight = vector(rng.standard_normal(width))

    def forward(ops: Any, x: Any, b: Batch, kv: Any, again: bool = False) -> Any:
        y = ops.norm(x, ops.vector([weight]), 1e-5, residual=x)
        return ops.norm(y, ops.vector([weight]), 1e-5, residual=x)

    y = bench.run(forward, x)
    assert distance(y, reference.run(forward, x)) < 1e-6
    for row in (0, rows - 1):
        assert np.array_equal(bench.run(forward, x[row : row + 1])[0], y[row])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("format", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("inner", [24, 96, 100])
def test_gated(bench: Bench, reference: Bench, activation: str, format: str, inner: int) -> None:
    rng = np.random.default_rng(3)
    x = 2 * rng.standard_normal((21, 256)).astype(np.float32)
    parts = [random_weight(rng, inner, 256, format), random_weight(rng, inner, 256, format)]

    def forward(ops: Any, x: Any, b: Batch, kv: Any) -> Any:
        return ops.gated(x, ops.matrix(parts), activation)

    y = bench.run(forward, x)
    assert distance(y, reference.run(forward, x)) < (1e-5 if format == "f32" else 0.01)
    assert np.array_equal(bench.run(forward, x[4:5])[0], y[4])


def test_take_moves_up_and_changes_nothing(bench: Bench) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((30, 64)).astype(np.float32)
    up = [random_weight(rng, 96, 64, "q8_0"), random_weight(rng, 96, 64, "q8_0")]
    down, norm = random_weight(rng, 64, 96, "q4_1"), vector(rng.standard_normal(64))

    def block(ops: Any, x: Any) -> Any:
        inner = ops.gated(ops.norm(x, ops.vector([norm]), 1e-5), ops.matrix(up), "silu")
        return ops.linear(inner, ops.matrix([down]), residual=x)

    everything = bench.run(lambda ops, x, b, kv: block(ops, block(ops, x)), x)
    wanted = [29, 0, 7, 7]
    some = bench.run(lambda ops, x, b, kv: ops.take(block(ops, block(ops, x)), b), x, plain_batch(30, wanted))
    assert np.array_equal(some, everything[wanted])


def test_widths_that_do_not_fit_are_refused(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    x = np.ones((2, 64), np.float32)
    matrix = bench.ops.matrix([random_weight(rng, 8, 32, "f32")])
    with pytest.raises(EngineError, match=r"32 values a row; 64"):
        bench.run(lambda ops, x, b, kv: ops.linear(x, matrix), x)
    with pytest.raises(EngineError, match="share their input"):
        bench.ops.matrix([random_weight(rng, 8, 32, "f32"), random_weight(rng, 8, 64, "f32")])


def test_an_operation_without_a_kernel_is_refused_by_name(bench: Bench) -> None:
    from tests.ops.test_graph import Scan

    with pytest.raises(EngineError, match="no kernel for <Scan of 64 values, all rows>"):
        bench.run(lambda ops, x, b, kv: Scan(x), np.ones((2, 64), np.float32))

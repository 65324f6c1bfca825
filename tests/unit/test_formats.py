"""Every storage format against the `gguf` package, on random bytes and on random values."""

from __future__ import annotations

import warnings

import gguf
import gguf.quants
import numpy as np
import pytest

from unspool.errors import ModelError
from unspool.weights.formats import FORMATS
from unspool.weights.gguf_layout import TENSOR_FORMATS
from unspool.weights.weight import Weight, encode_weight

NAMES = list(TENSOR_FORMATS.values())  # those of GGUF; 8-bit floats have a file of their own
# Root mean square error of a plain quantizer on normal values; about half a step of the format.
ERROR = {"f32": 0.0, "f16": 3e-4, "bf16": 2e-3, "q8_0": 6e-3, "q6_k": 0.02, "q5_0": 0.05, "q5_1": 0.05, "q5_k": 0.05,
         "q4_0": 0.1, "q4_1": 0.09, "q4_k": 0.09, "q3_k": 0.2, "q2_k": 0.4, "mxfp4": 0.15}  # fmt: skip


def oracle(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_ggml(name: str) -> None:
    format = FORMATS[name]
    assert (format.block, format.bytes_per_block) == gguf.GGML_QUANT_SIZES[oracle(name)]


@pytest.mark.parametrize("name", NAMES)
def test_decode_agrees_bit_for_bit_on_random_bytes(name: str) -> None:
    """Random bytes hold NaN, infinite and subnormal scales too; none may warn."""
    format = FORMATS[name]
    data = np.random.default_rng(7).integers(0, 256, (512, format.bytes_per_block), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = format.decode(data)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(data, oracle(name)).reshape(-1)
    assert mine.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
    valid = ~np.isnan(mine)
    np.testing.assert_array_equal(mine[valid].view(np.uint32), theirs[valid].astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_encode_agrees_byte_for_byte(name: str) -> None:
    values = np.random.default_rng(8).standard_normal((64, 256)).astype(np.float32)
    values[3] = 0
    assert FORMATS[name].encode(values) == gguf.quants.quantize(values, oracle(name)).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_encode_then_decode_is_near(name: str) -> None:
    values = np.random.default_rng(9).standard_normal((64, 512)).astype(np.float32)
    weight = encode_weight("w", values, name)
    error = float(np.sqrt(np.mean((weight.dequantize() - values) ** 2)))
    assert error <= ERROR[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-30])
def test_a_constant_survives(name: str, value: float) -> None:
    values = np.full((1, 256), value, np.float32)
    result = FORMATS[name].decode(np.frombuffer(FORMATS[name].encode(values), np.uint8))
    np.testing.assert_allclose(result, values[0], rtol=0.01, atol=1e-7)


def test_bf16_rounds_to_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    result = FORMATS["bf16"].decode(np.frombuffer(FORMATS["bf16"].encode(values), np.uint8))
    np.testing.assert_array_equal(result, np.array([1.0, 1.0, 1.015625, np.inf, -np.inf, np.nan, np.inf], np.float32))


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].block > 1])
def test_what_a_format_cannot_store_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not finite"):
        FORMATS[name].encode(np.full((1, 256), np.nan, np.float32))
    with pytest.raises(ModelError, match="whole blocks"):
        FORMATS[name].encode(np.zeros((256, 8), np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_rows_of_the_whole(name: str) -> None:
    values = np.random.default_rng(10).standard_normal((12, 256)).astype(np.float32)
    weight = encode_weight("w", values, name)
    rows = np.array([3, 0, 3, 11])
    np.testing.assert_array_equal(weight.dequantize_rows(rows), weight.dequantize()[rows])


def test_a_weight_checks_itself() -> None:
    data = np.zeros(34, np.uint8)
    weight = Weight("w", "q8_0", (1, 32), data)
    assert weight.nbytes == 34
    assert not weight.data.flags.writeable
    with pytest.raises(ModelError, match=r"w: q8_0 of shape \(2, 32\) takes 68 bytes; 34 are here"):
        Weight("w", "q8_0", (2, 32), data)
    with pytest.raises(ModelError, match="does not fit q8_0"):
        Weight("w", "q8_0", (2, 16), data)
    with pytest.raises(ModelError, match="unknown format 'iq2'"):
        Weight("w", "iq2", (1, 32), data)

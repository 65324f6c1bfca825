"""Quantized weights as they lie on the device: everything finds its way back, and is where kernels look for it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.cuda_setting import MARKS, torch
from unspool.ops.cuda.matrix import make_matrix
from unspool.ops.cuda.memory import ROWS
from unspool.ops.cuda.plane_layout import tile_columns
from unspool.ops.cuda.planes import Planes
from unspool.weights.weight import Weight, encode_weight

pytestmark = MARKS
CPU = torch.device("cpu")
FORMATS = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "fp8", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]


def weight_of(format: str, features: int, width: int, seed: int = 0) -> Weight:
    values = np.random.default_rng(seed).standard_normal((features, width)).astype(np.float32)
    return encode_weight("w", values, format)


def padded(values: np.ndarray, width: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_those_of_the_file(format: str) -> None:
    weight = weight_of(format, 200, 512)  # not whole tiles of rows
    planes = make_matrix([weight], CPU).planes
    assert planes.features == 200
    expected = weight.dequantize()
    assert np.abs(planes.values().numpy() - padded(expected, planes.width)).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("format", "width"), [("q8_0", 96), ("q8_0", 64), ("q4_1", 160), ("q8_0", 128)])
def test_a_width_that_is_no_whole_tile_is_padded(format: str, width: int) -> None:
    weight = weight_of(format, 3, width)
    planes = make_matrix([weight], CPU).planes
    assert planes.width % tile_columns(planes.width) == 0
    values = planes.values().numpy()
    assert (values[:, width:] == 0).all()
    assert np.allclose(values[:, :width], weight.dequantize(), atol=2e-3)


@pytest.mark.parametrize("format", ["q8_0", "q4_1", "fp8", "q6_k"])
def test_rows_are_picked_and_stacked(format: str) -> None:
    parts = [weight_of(format, features, 256, seed) for seed, features in enumerate((130, 5, 128))]
    matrix = make_matrix(parts, CPU)
    rows = torch.from_numpy(np.random.default_rng(1).permutation(263))
    apart = torch.cat([make_matrix([part], CPU).planes.values() for part in parts])
    assert torch.equal(matrix.planes.values(), apart)
    assert torch.equal(matrix.planes.select(rows).values(), apart[rows])


@pytest.mark.parametrize("formats", [("q4_0", "q8_0"), ("q8_0", "q5_1")])
@pytest.mark.parametrize("width", [96, 576])
def test_parts_of_different_formats_become_bf16_without_padding(formats: tuple[str, str], width: int) -> None:
    parts = [weight_of(format, 16, width, seed) for seed, format in enumerate(formats)]
    planes = make_matrix(parts, CPU).planes
    assert (planes.format, planes.features, planes.width) == ("bf16", 32, width)
    expected = np.concatenate([part.dequantize() for part in parts])
    values = planes.values().numpy()
    assert np.allclose(values[:32], expected, rtol=1e-2, atol=2e-2)
    assert not values[32:].any(), "rows that fill up a tile"


def test_a_tile_is_in_one_place_and_its_bytes_take_turns() -> None:
    """Row 130, column 145: the second tile of rows and of columns; columns 144 and 145 are followed by 160 and 161."""
    features, width = 200, 384
    codes = (torch.arange(features * width) % 251).to(torch.uint8).reshape(features, width)
    scales = torch.arange(features * width // 32, dtype=torch.float16).reshape(features, -1)
    planes = Planes.of_rows("i8g32", width, codes, scales)
    assert planes.codes.shape == (2 * 3 * ROWS, 128)
    line = planes.codes[(1 * 3 + 1) * ROWS + 2].tolist()
    assert line[:6] == codes[130, [128, 129, 144, 145, 130, 131]].tolist()
    assert line[32:36] == codes[130, [160, 161, 176, 177]].tolist()
    assert planes.scales is not None
    assert planes.scales.shape == (2 * 3 * 4, ROWS)
    assert planes.scales[(1 * 3 + 1) * 4 + 2, 2] == scales[130, 4 + 2]
    again, factors, offsets = planes.rows()
    assert torch.equal(again, codes)
    assert factors is not None
    assert torch.equal(factors, scales)
    assert offsets is None

"""MXFP4 experts of Hugging Face directories: joined from blocks and scales, the same model as one of floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.family_files import FIXTURES, expected_of, rows_of
from tests.models.mxfp4_directory import random_parts, write_directories
from unspool.errors import ModelError
from unspool.models.checkpoint import open_checkpoint
from unspool.ops.reference import ReferenceOps
from unspool.weights.mxfp4_blocks import join_blocks
from unspool.weights.safetensors import open_safetensors, write_safetensors
from unspool.weights.weight import Weight, encode_weight


def parts(blocks: np.ndarray, scales: np.ndarray) -> dict[str, Weight]:
    found = {"w_blocks": blocks, "w_scales": scales}
    return {name: Weight(name, "u8", each.shape, each.reshape(-1).data) for name, each in found.items()}


def test_blocks_and_scales_are_one_weight() -> None:
    blocks, scales, values = random_parts(np.random.default_rng(3), (2, 6, 96))
    other = encode_weight("v", np.ones(4, np.float32))
    joined = join_blocks({**parts(blocks, scales), "v": other})
    assert list(joined) == ["v", "w"]
    assert (joined["w"].format, joined["w"].shape) == ("mxfp4", (2, 6, 96))
    np.testing.assert_array_equal(joined["w"].dequantize(), values)


def test_what_does_not_fit_is_refused() -> None:
    blocks, scales, _ = random_parts(np.random.default_rng(3), (2, 6, 96))
    both = parts(blocks, scales)
    with pytest.raises(ModelError, match=r"'w_blocks': there is no 'w_scales' beside it"):
        join_blocks({"w_blocks": both["w_blocks"]})
    with pytest.raises(ModelError, match=r"'w_scales': bytes without a meaning"):
        join_blocks({"w_scales": both["w_scales"]})
    with pytest.raises(ModelError, match=r"'w_blocks' of shape \(2, 6, 3, 16\): .*which have \(2, 6, 2\)"):
        join_blocks(parts(blocks, scales[:, :, :2].copy()))


def test_bytes_are_stored_and_have_no_values(tmp_path: Path) -> None:
    blocks, scales, _ = random_parts(np.random.default_rng(3), (1, 2, 32))
    write_safetensors(tmp_path / "m.safetensors", parts(blocks, scales))
    found = open_safetensors(tmp_path / "m.safetensors")["w_blocks"]
    assert (found.format, bytes(found.raw)) == ("u8", blocks.tobytes())
    with pytest.raises(ModelError, match="no values by themselves"):
        found.dequantize()


def test_a_directory_of_packed_experts_is_the_model_of_its_values(tmp_path: Path) -> None:
    write_directories(FIXTURES / "gpt-oss", tmp_path / "floats", tmp_path / "packed")
    ids = expected_of("gpt-oss")["ids"][:24]
    packed = open_checkpoint(tmp_path / "packed")
    assert packed.weights["blk.0.ffn_gate_exps.weight"].format == "mxfp4"
    found, expected = (
        rows_of(each, ReferenceOps(), ids, [24]) for each in (packed, open_checkpoint(tmp_path / "floats"))
    )
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()

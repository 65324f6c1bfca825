"""Quantized directories: 8-bit floats pass, everything else is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import ModelError
from unspool.weights.fields import Fields
from unspool.weights.quantization import check_quantization


def groups(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "compressed-tensors"},
        groups(type="float", num_bits=8),
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": None}}},
    ],
)
def test_8_bit_floats_pass(tmp_path: Path, config: dict[str, Any]) -> None:
    check_quantization(Fields(tmp_path / "config.json", {"quantization_config": config}))
    check_quantization(Fields(tmp_path / "config.json", {}))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ"),
        ({"quant_method": "awq"}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "of tomorrow"}, "'of tomorrow'"),
        ({"group_size": 64, "bits": 4}, "MLX"),
        ({}, "an unknown method"),
        (groups(type="int", num_bits=4), "compressed-tensors with int4 weights"),
        (groups(type="int", num_bits=8), "compressed-tensors with int8 weights"),
        (groups(type="float", num_bits=4), "compressed-tensors with float4 weights"),
    ],
)
def test_everything_else_is_refused_by_its_name(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    fields = Fields(tmp_path / "config.json", {"quantization_config": config})
    with pytest.raises(ModelError, match=f"quantization_config: {name} cannot be read; of quantized directories those"):
        check_quantization(fields)


def test_what_other_files_say(tmp_path: Path) -> None:
    fields = Fields(tmp_path / "config.json", {"quantization": {"group_size": 64, "bits": 4}})
    with pytest.raises(ModelError, match="MLX cannot be read"):
        check_quantization(fields)
    beside, plain = tmp_path / "hf_quant_config.json", Fields(tmp_path / "config.json", {})
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    check_quantization(plain)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelError, match="ModelOpt's NVFP4 cannot be read"):
        check_quantization(plain)

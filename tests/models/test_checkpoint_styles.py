"""Checkpoints as they are published, made of tiny ones that transformers wrote: other fields and tensors, the same
logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.family_files import FIXTURES, expected_of, rows_of
from unspool.models.checkpoint import open_checkpoint
from unspool.ops.cpu import CpuOps
from unspool.weights import fp8
from unspool.weights.safetensors import open_safetensors_directory, write_safetensors
from unspool.weights.weight import Weight, encode_weight

Tensors = Mapping[str, Weight]
TOKENS = 80


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text("utf-8"))
    return found


def write_directory(folder: Path, config: Mapping[str, Any], tensors: Tensors, num_files: int = 1) -> Path:
    """With more than one file, there is an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if num_files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    index = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        write_safetensors(folder / file, part)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}), "utf-8")
    return folder


def logits_of(folder: Path, ids: np.ndarray) -> np.ndarray:
    return rows_of(open_checkpoint(folder), CpuOps(threads=1), ids, [len(ids)])


def renamed(tensors: Tensors, name_of: Callable[[str], str]) -> dict[str, Weight]:
    return {name_of(name): replace(each, name=name_of(name)) for name, each in tensors.items()}


# Kimi K2 --------------------------------------------------------------------------------------------------------------
def as_kimi(config: Mapping[str, Any]) -> dict[str, Any]:
    """Kimi K2's config.json: a type of its own with code beside it, and the fields of transformers 4."""
    left_out = ("rope_parameters", "rope_interleave", "head_dim", "qk_head_dim", "dtype", "output_router_logits")
    kept = {key: value for key, value in config.items() if key not in left_out}
    scaling = {key: value for key, value in config["rope_parameters"].items() if key not in ("rope_theta", "rope_type")}
    return kept | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "rope_scaling": scaling | {"type": "yarn"},
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }


# Its own numbers: one group of experts, a ramp of yarn without width, and no further layers.
KIMI = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
KIMI_YARN = {"beta_fast": 1.0, "beta_slow": 1.0}


@pytest.mark.parametrize("own", [False, True])
def test_kimi_k2_is_read_as_deepseek_v3(own: bool, tmp_path: Path) -> None:
    config, tensors = config_of("deepseek-v3"), open_safetensors_directory(FIXTURES / "deepseek-v3")
    if own:
        config |= KIMI | {"rope_parameters": config["rope_parameters"] | KIMI_YARN}
    kimi = write_directory(tmp_path / "kimi", as_kimi(config), tensors, num_files=3)
    plain = write_directory(tmp_path / "plain", config, tensors)
    expected = expected_of("deepseek-v3")
    found = logits_of(kimi, expected["ids"][:TOKENS])
    assert np.array_equal(found, logits_of(plain, expected["ids"][:TOKENS]))
    first = expected["logits"][:24]
    is_that_of_transformers = np.abs(found[:24] - first).max() < 2e-4 * np.abs(first).max()
    assert is_that_of_transformers != own


def in_eight_bits(weight: Weight) -> tuple[Weight, Weight, Weight]:
    """A matrix in FP8, its scales of blocks of 128 by 128 values, and what they stand for."""
    values = weight.dequantize()
    rows, columns = (-(-size // 128) for size in values.shape)
    padded = np.zeros((rows * 128, columns * 128), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    scales = padded.reshape(rows, 128, columns, 128).max(axis=(1, 3)) / 448
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: values.shape[0], : values.shape[1]]
    codes = Weight(weight.name, "f8_e4m3", values.shape, fp8.encode(values / spread).reshape(-1))
    name = f"{weight.name}_scale_inv"
    stands_for = encode_weight(weight.name, codes.dequantize() * spread, "bf16")
    return codes, encode_weight(name, scales), stands_for


def test_kimi_k2_in_eight_bits(tmp_path: Path) -> None:
    """Matrices of layers are FP8, but for the routers."""
    config, tensors = config_of("deepseek-v3") | KIMI, open_safetensors_directory(FIXTURES / "deepseek-v3")
    packed, floats = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.startswith("model.layers.") and len(weight.shape) == 2 and not name.endswith("mlp.gate.weight"):
            packed[name], scales, floats[name] = in_eight_bits(weight)
            packed[scales.name] = scales
    assert len(packed) > len(tensors)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization |= {"weight_block_size": [128, 128]}
    kimi = as_kimi(config) | {"quantization_config": quantization}
    ids = expected_of("deepseek-v3")["ids"][:TOKENS]
    found = logits_of(write_directory(tmp_path / "kimi", kimi, packed, num_files=2), ids)
    assert np.array_equal(found, logits_of(write_directory(tmp_path / "plain", config, floats), ids))


# Qwen 3.5 with experts, and with images -------------------------------------------------------------------------------
def packed_experts(tensors: Tensors) -> dict[str, Weight]:
    """Experts as [expert, out, in], each one's gate stacked on its up projection."""
    pattern = re.compile(r"(.*\.mlp\.experts\.)\d+\.gate_proj\.weight")
    result = {name: each for name, each in tensors.items() if ".mlp.experts." not in name}
    for stem in {found[1] for name in tensors if (found := pattern.fullmatch(name))}:
        count = sum(bool(re.fullmatch(re.escape(stem) + r"\d+\.gate_proj\.weight", name)) for name in tensors)

        def part(which: str, stem: str = stem, count: int = count) -> np.ndarray:
            return np.stack([tensors[f"{stem}{number}.{which}_proj.weight"].dequantize() for number in range(count)])

        gate_up = np.concatenate([part("gate"), part("up")], axis=1)
        for name, values in ((f"{stem}gate_up_proj", gate_up), (f"{stem}down_proj", part("down"))):
            result[name] = encode_weight(name, values, "bf16")
    return result


@pytest.mark.parametrize("packed", [False, True])
def test_qwen3_5_with_experts_inside_a_model_of_images(packed: bool, tmp_path: Path) -> None:
    text, tensors = config_of("qwen3.5-moe"), open_safetensors_directory(FIXTURES / "qwen3.5-moe")
    assert len(packed_experts(tensors)) < len(tensors)
    inner = renamed(
        packed_experts(tensors) if packed else tensors,
        lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
    )
    eyes = ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.weight")
    inner |= {name: encode_weight(name, np.ones((4, 4), np.float32)) for name in eyes}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": 1,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "tie_word_embeddings": False,
        "vision_config": {"depth": 1, "model_type": "qwen3_5_moe"},
    }
    expected = expected_of("qwen3.5-moe")
    found = logits_of(write_directory(tmp_path / "model", config, inner, num_files=2), expected["ids"][:TOKENS])
    assert np.array_equal(found, logits_of(FIXTURES / "qwen3.5-moe", expected["ids"][:TOKENS]))
    first = expected["logits"][:24]
    assert np.abs(found[:24] - first).max() < 2e-4 * np.abs(first).max()

"""A gpt-oss directory as it is published: experts in MXFP4, two tensors each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from unspool.weights.safetensors import open_safetensors_directory, write_safetensors
from unspool.weights.weight import Weight, encode_weight

# What the sixteen codes stand for, and the sign in the fourth bit.
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def random_parts(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks and scales of `shape` values, and these."""
    groups = (*shape[:-1], shape[-1] // 32)
    blocks = rng.integers(0, 256, (*groups, 16), dtype=np.uint8)
    scales = rng.integers(121, 126, groups, dtype=np.uint8)
    halves = np.stack([blocks & 15, blocks >> 4], -1).reshape(*groups, 32)  # neighbours share a byte
    values = CODES[halves] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return blocks, scales, values.reshape(shape)


def write_directories(source: Path, floats: Path, packed: Path) -> None:
    """Two directories with the same values, of a model whose experts are floats in `source`."""
    rng = np.random.default_rng(7)
    own = open_safetensors_directory(source)
    as_floats, as_parts = dict(own), dict(own)
    for name in [name for name in own if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = own[name].shape
        blocks, scales, values = random_parts(rng, (experts, outer, inner))
        as_floats[name] = encode_weight(name, values.swapaxes(1, 2), "f32")
        del as_parts[name]
        for part, array in (("_blocks", blocks), ("_scales", scales)):
            as_parts[name + part] = Weight(name + part, "u8", array.shape, array.reshape(-1).data)
    config = json.loads((source / "config.json").read_text())
    for folder, tensors in ((floats, as_floats), (packed, as_parts)):
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", tensors)
        shutil.copy(source / "config.json", folder)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))

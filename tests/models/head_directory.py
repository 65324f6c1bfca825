"""Directories of models with a head that predicts a token further ahead, made of tiny ones without."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.models.family_files import FIXTURES
from unspool.weights.safetensors import open_safetensors_directory, write_safetensors
from unspool.weights.weight import encode_weight

# Tensors beside the head's layer: GGUF's names, and Hugging Face's.
QWEN_HEAD = {
    "eh_proj": "mtp.fc.weight",
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "shared_head_norm": "mtp.norm.weight",
}


def glm_head(name: str) -> dict[str, str]:
    into = f"model.layers.{num_layers(name)}."
    found = {which: f"{into}{which}.weight" for which in ("eh_proj", "enorm", "hnorm")}
    return found | {"shared_head_norm": f"{into}shared_head.norm.weight"}


def num_layers(name: str) -> int:
    return int(json.loads((FIXTURES / name / "config.json").read_text())["num_hidden_layers"])


def with_qwen_head(folder: Path, name: str) -> Path:
    attending = json.loads((FIXTURES / name / "config.json").read_text())["layer_types"].index("full_attention")
    return _with_head(folder, name, QWEN_HEAD, f"model.layers.{attending}.", "mtp.layers.0.")


def with_glm_head(folder: Path, name: str) -> Path:
    layers = num_layers(name)
    return _with_head(folder, name, glm_head(name), f"model.layers.{layers - 1}.", f"model.layers.{layers}.")


def _with_head(folder: Path, name: str, names: dict[str, str], layer: str, into: str) -> Path:
    """A fixture with a head: a copy of one of its layers, and what a head has beside it."""
    shutil.copytree(FIXTURES / name, folder)
    tensors = open_safetensors_directory(folder)
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    copied = {into + key.removeprefix(layer): each for key, each in tensors.items() if key.startswith(layer)}
    rng = np.random.default_rng(5)
    for which, stored in names.items():
        shape = (hidden, 2 * hidden) if which == "eh_proj" else (hidden,)
        copied[stored] = encode_weight(stored, 0.2 * rng.standard_normal(shape, np.float32))
    copied = {key: replace(each, name=key) for key, each in copied.items()}
    file = next(folder.glob("*.safetensors"))
    write_safetensors(file, {**tensors, **copied})
    return folder

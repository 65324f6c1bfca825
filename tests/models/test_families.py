"""Tiny models that transformers wrote give its logits, from Hugging Face files and from GGUF, on every backend.

The first tokens of each; test_matrix.py has all of them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.models.family_files import (
    FIXTURES,
    IN_GGUF,
    NAMES,
    NOT_IN_GGUF,
    expected_of,
    rows_of,
    stacked,
    write_as_gguf,
)
from unspool.errors import ModelError
from unspool.models.checkpoint import open_checkpoint
from unspool.models.registry import gguf_name, metadata_of
from unspool.models.wrappers import text_name
from unspool.ops import Ops
from unspool.ops.reference import ReferenceOps
from unspool.weights.safetensors import open_safetensors_directory, write_safetensors
from unspool.weights.weight import encode_weight

try:
    from unspool.ops.cpu import CpuOps
except ImportError:  # not built: where there is a GPU, its tests run without
    CpuOps = None  # type: ignore[assignment,misc]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(name: str, backend: str) -> None:
    expected = expected_of(name)
    ops: Ops = ReferenceOps() if backend == "reference" else CpuOps(threads=1)
    found = rows_of(open_checkpoint(FIXTURES / name), ops, expected["ids"], [13, 1, 10])
    logits = expected["logits"][: len(found)]
    assert np.abs(found - logits).max() < 2e-4 * np.abs(logits).max()


@pytest.mark.parametrize("name", IN_GGUF)
def test_the_same_model_as_a_gguf_file_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FIXTURES / name)
    write_as_gguf(tmp_path / "model.gguf", checkpoint)
    ids = expected_of(name)["ids"][:24]
    found, expected = (
        rows_of(each, ReferenceOps(), ids, [len(ids)])
        for each in (open_checkpoint(tmp_path / "model.gguf"), checkpoint)
    )
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_gemma3n_inside_a_model_of_images_and_sound(tmp_path: Path) -> None:
    """Hugging Face nests its config, and its tensors lie beside those of other parts."""
    tensors = open_safetensors_directory(FIXTURES / "gemma3n")
    inner = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    shared = tensors["model.layers.0.self_attn.k_proj.weight"]
    others = ("model.language_model.layers.3.self_attn.k_proj.weight", "model.vision_tower.timm_model.conv.weight",
              "model.audio_tower.conformer.0.weight", "model.embed_audio.embedding.weight")  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", inner | {name: replace(shared, name=name) for name in others})
    text = json.loads((FIXTURES / "gemma3n" / "config.json").read_text())
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = expected_of("gemma3n")["ids"][:5]
    whole, plain = (
        rows_of(open_checkpoint(each), ReferenceOps(), ids, [5]) for each in (tmp_path, FIXTURES / "gemma3n")
    )
    assert np.array_equal(whole, plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_correct_scale": False}, "altup_correct_scale: only true is supported"),
        ({"altup_num_inputs": 1}, "altup_num_inputs: 1 is outside 2 to 64"),
        ({"altup_active_idx": 4}, "altup_active_idx: 4 is outside 0 to 3"),
        ({"intermediate_size": [48, 64]}, "intermediate_size: a list of 4 numbers"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern: a list of 4 numbers"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: no layer of that kind has keys"),
    ],
)
def test_what_gemma3n_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "gemma3n" / "model.safetensors", tmp_path)
    config = json.loads((FIXTURES / "gemma3n" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


def test_a_token_beyond_the_table_of_inputs_has_its_first_row() -> None:
    checkpoint = open_checkpoint(FIXTURES / "gemma3n")
    table = checkpoint.weights["per_layer_token_embd.weight"]
    rows = table.dequantize()
    more = np.concatenate([rows, np.repeat(rows[:1], checkpoint.config.vocab_size - len(rows), 0)])
    whole = replace(
        checkpoint,
        config=replace(checkpoint.config, token_rows=None),  # type: ignore[call-arg]
        weights=dict(checkpoint.weights) | {table.name: encode_weight(table.name, more, table.format)},
    )
    ids = np.array([3, 90, 95, 2], np.int32)
    for ops in (ReferenceOps(), CpuOps(threads=1)):
        found, expected = (rows_of(each, ops, ids, [4]) for each in (checkpoint, whole))
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", NOT_IN_GGUF)
def test_what_gguf_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="GGUF"):
        metadata_of(open_checkpoint(FIXTURES / name).config)


@pytest.mark.parametrize("name", IN_GGUF)
def test_tensors_have_the_names_that_gguf_gives_them(name: str) -> None:
    """Names are compared with the tables of the gguf package."""
    checkpoint = open_checkpoint(FIXTURES / name)
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds[gguf_name(checkpoint.config.architecture)]
    table = gguf.get_tensor_name_map(kind, checkpoint.config.num_layers)
    theirs = {
        table.get_name(re.sub(STACKED, r".\1.", each), try_suffixes=(".weight", ".bias"))
        for each in map(text_name, open_safetensors_directory(FIXTURES / name))
        if each is not None
    }
    own = {each for each in stacked(checkpoint.weights) if f"{each.rpartition('.')[0]}" not in UNLISTED[name]}
    assert own <= theirs


STACKED = r"\.(experts|altup_projections|altup_unembed_projections)\.\d+\."  # one tensor in GGUF

# What converters split by themselves, and the package's table does not list: gates and up projections in one tensor.
UNLISTED: dict[str, tuple[str, ...]] = defaultdict(tuple)
UNLISTED["granite-moe"] = tuple(f"blk.{layer}.ffn_{part}_exps" for layer in range(2) for part in ("gate", "up"))
UNLISTED["gpt-oss"] = (
    *UNLISTED["granite-moe"],
    *(f"blk.{layer}.{name}" for layer in range(2) for name in ("ffn_down_exps", "attn_sinks")),
)
UNLISTED["qwen3-vl-moe"] = (*UNLISTED["granite-moe"], *(f"blk.{layer}.ffn_down_exps" for layer in range(2)))
UNLISTED["gemma3n"] = tuple(f"blk.{layer}.altup_correct_scale" for layer in range(4))
_scales = tuple(f"blk.{layer}.layer_output_scale" for layer in range(4))
UNLISTED |= dict.fromkeys(("gemma4", "gemma4-dense", "gemma4-images"), _scales)
_moe = ("ffn_gate_up_exps", "ffn_down_exps", "ffn_gate_inp")
UNLISTED["gemma4-moe"] = (*_scales, *(f"blk.{layer}.{name}" for layer in range(2) for name in _moe))
for _name in ("glm4-moe", "glm4-moe-groups", "minimax-m2"):
    UNLISTED[_name] = tuple(f"blk.{layer}.exp_probs_b" for layer in range(3))
for _name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "mistral4"):  # and k_b and v_b
    _parts = ("attn_k_b", "attn_v_b", "exp_probs_b")
    UNLISTED[_name] = tuple(f"blk.{layer}.{part}" for layer in range(3) for part in _parts)
for _name in ("qwen3.5", "qwen3.5-images", "qwen3.5-moe", "qwen3-next"):  # converters give it another name first
    UNLISTED[_name] = tuple(f"blk.{layer}.ssm_dt" for layer in range(3))
UNLISTED["qwen3-next"] += ("blk.0.attn_qkv", "blk.0.attn_gate")
_halves = tuple(f"blk.{layer}.ffn_{part}_shexp" for layer in range(2) for part in ("gate", "up", "down"))
UNLISTED["granite-moe-shared"] = (*UNLISTED["granite-moe"], *_halves)
UNLISTED["granite-hybrid"] = (*UNLISTED["granite-moe-shared"], "blk.0.ssm_dt")
_halves = tuple(f"blk.{layer}.ffn_{part}" for layer in range(3) for part in ("gate", "up", "down"))
UNLISTED["granite-hybrid-dense"] = (*_halves, "blk.0.ssm_dt", "blk.2.ssm_dt")
UNLISTED["granite-4-dense"] = _halves
for _name in ("nemotron-h", "nemotron-h-moe", "nemotron-h-latents"):
    _parts = ("ssm_dt", "ffn_up_exps", "ffn_down_exps", "exp_probs_b")
    UNLISTED[_name] = tuple(f"blk.{layer}.{part}" for layer in range(4) for part in _parts)
_parts = ("exp_probs_b", *(f"ffn_{part}_exps" for part in ("gate", "up", "down")))
UNLISTED["lfm2-moe"] = tuple(f"blk.1.{part}" for part in _parts)
UNLISTED["mistral4"] += tuple(f"blk.{layer}.ffn_{part}_exps" for layer in range(3) for part in ("gate", "up", "down"))

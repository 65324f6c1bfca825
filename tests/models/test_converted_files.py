"""GGUF files as llama.cpp's converter writes them: other keys and other tensors than unspool's own files, and the same
logits.

tests/fixtures/converter.json has the differences; scripts/compare_converter.py finds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.models.family_files import FIXTURES, IN_GGUF, expected_of, rows_of, write_as_gguf
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.ops.cpu import CpuOps
from unspool.weights.gguf import open_gguf
from unspool.weights.gguf_writer import write_gguf
from unspool.weights.weight import Weight, encode_weight

DIFFERENCES = json.loads((FIXTURES.parent / "converter.json").read_text("utf-8"))
TOKENS = 100
# Files whose keys say the same as unspool's, in other words. The converter leaves something out of the others.
SAME_KEYS = [name for name in IN_GGUF if "absent" in DIFFERENCES[name] and not DIFFERENCES[name]["note"]]
Tensors = dict[str, Weight]


def as_converted(name: str, path: Path) -> Checkpoint:
    """A file with the keys that the converter writes."""
    write_as_gguf(path, open_checkpoint(FIXTURES / name))
    file, differs = open_gguf(path), DIFFERENCES[name]
    old = str(file.metadata["general.architecture"])
    keys = {key.removeprefix(f"{old}."): file.metadata[key] for key in file.metadata if key.startswith(f"{old}.")}
    keys = {key: value for key, value in keys.items() if key not in differs["absent"]} | differs["other"]
    new = keys.pop("architecture", old)
    metadata = {"general.architecture": new} | {f"{new}.{key}": value for key, value in keys.items()}
    write_gguf(path.with_suffix(".converted.gguf"), metadata, file.tensors)
    return open_checkpoint(path.with_suffix(".converted.gguf"))


def with_tensors(name: str, path: Path, change: Callable[[Tensors], Tensors]) -> Checkpoint:
    """A file with other tensors."""
    write_as_gguf(path, open_checkpoint(FIXTURES / name))
    file = open_gguf(path)
    write_gguf(path.with_suffix(".changed.gguf"), file.metadata, change(dict(file.tensors)))
    return open_checkpoint(path.with_suffix(".changed.gguf"))


def check(name: str, checkpoint: Checkpoint) -> None:
    ids = expected_of(name)["ids"][:TOKENS]
    found, wanted = (
        rows_of(each, CpuOps(threads=1), ids, [len(ids)]) for each in (checkpoint, open_checkpoint(FIXTURES / name))
    )
    assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", SAME_KEYS)
def test_the_keys_of_converted_files_say_the_same(name: str, tmp_path: Path) -> None:
    check(name, as_converted(name, tmp_path / "model.gguf"))


def fused(tensors: Tensors) -> Tensors:
    """Gates and up projections of experts in one tensor."""
    result = dict(tensors)
    for name in [name for name in tensors if name.endswith(".ffn_gate_exps.weight")]:
        gate, up = result.pop(name), result.pop(name.replace("gate", "up"))
        both = np.concatenate([gate.dequantize(), up.dequantize()], axis=1)
        whole = name.replace("gate", "gate_up")
        result[whole] = encode_weight(whole, both, gate.format)
    assert result.keys() != tensors.keys()
    return result


@pytest.mark.parametrize("name", ["mistral4", "deepseek-v3", "glm4-moe-lite", "qwen3.5-moe", "qwen3-moe", "gpt-oss"])
def test_gates_and_up_projections_of_experts_may_be_one_tensor(name: str, tmp_path: Path) -> None:
    check(name, with_tensors(name, tmp_path / "model.gguf", fused))


def gates_as_rows(tensors: Tensors) -> Tensors:
    names = [name for name in tensors if name.endswith(".ffn_gate_inp_shexp.weight")]
    assert names
    return tensors | {name: replace(tensors[name], shape=(1, *tensors[name].shape)) for name in names}


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3.5-moe", "qwen3-next"])
def test_a_shared_expert_s_gate_may_be_a_matrix_of_one_row(name: str, tmp_path: Path) -> None:
    check(name, with_tensors(name, tmp_path / "model.gguf", gates_as_rows))


def padded(tensors: Tensors) -> Tensors:
    name = "per_layer_token_embd.weight"
    rows = tensors[name].dequantize()
    more = np.concatenate([rows, np.repeat(rows[:1], 96 - len(rows), 0)])
    return tensors | {name: encode_weight(name, more, tensors[name].format)}


def test_a_second_table_of_tokens_may_have_rows_for_all(tmp_path: Path) -> None:
    check("gemma3n", with_tensors("gemma3n", tmp_path / "model.gguf", padded))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite"])
def test_a_file_that_does_not_name_the_scores_of_experts(name: str, tmp_path: Path) -> None:
    """Those with a correction are sigmoids, the others a softmax."""
    write_as_gguf(tmp_path / "model.gguf", open_checkpoint(FIXTURES / name))
    file = open_gguf(tmp_path / "model.gguf")
    metadata = {key: file.metadata[key] for key in file.metadata if not key.endswith(".expert_gating_func")}
    assert len(metadata) == len(file.metadata) - 1
    write_gguf(tmp_path / "older.gguf", metadata, file.tensors)
    check(name, open_checkpoint(tmp_path / "older.gguf"))

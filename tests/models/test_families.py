"""Tiny models that transformers wrote give its logits, from Hugging Face files and from GGUF, on every backend.

scripts/fixture_families.py makes the fixtures; nothing here needs torch or transformers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.errors import ModelError
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.registry import build, family_of, gguf_name, metadata_of
from unspool.ops import Batch, Ops
from unspool.ops.reference import ReferenceOps
from unspool.weights.gguf import write_gguf
from unspool.weights.safetensors import open_safetensors_directory
from unspool.weights.weight import Weight, encode_weight

try:
    from unspool.ops.cpu import CpuOps
except ImportError:  # not built: where there is a GPU, its tests run without
    CpuOps = None  # type: ignore[assignment,misc]

FIXTURES = Path(__file__).parent.parent / "fixtures" / "families"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
IN_GGUF = [name for name in NAMES if name not in ("qwen3-moe-dense",)]  # its files cannot have such layers
BLOCK = 16


def logits_of(
    checkpoint: Checkpoint, ops: Ops, ids: np.ndarray, pieces: Sequence[int], kv_dtype: Any = "f32"
) -> np.ndarray:
    """Logits of every token, computed piece by piece."""
    model = build(checkpoint.config, checkpoint.weights, ops)
    engine = EngineConfig(kv_dtype=kv_dtype, block_size=BLOCK).with_device_defaults(ops.name)
    kv = ops.kv_cache(model.architecture.storage, engine, 4)
    step = ops.compile(model, kv)
    found, start = [], 0
    for count in pieces:
        positions = np.arange(start, start + count, dtype=np.int32)
        batch = Batch(
            ids=ids[start : start + count].astype(np.int32),
            positions=positions,
            slots=positions.astype(np.int64),
            starts=np.array([0, count], np.int32),
            tables=np.arange(4, dtype=np.int32)[None],
            logit_rows=np.arange(count, dtype=np.int32),
        )
        found.append(np.array(step.run(batch)))
        start += count
    return np.concatenate(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(name: str, backend: str) -> None:
    expected = np.load(FIXTURES / name / "expected.npz")
    ops: Ops = ReferenceOps() if backend == "reference" else CpuOps(threads=1)
    found = logits_of(open_checkpoint(FIXTURES / name), ops, expected["ids"], [13, 1, 10])
    assert np.abs(found - expected["logits"]).max() < 2e-4 * np.abs(expected["logits"]).max()


def write_as_gguf(path: Path, checkpoint: Checkpoint) -> None:
    """The checkpoint by GGUF's conventions: experts in one tensor, q and k permuted where channels rotate in pairs."""
    config = checkpoint.config
    style = family_of(config.architecture).gguf_rope_style
    weights = stacked(checkpoint.weights)
    if config.rope_dim and style != config.rope_style:
        config = replace(config, rope_style=style)
        for name, weight in weights.items():
            if ".attn_q." in name or ".attn_k." in name:
                values = weight.dequantize()
                heads = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:]).swapaxes(1, 2)
                weights[name] = encode_weight(name, heads.reshape(values.shape), weight.format)
    write_gguf(path, metadata_of(config), weights)


def stacked(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    result: dict[str, Weight] = {}
    for name, weight in weights.items():
        whole = re.sub(r"_exps\.\d+\.", "_exps.", name)
        if whole == name:
            result[name] = weight
        elif whole not in result:
            names = [each for each in weights if re.sub(r"_exps\.\d+\.", "_exps.", each) == whole]
            names.sort(key=lambda each: int(each.split(".")[-2]))
            raw = b"".join(bytes(weights[each].raw) for each in names)
            result[whole] = Weight(whole, weight.format, (len(names), *weight.shape), memoryview(raw))
    return result


@pytest.mark.parametrize("name", IN_GGUF)
def test_the_same_model_as_a_gguf_file_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FIXTURES / name)
    write_as_gguf(tmp_path / "model.gguf", checkpoint)
    ids = np.load(FIXTURES / name / "expected.npz")["ids"]
    found, expected = (
        logits_of(each, ReferenceOps(), ids, [len(ids)])
        for each in (open_checkpoint(tmp_path / "model.gguf"), checkpoint)
    )
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(IN_GGUF)))
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
        table.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", each), try_suffixes=(".weight", ".bias"))
        for each in open_safetensors_directory(FIXTURES / name)
    }
    own = {each for each in stacked(checkpoint.weights) if f"{each.rpartition('.')[0]}" not in UNLISTED[name]}
    assert own <= theirs


# What converters split by themselves, and the package's table does not list: gates and up projections in one tensor.
UNLISTED: dict[str, tuple[str, ...]] = defaultdict(tuple)
UNLISTED["granite-moe"] = tuple(f"blk.{layer}.ffn_{part}_exps" for layer in range(2) for part in ("gate", "up"))
UNLISTED["gpt-oss"] = (
    *UNLISTED["granite-moe"],
    *(f"blk.{layer}.{name}" for layer in range(2) for name in ("ffn_down_exps", "attn_sinks")),
)

"""Tiny models that transformers wrote give its logits, from Hugging Face files and from GGUF, on every backend.

scripts/fixture_families.py makes the fixtures; nothing here needs torch or transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.registry import GGUF, build, metadata_of
from unspool.ops import Batch, Ops
from unspool.ops.reference import ReferenceOps
from unspool.weights.gguf import write_gguf
from unspool.weights.safetensors import open_safetensors_directory

try:
    from unspool.ops.cpu import CpuOps
except ImportError:  # not built: where there is a GPU, its tests run without
    CpuOps = None  # type: ignore[assignment,misc]

FIXTURES = Path(__file__).parent.parent / "fixtures" / "families"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
BLOCK = 16


def logits_of(checkpoint: Checkpoint, ops: Ops, ids: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
    """Logits of every token, computed piece by piece."""
    model = build(checkpoint.config, checkpoint.weights, ops)
    kv = ops.kv_cache(model.architecture.storage, EngineConfig(kv_dtype="f32", block_size=BLOCK).suited(ops.name), 4)
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
        found.append(np.array(step(batch)))
        start += count
    return np.concatenate(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(name: str, backend: str) -> None:
    expected = np.load(FIXTURES / name / "expected.npz")
    ops: Ops = ReferenceOps() if backend == "reference" else CpuOps(threads=1)
    found = logits_of(open_checkpoint(FIXTURES / name), ops, expected["ids"], [13, 1, 10])
    assert np.abs(found - expected["logits"]).max() < 2e-4 * np.abs(expected["logits"]).max()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_model_as_a_gguf_file_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FIXTURES / name)
    if checkpoint.config.architecture not in GGUF:
        pytest.skip("GGUF files say that they are of another family")
    write_gguf(tmp_path / "model.gguf", metadata_of(checkpoint.config), checkpoint.weights)
    ids = np.load(FIXTURES / name / "expected.npz")["ids"]
    found, expected = (
        logits_of(each, ReferenceOps(), ids, [len(ids)])
        for each in (open_checkpoint(tmp_path / "model.gguf"), checkpoint)
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_that_gguf_gives_them(name: str) -> None:
    """Names are compared with the tables of the gguf package."""
    checkpoint = open_checkpoint(FIXTURES / name)
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    if checkpoint.config.architecture not in kinds:
        pytest.skip("GGUF has no such architecture")
    table = gguf.get_tensor_name_map(kinds[checkpoint.config.architecture], checkpoint.config.num_layers)
    theirs = {
        table.get_name(each, try_suffixes=(".weight", ".bias")) for each in open_safetensors_directory(FIXTURES / name)
    }
    assert set(checkpoint.weights) <= theirs

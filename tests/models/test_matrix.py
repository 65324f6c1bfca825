"""Every family and variant over 600 tokens, beyond its window and its original context, in pieces, on the reference and
on the CPU, from Hugging Face files and from GGUF: each token's logprob is that of transformers. `make test-models`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.family_files import FIXTURES, IN_GGUF, NAMES, expected_of, logprobs_of, rows_of, write_as_gguf
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.ops import Ops
from unspool.ops.cpu import CpuOps
from unspool.ops.reference import ReferenceOps

pytestmark = pytest.mark.slow

PIECES = [250, 1, 93, 256]
BOUND = 1e-4
BOUNDS = {
    # Speeds of rotation are float32 in transformers at each step of their computation, here at the last; longrope's
    # attention factor makes scores one and a half times as large, and the error with them.
    "phi3-long": 3e-4,
}


def check(name: str, checkpoint: Checkpoint, ops: Ops) -> None:
    expected = expected_of(name)
    ids = expected["ids"]
    found = rows_of(checkpoint, ops, ids, PIECES)
    errors = np.abs(logprobs_of(found, ids) - expected["logprobs"])
    assert errors.max() < BOUNDS.get(name, BOUND)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logprobs_from_a_directory(name: str, backend: str) -> None:
    check(name, open_checkpoint(FIXTURES / name), ReferenceOps() if backend == "reference" else CpuOps(threads=1))


@pytest.mark.parametrize("name", IN_GGUF)
def test_logprobs_from_a_gguf_file(name: str, tmp_path: Path) -> None:
    write_as_gguf(tmp_path / "model.gguf", open_checkpoint(FIXTURES / name))
    check(name, open_checkpoint(tmp_path / "model.gguf"), CpuOps(threads=1))

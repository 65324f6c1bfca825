"""The models of test_families.py on the CUDA backend: bf16's error, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.family_files import FIXTURES, NAMES, expected_of, rows_of
from tests.ops.cuda_setting import MARKS
from unspool.models.checkpoint import open_checkpoint
from unspool.models.registry import architecture_of
from unspool.ops.cuda import CudaOps

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]



def has_kernels(name: str) -> bool:
    """Not those with heads of other than 16, 32, … channels: they are refused by name."""
    checkpoint = open_checkpoint(FIXTURES / name)
    heads = (layer.kv for layer in architecture_of(checkpoint.config).storage)
    return all(kv is None or (kv.key_dim % 16 == 0 and not kv.latent) for kv in heads)


@pytest.mark.parametrize("name", [name for name in NAMES if has_kernels(name)])
def test_logits_are_near_those_of_transformers(name: str) -> None:
    """Of a prompt, and of a token after it."""
    expected = expected_of(name)
    found = rows_of(open_checkpoint(FIXTURES / name), CudaOps(), expected["ids"], [5, 1], "f16")
    logits = expected["logits"][: len(found)]
    assert np.linalg.norm(found - logits) / np.linalg.norm(logits) < 0.03

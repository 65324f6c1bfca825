"""The CPU backend on the default model: how far 8-bit activations are from float32, over a whole text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ops.conftest import make_batch
from unspool.config import EngineConfig
from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import build
from unspool.ops import Batch
from unspool.ops.cpu import CpuOps

TEXT = Path(__file__).parent.parent / "fixtures" / "smollm2" / "text512.npz"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("isa", ["auto"])
def test_as_close_to_float32_as_can_be_asked(smollm2: Checkpoint, isa: str) -> None:
    text = np.load(TEXT)
    ids = text["ids"]
    ops = CpuOps(isa=isa)
    model = build(smollm2.config, smollm2.weights, ops)
    step = ops.compile(model, ops.kv_cache(model.architecture.storage, EngineConfig().with_device_defaults("cpu"), 16))
    shape = make_batch([(0, len(ids), range(16))], 32)
    batch = Batch(ids, shape.positions, shape.slots, shape.starts, shape.tables, shape.logit_rows)
    logprobs = log_softmax(np.array(step.run(batch)))

    nll = -logprobs[np.arange(len(ids) - 1), ids[1:]]
    assert abs(np.exp(nll.mean() - text["nll"].mean()) - 1) < 0.005  # perplexity
    assert (logprobs.argmax(axis=1) == text["top_ids"][:, 0]).mean() >= 0.98

    ours = np.take_along_axis(logprobs, text["top_ids"].astype(np.int64), axis=1)
    theirs = text["top_logprobs"].astype(np.float64)
    rest = np.log1p(-np.exp(ours).sum(axis=1).clip(max=1 - 1e-12))
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    kl += np.exp(text["rest_logprob"].astype(np.float64)) * (text["rest_logprob"] - rest)
    assert kl.mean() < 0.0005

    alone = np.array(step.run(Batch(ids, shape.positions, shape.slots, shape.starts, shape.tables, np.array([511]))))
    assert np.array_equal(log_softmax(alone)[0], logprobs[511])

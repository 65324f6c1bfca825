"""Models of unusual layers on the CUDA backend: near the reference, and the same bits whatever rows come along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.cuda_setting import MARKS
from tests.ops.test_cuda_models import make_batch, tokens_of
from tests.ops.test_layers import GEOMETRIES, MODELS, OTHER_MODELS, VOCABULARY, WHOLE, architecture, random_weights
from unspool.config import EngineConfig
from unspool.models.decoder import Decoder
from unspool.models.layers import Architecture
from unspool.models.shapes import TINY
from unspool.models.tensors import TensorReader
from unspool.ops.cuda import CudaOps
from unspool.ops.reference import ReferenceOps

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# Activations differ by a line each; two of them stand for all.
SLOW = [f"a feed-forward without gate: {activation}" for activation in ("gelu_tanh", "relu", "silu")]


def model_of(name: str) -> Architecture:
    return architecture(GEOMETRIES, **WHOLE[name]) if name in WHOLE else architecture((MODELS | OTHER_MODELS)[name])


def step_of(ops: Any, model: Architecture) -> Any:
    engine = EngineConfig(block_size=16).with_device_defaults(ops.name)
    weights = random_weights(model, seed=1, format="bf16")
    kv = ops.kv_cache(model.storage, engine, 8, num_states=8)
    return ops.compile(Decoder(TINY, model, TensorReader(ops, weights)), kv)


@pytest.mark.parametrize("name", [name for name in (*MODELS, *OTHER_MODELS, *WHOLE) if name not in SLOW])
def test_the_gpu_computes_what_the_reference_does(name: str) -> None:
    """A prompt of which the last logits are wanted, beside a decode; then all logits of a second piece."""
    model, tokens = model_of(name), tokens_of(1, 40) % VOCABULARY
    outs = []
    for ops in (ReferenceOps(), CudaOps()):
        step = step_of(ops, model)
        first = make_batch([(0, tokens[30:31], (6,)), (0, tokens[:6], (0, 1))], 16, last=True)
        second = make_batch([(1, tokens[32:33], (6,)), (6, tokens[17:20], (0, 1))], 16)
        outs.append(np.concatenate([np.array(step.run(first)), np.array(step.run(second))]))
    expected, found = outs
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.03


@pytest.mark.parametrize("name", ["geometries", "gates", "latents", "delta nets", "blocks of their own"])
def test_a_row_does_not_depend_on_its_company(name: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 40) % VOCABULARY
    step = step_of(CudaOps(), model)
    alone = np.array(step.run(make_batch([(0, tokens[:5], (0,))], 16, last=True)))
    step.run(make_batch([(0, tokens[:2], (1,))], 16, last=True))
    crowd = make_batch([(0, tokens[10:12], (2,)), (2, tokens[2:5], (1,)), (0, tokens[20:21], (3,))], 16, last=True)
    assert np.array_equal(np.array(step.run(crowd))[1], alone[0])

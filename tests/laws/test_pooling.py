"""A prompt whose output is pooled hidden rows instead of tokens: the same bits alone, in a crowd, in pieces, preempted,
and from the prefix cache; and the rows are those that the model's head reads."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.laws.crowd import Crowd
from unspool.config import EngineConfig
from unspool.engine.request import Pooling
from unspool.errors import BackendError, RequestError
from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import build
from unspool.ops import Batch
from unspool.ops.reference import ReferenceOps
from unspool.params import SamplingParams

PROMPT = tuple(random.Random(3).choices(range(256), k=45))
NOTHING = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
Tiny = Callable[..., Checkpoint]
SHAPES = ["tiny", "tiny-gemma3", "tiny-gpt2", "tiny-qwen3-moe", "tiny-lfm2"]


def hidden_rows(checkpoint: Checkpoint, prompt: tuple[int, ...]) -> np.ndarray:
    """The reference's, straight from the model."""
    ops = ReferenceOps()
    model = build(checkpoint.config, checkpoint.weights, ops)
    config = EngineConfig(device="reference", block_size=64, kv_dtype="f32").with_device_defaults("reference")
    kv = ops.kv_cache(model.architecture.storage, config, 1, 1)
    ids = np.array(prompt, np.int32)
    at = np.arange(len(ids), dtype=np.int32)
    ends = np.array([0, len(ids)], np.int32)
    zero = np.zeros(1, np.int32)
    batch = Batch(ids, at, at.astype(np.int64), ends, zero.reshape(1, 1), at, zero)
    return np.asarray(model.hidden(batch.arrays(), kv))


def pooled(crowd: Crowd, pooling: Pooling, prompt: tuple[int, ...] = PROMPT) -> tuple[float, ...]:
    id = crowd.engine.add(prompt, NOTHING, pooling=pooling)
    crowd.drain()
    ending = crowd.collector.ends[id]
    assert ending.reason == "length"
    assert ending.usage.completion_tokens == 0
    return ending.pooled


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_pooled_rows_are_those_that_the_head_reads(shape: str, device: str, tiny: Tiny) -> None:
    checkpoint = tiny(shape)
    expected = hidden_rows(checkpoint, PROMPT)
    crowd = Crowd(checkpoint, kv_tokens=256, block_size=8, device=device, kv_dtype="f32")
    np.testing.assert_allclose(pooled(crowd, "last"), expected[-1], atol=2e-5)
    np.testing.assert_allclose(pooled(crowd, "mean"), expected.mean(0), atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooled_rows_do_not_depend_on_company_or_pieces(shape: str, pooling: Pooling, tiny: Tiny) -> None:
    alone = pooled(Crowd(tiny(shape), kv_tokens=256, block_size=8), pooling)
    assert alone == pooled(Crowd(tiny(shape), kv_tokens=256, block_size=8, step_tokens=7), pooling), "in pieces"
    crowd = Crowd(tiny(shape), kv_tokens=1024, block_size=8, step_tokens=32)
    answers = [crowd.engine.add(PROMPT[i:], GREEDY) for i in range(1, 4)]
    ids = [crowd.engine.add(PROMPT[:k], NOTHING, pooling=pooling) for k in (45, 20, 45)]
    crowd.drain()
    ends = [crowd.collector.ends[id] for id in ids]
    assert ends[0].pooled == ends[2].pooled == alone
    assert ends[1].pooled == pooled(Crowd(tiny(shape), kv_tokens=256, block_size=8), pooling, PROMPT[:20])
    for i, id in enumerate(answers, 1):
        quiet = Crowd(tiny(shape), kv_tokens=256, block_size=8)
        other = quiet.engine.add(PROMPT[i:], GREEDY)
        quiet.drain()
        assert crowd.collector.answer(id) == quiet.collector.answer(other), "the others' answers are the same, too"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_preempted_prompt_has_the_same_pooled_row(pooling: Pooling, tiny: Tiny) -> None:
    alone = pooled(Crowd(tiny(), kv_tokens=256, block_size=8), pooling)
    crowd = Crowd(tiny(), kv_tokens=72, block_size=8, step_tokens=4, prefix_cache=False)
    first = crowd.engine.add(PROMPT[:20], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, priority=-1))
    id = crowd.engine.add(PROMPT, NOTHING, pooling=pooling)
    crowd.drain()
    assert crowd.engine.stats["preemptions"] > 0
    assert crowd.collector.ends[id].pooled == alone
    assert crowd.collector.ends[first].usage.completion_tokens == 30


def test_the_last_row_uses_the_prefix_cache_and_the_mean_cannot(tiny: Tiny) -> None:
    crowd = Crowd(tiny(), kv_tokens=256, block_size=8)
    first = pooled(crowd, "last"), pooled(crowd, "mean")
    again = crowd.engine.add(PROMPT, NOTHING, pooling="last"), crowd.engine.add(PROMPT, NOTHING, pooling="mean")
    crowd.drain()
    ends = [crowd.collector.ends[id] for id in again]
    assert tuple(end.pooled for end in ends) == first
    assert [end.usage.cached_tokens for end in ends] == [40, 0], "the full blocks"


def test_a_pooled_prompt_with_an_answer_is_refused(tiny: Tiny) -> None:
    engine = Crowd(tiny(), kv_tokens=256, block_size=8).engine
    with pytest.raises(RequestError, match="max_tokens is 5"):
        engine.add(PROMPT, SamplingParams(max_tokens=5), pooling="mean")
    with pytest.raises(RequestError, match="no answers"):
        engine.add(PROMPT, SamplingParams(max_tokens=0, n=2), pooling="mean")
    assert not engine.has_work


def test_a_device_without_hidden_rows_refuses_by_name(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Crowd(tiny(), kv_tokens=256, block_size=8).engine

    def compile(forward: object, kv: object) -> None:
        raise BackendError("this device has no hidden rows")

    monkeypatch.setattr(engine.ops, "compile", compile)
    with pytest.raises(BackendError, match="no hidden rows"):
        engine.add(PROMPT, NOTHING, pooling="last")
    assert not engine.has_work

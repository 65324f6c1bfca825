"""The default model against an independent implementation: transformers in float32 on the same file.

The fixtures, and how they were made, are in tests/fixtures/smollm2; nothing here needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Text
from unspool.models.checkpoint import Checkpoint
from unspool.params import SamplingParams
from unspool.plan import Plan, Work

FIXTURES = Path(__file__).parent.parent / "fixtures" / "smollm2"
CLEAR = 0.02  # a margin between the best and the second best logit that float32 rounding cannot turn over


def make_engine(checkpoint: Checkpoint, device: str, kv_dtype: str = "f32", **options) -> Engine:
    return Engine(checkpoint, EngineConfig(device=device, kv_dtype=kv_dtype, kv_tokens=4096, **options))


def all_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits at every position of a text, teacher-forced, straight through the runner."""
    size = engine.config.block_size
    blocks = tuple(range(-(-len(ids) // size)))
    rows = []
    for start in range(0, len(ids), 64):
        tokens = tuple(ids[start : start + 64])
        work = Work(0, start, tokens, blocks, num_logits=len(tokens), num_samples=0)
        rows.append(np.array(engine.runner.run(Plan((work,)))))
    return np.concatenate(rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_the_reference_has_transformers_logits(smollm2) -> None:
    engine = make_engine(smollm2, "reference")
    fixture = np.load(FIXTURES / "logits.npz")
    for name in sorted({key.split(".")[0] for key in fixture}):
        ours = all_logits(engine, fixture[f"{name}.ids"].tolist())
        top = np.take_along_axis(ours, fixture[f"{name}.top_ids"].astype(np.int64), axis=1)
        assert np.abs(top - fixture[f"{name}.top_logits"]).max() < 1e-3, name
        assert np.abs(ours[-1] - fixture[f"{name}.last"]).max() < 1e-3, name


def greedy(engine: Engine, cases: list[dict]) -> list[list[int]]:
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    ids = [engine.add(case["prompt_ids"], params) for case in cases]
    outputs: dict[str, list[int]] = {id: [] for id in ids}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Text):
                outputs[event.request] += [token.id for token in event.tokens]
    engine.check()
    return [outputs[id] for id in ids]


def greedy_cases() -> list[dict]:
    return json.loads((FIXTURES / "greedy.json").read_text())["cases"]


def test_the_reference_has_transformers_greedy_tokens(smollm2) -> None:
    cases = [case for case in greedy_cases() if case["min_margin"] > CLEAR][:10]
    assert len(cases) == 10
    for case, ours in zip(cases, greedy(make_engine(smollm2, "reference"), cases), strict=True):
        assert ours == case["ids"], case["name"]


@pytest.mark.parametrize(
    ("text", "isa", "kv_dtype"),
    [
        ("text512", "auto", "q8"),
        ("chat512", "auto", "q8"),
        ("text512", "auto", "f16"),
        ("chat512", "auto", "f16"),
        ("text512", "auto", "f32"),
        ("chat512", "avx2", "f16"),
        ("chat512", "avx2", "q8"),
        ("text512", "plain", "f16"),
    ],
)
def test_the_native_body_is_closer_to_float32_than_llama_cpp(smollm2, isa, kv_dtype, text) -> None:
    """Over a 512-token text: perplexity within 0.5%, mean KL at most 0.002, the same best token 98.8% of the time
    (98% where keys and values are floats, which is not the default), and always where the reference prefers it clearly.

    llama.cpp on the same texts: 0.7 and 1.0%, 0.0022 and 0.0018, 96.7 and 97.3%. The KL is over the 64 likeliest tokens
    and the rest as one, a lower bound of the whole.
    """
    engine = make_engine(smollm2, "cpu", kv_dtype, isa=isa)
    fixture = np.load(FIXTURES / f"{text}.npz")
    ids = fixture["ids"].tolist()
    ours = log_softmax(all_logits(engine, ids))

    nll = -ours[np.arange(511), ids[1:]]
    perplexity, expected = np.exp(nll.mean()), np.exp(fixture["nll"].mean())
    assert abs(perplexity / expected - 1) < 0.005

    top = np.take_along_axis(ours, fixture["top_ids"].astype(np.int64), axis=1)
    rest = np.log(np.maximum(1 - np.exp(top).sum(axis=1), 1e-12))
    reference, reference_rest = fixture["top_logprobs"].astype(np.float64), fixture["rest_logprob"].astype(np.float64)
    kl = (np.exp(reference) * (reference - top)).sum(axis=1) + np.exp(reference_rest) * (reference_rest - rest)
    assert kl.mean() <= 0.002

    agrees = ours.argmax(axis=1) == fixture["top_ids"][:, 0]
    margin = reference[:, 0] - reference[:, 1]
    assert agrees[margin > 0.2].all()
    # One position of twelve is a near tie in the prose, so arithmetic that is no worse may have less luck there.
    assert agrees.mean() >= (0.988 if kv_dtype == "q8" else 0.98)


def test_the_native_body_has_the_greedy_tokens_where_the_margin_is_clear(smollm2) -> None:
    """Up to the first place where float32's margin is below half a logit the tokens must be the same."""
    cases = greedy_cases()
    compared = 0
    for case, ours in zip(cases, greedy(make_engine(smollm2, "cpu", "f16"), cases), strict=True):
        clear = next((i for i, margin in enumerate(case["margins"]) if margin < 0.5), 64)
        assert ours[:clear] == case["ids"][:clear], case["name"]
        compared += clear
    assert compared > 300, "the fixtures must have clear stretches"

"""The default model on a card: transformers' own greedy tokens, the same alone and in a crowd.

It needs the model's file: where it was fetched before, or named with `--model PATH`. (A file that came in parts is
joined with `cat PART… > FILE`.)
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.ops.cuda_setting import MARKS, ON_CARD
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Failed
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.params import SamplingParams
from unspool.plan import Plan, Work
from unspool.weights.store import default_model_path

pytestmark = [*MARKS, pytest.mark.skipif(not ON_CARD, reason="thirty layers take a card; smaller models run without")]
FIXTURES = Path(__file__).parent.parent / "fixtures" / "smollm2"
CLEAR = 0.3  # a lead of the best logit over the second that bf16 between kernels does not turn over


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    path = request.config.getoption("--model") or default_model_path()
    if path is None:
        pytest.skip("the default model is not here; name its file with --model PATH")
    return open_checkpoint(path)


def answers(checkpoint: Checkpoint, prompts: list[list[int]], **options: object) -> list[list[int]]:
    engine = Engine(checkpoint, EngineConfig(device="cuda", kv_tokens=8192, **options))  # type: ignore[arg-type]
    ids = [engine.add(prompt, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)) for prompt in prompts]
    reported: dict[str, list[int]] = {id: [] for id in ids}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            reported[event.request] += [token.id for token in getattr(event, "tokens", ())]
    engine.check()
    return [reported[id] for id in ids]


def test_greedy_tokens_are_transformers(checkpoint: Checkpoint) -> None:
    """Up to the first step at which two tokens are close, and to the end where none are."""
    cases = json.loads((FIXTURES / "greedy.json").read_text())["cases"]
    compared = whole = 0
    for case, ours in zip(cases, answers(checkpoint, [case["prompt_ids"] for case in cases]), strict=True):
        clear = next((i for i, margin in enumerate(case["margins"]) if margin < CLEAR), len(case["ids"]))
        assert ours[:clear] == case["ids"][:clear], case["name"]
        compared += clear
        whole += clear == len(case["ids"])
    assert whole >= 9
    assert compared > 600


def test_greedy_tokens_are_the_same_alone_in_chunks_and_in_a_crowd(checkpoint: Checkpoint) -> None:
    prompts = [case["prompt_ids"] for case in json.loads((FIXTURES / "greedy.json").read_text())["cases"]]
    crowd = answers(checkpoint, prompts)
    assert answers(checkpoint, prompts[:1]) == crowd[:1]
    assert answers(checkpoint, prompts, step_tokens=24, chunk_tokens=7, block_size=16) == crowd


def test_logits_are_near_transformers(checkpoint: Checkpoint) -> None:
    engine = Engine(checkpoint, EngineConfig(device="cuda", kv_tokens=1024))
    text = np.load(FIXTURES / "text512.npz")
    ids = text["ids"].tolist()
    blocks = tuple(range(-(-len(ids) // engine.config.block_size)))
    logits = engine.runner.run(Plan((Work(0, 0, tuple(ids), blocks, len(ids), 0),))).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    nll = -logprobs[np.arange(len(ids) - 1), ids[1:]]
    assert abs(np.exp(nll.mean() - text["nll"].mean()) - 1) < 0.01, "perplexity"
    assert (logprobs.argmax(axis=1) == text["top_ids"][:, 0]).mean() > 0.97

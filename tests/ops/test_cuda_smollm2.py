"""The default model on a card, against transformers in float32 on the same file. `make test-gpu` runs this."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.ops.cuda_setting import MARKS, ON_CARD
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Event, Finished, Text
from unspool.params import SamplingParams
from unspool.weights.checkpoint import Checkpoint

pytestmark = [*MARKS, pytest.mark.skipif(not ON_CARD, reason="30 layers of a real model take an interpreter too long")]

FIXTURES = Path(__file__).parent.parent / "fixtures" / "smollm2"
# Activations are bf16 between kernels: where the two best logits are nearer than this, rounding may choose.
CLEAR = 0.3


@pytest.fixture(scope="module")
def engine(smollm2: Checkpoint) -> Engine:
    return Engine(smollm2, EngineConfig(device="cuda", kv_tokens=32768, block_size=64, step_tokens=4096))


def events_of(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    engine.check()
    return events


def test_greedy_tokens_are_those_of_transformers_until_a_near_tie(engine: Engine) -> None:
    cases = json.loads((FIXTURES / "greedy.json").read_text())["cases"]
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    names = {engine.add(case["prompt_ids"], params): case for case in cases}
    answers: dict[str, list[int]] = {id: [] for id in names}
    for event in events_of(engine):
        if isinstance(event, Text):
            answers[event.request] += [token.id for token in event.tokens]
    whole = 0
    for id, case in names.items():
        differ = [i for i, (ours, theirs) in enumerate(zip(answers[id], case["ids"], strict=True)) if ours != theirs]
        whole += not differ
        assert not differ or case["margins"][differ[0]] < CLEAR, (case["name"], differ[0])
    assert whole >= len(cases) // 2


def test_a_text_is_as_likely_as_in_float32(engine: Engine) -> None:
    text = np.load(FIXTURES / "text512.npz")
    engine.add(text["ids"].tolist(), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    (finished,) = [event for event in events_of(engine) if isinstance(event, Finished)]
    ours = np.array([token.logprob for token in finished.details["prompt_logprobs"][1:]])
    assert len(ours) == len(text["nll"])
    assert abs(np.exp(-ours.mean() - text["nll"].mean()) - 1) < 0.01

"""Beam search on the default model equals transformers': ids and scores, for widths, length penalties, stopping rules.

The weights are taken as float32 here, so that both compute the same function; all searches run as one batch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Failed, Finished, Text
from unspool.params import BeamParams, SamplingParams
from unspool.weights.weight import encode_weight

FIXTURE = Path(__file__).parent.parent / "fixtures" / "smollm2" / "beam.json"


def test_beams_equal_transformers(smollm2) -> None:
    fixture = json.loads(FIXTURE.read_text())
    weights = {name: encode_weight(name, weight.dequantize(), "f32") for name, weight in smollm2.weights.items()}
    engine = Engine(replace(smollm2, weights=weights), EngineConfig(kv_dtype="f32", kv_tokens=65_536, step_tokens=1024))
    cases = [case for case in fixture["cases"] if case["clear"]]
    assert len(cases) > 100
    ids = {}
    for case in cases:
        engine.end_ids = frozenset(case["eos_token_ids"])
        width = case["num_beams"]
        beam = BeamParams(width, length_penalty=case["length_penalty"], early_stopping=case["early_stopping"])
        params = SamplingParams(beam=beam, n=width, max_tokens=fixture["max_new_tokens"])
        ids[engine.add(fixture["prompts"][case["prompt"]], params)] = case
    tokens: dict[tuple[str, int], list[int]] = {}
    scores: dict[tuple[str, int], float] = {}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Text):
                tokens[event.request, event.choice] = [token.id for token in event.tokens]
            elif isinstance(event, Finished):
                scores[event.request, event.choice] = event.beam_score
    engine.check()
    engine.scheduler.blocks.check()
    for id, case in ids.items():
        width = case["num_beams"]
        assert [tokens[id, choice] for choice in range(width)] == case["ids"], case
        assert np.allclose([scores[id, choice] for choice in range(width)], case["scores"], atol=2e-4), case


def test_width_one_is_greedy(tiny) -> None:
    checkpoint = tiny("tiny", "q4_1")
    engine = Engine(checkpoint, EngineConfig(kv_tokens=256), tokenizer=checkpoint.tokenizer())

    def answer(params: SamplingParams) -> tuple[list[int], str, str]:
        engine.add([7, 8, 9], params)
        events = []
        while engine.has_work:
            events += engine.step()
            engine.check()
        ids = [token.id for event in events if isinstance(event, Text) for token in event.tokens]
        return ids, "".join(e.text for e in events if isinstance(e, Text)), events[-1].reason

    for max_tokens in (1, 5, 20):
        searched = answer(SamplingParams(beam=BeamParams(1), max_tokens=max_tokens))
        assert searched == answer(SamplingParams(temperature=0, max_tokens=max_tokens))


@pytest.mark.parametrize("kv_tokens", [32, 64, 512])
def test_beams_survive_preemption_and_neighbours(tiny, kv_tokens) -> None:
    checkpoint = tiny("tiny", "q4_1")
    params = SamplingParams(beam=BeamParams(4), n=4, max_tokens=9, logprobs=0)

    def run(engine: Engine, crowd: int) -> list:
        beam = engine.add([7, 8, 9, 10, 11], params)
        for seed in range(crowd):
            engine.add([7, 8, 9, seed], SamplingParams(max_tokens=12, seed=seed, ignore_eos=True))
        found = []
        while engine.has_work:
            for event in engine.step():
                if event.request == beam:
                    found.append((event.choice, getattr(event, "tokens", None), getattr(event, "beam_score", None)))
            engine.check()
        engine.scheduler.blocks.check()
        return found

    alone = run(Engine(checkpoint, EngineConfig(kv_tokens=1024)), 0)
    tight = Engine(checkpoint, EngineConfig(kv_tokens=kv_tokens, block_size=4, step_tokens=8))
    assert run(tight, 5) == alone
    if kv_tokens < 100:
        assert tight.scheduler.num_preemptions > 0


def test_stops_constraints_and_aborts_in_beams(tiny) -> None:
    from unspool.params import Constraint

    checkpoint = tiny("tiny", "q4_1")
    engine = Engine(checkpoint, EngineConfig(kv_tokens=512), tokenizer=checkpoint.tokenizer())
    choice = Constraint("choice", ["apple", "apply", "banana"])
    engine.add([7, 8, 9], SamplingParams(beam=BeamParams(3), n=3, max_tokens=20, constraint=choice))
    texts = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Text):
                texts[event.choice] = event.text
    assert sorted(texts.values()) == ["apple", "apply", "banana"]

    stopped = SamplingParams(beam=BeamParams(2), n=2, max_tokens=20, stop=["b"], allowed_token_ids=[97, 98, 99])
    engine.add([7, 8, 9], stopped)
    ends = [e for _ in range(200) for e in engine.step() if isinstance(e, Finished)]
    assert any(end.reason == "stop" and end.stop == "b" for end in ends)

    id = engine.add([7, 8, 9], SamplingParams(beam=BeamParams(3), n=2, max_tokens=200, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.abort(id)
    assert [e.reason for e in engine.step() if isinstance(e, Finished)] == ["abort", "abort"]
    engine.check()
    engine.scheduler.blocks.check()

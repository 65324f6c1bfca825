"""The engine on the CUDA body, tokens chosen there, one step ahead: what stepping plainly gives, bit for bit."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.cuda_setting import MARKS
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Failed
from unspool.models.random import SHAPES, random_checkpoint
from unspool.params import SamplingParams

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ASKED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 1},
    "filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 2, "logprobs": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 0},
    "bias": {"temperature": 0.7, "seed": 3, "logit_bias": {5: 3.0, 9: -100.0}, "presence_penalty": 1.0},
    "allowed": {"temperature": 1.0, "seed": 4, "allowed_token_ids": list(range(250, 270)), "min_tokens": 2},
    "ranked": {"temperature": 1.0, "seed": 5, "n": 1, "best_of": 2},
}
Answer = list[tuple[int, bytes]]


def make_engine() -> Engine:
    checkpoint = random_checkpoint(replace(SHAPES["tiny"], num_layers=1), format="bf16")
    return Engine(checkpoint, EngineConfig(device="cuda", block_size=16, kv_tokens=512, step_tokens=64))


def answers(engine: Engine, names: list[str]) -> dict[str, Answer]:
    for index, name in enumerate(names):
        params = SamplingParams(max_tokens=4, ignore_eos=name != "allowed", **ASKED[name])
        engine.add([17 + len(name), 5, 5, 250, 7 + len(ASKED[name])], params, id=f"{name}-{index}")
    told: dict[str, Answer] = {name: [] for name in names}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            for token in getattr(event, "tokens", ()):
                bits = struct.pack("<d", float("nan") if token.logprob is None else token.logprob)
                bits += b"".join(struct.pack("<id", id, logprob) for id, logprob in token.top)
                name = event.request.rpartition("-")[0]
                if name in told:
                    told[name].append((token.id, bits))
    engine.check()
    return told


def test_ahead_is_plain_whatever_shapes_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ahead = make_engine(), make_engine()
    monkeypatch.setattr(plain.runner, "can_draw", lambda params: False)  # so that the host chooses
    expected = answers(plain, list(ASKED))
    monkeypatch.setattr(ahead.runner, "run", lambda plan: pytest.fail("logits left the device"))
    assert answers(ahead, list(ASKED)) == expected
    # In another order, with some gone: rows, slots and neighbours are others.
    some = ["bias", "penalties", "filters"]
    assert answers(ahead, some) == {name: expected[name] for name in some}


def test_the_host_chooses_in_between() -> None:
    """A request that needs the host makes everyone step plainly; the device's counts are set anew afterwards."""
    engine = make_engine()
    expected = answers(make_engine(), ["penalties"])["penalties"]
    engine.add([1, 2], SamplingParams(max_tokens=2, temperature=1, typical_p=0.5, ignore_eos=True))
    assert answers(engine, ["penalties"])["penalties"] == expected

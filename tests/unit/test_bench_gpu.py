"""What `unspool bench gpu` counts, on an engine that needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unspool.bench.gpu import laws
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.weights.random import SHAPES, random_checkpoint


def make_engine() -> Engine:
    config = EngineConfig(device="cpu", block_size=16, kv_tokens=16_384, step_tokens=512)
    return Engine(random_checkpoint(replace(SHAPES["tiny"], context_length=2048)), config)


def test_one_prompt_has_one_answer_however_it_is_asked() -> None:
    found = laws(make_engine(), 3, copies=4)
    assert (found["completions"], found["answers"]) == (2 + 2 * 8, 2)
    assert 0 < found["cached"] < found["completions"], "hit and miss"


def test_an_answer_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a token's logprob alone."""
    engine = make_engine()
    step, wrong = engine.step, []

    def changed() -> list[Any]:
        events = step()
        for i, event in enumerate(events):
            tokens = getattr(event, "tokens", ())
            if tokens and tokens[0].logprob is not None and not wrong:
                wrong.append(event)
                first = tokens[0]._replace(logprob=tokens[0].logprob - 1e-9)
                events[i] = event._replace(tokens=(first, *tokens[1:]))
        return events

    monkeypatch.setattr(engine, "step", changed)
    assert laws(engine, 2, copies=2)["answers"] == 3

"""What `unspool bench gpu` counts, on an engine that needs no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from unspool.bench import gpu, kernels
from unspool.bench.gpu import laws
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.machine import Bandwidth
from unspool.models.random import SHAPES, random_checkpoint


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


@pytest.mark.parametrize(("measures", "engines"), [(["decode", "laws"], [False, True]), (["laws"], [True])])
def test_a_measure_starts_the_engine_that_it_asks(
    measures: list[str], engines: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[bool] = []

    def start(checkpoint: Any, *, prefix_cache: bool = False, **sizes: int) -> Engine:
        started.append(prefix_cache)
        return make_engine()

    monkeypatch.setattr(gpu, "require_card", lambda: None)
    monkeypatch.setattr(gpu, "versions", lambda: {"card": "none"})
    monkeypatch.setattr(gpu, "measure_gpu_bandwidth", lambda: Bandwidth(1e9, "measured"))
    monkeypatch.setattr(gpu, "make_engine", start)
    monkeypatch.setattr(gpu, "decode_rows", lambda engine, bandwidth: {"1": {"ms": 1.0}})
    assert gpu.main(["--random", "tiny", "--rounds", "1", *(f"--only={measure}" for measure in measures)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert started == engines
    assert told["laws"] == {"completions": 2, "cached": 0, "answers": 2}
    assert told["ready_seconds"] > 0
    assert ("decode" in told) == ("decode" in measures)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rows", "0"], "--rows: [0] are not all from 1 to 8,192"),
        (["--rows", "1", "--rows", "9000"], "--rows: [1, 9000]"),
        (["--rows", "256", "--context", "1024"], "--context: 1024 is not from 0 to 1,023, for 256 rows"),
        (["--context", "-1"], "--context: -1"),
    ],
)
def test_sizes_of_kernels_that_have_no_room_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernels.main(arguments)
    assert told in capsys.readouterr().err

"""What `unspool bench gpu` counts, on an engine that needs no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.schemas import validate
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
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert started == engines
    assert reported["laws"] == {"completions": 2, "cached": 0, "answers": 2}
    assert reported["ready_seconds"] > 0
    assert ("decode" in reported) == ("decode" in measures)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rows", "0"], "--rows: [0] are not all from 1 to 8,192"),
        (["--rows", "1", "--rows", "9000"], "--rows: [1, 9000]"),
        (["--rows", "256", "--context", "1024"], "--context: 1024 is not from 0 to 1,023, for 256 rows"),
        (["--context", "-1"], "--context: -1"),
    ],
)
def test_sizes_of_kernels_that_have_no_room_are_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernels.main(arguments)
    assert expected in capsys.readouterr().err

def test_kernels_end_with_a_line_that_the_schema_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the last line, of measurements that are made up."""
    row = {"kernel": "attention", "shape": [64, 32], "count": 2, "microseconds": 4.0, "terabytes_per_second": 1.0,
           "teraflops": 2.0, "floor_microseconds": 1.0}  # fmt: skip
    step = {"kernel": "step", "microseconds": 9.0, "floor_microseconds": 2.0}
    monkeypatch.setattr(kernels, "require_card", lambda: None)
    monkeypatch.setattr(kernels, "measure_gpu_bandwidth", lambda: Bandwidth(1e12, "measured"))
    monkeypatch.setattr(kernels, "matrix_rate", lambda: 1e14)
    monkeypatch.setattr(kernels, "make_step", lambda checkpoint: None)
    monkeypatch.setattr(kernels, "versions", lambda: {"card": "none", "torch": "0", "triton": "0"})
    monkeypatch.setattr(
        kernels, "measure", lambda _, rows, context, limits: [row | {"rows": rows}, step | {"rows": rows}]
    )
    assert kernels.main(["--random", "tiny", "--rows", "1", "--rows", "8"]) == 0
    output = capsys.readouterr().out
    reported = validate("bench", json.loads(output.splitlines()[-1]))
    assert [each["rows"] for each in reported["kernels"]] == [1, 1, 8, 8]
    assert reported["limits"] == {"bandwidth": 1e12, "compute": 1e14}
    assert "limits: 1.00 TB/s read, 100 TFLOP/s" in output
    pytest.importorskip("matplotlib")
    path = tmp_path / "kernels.svg"
    assert kernels.main(["--random", "tiny", "--rows", "1", "--plot", str(path)]) == 0
    assert "attention 64×32" in path.read_text("utf-8")

"""The benchmark of speculation with a drafter of known acceptance, on a model that is nothing but small."""

from __future__ import annotations

import json

import pytest

from tests.unit.schemas import validate
from unspool.bench.speculate import main
from unspool.bench.synthetic import Synthetic, tokens_a_round
from unspool.drafter import DraftContext


def test_the_formula() -> None:
    assert tokens_a_round(0.5, 2) == 1.75
    assert tokens_a_round(1.0, 4) == 5
    assert tokens_a_round(0.0, 4) == 1


def test_a_synthetic_drafter_is_right_as_often_as_it_says() -> None:
    prompt, answer = (1, 2, 3), [7, 8, 9] * 1000
    drafter = Synthetic({prompt: answer}, 0.7, 10)
    said = drafter.propose([DraftContext(0, prompt, 3, (), None)], [3000])[0]
    assert sum(a == b for a, b in zip(answer, said, strict=True)) == pytest.approx(2100, abs=90)
    later = drafter.propose([DraftContext(0, [*prompt, *answer[:5]], 3, (), None)], [4])[0]
    assert later == said[5:9], "the same places every time"


def test_it_runs_and_its_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--device cpu --random tiny --synthetic 0.5 --synthetic 0.9 --context 8 -n 24 --rounds 1 --at-once 1 3"
    assert main([*small.split(), "--lengths", "2", "3"]) == 0
    reported = validate("bench", json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [row["at_once"] for row in reported["rows"]] == [1, 3]
    drafts = reported["rows"][0]["drafts"]
    assert [(draft["chance"], draft["length"]) for draft in drafts] == [
        (0.5, 2), (0.5, 3), (0.5, None), (0.9, 2), (0.9, 3), (0.9, None),
    ]  # fmt: skip
    assert all(draft["drafted"] >= draft["accepted"] > 0 for draft in drafts if draft["length"])


def test_drafts_beside_plain_decoding(chat_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["-m", chat_model, "--kinds", "plain", "--rounds", "1", "-n", "6", "--at-once", "1", "2"]
    assert main(small) == 0
    reported = validate("bench", json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [(each["kind"], each["at_once"]) for each in reported["kinds"]] == [("plain", 1), ("plain", 2)]
    assert all(row["drafted"] >= row["accepted"] for each in reported["kinds"] for row in each["drafters"].values())
    assert reported["cost"]["1"] == 1.0


def test_ctrl_c_tells_what_is_done(
    chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unspool.bench.speculate.costs", interrupted)
    assert main(["-m", chat_model, "--kinds", "plain", "--rounds", "1", "-n", "4"]) == 130
    reported = validate("bench", json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert reported["interrupted"] is True
    assert [each["kind"] for each in reported["kinds"]] == ["plain"]
    assert set(reported["kinds"][0]["drafters"]) == {"lookup"}

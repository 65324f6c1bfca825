"""Scoring a text: each token once, with the bits that generating it would have given."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schemas import validate
from unspool.cli import main
from unspool.errors import RequestError
from unspool.evaluation import scoring
from unspool.evaluation.scoring import Score, ScoredToken, score_tokens, windows
from unspool.llm import LLM

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llm(short_model: str) -> LLM:
    return LLM(short_model, device="cpu", threads=1, kv_tokens=512)


def whole(llm: LLM, tokens: list[int], **options: Any) -> Score:
    return list(score_tokens(llm, tokens, **options))[-1]


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_windows_score_each_token_once(num_tokens: int, size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, size - 1))
    found = windows(num_tokens, size, stride)
    assert [i for each in found for i in range(each.first, each.end)] == list(range(1, num_tokens))
    for index, each in enumerate(found):
        assert 0 <= each.start < each.first < each.end <= each.start + size
        assert index == 0 or each.first - each.start >= size - stride


def test_the_law_scored_is_generated(llm: LLM) -> None:
    """Bit for bit, for tokens that were drawn at temperature 1 and for every window that holds them whole."""
    prompt = llm.encode("Once upon a time")
    answer = llm.generate(prompt, max_tokens=40, temperature=1, seed=5, logprobs=2, ignore_eos=True)
    score = whole(llm, [*prompt, *answer.token_ids], window=96, top=2)
    scored = score.tokens[len(prompt) - 1 :]
    assert [token.id for token in scored] == answer.token_ids
    assert [token.logprob for token in scored] == answer.logprobs
    assert [token.top for token in scored] == [token.top for token in answer.tokens]
    assert [token.rank for token in scored] == [token.rank for token in answer.tokens]


def test_a_window_scores_as_if_it_stood_alone(llm: LLM) -> None:
    tokens = llm.encode("Many hands make light work, and too many cooks spoil the broth.")
    score = whole(llm, tokens, window=16, stride=5)
    assert [token.position for token in score.tokens] == list(range(1, len(tokens)))
    for each in windows(len(tokens), 16, 5):
        alone = llm.score(tokens[each.start : each.end])
        for position in range(each.first, each.end):
            token = alone[position - each.start]
            assert token is not None
            assert score.tokens[position - 1].logprob == token.logprob


def test_passes_change_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = llm.encode("A rolling stone gathers no moss. " * 4)
    together = whole(llm, tokens, window=12, stride=4)
    monkeypatch.setattr(scoring, "PASS_TOKENS", 1)
    assert whole(llm, tokens, window=12, stride=4) == together


def test_figures_by_hand() -> None:
    tokens = [ScoredToken(i, 1, "ab", math.log(p), 1, 2) for i, p in enumerate([0.5, 0.25], 1)]
    score = Score(3, tokens)
    assert score.perplexity == pytest.approx(math.sqrt(8))
    assert score.bits_per_byte == pytest.approx(3 / 4)
    assert score.perplexity_error == pytest.approx(math.sqrt(8) * math.log(2) / 2)
    assert Score(1).as_dict()["perplexity"] is None
    assert Score(2, [ScoredToken(1, 1, "a", -math.inf, None, 1)]).as_dict()["nll"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [({"window": 97}, "window is 97"), ({"window": 8, "stride": 8}, "stride is 8"), ({"window": 1}, "window is 1")],
)
def test_windows_that_cannot_be(llm: LLM, options: dict[str, int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        whole(llm, [1, 2, 3], **options)


# The command --------------------------------------------------------------------------------------------------------
def test_a_file_is_scored(chat_model: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Grüße aus dem Süden. " * 20, "utf-8")
    arguments = ["score", str(path), "-m", chat_model, "--window", "64", "--stride", "16", "--kv-tokens", "2048"]
    assert main([*arguments, "--json", "--top", "2"]) == 0
    reported = validate("score", json.loads(capsys.readouterr().out))
    assert reported["tokens"] == reported["scored"] + 1 == len(path.read_bytes())
    assert reported["bytes"] == reported["scored"]
    assert all(len(token["top"]) == 2 for token in reported["token_table"])
    assert reported["nll"] == pytest.approx(-sum(token["logprob"] for token in reported["token_table"]))
    assert main(arguments) == 0
    assert f"perplexity {reported['perplexity']:.4f}" in capsys.readouterr().out
    assert main([*arguments, "--tokens", "--limit", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4, "a head, two tokens, the summary"


def test_standard_input(chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"hello there"), isatty=lambda: False))
    assert main(["score", "-", "-m", chat_model, "--kv-tokens", "2048", "-q"]) == 0
    assert "10 of 11 tokens, 10 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b"\xff\xfe", [], "is not UTF-8: byte 0 is 0xff"),
        (b"", [], "has 0 tokens; two are needed"),
        (b"abc", ["--limit", "1"], "--limit is 1"),
        (b"abc", ["--top", "21"], "--top is 21"),
        (b"abc", ["--window", "1"], "window is 1"),
        (None, [], "No such file"),
    ],
)
def test_what_cannot_be_scored(
    content: bytes | None, arguments: list[str], said: str, chat_model: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert main(["score", str(path), "-m", chat_model, "--kv-tokens", "2048", *arguments]) in (1, 2)
    assert said in capsys.readouterr().err


def test_ctrl_c_tells_what_was_scored(
    chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "text").write_text("x" * 200)
    monkeypatch.setattr(scoring, "PASS_TOKENS", 1)
    many, count = LLM.score_many, iter(range(100))

    def interrupted(self: LLM, *arguments: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return many(self, *arguments)

    monkeypatch.setattr(LLM, "score_many", interrupted)
    arguments = ["--window", "32", "--stride", "16", "--json", "--kv-tokens", "2048"]
    assert main(["score", str(tmp_path / "text"), "-m", chat_model, *arguments]) == 130
    reported = validate("score", json.loads(capsys.readouterr().out))
    assert reported["interrupted"] is True
    assert reported["scored"] == 31 + 16

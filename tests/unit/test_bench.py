"""Benchmarks run, count what they say they count, end with JSON that the schema describes, and can be gone on with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.schemas import validate
from unspool.bench import determinism, latency, roofline, throughput, why_cache
from unspool.bench import sampling as bench_sampling
from unspool.bench.determinism import first_difference, summary
from unspool.bench.local import Bench
from unspool.bench.why_cache import Measure, integral
from unspool.bench.workload import MIXES, Job, jobs_of
from unspool.cli import main as cli
from unspool.cli.bench import benchmarks
from unspool.errors import RequestError
from unspool.reporting import Journal, check_plot, print_table, quantile

Capture = pytest.CaptureFixture[str]


def reported(capsys: Capture) -> dict[str, Any]:
    value: dict[str, Any] = validate("bench", json.loads(capsys.readouterr().out.splitlines()[-1]))
    return value


# Each benchmark -----------------------------------------------------------------------------------------------------
def test_without_a_cache_every_position_is_computed_again(chat_model: str, capsys: Capture) -> None:
    assert cli(["bench", "why-cache", "-m", chat_model, "-n", "40", "--threads", "1"]) == 0
    found = reported(capsys)
    assert found["positions"] == {"with": 40, "without": 820}
    assert found["same_answer"] is True
    assert found["lengths"] == list(range(1, 41))


def test_the_positions_of_a_thousand_tokens(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(model=chat_model, random=None, device="cpu", threads=1, tokens=1000, every=1)
    measured = Measure(options)
    measured.whole, measured.cached = dict.fromkeys(range(1, 1001), 0.5), [0.1] * 1000
    assert measured.result()["positions"] == {"with": 1000, "without": 500_500}


def test_what_lies_between_measured_lengths_is_on_the_line() -> None:
    assert integral({1: 1.0, 2: 2.0, 3: 3.0}) == 6.0
    assert integral({1: 1.0, 3: 3.0}) == 6.0
    assert integral({}) == 0.0


def test_an_engine_that_computes_positions_again_is_measured(chat_model: str, capsys: Capture) -> None:
    """The engine's own count of what it computed, with and without: nothing is kept between the requests."""
    options = argparse.Namespace(model=chat_model, random=None, device="cpu", threads=1, tokens=6, every=1)
    measured = Measure(options)
    run, rows = measured.engine.runner.run, []

    def counted(plan: Any) -> Any:
        rows.append(plan.num_tokens)
        return run(plan)

    measured.engine.runner.run = counted  # type: ignore[method-assign]
    measured._steps(measured.tokens, 6)
    assert sum(rows) == 6
    rows.clear()
    for length in range(1, 7):
        measured._steps([300] * length, 1)
    assert sum(rows) == 21


def test_repeated_answers_are_the_same(chat_model: str, capsys: Capture) -> None:
    assert determinism.main(["-m", chat_model, "--runs", "6", "--at-once", "3", "-n", "6", "--threads", "1"]) == 0
    results = reported(capsys)["results"]
    assert [(row["mode"], row["answers"], row["distinct"]) for row in results] == [("greedy", 6, 1), ("seeded", 6, 1)]


def test_answers_that_differ_are_counted_and_where_they_part() -> None:
    items = [{"answer": text} for text in ["a b c", "a b c", "a b d", "a b c d"]] + [{"error": "timeout"}]
    found = summary(items)
    assert (found["answers"], found["distinct"], found["most_frequent"]) == (4, 3, 2)
    assert found["first_divergence"] == 2
    assert found["divergences"] == [2, 3]
    assert found["errors"] == {"timeout": 1}
    assert first_difference("a", "b") == 0


def test_latency_by_prompt_and_batch(chat_model: str, capsys: Capture) -> None:
    small = ["--prompts", "4", "9", "--at-once", "1", "3", "-n", "4", "--rounds", "2", "--threads", "1"]
    assert latency.main(["-m", chat_model, *small]) == 0
    rows = reported(capsys)["rows"]
    assert [(row["prompt_tokens"], row["at_once"], row["samples"]) for row in rows] == [
        (4, 1, 2), (4, 3, 6), (9, 1, 2), (9, 3, 6),
    ]  # fmt: skip
    assert all(row["first"]["p50"] <= row["first"]["p99"] for row in rows)


def test_latency_behind_a_context_that_is_cached(chat_model: str, capsys: Capture) -> None:
    """The time to the first token is that of the prompt and of what no whole block holds."""
    options = argparse.Namespace(model=chat_model, random=None, device="cpu", threads=1)
    bench = Bench(options, 1024, prefix_cache=True)
    run, rows = bench.engine.runner.run, []

    def counted(plan: Any) -> Any:
        rows.append(plan.num_tokens)
        return run(plan)

    size = bench.engine.scheduler.blocks.block_size
    bench.engine.runner.run = counted  # type: ignore[method-assign]
    [sample] = bench.run([Job(5, 3)], context=2 * size + 1)
    assert len(sample.arrivals) == 3
    assert rows[-3:] == [1 + 5, 1, 1]
    small = ["--prompts", "4", "--context", "0", str(size), "--at-once", "1", "-n", "3", "--rounds", "1"]
    assert latency.main(["-m", chat_model, "--threads", "1", *small]) == 0
    assert [(row["prompt_tokens"], row["context"]) for row in reported(capsys)["rows"]] == [(4, 0), (4, size)]


def test_throughput_counts_every_token(chat_model: str, capsys: Capture) -> None:
    assert throughput.main(["-m", chat_model, "--mix", "short", "--requests", "5", "--threads", "1"]) == 0
    [row] = reported(capsys)["rows"]
    jobs = jobs_of("short", 5, 0)
    assert row["output_tokens"] == sum(job.output_tokens for job in jobs)
    assert row["prompt_tokens"] == sum(job.prompt_tokens for job in jobs)


def test_a_roofline_has_each_step_below_the_ceiling_that_limits_it(
    chat_model: str, own_cache: Path, capsys: Capture
) -> None:
    small = ["--batches", "1", "3", "--prompts", "8", "--context", "16", "--rounds", "2", "--threads", "1"]
    assert roofline.main(["-m", chat_model, *small]) == 0
    found = reported(capsys)
    assert [(each["what"], each["batch"], each["rows"]) for each in found["points"]] == [
        ("decode", 1, 1), ("decode", 3, 1), ("prefill", 1, 8),
    ]  # fmt: skip
    split = found["decode_split"]
    assert split["whole"] > 0
    for each in found["points"]:
        assert each["intensity"] == pytest.approx(each["flops"] / each["bytes"])


def test_what_choosing_a_token_costs(capsys: Capture) -> None:
    small = ["--vocab-size", "2000", "--rounds", "1", "--rows", "2", "--reference"]
    assert bench_sampling.main(small) == 0
    medians = reported(capsys)["median_us"]
    assert set(medians["greedy"]) == {"unspool", "reference"}
    assert set(bench_sampling.CASES) | set(bench_sampling.OURS_ALONE) == set(medians)


@pytest.mark.parametrize("mix", MIXES)
def test_lengths_are_those_of_the_mix(mix: str) -> None:
    jobs = jobs_of(mix, 2000, 0)
    prompts = sorted(job.prompt_tokens for job in jobs)
    assert prompts[1000] == pytest.approx(MIXES[mix].prompt, rel=0.15)
    assert max(prompts) <= MIXES[mix].most[0]
    assert jobs == jobs_of(mix, 2000, 0)
    assert jobs != jobs_of(mix, 2000, 1)


# Plots --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(chat_model: str, tmp_path: Path, suffix: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    assert why_cache.main(["-m", chat_model, "-n", "4", "--threads", "1", "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


def test_a_plot_that_cannot_be_drawn_is_refused_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(RequestError, match=r"must end in .png, .svg or .pdf"):
        check_plot(tmp_path / "plot.doc")
    with pytest.raises(RequestError, match="no such directory"):
        check_plot(tmp_path / "nowhere" / "plot.svg")


def test_what_to_install_for_plots(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert cli(["bench", "why-cache", "--plot", "x.svg"]) == 1
    assert "pip install 'unspool[plot]'" in capsys.readouterr().err


# Long runs ----------------------------------------------------------------------------------------------------------
def interrupt_after(monkeypatch: pytest.MonkeyPatch, crowds: int) -> None:
    """Ctrl-C while the next crowd is answered."""
    crowd, count = determinism.Here.crowd, iter(range(1000))

    def interrupted(self: Any, *arguments: Any) -> Any:
        if next(count) == crowds:
            raise KeyboardInterrupt
        return crowd(self, *arguments)

    monkeypatch.setattr(determinism.Here, "crowd", interrupted)


def test_ctrl_c_and_going_on(
    chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    small = ["-m", chat_model, "--runs", "6", "--at-once", "2", "-n", "4", "--threads", "1"]
    keep = [*small, "--keep", str(tmp_path / "runs.jsonl")]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert determinism.main(keep) == 130
    output = capsys.readouterr()
    assert "goes on from" in output.err
    partial = validate("bench", json.loads(output.out.splitlines()[-1]))
    assert partial["interrupted"] is True
    assert [(row["mode"], row["answers"]) for row in partial["results"]] == [("greedy", 6), ("seeded", 2)]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)  # only two crowds are left
        assert determinism.main(keep) == 0
    whole = reported(capsys)
    assert [(row["answers"], row["distinct"]) for row in whole["results"]] == [(6, 1), (6, 1)]
    assert determinism.main(small) == 0
    assert reported(capsys)["results"] == whole["results"], "interrupted or not, the same"


def test_a_journal_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    Journal(path, {"runs": 3}).add({"x": 1})
    assert Journal(path, {"runs": 3}).items == [{"x": 1}]
    with pytest.raises(RequestError, match="other settings"):
        Journal(path, {"runs": 4})
    path.write_text("hello\n")
    with pytest.raises(RequestError, match="not the record of such a run"):
        Journal(path, {"runs": 3})


def test_a_journal_that_was_cut_while_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    journal = Journal(path, {})
    journal.add({"x": 1})
    journal.add({"x": 2})
    path.write_text(path.read_text()[:-4])
    again = Journal(path, {})
    assert again.items == [{"x": 1}]
    again.add({"x": 3})
    assert Journal(path, {}).items == [{"x": 1}, {"x": 3}]


# Small things -------------------------------------------------------------------------------------------------------
def test_names_have_hyphens(capsys: Capture) -> None:
    assert {"why-cache", "latency", "throughput", "serve", "roofline", "determinism"} <= set(benchmarks())


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([], 0.5, None), ([3.0], 0.99, 3.0), ([4, 1, 3, 2], 0.5, 3), ([1, 2], 0.99, 2)]
)
def test_quantiles(values: Sequence[float], share: float, expected: float | None) -> None:
    assert quantile(values, share) == expected


def test_a_table(capsys: Capture) -> None:
    print_table(["name", "n"], [["a", 1234], ["longer", None]])
    assert capsys.readouterr().out == "name        n\na       1,234\nlonger      –\n"

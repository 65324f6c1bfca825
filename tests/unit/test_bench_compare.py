"""python -m benchmarks compare: what it calls a difference, and a whole run with checkouts that only pretend."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import compare, rounds
from benchmarks.compare import Ratio
from tests.unit.test_bench_cpu import FAKE
from unspool.errors import BackendError

ROW = rounds.rows(64)["decode-32"]


def test_the_range_leaves_out_as_many_rounds_as_certainty_allows() -> None:
    """Of n rounds on either side of the median with even chances: 6 leave out none, 9 one, 20 five."""
    for count, outside in ((6, 0), (8, 0), (9, 1), (20, 5)):
        values = [1 + i / 100 for i in range(count)]
        found = Ratio.of(values[::-1])
        assert (found.low, found.high) == (values[outside], values[-1 - outside])
    assert Ratio.of([1.0] * 3 + [5.0]).median == 1.0


@pytest.mark.parametrize(
    ("ratio", "noise", "called"),
    [
        (Ratio(1.05, 1.02, 1.08), Ratio(1.0, 0.99, 1.01), "faster"),
        (Ratio(0.95, 0.94, 0.97), Ratio(1.0, 0.99, 1.01), "slower"),
        (Ratio(1.05, 0.99, 1.08), Ratio(1.0, 0.99, 1.01), "no difference seen"),  # 1 is not left out
        (Ratio(1.05, 1.02, 1.08), Ratio(1.0, 0.94, 1.01), "no difference seen"),  # the noise reaches as far
    ],
)
def test_a_difference_must_leave_one_out_and_reach_beyond_the_noise(ratio: Ratio, noise: Ratio, called: str) -> None:
    assert compare.verdict(ROW, ratio, noise) == called


def test_memory_is_larger_or_smaller() -> None:
    quiet = Ratio(1.0, 1.0, 1.0)
    assert compare.verdict(rounds.rows(64)["memory"], Ratio(0.9, 0.9, 0.9), quiet) == "larger"


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paces: tuple[float, float, float]) -> rounds.Record:
    """Nine rounds of decoding and prefill at these seconds a token."""
    shutil.copy(rounds.DRIVERS / "driver.py", tmp_path)
    (tmp_path / "via_unspool.py").write_text(FAKE)
    monkeypatch.setattr(rounds, "DRIVERS", tmp_path)
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0.0)
    reported = {"text": "", "ids": [1] * 37, "version": "1"}
    engines = compare.checkouts([sys.executable] * 2, reported)
    for engine, pace in zip(engines, paces, strict=True):
        engine.options["pace"] = pace
    known = {name: row for name, row in rounds.rows(64).items() if name in ("decode-32", "prefill-512")}
    bench = rounds.Rounds(engines, known, vocab_size=5000)
    bench.run(9)
    return bench.record


def test_a_run_tells_noise_first_and_then_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(tmp_path, monkeypatch, (0.001, 0.001, 0.0005))
    known = {name: rounds.rows(64)[name] for name in record.values}
    summary = compare.summarise(record, known)
    assert {name: of["verdict"] for name, of in summary.items()} == {"decode-32": "faster", "prefill-512": "faster"}
    assert summary["decode-32"]["ratio"].median == pytest.approx(2)
    printed = list(compare.table(summary, known))
    assert printed[0].startswith("noise (before against before)")
    assert "1.000 (1.000 to 1.000)" in printed[1]
    assert printed[4].split()[:-3] == [
        "decode,", "32-token", "prompt", "1000.0", "2000.0", "tokens/s", "2.000", "(2.000", "to", "2.000)", "faster",
    ]  # fmt: skip
    reported = json.loads(json.dumps(compare.report(record, summary, {"model": "m"})))
    assert reported["rows"]["decode-32"]["ratio"] == {"median": pytest.approx(2), "low": pytest.approx(2), "high": 2.0}
    assert len(reported["rounds"]["prefill-512"][compare.AGAIN]) == 9


def test_checkouts_that_are_alike_show_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(tmp_path, monkeypatch, (0.001, 0.001, 0.001))
    known = {name: rounds.rows(64)[name] for name in record.values}
    assert {of["verdict"] for of in compare.summarise(record, known).values()} == {"no difference seen"}


def test_rounds_that_others_disturbed_do_not_count_where_enough_are_left() -> None:
    record = rounds.Record()
    for others in [0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]:
        for engine in (compare.BEFORE, compare.AGAIN, compare.AFTER):
            is_slowed = others and engine == compare.AFTER
            record.add("decode-32", engine, 50 if is_slowed else 100, others if engine == compare.AFTER else 0.0)
    assert compare.counted_rounds(record, "decode-32") == [2, 3, 4, 5, 6, 7]
    assert compare.summarise(record, {"decode-32": ROW})["decode-32"]["ratio"] == Ratio(1.0, 1.0, 1.0)
    record.add("decode-32", compare.BEFORE, 100)
    record.others["decode-32"][compare.BEFORE] = [0.5] * 3 + [0.0] * 6
    for engine in (compare.AGAIN, compare.AFTER):
        record.add("decode-32", engine, 100, 0.9)
    assert compare.counted_rounds(record, "decode-32") == list(range(9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "a"], "--python was given 1 times; give it for the two checkouts"),
        (["--python", "a", "--python", "b", "--rounds", "5"], "--rounds is 5; fewer than 6 say nothing"),
    ],
)
def test_what_proves_nothing_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert message in capsys.readouterr().err


def test_a_python_without_unspool_says_so(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named unspool' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(BackendError, match="No module named unspool"):
        compare.commit_of(str(python))

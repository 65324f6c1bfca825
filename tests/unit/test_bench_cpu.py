"""python -m benchmarks cpu: its arithmetic, and a whole run with engines that only pretend."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cpu, rounds
from benchmarks.export import export
from benchmarks.peer import Process
from benchmarks.peers import exact_openvino
from unspool import quiet
from unspool.errors import BackendError
from unspool.machine import Bandwidth
from unspool.models.checkpoint import Checkpoint

KNOWN = rounds.rows(64)
FAKE = """
class Engine:
    def __init__(self, options):
        print("chatter that is no answer")
        self.version, self._pace = options["version"], options["pace"]

    def first(self, text, ids):
        assert len(ids) == 37

    def prefill(self, prompt):
        return len(prompt) * self._pace

    def decode(self, prompts, steps):
        return steps * self._pace
"""


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(rounds.DRIVERS / "driver.py", tmp_path)
    (tmp_path / "via_fake.py").write_text(FAKE)
    monkeypatch.setattr(rounds, "DRIVERS", tmp_path)
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0.0)
    quick = Bandwidth(10e9, "measured")
    monkeypatch.setattr(cpu, "measure_bandwidth", lambda *_, **__: quick)
    monkeypatch.setattr(cpu, "MemoryReader", QuickReader)
    monkeypatch.setattr(quiet.Watch, "others", lambda *_: 0.0)  # whatever else this machine does
    return tmp_path


class QuickReader:
    def __init__(self, threads: int) -> None:
        self._passes = iter(range(10, 1000))

    def best(self) -> float:
        return 1e9 * next(self._passes)

    def close(self) -> None:
        pass


def fake(name: str, pace: float) -> rounds.Engine:
    reported = {"text": "", "ids": [1] * 37, "version": f"{name} 1", "pace": pace}
    return rounds.Engine(name, Path(sys.executable), "fake", reported)


@pytest.mark.parametrize(
    ("row", "seconds", "rate"), [("decode-32", 0.5, 128.0), ("prefill-512", 0.5, 1024.0), ("eight", 0.5, 1024.0)]
)
def test_a_rate_counts_what_was_computed(row: str, seconds: float, rate: float) -> None:
    assert KNOWN[row].rate(seconds) == rate


def test_above_one_is_ours_in_every_unit() -> None:
    assert KNOWN["decode-32"].ratio(200, 100) == 2
    assert KNOWN["start"].ratio(0.2, 0.4) == 2
    assert KNOWN["memory"].ratio(400, 100) == 0.25


def test_a_ratio_is_the_median_of_rounds_not_the_ratio_of_medians() -> None:
    record = cpu.CpuRecord()
    for ours, theirs in ((100, 10), (10, 10), (20, 1)):
        record.add("decode-32", cpu.OURS, ours)
        record.add("decode-32", "other", theirs)
    assert record.medians() == {"decode-32": {cpu.OURS: 20, "other": 10}}
    assert record.median_ratios(KNOWN) == {"decode-32": {"other": 10}}


def test_the_ceiling_is_the_fastest_round_for_neighbours_only_slow_reading() -> None:
    record = cpu.CpuRecord(bandwidths=[33e9, 58e9, 34e9], turns=[(300, 50e9), (350, 60e9), (360, 40e9)])
    assert record.share_of_ceiling(10**8) is None
    for rate in (300, 350, 360):
        record.add("decode-32", cpu.OURS, rate)
    assert record.share_of_ceiling(10**8) == pytest.approx(35 / 60)


def test_a_turn_is_measured_by_the_reading_beside_it() -> None:
    record = cpu.CpuRecord(turns=[(300, 50e9), (350, 60e9), (360, 40e9)])
    assert record.shares(10**8) == pytest.approx([(35 / 60 + 0.6) / 2, 0.6, 0.75])
    assert cpu.CpuRecord(turns=[(300, 50e9)]).shares(10**8) == pytest.approx([0.6, 0.6, 0.6])
    assert cpu.CpuRecord().shares(10**8) == []


@pytest.mark.parametrize(("others", "counted"), [(0.0, cpu.TURNS), (0.9, 0)])
def test_turns_that_others_disturbed_are_not_counted(
    drivers: Path, monkeypatch: pytest.MonkeyPatch, others: float, counted: int
) -> None:
    monkeypatch.setattr(quiet.Watch, "others", lambda *_: others)
    bench = cpu.Bench([fake(cpu.OURS, 0.001)], {"decode-32": KNOWN["decode-32"]}, vocab_size=5000, threads=2)
    bench.run(1)
    record = bench.record
    turns = record.turns
    assert (len(turns), record.disturbed_turns) == (counted, cpu.TURNS - counted)
    # Of the passes before and after, the faster: each of these readers' is faster than the one before.
    assert turns == [(pytest.approx(1000), (11 + 2 * i) * 1e9) for i in range(counted)]


def test_disturbed_measurements_are_counted() -> None:
    record = cpu.CpuRecord()
    for others in (0.0, 0.1, 0.9):
        record.add("eight", cpu.OURS, 1, others)
    assert record.disturbed == (1, 3)


def test_the_time_of_others_is_read_from_the_kernels_counters() -> None:
    stat = "cpu  100 20 30 9999 888 4 5 6 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert quiet.busy_seconds(stat) == 165 / quiet.TICK
    assert quiet.process_seconds("7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0") == 300 / quiet.TICK


@pytest.mark.parametrize(("noise", "kept", "tries"), [([0.9, 0.0], 2, 2), ([0.9, 0.4, 0.5], 2, 3), ([0.0], 1, 1)])
def test_a_disturbed_measurement_is_made_again_and_the_least_disturbed_counts(
    drivers: Path, monkeypatch: pytest.MonkeyPatch, noise: list[float], kept: int, tries: int
) -> None:
    seen = [(others, number) for number, others in enumerate(noise, 1)]
    known = {"start": KNOWN["start"]}
    bench = cpu.Bench([fake(cpu.OURS, 0.001)], known, vocab_size=5000, threads=2)
    left = iter(seen)
    monkeypatch.setattr(bench, "_once", lambda *_: next(left))
    bench.run(1)
    assert bench.record.values["start"][cpu.OURS] == [kept]
    assert len(list(left)) == len(noise) - tries


def test_a_run_visits_every_engine_in_every_round(drivers: Path) -> None:
    known = {name: KNOWN[name] for name in ("decode-32", "prefill-512", "eight", "start", "memory")}
    bench = cpu.Bench([fake(cpu.OURS, 0.001), fake("other", 0.004)], known, vocab_size=5000, threads=2)
    bench.run(3)
    record = bench.record
    ratios = record.median_ratios(known)
    assert ratios["decode-32"]["other"] == ratios["prefill-512"]["other"] == pytest.approx(4)
    assert record.medians()["eight"] == pytest.approx({cpu.OURS: 8000, "other": 2000})
    assert all(len(values) == 3 for of in record.values.values() for values in of.values())
    assert all(value > 1 for value in record.values["memory"]["other"])  # MiB of a Python at least
    assert record.versions == {cpu.OURS: "unspool 1", "other": "other 1"}
    printed = "\n".join(cpu.table(record, known))
    assert "4.00×" in printed
    assert "eight requests at once" in printed
    reported = json.loads(json.dumps(cpu.report(record, known, 10**8)))
    assert reported["decode_share_of_fastest_read"] == pytest.approx(1000 * 1e8 / record.ceiling)
    low, high = reported["decode_share_of_bandwidth_quartiles"]
    assert [low, reported["decode_share_of_bandwidth"], high] == pytest.approx(record.shares(10**8))
    assert low <= reported["decode_share_of_bandwidth"] <= high


def test_no_prompt_is_used_twice_not_even_to_try_again(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def once(engine: rounds.Engine, process: Process, row: rounds.Row, prompts: list[list[int]]) -> tuple[float, float]:
        seen.extend(tuple(prompt) for prompt in prompts)
        return 1.0, 1.0  # disturbed

    known = {"prefill-512": KNOWN["prefill-512"], "eight": KNOWN["eight"]}
    bench = cpu.Bench([fake(cpu.OURS, 0.001), fake("other", 0.001)], known, vocab_size=5000, threads=2)
    monkeypatch.setattr(bench, "_once", once)
    bench.run(2)
    assert len(seen) == len(set(seen)) == 2 * 2 * rounds.TRIES * (1 + 8)


def test_there_is_room_for_the_widest_row() -> None:
    assert rounds.room([KNOWN["decode-32"]]) == 256
    assert rounds.room(list(KNOWN.values())) == 2048
    assert rounds.room([rounds.rows(300)["eight"]]) == 8 * 512


def test_a_process_that_fails_says_why() -> None:
    with (
        Process([sys.executable, "-c", "raise SystemExit('no such engine')"]) as process,
        pytest.raises(BackendError, match="no such engine"),
    ):
        process.answer()


def test_export_is_what_the_weights_are_worth(tmp_path: Path, tiny: Callable[..., Checkpoint]) -> None:
    checkpoint = tiny("tiny", "q4_1")
    export(checkpoint, tmp_path)
    with np.load(tmp_path / "weights.npz") as arrays:
        assert set(arrays) == set(checkpoint.weights)
        for name, weight in checkpoint.weights.items():
            assert np.array_equal(arrays[name], weight.dequantize())
    assert json.loads((tmp_path / "config.json").read_text())["num_layers"] == checkpoint.config.num_layers
    assert (tmp_path / "model.gguf").is_symlink() == (checkpoint.path.suffix == ".gguf")


def blocks(rng: np.random.Generator, rows: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, zero points that are no codes, and the weight they make."""
    codes = rng.integers(0, 16, (rows, count, 32), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (rows, count, 1)).astype(np.float16)
    points = rng.uniform(-2, 18, (rows, count, 1))
    weight = (scales.astype(np.float64) * (codes - points)).astype(np.float32).reshape(rows, -1)
    return codes, scales, points, weight


def test_zero_points_are_those_that_the_weights_stand_for() -> None:
    codes, scales, points, weight = blocks(np.random.default_rng(1), 8, 3)
    assert exact_openvino.zero_points(codes, scales, weight) == pytest.approx(points, abs=1e-4)
    assert exact_openvino.zero_points(codes, scales, weight[::-1]) is None
    scales[0, 0] = 0
    empty = weight.copy()
    empty[0, :32] = 0
    assert exact_openvino.zero_points(codes, scales, empty) == pytest.approx(np.where(scales == 0, 0, points), abs=1e-4)
    empty[0, :32] = 0.1
    with pytest.raises(ValueError, match="a minimum but no scale"):
        exact_openvino.zero_points(codes, scales, empty)


def test_a_weight_is_found_among_those_of_its_shape_in_the_order_of_either_rotation() -> None:
    rng = np.random.default_rng(2)
    codes, scales, points, weight = blocks(rng, 8, 2)
    side_by_side = weight.reshape(2, 2, 2, 64).swapaxes(1, 2).reshape(8, 64)  # two heads of four channels
    others = {"other": blocks(rng, 8, 2)[3], "wide": blocks(rng, 8, 4)[3]}
    for order in (weight, side_by_side):
        name, found = exact_openvino.find(codes, scales, {**others, "this": order}, head_dim=4)
        assert name == "this"
        assert found == pytest.approx(points, abs=1e-4)
    with pytest.raises(ValueError, match="8 x 64"):
        exact_openvino.find(codes, scales, others, head_dim=4)


def test_four_bit_codes_are_unpacked_the_lower_half_of_a_byte_first() -> None:
    class Constant:
        data, shape = np.array([0x21, 0x43, 0x05], np.uint8), (5,)

    assert exact_openvino.unpacked(Constant()).tolist() == [1, 2, 3, 4, 5]

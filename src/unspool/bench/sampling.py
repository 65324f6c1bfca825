"""What choosing a token costs, for each row on one core; against llama.cpp's and transformers' own pipelines.

Every engine gets the same rows, in turns, so that the machine's moods fall on all. Ours is timed as the engine calls it
(`Sampler.choose` and `accept`, Python and all); llama.cpp's without copying the logits into its array.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unspool.bench.peer import Process
from unspool.params import SamplingParams
from unspool.sampling import native
from unspool.sampling.pipeline import Sampler

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "full": {
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
    },
    "nucleus": {"temperature": 0.7, "top_p": 0.95},
    "draw": {},
}
OURS_ALONE: dict[str, dict[str, Any]] = {
    "full, 5 logprobs": {**CASES["full"], "logprobs": 5},
    "full, DRY, XTC": {**CASES["full"], "dry_multiplier": 0.8, "xtc_probability": 0.5},
    "typical": {"typical_p": 0.95},
}
NUM_ROWS, HISTORY = 16, 1000
Runner = Callable[[str, int], list[float]]  # case, rows: microseconds


def language_like(vocab_size: int) -> np.ndarray:
    """Rows shaped like a language model's: a wide bulk, and a few hundred tokens that stand out of it."""
    generator = np.random.default_rng(0)
    rows = generator.normal(0, 2.2, (NUM_ROWS, vocab_size))
    for row in rows:
        row[generator.integers(0, vocab_size, 300)] += generator.exponential(4.0, 300)
    return rows.astype(np.float32)


def our_runner(rows: np.ndarray, history: np.ndarray, is_native: bool) -> Runner:
    def run(case: str, count: int) -> list[float]:
        vocab_size = rows.shape[1]
        params = SamplingParams(seed=1, **{**CASES, **OURS_ALONE}[case]).resolve({}, vocab_size=vocab_size)
        ends = frozenset({0})
        sampler = Sampler(params, prompt_ids=history.tolist(), vocab_size=vocab_size, end_ids=ends, native=is_native)
        times = []
        for i in range(count):
            row = rows[i % NUM_ROWS]
            began = time.perf_counter()
            choice = sampler.choose(row, HISTORY + i)
            sampler.accept(choice.token)
            times.append(1e6 * (time.perf_counter() - began))
        return times

    return run


class Peer(Process):
    """Another engine in a process of its own."""

    def __init__(self, name: str, python: str, rows: Path, history: Path) -> None:
        script = Path(__file__).with_name("sampling_peers.py")
        super().__init__([python, str(script), name, str(rows), str(history)])
        self.answer()

    def run(self, case: str, count: int) -> list[float]:
        times: list[float] = self.ask(f"{case} {count}")
        return times


def measure(runners: dict[str, Runner], rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by case and engine; every round visits all of them."""
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for case in {**CASES, **OURS_ALONE}:
            for name, run in runners.items():
                if case in CASES or name == "unspool":
                    times.setdefault((case, name), []).extend(run(case, count)[1:])  # the first row warms up
    medians: dict[str, dict[str, float]] = {}
    for (case, name), values in times.items():
        medians.setdefault(case, {})[name] = round(statistics.median(values), 1)
    return medians


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="unspool bench sampling", description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=152_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=40, help="rows for each case and engine in a round (40)")
    parser.add_argument("--reference", action="store_true", help="measure our numpy reference too")
    parser.add_argument("--llama-python", help="a Python that has llama_cpp")
    parser.add_argument("--transformers-python", help="a Python that has transformers")
    options = parser.parse_args(argv)
    rows = language_like(options.vocab_size)
    history = np.random.default_rng(1).integers(0, options.vocab_size, HISTORY).astype(np.int32)
    runners: dict[str, Runner] = {"unspool": our_runner(rows, history, True)}
    if options.reference:
        runners["reference"] = our_runner(rows, history, False)
    peers = []
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "rows.npy", Path(folder) / "history.npy"
        for path, array in zip(paths, (rows, history), strict=True):
            np.save(path, array)
        for name, python in (("llama.cpp", options.llama_python), ("transformers", options.transformers_python)):
            if python:
                peers.append(Peer(name, python, *paths))
                runners[name] = peers[-1].run
        medians = measure(runners, options.rounds, options.rows)
        for peer in peers:
            peer.close()
    body = native.body()
    isa = "reference" if body is None else body.isa
    print(f"vocabulary {options.vocab_size:,}, {HISTORY:,} tokens of history, {isa}; median µs a row")
    for case, found in medians.items():
        print(f"{case:>18}  " + "  ".join(f"{name} {value:,.0f}" for name, value in found.items()))
    report = {"benchmark": "sampling", "vocab_size": options.vocab_size, "isa": isa, "median_us": medians}
    print(json.dumps(report))
    return 0

"""What choosing a token costs, for each row on one core, with the native kernels and the numpy reference.

Timed as the engine calls it (`Sampler.choose` and `accept`, Python included). `python -m benchmarks sampling` compares
it with llama.cpp and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unspool.params import SamplingParams
from unspool.reporting import Run, add_output, check_plot, figure, print_table, progress
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


def measure(runners: dict[str, Runner], rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by case and engine; every round visits all of them."""
    times: dict[tuple[str, str], list[float]] = {}
    with progress("rounds", rounds) as shown:
        for done in range(1, rounds + 1):
            for case in {**CASES, **OURS_ALONE}:
                for name, run in runners.items():
                    if case in CASES or name == "unspool":
                        times.setdefault((case, name), []).extend(run(case, count)[1:])  # the first row warms up
            shown(done)
    medians: dict[str, dict[str, float]] = {}
    for (case, name), values in times.items():
        medians.setdefault(case, {})[name] = round(statistics.median(values), 1)
    return medians


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab-size", type=int, default=152_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=40, help="rows for each case and engine in a round (40)")
    parser.add_argument("--reference", action="store_true", help="measure our numpy reference too")
    add_output(parser)


def inputs(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of logits, and the tokens before them."""
    history = np.random.default_rng(1).integers(0, vocab_size, HISTORY).astype(np.int32)
    return language_like(vocab_size), history


def our_runners(rows: np.ndarray, history: np.ndarray, *, reference: bool) -> dict[str, Runner]:
    runners = {"unspool": our_runner(rows, history, True)}
    if reference:
        runners["reference"] = our_runner(rows, history, False)
    return runners


def report(runners: dict[str, Runner], options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a table and draw it; the result."""
    medians = measure(runners, options.rounds, options.rows)
    kernels = native.native_sampling()
    isa = "reference" if kernels is None else kernels.isa
    print(f"vocabulary {options.vocab_size:,}, {HISTORY:,} tokens of history, {isa}; median µs per row")
    print_table(["", *runners], [[case, *(found.get(name) for name in runners)] for case, found in medians.items()])
    if options.plot is not None:
        draw(medians, list(runners), options)
    return {"vocab_size": options.vocab_size, "isa": isa, "median_us": medians}


def draw(medians: dict[str, dict[str, float]], names: Sequence[str], options: argparse.Namespace) -> None:
    title = f"choosing a token of {options.vocab_size:,}, one core"
    with figure(options.plot, title=title, x="", y="median microseconds a row", log="y") as axes:
        for name in names:
            some = [case for case in medians if name in medians[case]]
            axes.plot(some, [medians[case][name] for case in some], marker="o", linestyle="", label=name)
        axes.tick_params("x", rotation=30)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="unspool bench sampling", description=__doc__)
    add_options(parser)
    options = parser.parse_args(argv)
    check_plot(options.plot)
    run = Run("sampling", argv, plot=options.plot)
    return run.finish(report(our_runners(*inputs(options.vocab_size), reference=options.reference), options))

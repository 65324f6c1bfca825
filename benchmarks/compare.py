"""Two checkouts of unspool beside each other: whether a change made anything faster, slower, larger or smaller.

    python -m benchmarks compare --python ../before/.venv/bin/python --python .venv/bin/python
    python -m benchmarks compare --python BEFORE --python AFTER --only decode-32 --only start --rounds 15

The first checkout is started twice: what its second process differs from its first is the noise, which is printed
first. All three live in processes of their own, one works at a time, and each round visits all of them, each first in
its turn; only ratios of one round count. A ratio above 1 means that the second is better: more tokens a second, fewer
seconds to the first token of a fresh process, less memory at its peak. Each row shows the median ratio and between
which ratios the true median lies with 95% certainty, by the order of the rounds alone. A row is called faster or slower
(smaller, larger) only where that range leaves 1 out and the median is further from 1 than any end of the noise's own
range: with few rounds, or on a busy machine, that takes a large difference. Rounds that other processes disturbed do
not count where at least 6 others are left; the table says how many counted. Prompts are random ids, never the same
twice; decoding is greedy, and its rate leaves the prompt out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import QUIET_CORES, Engine, Record, Rounds, Row, rows, start_prompt
from unspool.errors import BackendError
from unspool.machine import num_cores

BEFORE, AGAIN, AFTER = "before", "before again", "after"
CERTAINTY = 0.95
FEWEST = 6  # rounds that can say anything with that certainty


@dataclass(frozen=True)
class Ratio:
    """How many times as good one is as the other: the rounds' median, and where the true one lies."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        """By order statistics: nothing is assumed of how the values are spread, only that rounds are independent."""
        found, outside = sorted(values), 0
        count = len(found)
        tail = 0.5**count  # the chance that all rounds lie on one side of the true median
        while 2 * (tail + math.comb(count, outside + 1) * 0.5**count) <= 1 - CERTAINTY:
            outside += 1
            tail += math.comb(count, outside) * 0.5**count
        return Ratio(statistics.median(found), found[outside], found[count - 1 - outside])

    def differs(self, noise: Ratio) -> bool:
        reach = max(abs(noise.low - 1), abs(noise.high - 1))
        return not self.low <= 1 <= self.high and abs(self.median - 1) > reach

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def verdict(row: Row, ratio: Ratio, noise: Ratio) -> str:
    if not ratio.differs(noise):
        return "no difference seen"
    better, worse = ("faster", "slower") if row.unit != "MiB" else ("smaller", "larger")
    return better if ratio.median > 1 else worse


def checkouts(pythons: Sequence[str], setup: dict[str, Any]) -> list[Engine]:
    before, after = map(Path, pythons)
    named = {BEFORE: before, AGAIN: before, AFTER: after}
    return [Engine(name, python, "unspool", dict(setup)) for name, python in named.items()]


def commit_of(python: str) -> str:
    """What is checked out where that Python's package lies; empty where it is no checkout of git."""
    find = "import os, unspool; print(os.path.dirname(unspool.__file__))"
    try:
        done = subprocess.run([python, "-c", find], capture_output=True, text=True)
    except OSError as error:
        raise BackendError(f"{python} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise BackendError(f"{python} cannot import unspool: {done.stderr.strip()[-500:]}")
    command = ["git", "-C", done.stdout.strip(), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


def summarise(record: Record, known: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """By row: the medians of the values, the noise, the ratio, and what to call it."""
    found = {}
    for name in record.values:
        row, values = known[name], record.values[name]
        counted = counted_rounds(record, name)
        noise = Ratio.of([record.ratios(row, AGAIN, BEFORE)[number] for number in counted])
        ratio = Ratio.of([record.ratios(row, AFTER, BEFORE)[number] for number in counted])
        medians = {engine: statistics.median(values[engine][n] for n in counted) for engine in (BEFORE, AFTER)}
        about = {"noise": noise, "ratio": ratio, "verdict": verdict(row, ratio, noise), "counted": len(counted)}
        found[name] = {**medians, **about}
    return found


def counted_rounds(record: Record, row: str) -> list[int]:
    """The rounds that nobody disturbed; all of them where too few are left."""
    cores = zip(*record.others[row].values(), strict=True)
    numbered = list(enumerate(max(of) for of in cores))
    quiet = [number for number, others in numbered if others <= QUIET_CORES]
    return quiet if len(quiet) >= FEWEST else [number for number, _ in numbered]


def table(summary: dict[str, dict[str, Any]], known: dict[str, Row]) -> Iterator[str]:
    yield f"{'noise (before against before)':<46}ratio"
    for name, of in summary.items():
        yield f"  {known[name].title:<44}{of['noise']}"
    yield f"{'after against before':<26}{'before':>10}{'after':>10}{'':<10}ratio"
    for name, of in summary.items():
        row = known[name]
        digits = 3 if row.unit == "s" else 1
        values = f"{of[BEFORE]:>10.{digits}f}{of[AFTER]:>10.{digits}f}"
        yield f"  {row.title:<24}{values} {row.unit:<9}{of['ratio']}  {of['verdict']} in {of['counted']} rounds"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores, known = num_cores(), rows(64)
    parser.add_argument("--python", action="append", required=True, help="a checkout's Python; give before, then after")
    parser.add_argument("-m", "--model", default="smollm2", help="(smollm2)")
    parser.add_argument("--rounds", type=int, default=9, help=f"at least {FEWEST} (9)")
    parser.add_argument("--steps", type=int, default=64, help="tokens that a decoding row decodes (64)")
    parser.add_argument("--threads", type=int, default=cores, help=f"threads of each process ({cores})")
    parser.add_argument("--isa", choices=("auto", "avx512", "avx2", "plain"), default="auto", help="kernel set (auto)")
    parser.add_argument("--only", choices=known, action="append", help="measure this row (repeatable)")
    options = parser.parse_args(argv)
    if len(options.python) != 2:
        parser.error(f"--python was given {len(options.python)} times; give it for the two checkouts")
    if options.rounds < FEWEST:
        parser.error(f"--rounds is {options.rounds}; fewer than {FEWEST} say nothing with {CERTAINTY:.0%} certainty")
    from unspool.models.checkpoint import open_checkpoint
    from unspool.weights.store import resolve

    checkpoint = open_checkpoint(resolve(options.model))
    text, ids = start_prompt(checkpoint)
    setup = {"model": str(checkpoint.path), "threads": options.threads, "isa": options.isa, "text": text, "ids": ids}
    known = {name: row for name, row in rows(options.steps).items() if not options.only or name in options.only}
    commits, load = [commit_of(python) for python in options.python], os.getloadavg()[0]
    bench = Rounds(checkouts(options.python, setup), known, checkpoint.config.vocab_size)
    bench.run(options.rounds)
    record, summary = bench.record, summarise(bench.record, known)
    for name, python, commit in zip((BEFORE, AFTER), options.python, commits, strict=True):
        print(f"{name:<7} {python}  {commit}")
    print("\n".join(table(summary, known)))
    disturbed, count = record.disturbed
    print(f"{disturbed} of {count} measurements were disturbed by other processes")
    about = {"model": checkpoint.name, "threads": options.threads, "isa": options.isa, "load_before": load}
    print(json.dumps(report(record, summary, {**about, "commits": commits})))
    return 0


def report(record: Record, summary: dict[str, dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    rows_of = {
        name: {key: vars(value) if isinstance(value, Ratio) else value for key, value in of.items()}
        for name, of in summary.items()
    }
    return {
        "benchmark": "compare",
        **about,
        "disturbed": record.disturbed,
        "rows": rows_of,
        "rounds": record.values,
        "others_cores": record.others,
    }

"""Measurements in rounds: engines in processes of their own, one at work at a time, each round visiting all of them."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peer import Process
from unspool.quiet import Watch

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint

DRIVERS = Path(__file__).with_name("peers")
START_TOKENS = 37
SETTLE_SECONDS = 0.3  # in which the threads of the engine before go to sleep
QUIET_CORES, TRIES = 0.15, 3  # a measurement that others disturbed more than this is made again, so many times at most
TEXT = "The river runs past the old stone house where the light of the morning falls on the garden wall. " * 8


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    unit: str
    work: str
    tokens: int = 0  # of each prompt
    prompts: int = 1
    steps: int = 0

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tokens/s"

    def rate(self, seconds: float) -> float:
        return self.prompts * (self.steps or self.tokens) / seconds

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times as good we are."""
        return ours / theirs if self.more_is_better else theirs / ours


def rows(steps: int) -> dict[str, Row]:
    rate = "tokens/s"
    found = [
        Row("decode-32", "decode, 32-token prompt", rate, "decode", 32, steps=steps),
        Row("decode-512", "decode, 512-token prompt", rate, "decode", 512, steps=steps),
        Row("prefill-512", "prefill 512 tokens", rate, "prefill", 512),
        Row("prefill-1800", "prefill 1,800 tokens", rate, "prefill", 1800),
        Row("eight", "eight requests at once", rate, "decode", 32, 8, steps),
        Row("start", "start to first token", "s", "start", START_TOKENS),
        Row("memory", "peak memory", "MiB", "memory", 32, steps=steps),
    ]
    return {row.name: row for row in found}


@dataclass(frozen=True)
class Engine:
    """How to start an engine: a driver, the Python that runs it, and what both are given."""

    name: str
    python: Path
    driver: str
    options: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def started(self, context: int) -> Iterator[tuple[Process, float, str]]:
        """A fresh process with room for `context` tokens, the seconds to its first token, and its version."""
        options = json.dumps({**self.options, "context": context})
        command = [str(self.python), str(DRIVERS / "driver.py"), self.driver, options]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        began = time.perf_counter()
        with Process(command, environ | self.environ) as process:
            version = process.answer()["version"]
            yield process, time.perf_counter() - began, version


def start_prompt(checkpoint: Checkpoint) -> tuple[str, list[int]]:
    """A text of 37 tokens: whole words, so that it is read back as the same ids."""
    tokenizer = checkpoint.tokenizer()
    ids = list(tokenizer.encode(TEXT))[:START_TOKENS]
    return tokenizer.decode(ids), ids


@dataclass
class Record:
    """Every number of a run, by row and engine, one for each round."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    others: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # cores that others kept busy meanwhile
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, row: str, engine: str, value: float, others: float = 0.0) -> None:
        self.values.setdefault(row, {}).setdefault(engine, []).append(value)
        self.others.setdefault(row, {}).setdefault(engine, []).append(others)

    @property
    def disturbed(self) -> tuple[int, int]:
        """How many measurements others disturbed, of how many."""
        cores = [value for of in self.others.values() for values in of.values() for value in values]
        return sum(value > QUIET_CORES for value in cores), len(cores)

    def medians(self) -> dict[str, dict[str, float]]:
        return {row: {name: statistics.median(found) for name, found in of.items()} for row, of in self.values.items()}

    def ratios(self, row: Row, engine: str, other: str) -> list[float]:
        """How many times as good one engine was as the other, round by round."""
        of = self.values[row.name]
        return list(map(row.ratio, of[engine], of[other]))


class Rounds:
    """Runs rows on engines; what was measured is in `record`."""

    def __init__(self, engines: Sequence[Engine], known: dict[str, Row], vocab_size: int) -> None:
        self.engines, self.rows = list(engines), known
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self.record = Record()

    def run(self, rounds: int) -> None:
        warm = [row for row in self.rows.values() if row.work in ("decode", "prefill")]
        with ExitStack() as stack:
            alive: dict[str, Process] = {}
            for engine in self.engines if warm else []:
                process, _, version = stack.enter_context(engine.started(room(warm)))
                alive[engine.name], self.record.versions[engine.name] = process, version
                for row in warm:
                    self.ask(process, row, self.prompts(row), min(row.steps, 4))
            for number in range(rounds):
                self.round(number, alive)
                print(f"round {number + 1} is done", file=sys.stderr, flush=True)

    def round(self, number: int, alive: dict[str, Process]) -> None:
        turn = number % len(self.engines)
        for name, row in self.rows.items():
            for engine in self.engines[turn:] + self.engines[:turn]:
                tries: list[tuple[float, float]] = []
                while len(tries) < TRIES and (not tries or tries[-1][0] > QUIET_CORES):
                    time.sleep(SETTLE_SECONDS)
                    prompts = self.prompts(row)  # never one that was seen: engines keep the prefixes they computed
                    tries.append(self._once(engine, alive.get(engine.name), row, prompts))
                others, value = min(tries)  # the least disturbed, whatever it says
                self.record.add(name, engine.name, value, others)

    def _once(self, engine: Engine, process: Process | None, row: Row, prompts: list[list[int]]) -> tuple[float, float]:
        """One measurement: the cores that others kept busy meanwhile, and the value."""
        if row.work in ("decode", "prefill"):
            assert process is not None  # started for these rows
            watch = Watch(process.pid)
            value = row.rate(self.ask(process, row, prompts, row.steps))
            return watch.others(process.pid), value
        if row.work == "start":  # one that is not counted, for systems take back files that nobody has read for a while
            with engine.started(room([row])):
                pass
        watch = Watch()
        with engine.started(room([row])) as (fresh, value, version):
            self.record.versions[engine.name] = version
            if row.work == "memory":
                fresh.ask(json.dumps({"work": "decode", "prompts": prompts, "steps": row.steps}))
                value = float(fresh.ask('{"work": "memory"}')["bytes"]) / (1 << 20)
            return watch.others(fresh.pid), value

    @staticmethod
    def ask(process: Process, row: Row, prompts: list[list[int]], steps: int) -> float:
        seconds = process.ask(json.dumps({"work": row.work, "prompts": prompts, "steps": steps}))["seconds"]
        return float(seconds)

    def prompts(self, row: Row) -> list[list[int]]:
        """Random ids, clear of control tokens, which stand at the beginning or the end of vocabularies."""
        ids = range(300, self._vocab_size - 1000)
        return [self._rng.choices(ids, k=row.tokens) for _ in range(row.prompts)]


def room(known: Sequence[Row]) -> int:
    """Tokens of context for the widest row; llama.cpp gives each sequence a multiple of 256."""
    return max(row.prompts * 256 * (1 + (row.tokens + row.steps) // 256) for row in known)

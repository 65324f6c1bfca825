"""The engine under load: prefix sharing, stalls, and memory against plan.

    unspool bench load                       all three experiments, in a few minutes
    unspool bench load --only sharing

sharing   64 requests behind one long system prompt, with the prefix cache and without
stall     the worst time between tokens of a running stream while 2,000-token prompts arrive, in chunks and whole
memory    what the process holds against what `unspool plan` says it would

Rounds of what is compared alternate, for machines drift. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Finished
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.registry import architecture_of
from unspool.ops.storage import kv_bytes_per_token
from unspool.params import SamplingParams
from unspool.reporting import Run
from unspool.weights.store import resolve

EXPERIMENTS = ("sharing", "stall", "memory")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench load", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="run this experiment (repeatable)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="in the sharing experiment")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    run = Run("load", argv)
    checkpoint = open_checkpoint(resolve(args.model))
    bench = Bench(checkpoint, args)
    results: dict[str, Any] = {"model": checkpoint.name}
    for name in args.only or EXPERIMENTS:
        results[name] = getattr(bench, name)()
    return run.finish(results)


class Bench:
    def __init__(self, checkpoint: Checkpoint, args: argparse.Namespace) -> None:
        self.checkpoint, self.args = checkpoint, args
        self.rng = random.Random(0)

    def engine(self, **options: Any) -> Engine:
        return Engine(self.checkpoint, EngineConfig(device=self.args.device, **{"kv_tokens": 32_768, **options}))

    def tokens(self, count: int) -> list[int]:
        """Random ids, clear of control tokens, which stand at the beginning or the end of vocabularies."""
        return [self.rng.randrange(300, self.checkpoint.config.vocab_size - 1000) for _ in range(count)]

    # Sharing --------------------------------------------------------------------------------------------------------
    def sharing(self) -> dict[str, Any]:
        system = self.tokens(600)
        jobs = [
            (system + self.tokens(self.rng.randrange(8, 64)), self.rng.randrange(8, 48))
            for _ in range(self.args.requests)
        ]
        output = sum(count for _, count in jobs)
        engines = {"shared": self.engine(prefix_cache=True), "alone": self.engine(prefix_cache=False)}
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(self.args.rounds):
            for name, engine in engines.items():
                engine.scheduler.blocks.clear_cache()
                start = time.perf_counter()
                for prompt, count in jobs:
                    engine.add(prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
                drain(engine)
                rates[name].append(output / (time.perf_counter() - start))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratio = medians["shared"] / medians["alone"]
        print(
            f"sharing   {len(jobs)} requests behind a 600-token prompt: {medians['shared']:.0f} tokens/s with the "
            f"prefix cache, {medians['alone']:.0f} without ({ratio:.1f} times)"
        )
        return {"requests": len(jobs), "tokens_per_second": medians, "ratio": ratio}

    # Stalls ---------------------------------------------------------------------------------------------------------
    def stall(self) -> dict[str, Any]:
        engines = {
            "chunked": self.engine(prefix_cache=False),
            "whole": self.engine(prefix_cache=False, step_tokens=4096, chunk_tokens=4096),
        }
        gaps: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(self.args.rounds):
            for name, engine in engines.items():
                gaps[name].append(self._worst_gap(engine))
        medians = {name: statistics.median(values) * 1000 for name, values in gaps.items()}
        print(
            f"stall     worst time between tokens while 2,000-token prompts arrive: {medians['chunked']:.0f} ms in "
            f"chunks, {medians['whole']:.0f} ms whole"
        )
        return {"worst_gap_ms": medians, "chunk_tokens": engines["chunked"].config.chunk_tokens}

    def _worst_gap(self, engine: Engine) -> float:
        stream = engine.add(self.tokens(16), SamplingParams(max_tokens=96, temperature=0, ignore_eos=True))
        last, worst, num_tokens = None, 0.0, 0
        while True:
            for event in engine.step():
                if event.request != stream:
                    continue
                if isinstance(event, Finished):
                    drain(engine)
                    return worst
                now = time.perf_counter()
                worst = max(worst, now - last) if last is not None else worst
                last, num_tokens = now, num_tokens + 1
                if num_tokens in (16, 48):
                    engine.add(self.tokens(2000), SamplingParams(max_tokens=1, temperature=0))

    # Memory ---------------------------------------------------------------------------------------------------------
    def memory(self) -> dict[str, Any]:
        weights = sum(weight.nbytes for weight in self.checkpoint.weights.values())
        per_token = kv_bytes_per_token(architecture_of(self.checkpoint.config).storage, "q8")
        before = resident_bytes()
        engine = self.engine()
        loaded = resident_bytes()
        num_tokens = 4000
        for _ in range(4):
            engine.add(self.tokens(num_tokens // 4 - 1), SamplingParams(max_tokens=1, temperature=0))
        drain(engine)
        used = resident_bytes()
        planned_kv = per_token * num_tokens
        print(
            f"memory    weights {weights / 1e6:.0f} MB planned, {(loaded - before) / 1e6:.0f} MB held; "
            f"{num_tokens:,} tokens of keys and values {planned_kv / 1e6:.0f} MB planned, "
            f"{(used - loaded) / 1e6:.0f} MB held with the step's buffers"
        )
        return {
            "weights_planned": weights,
            "weights_held": loaded - before,
            "kv_planned": planned_kv,
            "kv_held": used - loaded,
            "process": used,
        }


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

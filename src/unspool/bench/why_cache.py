"""Why there is a KV cache: the same answer with one and without, token by token.

    unspool bench why-cache                              200 tokens
    unspool bench why-cache -n 1000 --plot why-cache.svg
    unspool bench why-cache -n 1000 --every 20           without a cache, measures every 20th token

With a cache each step computes one position. Without one it computes the whole text again, so n tokens cost
1 + 2 + … + n positions: 500,500 instead of 1,000 for a thousand. The answers are compared: they are the same.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.events import Finished, Text
from unspool.models.checkpoint import open_checkpoint
from unspool.params import SamplingParams
from unspool.reporting import Progress, Run, add_output, check_plot, figure, print_table, progress
from unspool.weights.store import resolve


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench why-cache", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--random", metavar="SHAPE[:FORMAT]", help="a shape of random weights instead of a model")
    parser.add_argument("-n", "--tokens", type=int, default=200, help="of the text, the first one included (200)")
    parser.add_argument("--every", type=int, default=1, help="without a cache, measure every Nth token (1)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    add_output(parser)
    options = parser.parse_args(argv)
    if options.tokens < 2 or options.every < 1:
        parser.error("--tokens is at least 2, and --every at least 1")
    check_plot(options.plot)
    run = Run("why-cache", argv, plot=options.plot)
    measured = Measure(options)
    interrupted = False
    try:
        with progress("with a cache", options.tokens) as shown:
            measured.with_cache(shown)
        with progress("without", options.tokens) as shown:
            measured.without_cache(shown)
    except KeyboardInterrupt:
        interrupted = True
    result = measured.result()
    report(result)
    if options.plot is not None and result["lengths"]:
        draw(result, options)
    return run.finish(result, interrupted=interrupted, failed=not result["same_answer"])


class Measure:
    """One greedy text, made in both ways. A length counts the tokens that are known, a time is of one more token."""

    def __init__(self, options: argparse.Namespace) -> None:
        from unspool.models.random import stand_in

        self.options = options
        checkpoint = stand_in(options.random) if options.random else open_checkpoint(resolve(options.model))
        config = EngineConfig(
            device=options.device, threads=options.threads, kv_tokens=2 * options.tokens + 256, prefix_cache=False
        )
        self.name = checkpoint.name
        self.engine = Engine(checkpoint, config)
        start = checkpoint.config.vocab_size // 3
        self.tokens = [start]  # one token to begin with, so that n tokens take n positions
        self.cached: list[float] = []  # seconds of the step that computed so many positions, from 1 on
        self.whole: dict[int, float] = {}  # length -> seconds
        self.is_same = True

    def _steps(self, prompt: Sequence[int], count: int) -> list[tuple[int, float]]:
        """(token, seconds since the one before) of so many tokens."""
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        self.engine.add(list(prompt), params)
        made, last = [], time.perf_counter()
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, Text | Finished):
                    for token in getattr(event, "tokens", ()):
                        now = time.perf_counter()
                        made.append((token.id, now - last))
                        last = now
        return made

    def with_cache(self, shown: Progress) -> None:
        self._steps(self.tokens, 2)  # what is done once is done now
        steps = self._steps(self.tokens, self.options.tokens)
        self.cached = [seconds for _, seconds in steps]
        self.tokens += [token for token, _ in steps]
        shown(self.options.tokens)

    def without_cache(self, shown: Progress) -> None:
        """Every step is a new request with the whole text so far, of which nothing is kept."""
        lengths = sorted({*range(1, self.options.tokens + 1, self.options.every), self.options.tokens})
        for length in lengths:
            [(token, seconds)] = self._steps(self.tokens[:length], 1)
            self.whole[length] = seconds
            self.is_same = self.is_same and token == self.tokens[length]
            shown(length)

    def result(self) -> dict[str, Any]:
        lengths = sorted(self.whole)
        done = lengths[-1] if lengths else 0
        return {
            "model": self.name,
            "kernels": self.engine.ops.kernel_set,
            "tokens": done,
            "positions": {"with": done, "without": done * (done + 1) // 2},
            "seconds": {"with": sum(self.cached[:done]), "without": integral(self.whole)},
            "measured_every": self.options.every,
            "same_answer": self.is_same,
            "lengths": lengths,
            "step_seconds": {
                "with": [self.cached[length - 1] for length in lengths],
                "without": [self.whole[length] for length in lengths],
            },
        }


def integral(seconds: dict[int, float]) -> float:
    """The time of all lengths, those between two measured ones on the line between them."""
    total, lengths = 0.0, sorted(seconds)
    for left, right in pairwise(lengths):
        width = right - left
        total += sum(seconds[left] + (seconds[right] - seconds[left]) * step / width for step in range(width))
    return total + (seconds[lengths[-1]] if lengths else 0.0)


def report(result: dict[str, Any]) -> None:
    positions, seconds = result["positions"], result["seconds"]
    print(f"{result['tokens']:,} tokens of {result['model']} ({result['kernels']})")
    rows = []
    for name, title in (("with", "with a KV cache"), ("without", "without")):
        steps = result["step_seconds"][name]
        first, last = (1000 * steps[0], 1000 * steps[-1]) if steps else (None, None)
        rows.append([title, positions[name], seconds[name], first, last])
    print_table(["", "positions", "seconds", "first step, ms", "last step, ms"], rows)
    if seconds["with"]:
        ratio, more = seconds["without"] / seconds["with"], positions["without"] / max(1, positions["with"])
        print(f"without a cache: {more:.1f} times the positions, {ratio:.1f} times the time")
    print("the answers are the same" if result["same_answer"] else "THE ANSWERS DIFFER: this is a defect")


def draw(result: dict[str, Any], options: argparse.Namespace) -> None:
    lengths, steps = result["lengths"], result["step_seconds"]
    with figure(options.plot, title=f"{result['model']}: time so far", x="tokens", y="seconds") as axes:
        for name, title in (("without", "without a cache: quadratic"), ("with", "with a cache: linear")):
            so_far, total = [], 0.0
            for index, length in enumerate(lengths):
                width = length - (lengths[index - 1] if index else 0)
                total += width * steps[name][index]
                so_far.append(total)
            axes.plot(lengths, so_far, label=title)

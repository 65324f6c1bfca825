"""Time to first token and between tokens, by prompt length, context and how many requests run at once.

    unspool bench latency
    unspool bench latency --prompts 32 512 4096 --at-once 1 8 --plot latency.svg
    unspool bench latency --prompts 32 --context 0 1024 4096        the next turn of a chat that is in the cache

A context is what stands before the prompt and is in the prefix cache (whole blocks of it), as the turns before are in
a chat. So many requests are added together, each with a prompt of its own; every one of them is a sample. With --random
a shape stands in for a model. The last line is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any

from unspool.bench.local import Bench
from unspool.bench.workload import Job
from unspool.reporting import Run, add_model, add_output, check_plot, figure, print_table, progress, quantile

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench latency", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model(parser)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512, 2048], help="lengths (32 512 2048)")
    parser.add_argument("--context", type=int, nargs="+", default=[0], help="cached tokens before the prompt (0)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4], help="requests in the engine (1 4)")
    parser.add_argument("-n", "--max-tokens", type=int, default=32, help="of an answer (32)")
    parser.add_argument("--rounds", type=int, default=3, help="of each combination, in turns (3)")
    add_output(parser)
    options = parser.parse_args(argv)
    if min(*options.prompts, *options.at_once, options.rounds) < 1 or options.max_tokens < 2:
        parser.error("lengths, --at-once and --rounds are at least 1, --max-tokens at least 2")
    if min(options.context) < 0:
        parser.error("--context is at least 0")
    check_plot(options.plot)
    run = Run("latency", argv, plot=options.plot)
    longest = max(options.prompts) + max(options.context) + options.max_tokens
    bench = Bench(options, max(options.at_once) * (longest + 256), prefix_cache=max(options.context) > 0)
    cases = list(product(options.prompts, options.context, options.at_once))
    found: dict[tuple[int, int, int], tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    interrupted = False
    try:
        with progress("latency", options.rounds * len(cases)) as shown:
            for number in range(options.rounds):
                for index, case in enumerate(cases):
                    prompt, context, count = case
                    for sample in bench.run([Job(prompt, options.max_tokens)] * count, context=context):
                        found[case][0].append(sample.first)
                        found[case][1].extend(sample.gaps)
                    shown(number * len(cases) + index + 1)
    except KeyboardInterrupt:
        interrupted = True
    rows = [row(*case, *times) for case, times in found.items() if times[0]]
    report(rows)
    if options.plot is not None and rows:
        draw(rows, options, bench.name)
    result = {"model": bench.name, "kernels": bench.engine.ops.kernel_set, "max_tokens": options.max_tokens}
    return run.finish(result | {"rows": rows}, interrupted=interrupted)


def row(prompt: int, context: int, at_once: int, first: list[float], gaps: list[float]) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "context": context,
        "at_once": at_once,
        "samples": len(first),
        "first": {name: quantile(first, share) for name, share in SHARES.items()},
        "between": {name: quantile(gaps, share) for name, share in SHARES.items()},
    }


def report(rows: Sequence[dict[str, Any]]) -> None:
    titles = ["prompt", "context", "at once", "samples"]
    titles += [f"{what} {share}, ms" for what in ("first", "between") for share in SHARES]
    table = [
        [each["prompt_tokens"], each["context"], each["at_once"], each["samples"]]
        + [1000 * each[what][share] for what in ("first", "between") for share in SHARES]
        for each in rows
    ]
    print_table(titles, table)


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace, name: str) -> None:
    with figure(options.plot, title=f"{name}: medians", x="tokens of the prompt", y="milliseconds", log="xy") as axes:
        for context, count in product(options.context, options.at_once):
            own = [each for each in rows if (each["context"], each["at_once"]) == (context, count)]
            for what, line in (("first", "-"), ("between", "--")):
                title = f"{'to the first token' if what == 'first' else 'between tokens'}, {count} at once"
                title += f", behind {context:,}" if len(options.context) > 1 else ""
                axes.plot(
                    [each["prompt_tokens"] for each in own], [1000 * each[what]["p50"] for each in own],
                    linestyle=line, marker="o", label=title,
                )  # fmt: skip

"""Tokens a second over many requests at once, with lengths as users send them.

    unspool bench throughput                             every mix, 64 requests each
    unspool bench throughput --mix chat --requests 256
    unspool bench throughput --mix chat --plot throughput.svg

Offline: all requests of a mix are there from the beginning, and the engine takes as many as it has room for. The share
of compute is of the machine's measured ceiling (`unspool plan` measures it). The last line is JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from unspool.bench.local import Bench
from unspool.bench.workload import MIXES, Job, jobs_of
from unspool.reporting import Run, add_model, add_output, check_plot, figure, print_table, progress


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench throughput", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model(parser)
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=["chat", "summarise", "write", "code"])
    parser.add_argument("--requests", type=int, default=64, help="of each mix (64)")
    parser.add_argument("--kv-tokens", type=int, default=32_768, help="capacity of the KV cache (32,768)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    add_output(parser)
    options = parser.parse_args(argv)
    if options.requests < 1:
        parser.error("--requests is at least 1")
    check_plot(options.plot)
    run = Run("throughput", argv, plot=options.plot)
    bench = Bench(options, options.kv_tokens)
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        for mix in options.mix:
            rows.append(measure(bench, mix, options))
    except KeyboardInterrupt:
        interrupted = True
    report(rows)
    if options.plot is not None and rows:
        draw(rows, options, bench.name)
    result = {"model": bench.name, "kernels": bench.engine.ops.kernel_set, "rows": rows}
    return run.finish(result, interrupted=interrupted)


def measure(bench: Bench, mix: str, options: argparse.Namespace) -> dict[str, Any]:
    room = min(bench.engine.context_length, options.kv_tokens)
    jobs = [fitted(job, room) for job in jobs_of(mix, options.requests, options.seed)]
    with progress(mix, len(jobs)) as shown:
        start = time.perf_counter()
        bench.run(jobs, shown)
        seconds = time.perf_counter() - start
    prompts, outputs = sum(job.prompt_tokens for job in jobs), sum(job.output_tokens for job in jobs)
    flops = sum(bench.costs.prefill_flops(job.prompt_tokens + job.output_tokens) for job in jobs)
    limits = bench.ceilings
    return {
        "mix": mix,
        "about": MIXES[mix].about,
        "requests": len(jobs),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "seconds": seconds,
        "output_per_second": outputs / seconds,
        "total_per_second": (prompts + outputs) / seconds,
        "compute_share": None if limits is None else flops / seconds / limits.compute,
    }


def fitted(job: Job, room: int) -> Job:
    """A request that the engine has room for."""
    output = min(job.output_tokens, room // 2)
    return Job(min(job.prompt_tokens, room - output - 1), output)


def report(rows: Sequence[dict[str, Any]]) -> None:
    table = [
        [
            row["mix"], row["requests"], row["prompt_tokens"] / row["requests"], row["output_tokens"] / row["requests"],
            row["seconds"], row["output_per_second"], row["total_per_second"],
            None if row["compute_share"] is None else 100 * row["compute_share"],
        ]
        for row in rows
    ]  # fmt: skip
    titles = ["mix", "requests", "mean prompt", "mean answer", "seconds", "answer tokens/s", "all tokens/s"]
    print_table([*titles, "compute, %"], table)


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace, name: str) -> None:
    with figure(options.plot, title=f"{name}, {options.requests} requests at once", x="", y="tokens a second") as axes:
        for what, title in (("total_per_second", "prompts and answers"), ("output_per_second", "answers")):
            axes.bar([row["mix"] for row in rows], [row[what] for row in rows], label=title)

"""This machine's ceilings, and where reading prompts and decoding stand below them.

    unspool bench roofline --plot roofline.svg
    unspool bench roofline -m model.gguf --batches 1 8 64 --context 2048

Bandwidth and compute are measured, then steps of the model: decoding with several batch sizes, prompts of several
lengths. Each has an arithmetic intensity (operations a byte), an achieved rate, and a share of the ceiling that limits
it: bandwidth below the ridge, compute above. Bytes and operations are the least that the step needs; see docs/plan.md.
A decode step of one sequence is split into weights, cache, sampling and host. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from unspool.bench.local import Bench
from unspool.bench.workload import Job
from unspool.cache.blocks import borrowed
from unspool.ceilings import Ceilings, ceilings
from unspool.plan import Plan, Work
from unspool.planning import compute_bound_batch
from unspool.reporting import Run, add_model, add_output, check_plot, figure, print_table, progress
from unspool.speculate.timing import step_times


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "unspool bench roofline", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="decoded together")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 256], help="lengths of prompts (16 64 256)")
    parser.add_argument("--context", type=int, default=512, help="tokens behind which is decoded (512)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind; the fastest counts (7)")
    parser.add_argument("--again", action="store_true", help="measure the ceilings again")
    add_output(parser)
    options = parser.parse_args(argv)
    if min(*options.batches, *options.prompts, options.context, options.rounds) < 1:
        parser.error("batches, lengths, --context and --rounds are at least 1")
    check_plot(options.plot)
    run = Run("roofline", argv, plot=options.plot)
    tokens = max(max(options.batches) * (options.context + 64), max(options.prompts) + 64)
    bench = Bench(options, tokens + 1024)
    limits = ceilings(bench.engine.ops.name, options.threads, again=options.again)
    points: list[dict[str, Any]] = []
    split: dict[str, float] | None = None
    interrupted = False
    try:
        measure(bench, limits, options, points)
        split = split_step(bench, options)
    except KeyboardInterrupt:
        interrupted = True
    costs, context = bench.costs, options.context
    ridge = {
        "operations_per_byte": limits.compute / limits.bandwidth,
        "batch_by_ceilings": compute_bound_batch(costs, 0, limits.bandwidth, limits.compute),
        "batch_by_ceilings_with_context": compute_bound_batch(costs, context, limits.bandwidth, limits.compute),
        "batch_measured": next((p["batch"] for p in points if p["what"] == "decode" and p["bound"] == "compute"), None),
    }
    result = {
        "model": bench.name, "kernels": bench.engine.ops.kernel_set, "context": context,
        "ceilings": limits.as_dict(), "ridge": ridge, "points": points, "decode_split": split,
    }  # fmt: skip
    report(result)
    if options.plot is not None and points:
        draw(result, options)
    return run.finish(result, interrupted=interrupted)


# Steps --------------------------------------------------------------------------------------------------------------
def measure(bench: Bench, limits: Ceilings, options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """Each step some times; the fastest counts, for whatever else runs only makes a step slower."""
    costs = bench.costs
    with progress("steps", len(options.batches) + len(options.prompts)) as shown:
        for batch in options.batches:
            seconds = fastest(bench, batch, 1, options.context, options.rounds)
            nbytes = costs.weight_bytes(batch) + batch * costs.cache_bytes(options.context)
            flops = batch * costs.decode_flops(options.context)
            points.append(point("decode", batch, 1, seconds, nbytes, flops, limits))
            shown(len(points))
        for length in options.prompts:
            seconds = fastest(bench, 1, length, 0, options.rounds)
            points.append(
                point("prefill", 1, length, seconds, costs.weight_bytes(length), costs.prefill_flops(length), limits)
            )
            shown(len(points))


def fastest(bench: Bench, batch: int, rows: int, context: int, rounds: int) -> float:
    """Seconds of a step of `batch` sequences, each with so many rows behind a context."""
    with borrowed(bench.engine.scheduler.tables.groups, batch, context, rows) as held:
        works = (
            Work(i, context, (1,) * rows, table, 1, 1, others=tuple(others))
            for i, (table, *others) in enumerate(held)
        )
        return min(step_times(bench.engine.runner, Plan(tuple(works)), rounds + 1)[1:])


def point(
    what: str, batch: int, rows: int, seconds: float, nbytes: float, flops: float, limits: Ceilings
) -> dict[str, Any]:
    bandwidth, compute = nbytes / seconds / limits.bandwidth, flops / seconds / limits.compute
    return {
        "what": what,
        "batch": batch,
        "rows": rows,
        "seconds": seconds,
        "bytes": nbytes,
        "flops": flops,
        "intensity": flops / nbytes,
        "bytes_per_second": nbytes / seconds,
        "flops_per_second": flops / seconds,
        "bandwidth_share": bandwidth,
        "compute_share": compute,
        "bound": "memory" if flops / nbytes < limits.compute / limits.bandwidth else "compute",
    }


def split_step(bench: Bench, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a decode step of one sequence: reading weights, reading the cache, sampling, and the host's rest."""
    [sample] = bench.run([Job(options.context, options.rounds + 8)])
    whole = statistics.median(sample.gaps)
    weights = fastest(bench, 1, 1, 0, options.rounds)
    device = max(weights, fastest(bench, 1, 1, options.context, options.rounds))
    sampling = 0.0 if bench.engine.runner.can_launch else sampling_seconds(bench)
    return {
        "whole": whole,
        "weights": weights,
        "cache": device - weights,
        "sampling": sampling,
        "host": max(0.0, whole - device - sampling),
    }


def sampling_seconds(bench: Bench) -> float:
    """Choosing a token greedily from a row of logits, as the engine does it after a step."""
    import numpy as np

    from unspool.params import SamplingParams
    from unspool.sampling.pipeline import Sampler

    size = bench.engine.checkpoint.config.vocab_size
    params = SamplingParams(temperature=0).resolve({}, vocab_size=size)
    sampler = Sampler(params, prompt_ids=(0,), vocab_size=size, end_ids=frozenset())
    row = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    times = []
    for index in range(21):
        start = time.perf_counter()
        sampler.choose(row, index)
        times.append(time.perf_counter() - start)
    return min(times)


# Reporting ----------------------------------------------------------------------------------------------------------
def report(result: dict[str, Any]) -> None:
    limits, ridge = result["ceilings"], result["ridge"]
    compute = max(limits["floats"], limits["integers"])
    note = "" if limits["disturbed"] <= 0.15 else f"; other programs kept {limits['disturbed']:.1f} cores busy: too low"
    print(
        f"ceilings ({limits['device']}, measured {limits['measured'][:10]}{note}): "
        f"{limits['bandwidth'] / 1e9:.1f} GB/s, {compute / 1e9:,.0f} GOP/s (float32 {limits['floats'] / 1e9:,.0f}); "
        f"ridge at {ridge['operations_per_byte']:.0f} operations a byte"
    )
    print(f"{result['model']} ({result['kernels']}), decoding behind {result['context']:,} tokens")
    table = [
        [
            each["what"], each["batch"], each["rows"], 1000 * each["seconds"], each["intensity"],
            each["bytes_per_second"] / 1e9, 100 * each["bandwidth_share"], each["flops_per_second"] / 1e9,
            100 * each["compute_share"], each["bound"],
        ]
        for each in result["points"]
    ]  # fmt: skip
    titles = ["", "batch", "rows", "ms", "op/byte", "GB/s", "bandwidth, %", "GOP/s", "compute, %", "limit"]
    print_table(titles, table)
    batch, behind = ridge["batch_by_ceilings"], ridge["batch_by_ceilings_with_context"]
    print(
        "decode is limited by compute "
        + ("never" if batch is None else f"from {batch:,} at once")
        + "; with that context "
        + ("never: caches take longer to read than to compute" if behind is None else f"from {behind:,}")
    )
    if result["decode_split"] is not None:
        split = result["decode_split"]
        parts = ", ".join(f"{name} {1000 * split[name]:.3g}" for name in ("weights", "cache", "sampling", "host"))
        print(f"a decode step of one sequence, ms: {1000 * split['whole']:.3g} = {parts}")


def draw(result: dict[str, Any], options: argparse.Namespace) -> None:
    limits = result["ceilings"]
    compute, bandwidth = max(limits["floats"], limits["integers"]), limits["bandwidth"]
    with figure(
        options.plot, title=f"{result['model']} on {limits['device']}", x="operations a byte", y="operations a second",
        log="xy",
    ) as axes:  # fmt: skip
        intensities = [each["intensity"] for each in result["points"]]
        low, high = min(*intensities, 1.0) / 2, max(*intensities, compute / bandwidth) * 4
        axes.plot(
            [low, compute / bandwidth, high], [low * bandwidth, compute, compute], color="black", label="ceilings"
        )
        for what, marker in (("decode", "o"), ("prefill", "s")):
            own = [each for each in result["points"] if each["what"] == what]
            places = [(each["intensity"], each["flops_per_second"]) for each in own]
            axes.plot([x for x, _ in places], [y for _, y in places], marker=marker, label=what)
            for each, place in zip(own, places, strict=True):
                size = each["batch"] if what == "decode" else each["rows"]
                axes.annotate(f"{size}", place, textcoords="offset points", xytext=(4, -10), fontsize=7)

"""Every kernel of a step against the card's limits: bytes a second and operations a second, by number of rows.

    unspool bench kernels --random llama-8b --rows 1 --rows 128 --rows 4096

A kind of kernel is timed over all layers in one CUDA graph, so that weights come from memory, never from the cache,
and the gaps between launches are those of a real step. The floor is the larger of bytes over the measured read
bandwidth and operations over the measured rate of a large matrix product. `step` is the whole step; what it takes
beyond the sum of its floors is what the kernels and the gaps between them cost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.bench.gpu import BLOCK_SIZE, event_seconds, versions
from unspool.config import EngineConfig
from unspool.machine import measure_gpu_bandwidth
from unspool.models.checkpoint import Checkpoint
from unspool.models.random import stand_in
from unspool.models.registry import build
from unspool.models.shapes import SHAPES
from unspool.ops import Batch
from unspool.ops.cuda import require_card
from unspool.reporting import Run, add_output, check_plot, figure, progress

if TYPE_CHECKING:
    from unspool.ops.cuda.launch import Launch
    from unspool.ops.cuda.runner import CudaStep


KV_TOKENS, STEP_TOKENS = 262_144, 8192  # what there is room for
MOST_DECODES = 256  # rows of a step that are decodes; more are one prompt


def matrix_rate() -> float:
    """Operations a second of an 8192³ bf16 product by torch; the best of ten."""
    import torch

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / min(event_seconds(lambda: a @ b) for _ in range(10))


def make_step(checkpoint: Checkpoint) -> CudaStep:
    from unspool.ops.cuda.backend import CudaOps

    ops = CudaOps()
    config = checkpoint.config
    model = build(config, checkpoint.weights, ops)
    engine = EngineConfig(block_size=BLOCK_SIZE, step_tokens=STEP_TOKENS)
    kv = ops.kv_cache(model.architecture.storage, engine, KV_TOKENS // BLOCK_SIZE, num_states=MOST_DECODES)
    return ops.compile(model, kv)


def batch_of(rows: int, context: int) -> Batch:
    """Decodes at a context where rows are few, one prompt where they are many."""
    if rows > MOST_DECODES:
        counts, start = [rows], 0
    else:
        counts, start = [1] * rows, context
    blocks = -(-(start + counts[0]) // BLOCK_SIZE)
    tables = np.arange(len(counts) * blocks, dtype=np.int32).reshape(len(counts), blocks)
    positions = np.concatenate([np.arange(start, start + count) for count in counts]).astype(np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(
        # Equal rows would make equal numbers, which a card multiplies with less power, hence faster.
        ids=np.random.default_rng(0).integers(0, 1000, rows, dtype=np.int32),
        positions=positions,
        slots=tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        starts=starts,
        tables=tables,
        logit_rows=np.arange(rows, dtype=np.int32) if rows <= MOST_DECODES else np.array([rows - 1], np.int32),
        states=np.arange(len(counts), dtype=np.int32),
    )


def seconds_of(launches: Sequence[Launch], repeats: int) -> float:
    """The median time of a graph of these launches."""
    from unspool.ops.cuda.runner import LaunchGraph

    graph = LaunchGraph(launches)
    for _ in range(3):
        graph.run()
    return statistics.median(event_seconds(graph.run) for _ in range(repeats))


def attention_cost(step: CudaStep, rows: int, context: int) -> tuple[int, int]:
    """Bytes of keys and values that one layer reads, and operations."""
    seen = rows * context if rows <= MOST_DECODES else rows * rows // 2
    read = rows * context if rows <= MOST_DECODES else rows
    kv = next(layer.kv for layer in step.kv.storage if layer.kv is not None)
    per_token = 2 * (kv.key_dim if kv.latent else kv.values_per_token)
    return read * per_token, 4 * seen * step.shapes[0].num_heads * kv.key_dim


def measure(step: CudaStep, rows: int, context: int, limits: tuple[float, float]) -> list[dict[str, Any]]:
    batch = batch_of(rows, context)
    step.run(batch)  # lays the step out, compiles it and leaves its description on the device
    launches = step.launches_of(rows)
    kinds: dict[tuple[str, int, int, int], list[Launch]] = {}
    for launch in launches:  # the last layer has fewer rows, those whose logits are wanted
        shape = (launch.args.get("features", 0), launch.args.get("width", 0), launch.args.get("num_tokens", rows))
        kinds.setdefault((launch.label, *shape), []).append(launch)
    # Of a prompt, the kernel for decodes has next to nothing to do.
    attending = "attention" if rows <= MOST_DECODES else "attention-prompt"
    repeats = 20 if rows <= MOST_DECODES else 5
    table: list[dict[str, Any]] = []
    for (label, features, width, tokens), some in kinds.items():
        took = seconds_of(some, repeats) / len(some)
        size, operations = some[0].bytes, some[0].flops
        if label in (attending, f"latent-{attending}"):
            size, operations = attention_cost(step, rows, context)
        floor = max(size / limits[0], operations / limits[1])
        table.append(
            {
                "rows": tokens,
                "kernel": label,
                "shape": [features, width],
                "count": len(some),
                "microseconds": 1e6 * took,
                "terabytes_per_second": size / took / 1e12,
                "teraflops": operations / took / 1e12,
                "floor_microseconds": 1e6 * floor,
            }
        )
    whole = seconds_of(launches, repeats)
    floor = sum(row["count"] * row["floor_microseconds"] for row in table)
    table.append({"rows": rows, "kernel": "step", "microseconds": 1e6 * whole, "floor_microseconds": floor})
    return table


def show(table: Sequence[dict[str, Any]]) -> None:
    print(f"{'rows':>5} {'kernel':<18} {'shape':>14} {'×':>4} {'µs':>9} {'floor':>9} {'TB/s':>6} {'TFLOP/s':>8}")
    for row in table:
        shape = "×".join(map(str, row["shape"])) if any(row.get("shape", ())) else ""
        rates = f"{row['terabytes_per_second']:6.2f} {row['teraflops']:8.1f}" if "count" in row else ""
        times = f"{row['microseconds']:9.2f} {row['floor_microseconds']:9.2f}"
        print(f"{row['rows']:5d} {row['kernel']:<18} {shape:>14} {row.get('count', ''):>4} {times} {rates}", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="unspool bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", default="llama-8b", metavar="SHAPE[:FORMAT]", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", type=int, action="append", help="rows of a step; repeatable (1, 8, 32, 128, 4096)")
    parser.add_argument("--context", type=int, default=512, help="tokens before each decoded one (512)")
    add_output(parser)
    options = parser.parse_args(argv)
    sizes = options.rows or [1, 8, 32, 128, 4096]
    if not 1 <= min(sizes) <= max(sizes) <= STEP_TOKENS:
        parser.error(f"argument --rows: {sizes} are not all from 1 to {STEP_TOKENS:,}")
    decoded = max((rows for rows in sizes if rows <= 256), default=1)
    most = KV_TOKENS // BLOCK_SIZE // decoded * BLOCK_SIZE - 1
    if not 0 <= options.context <= most:
        parser.error(f"argument --context: {options.context} is not from 0 to {most:,}, for {decoded} rows")
    check_plot(options.plot)
    require_card()
    run = Run("kernels", argv, plot=options.plot)
    limits = (measure_gpu_bandwidth().bytes_per_second, matrix_rate())
    table: list[dict[str, Any]] = []
    interrupted = False
    try:
        step = make_step(stand_in(options.random))
        with progress("steps", len(sizes)) as shown:
            for done, rows in enumerate(sizes, 1):
                table += measure(step, rows, options.context, limits)
                shown(done)
    except KeyboardInterrupt:
        interrupted = True
    print(f"limits: {limits[0] / 1e12:.2f} TB/s read, {limits[1] / 1e12:.0f} TFLOP/s")
    show(table)
    if options.plot is not None and table:
        draw(table, options)
    result = {"shape": options.random, **versions(), "limits": {"bandwidth": limits[0], "compute": limits[1]}}
    return run.finish(result | {"kernels": table}, interrupted=interrupted)


def draw(table: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """The share of its floor that each kind of kernel, and the whole step, takes by the rows of the step."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in table:
        name = row["kernel"] + (" " + "×".join(map(str, row["shape"])) if any(row.get("shape", ())) else "")
        found.setdefault(name, []).append((row["rows"], 100 * row["floor_microseconds"] / row["microseconds"]))
    with figure(options.plot, title=options.random, x="rows of a step", y="floor / time, percent", log="x") as axes:
        for kernel, points in found.items():
            points.sort()
            style = {"color": "black", "linewidth": 2} if kernel == "step" else {}
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=kernel, **style)
        axes.set_ylim(bottom=0)

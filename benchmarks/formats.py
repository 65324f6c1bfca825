"""How fast one row is multiplied by a matrix of each weight format on the CPU: what decoding does.

    python -m benchmarks formats                 every format, one thread
    python -m benchmarks formats q4_k mxfp4 --rows 4

A line for each format: gigabytes of the file's weights a second, and of the packed tiles that are read; the best of
some runs, by the processor's seconds. A format below the bandwidth of memory is limited by its kernel. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from unspool.config import EngineConfig
from unspool.ops import Batch, KVCache
from unspool.ops.cpu import CpuOps
from unspool.ops.storage import Storage
from unspool.weights.formats import FORMATS
from unspool.weights.weight import Weight

NAMES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4")
BLOCK = 16
POOL = 4096  # blocks that a matrix repeats


def rates(format: str, shape: tuple[int, int], rows: int, runs: int, threads: int) -> dict[str, float]:
    """Bytes a second of the file's weights and of the tiles."""
    ops, kind = CpuOps(threads=threads), FORMATS[format]
    values = np.random.default_rng(0).standard_normal((POOL, kind.block), dtype=np.float32) / np.sqrt(shape[1])
    data = np.resize(np.frombuffer(kind.encode(values.astype(np.float32)), np.uint8), kind.nbytes(shape[0] * shape[1]))
    matrix = ops.matrix([Weight("weight", format, shape, data.data)])

    def forward(batch: Batch, kv: KVCache) -> Any:
        return ops.linear(ops.given(batch, shape[1]), matrix)

    step = ops.compile(forward, ops.kv_cache([Storage()], EngineConfig(block_size=BLOCK), rows // BLOCK + 1))
    places = np.arange(rows, dtype=np.int32)
    x = np.random.default_rng(1).standard_normal(rows * shape[1], dtype=np.float32)
    starts, tables = np.array([0, rows], np.int32), np.zeros((1, -(-rows // BLOCK)), np.int32)
    batch = Batch(np.zeros(rows, np.int32), places, places.astype(np.int64), starts, tables, places, given=x)
    seconds = []
    for _ in range(runs + 1):  # the first packs
        began = time.process_time() if threads == 1 else time.perf_counter()
        step.run(batch)
        seconds.append((time.process_time() if threads == 1 else time.perf_counter()) - began)
    best = min(seconds[1:])
    return {"file": data.nbytes / best, "tiles": matrix.native.packed_bytes / best}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks formats", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--rows", type=int, default=1, help="(1)")
    parser.add_argument("--shape", type=int, nargs=2, default=(16_384, 4096), metavar=("OUT", "IN"))
    parser.add_argument("--runs", type=int, default=12, help="(12)")
    parser.add_argument("--threads", type=int, default=1, help="(1); more are timed by the clock")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.formats if name not in NAMES]:
        parser.error(f"there is no format {unknown[0]!r}; there are {', '.join(NAMES)}")
    found: dict[str, dict[str, float]] = {}
    for name in options.formats or NAMES:
        found[name] = rates(name, tuple(options.shape), options.rows, options.runs, options.threads)
        print(f"{name:<8}{found[name]['file'] / 1e9:>8.1f} GB/s of the file{found[name]['tiles'] / 1e9:>8.1f} of tiles")
    print(json.dumps({"benchmark": "formats", "rows": options.rows, "threads": options.threads, "rates": found}))
    return 0

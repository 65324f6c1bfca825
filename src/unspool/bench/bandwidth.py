"""How fast this machine reads memory: the limit of every decoding step.

All threads at once take the largest value of their parts of an array that no cache holds: numpy's SIMD loop, which does
nothing but read. The best pass counts, for whatever else runs here can only make a pass slower.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

ARRAY_BYTES = 256 << 20


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float
    threads: int
    seconds: float  # spent measuring
    array_bytes: int

    @property
    def how(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"numpy, {threads}, best pass over {self.array_bytes >> 20} MiB in {self.seconds:.1f} s"


class Reader:
    """An array, and the threads that read it together."""

    def __init__(self, threads: int, array_bytes: int = ARRAY_BYTES) -> None:
        self._parts = np.array_split(np.ones(array_bytes // 4, np.float32), threads)  # written, so that pages are there
        self._pool = ThreadPoolExecutor(threads)
        self.array_bytes = array_bytes

    def best(self, seconds: float = 0.0) -> float:
        """Bytes a second of the best pass of those that fit into the time, three at least."""
        start, best, passes = time.perf_counter(), float("inf"), 0
        while passes < 3 or time.perf_counter() - start < seconds:
            began = time.perf_counter()
            list(self._pool.map(np.max, self._parts))
            best, passes = min(best, time.perf_counter() - began), passes + 1
        return self.array_bytes / best

    def close(self) -> None:
        self._pool.shutdown()


def measure(threads: int | None = None, *, seconds: float = 0.3, array_bytes: int = ARRAY_BYTES) -> Bandwidth:
    threads = threads or len(os.sched_getaffinity(0))
    start = time.perf_counter()
    with closing(Reader(threads, array_bytes)) as reader:
        best = reader.best(seconds)
    return Bandwidth(best, threads, time.perf_counter() - start, array_bytes)


def main(argv: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="unspool bench bandwidth", description=__doc__)
    parser.add_argument("--threads", type=int, help="threads; without it one, then all")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of threads (2)")
    options = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    report = {}
    for threads in [options.threads] if options.threads else sorted({1, cores}):
        found = measure(threads, seconds=options.seconds)
        report[str(threads)] = found.bytes_per_second / 1e9
        print(f"{threads:>3} threads  {found.bytes_per_second / 1e9:6.1f} GB/s")
    print(json.dumps({"benchmark": "bandwidth", "gb_per_second": report}))
    return 0

"""This machine: its cores, its free memory and the measured speed of its memory, which limits every decoding step."""

from __future__ import annotations

import os
import time
from contextlib import closing

from unspool.cgroups import cpu_limit, memory_left
from unspool.lazy import np
from unspool.records import record

ARRAY_BYTES = 256 << 20  # larger than any cache


def num_cores() -> int:
    """The cores that this process may use: its affinity, or fewer if a container has a CPU quota. With more threads
    than the quota, the kernel would stop all of them repeatedly."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit()
    return count if limit is None else max(1, min(count, int(limit)))


def processor_name() -> str:
    """The processor's name in the system: identifies the machine of a measurement."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def free_memory() -> int:
    """Bytes of memory that are available now on this machine, or in the container if it has a limit; the page cache
    counts as free."""
    free, left = _free_of_machine(), memory_left()
    return free if left is None else min(free, left)


def _free_of_machine() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@record(frozen=True)
class Bandwidth:
    """A memory bandwidth and how it was measured."""

    bytes_per_second: float
    how: str


class MemoryReader:
    """An array that is larger than any cache, and threads that read it together.

    Each thread takes the largest value of its part: numpy's SIMD loop, which does nothing but read.
    """

    def __init__(self, threads: int, array_bytes: int = ARRAY_BYTES) -> None:
        from concurrent.futures import ThreadPoolExecutor  # imports logging: not at start-up

        self._parts = np.array_split(np.ones(array_bytes // 4, np.float32), threads)  # written, so that pages exist
        self._pool = ThreadPoolExecutor(threads)
        self.array_bytes = array_bytes

    def best(self, seconds: float = 0.0) -> float:
        """Bytes per second of the best pass. Passes repeat for `seconds`, at least three times.

        The best pass counts, because other programs can only make a pass slower.
        """
        start, best, passes = time.perf_counter(), float("inf"), 0
        while passes < 3 or time.perf_counter() - start < seconds:
            began = time.perf_counter()
            list(self._pool.map(np.max, self._parts))
            best, passes = min(best, time.perf_counter() - began), passes + 1
        return self.array_bytes / best

    def close(self) -> None:
        self._pool.shutdown()


def measure_bandwidth(
    threads: int | None = None, *, seconds: float = 0.3, array_bytes: int = ARRAY_BYTES
) -> Bandwidth:
    """The memory bandwidth of the processor with `threads` threads (None: one for each core)."""
    threads = threads or num_cores()
    start = time.perf_counter()
    with closing(MemoryReader(threads, array_bytes)) as reader:
        best = reader.best(seconds)
    took, plural = time.perf_counter() - start, "s" if threads > 1 else ""
    return Bandwidth(
        best, f"numpy, {threads} thread{plural}, best pass over {array_bytes >> 20} MiB in {took:.1f} s"
    )


def measure_gpu_bandwidth() -> Bandwidth:
    """The memory bandwidth of the current GPU: the best of ten sums over 8 GiB."""
    import torch

    data = torch.ones(1 << 31, dtype=torch.float32, device="cuda")
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        best = min(best, float(start.elapsed_time(end) / 1000))
    return Bandwidth(data.numel() * 4 / best, "measured by reading 8 GiB")


def measure_gpu_compute() -> float:
    """Operations a second of the current GPU: the best of ten bf16 products of 8,192 by 8,192."""
    import torch

    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ a
        end.record()
        end.synchronize()
        best = min(best, float(start.elapsed_time(end) / 1000))
    return 2 * size**3 / best

"""What this machine can do at best: measured once, kept in a file, and compared with what an engine reaches."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.machine import measure_bandwidth, num_cores, processor_name
from unspool.quiet import Watch
from unspool.records import record
from unspool.weights.store import cache_dir

if TYPE_CHECKING:
    from unspool.events import StepWork, Timings, Usage
    from unspool.models.costs import StepCosts

FORMAT = 2  # of the file
SPIN_ROUNDS, SPIN_SECONDS = 10_000, 0.3  # a pass is long beside what waking the threads takes
QUIET_CORES = 0.15


@record(frozen=True)
class Ceilings:
    """Speeds that a program on this machine can reach at most, with so many threads."""

    device: str  # the processor's or the card's name
    threads: int
    kernels: str  # the instruction set that computes
    bandwidth: float  # bytes a second that are read from memory
    floats: float  # operations a second, float32 (a card: bf16 products with float32 sums)
    integers: float  # operations a second, 8-bit integers with 32-bit sums; those that the CPU's kernels compute with
    measured: str  # when, UTC
    disturbed: float = 0.0  # cores that other programs kept busy meanwhile: what was found is too low then

    @property
    def is_reliable(self) -> bool:
        return self.disturbed <= QUIET_CORES

    @property
    def compute(self) -> float:
        """The faster of the two: what products of weights are compared with."""
        return max(self.floats, self.integers)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ceilings_path() -> Path:
    return cache_dir() / "ceilings.json"


def known_ceilings(device: str = "cpu", threads: int | None = None) -> Ceilings | None:
    """Those that were measured before on this machine, while it was quiet. Reading them takes no measurable time."""
    if device == "cpu":
        threads, name = threads or num_cores(), processor_name()
    else:
        threads, name = 0, _card_name()
    kept = _kept(name, threads)
    return kept if kept is not None and kept.is_reliable else None


def _kept(device: str, threads: int) -> Ceilings | None:
    found = _read().get(_key(device, threads))
    with suppress(TypeError):  # fields of another version's
        return Ceilings(**found) if isinstance(found, dict) else None
    return None


def ceilings(device: str = "cpu", threads: int | None = None, *, again: bool = False) -> Ceilings:
    """Those of this machine: from the file, or measured now and written there. Never called while a model starts.

    Whatever else runs can only make a measurement lower. So one that was disturbed is made again the next time, and of
    several disturbed ones the best of each speed is kept.
    """
    known = None if again else known_ceilings(device, threads)
    if known is not None:
        return known
    found = _measure_card() if device == "cuda" else _measure_processor(threads or num_cores())
    before = _kept(found.device, found.threads)
    if not found.is_reliable and before is not None and not again:
        best = {name: max(getattr(found, name), getattr(before, name)) for name in ("bandwidth", "floats", "integers")}
        found = replace(found, **best)
    _write(found)
    return found


# Measuring ----------------------------------------------------------------------------------------------------------
def _measure_processor(threads: int) -> Ceilings:
    from unspool import _native

    isa = next(name for name in ("avx512", "avx2", "plain") if _native.supports(name))
    watch = _watch()
    bandwidth = measure_bandwidth(threads).bytes_per_second
    floats, integers = (_fastest(partial(_native.spin, isa, kind), threads) for kind in (False, True))
    others = 0.0 if watch is None else round(watch.others(), 3)
    return Ceilings(processor_name(), threads, f"cpu-{isa}", bandwidth, floats, integers, _now(), others)


def _watch() -> Watch | None:
    """None: the system does not report what other programs use."""
    try:
        return Watch()
    except OSError:
        return None


def _fastest(spin: Callable[[int], float], threads: int) -> float:
    """Operations a second of all threads in the best pass: whatever else runs can only make a pass slower."""
    from concurrent.futures import ThreadPoolExecutor

    best, start = 0.0, time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        while time.perf_counter() - start < SPIN_SECONDS:
            began = time.perf_counter()
            operations = sum(pool.map(spin, [SPIN_ROUNDS] * threads))
            best = max(best, operations / (time.perf_counter() - began))
    return best


def _measure_card() -> Ceilings:
    from unspool.machine import measure_gpu_bandwidth, measure_gpu_compute

    compute = measure_gpu_compute()
    return Ceilings(_card_name(), 0, "cuda", measure_gpu_bandwidth().bytes_per_second, compute, 0.0, _now())


def _card_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# The file -----------------------------------------------------------------------------------------------------------
def _key(device: str, threads: int) -> str:
    return f"{device} | {threads} threads"


def _read() -> dict[str, Any]:
    """What is in the file; a file that is not ours counts as none."""
    try:
        kept = json.loads(ceilings_path().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    machines = kept.get("machines") if isinstance(kept, dict) and kept.get("format") == FORMAT else None
    return machines if isinstance(machines, dict) else {}


def _write(found: Ceilings) -> None:
    """Beside the others, in one step. A machine on which nothing can be written measures each time."""
    path, machines = ceilings_path(), _read()
    machines[_key(found.device, found.threads)] = found.as_dict()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format": FORMAT, "machines": machines}, indent=1) + "\n", "utf-8")
        temporary.replace(path)


# Shares -------------------------------------------------------------------------------------------------------------
@record(frozen=True)
class Utilization:
    """How near an answer came to the machine's ceilings. None: nothing was computed there, or too little to measure."""

    weight_bytes: float  # that a decode step of the answer alone reads
    cache_bytes: float  # likewise, in the middle of the answer
    mbu: float | None  # share of the measured bandwidth that the steps reached from its first token to its last
    prefill_compute: float | None  # share of the measured compute that they reached until its first token

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def utilization(
    costs: StepCosts, usage: Usage, timings: Timings, work: StepWork | None, limits: Ceilings
) -> Utilization:
    """Of one answer. With neighbours in its steps, what was read and computed for them counts in the shares, for the
    machine was theirs too."""
    middle = usage.prompt_tokens + usage.completion_tokens / 2
    weights, cache = costs.weight_bytes(), costs.cache_bytes(middle)
    mbu = compute = None
    if work is not None and usage.completion_tokens > 1 and timings.decode > 0:
        mbu = work.decode_bytes / timings.decode / limits.bandwidth
    if work is not None and usage.prompt_tokens - usage.cached_tokens > 1 and timings.prefill > 0:
        compute = work.prefill_flops / timings.prefill / limits.compute
    return Utilization(weights, cache, mbu, compute)

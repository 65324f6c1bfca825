"""Whether a measurement had the machine to itself: the processor time that others took while it ran.

A load average says too little and says it late. A neighbour on one of two cores halves whatever splits its work evenly,
and not every engine alike, so ratios suffer too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def busy_seconds(stat: str) -> float:
    """Of all cores since the start, from /proc/stat: user, nice, system, irq, softirq, and what the host took away."""
    fields = [int(part) for part in stat.splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICK  # less idle and waiting for input


def process_seconds(stat: str) -> float:
    """Of one process and all its threads, from /proc/PID/stat; its name may hold spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Watch:
    """Started before a measurement; afterwards it reports how many cores others kept busy."""

    def __init__(self, pid: int | None = None) -> None:
        """`pid`: a process that works already; one that is started later has used nothing yet."""
        self._own = self._ours(pid)
        self._busy, self._began = self._all(), time.perf_counter()

    def others(self, pid: int | None = None) -> float:
        seconds = time.perf_counter() - self._began
        theirs = self._all() - self._busy - (self._ours(pid) - self._own)
        return max(0.0, theirs / seconds)

    @staticmethod
    def _all() -> float:
        return busy_seconds(Path("/proc/stat").read_text())

    @staticmethod
    def _ours(pid: int | None) -> float:
        here = [os.getpid()] if pid is None else [os.getpid(), pid]
        return sum(process_seconds(Path(f"/proc/{one}/stat").read_text()) for one in here)

"""What a container, a systemd unit or whoever else made this process's control group allows it: cores and memory.

Limits hold for a group and all groups below it, so those of every folder from the process's own up to the root count.
Version 2 of the kernel's interface and version 1, where files have other names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes the largest page-aligned number for no limit


def cpu_limit() -> float | None:
    """How many cores' time the process may use; None: as much as there is."""
    limits = []
    for folder in _folders("cpu"):
        quota, period = _words(folder / "cpu.max") or _both(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        if quota > 0 and period > 0:
            limits.append(quota / period)
    return min(limits, default=None)


def memory_left() -> int | None:
    """Bytes that the process may still take, files in the page cache counted as free; None: as many as there are."""
    left = []
    for folder in _folders("memory"):
        limit, used = _both(folder / "memory.max", folder / "memory.current")
        if limit < 0:
            limit, used = _both(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes")
        if 0 <= limit < UNLIMITED and used >= 0:
            left.append(max(0, limit - max(0, used - _cached(folder / "memory.stat"))))
    return min(left, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """The process's group and those above it. Where the path is not this file system's, as in a container that sees
    its own group as the root, the root alone."""
    try:
        lines = OWN.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        if not names and not (ROOT / "cgroup.controllers").exists():
            continue  # version 2 without controllers, beside version 1
        base = ROOT / names if names else ROOT
        own = base / path.lstrip("/")
        while own != base and base in own.parents:
            yield own
            own = own.parent
        yield base


def _words(path: Path) -> tuple[int, int] | None:
    """cpu.max: a quota and its period. None: there is no such file; a quota of -1: no limit."""
    try:
        quota, period = path.read_text("utf-8").split()
        return -1 if quota == "max" else int(quota), int(period)
    except (OSError, ValueError):
        return None


def _both(first: Path, second: Path) -> tuple[int, int]:
    """The numbers of two files; -1: there is none, or no limit."""
    return _number(first), _number(second)


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text("utf-8"))
    return -1


def _cached(path: Path) -> int:
    """Bytes of files that are counted as used and given back when somebody needs them."""
    total = 0
    with suppress(OSError, ValueError):
        values = dict(line.split(" ", 1) for line in path.read_text("utf-8").splitlines())
        for name in ("inactive_file", "active_file"):
            total += int(values.get(f"total_{name}", values.get(name, 0)))
    return total

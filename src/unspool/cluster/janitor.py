"""Ends what a local Ray left, if the process that started it was killed.

    python -P -m unspool.cluster.janitor FOLDER

FOLDER is the Ray's own. The process that started it holds stdin open and ends what it started by itself, so when stdin
ends there is usually nothing left to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE = 3.0  # seconds that processes have to end by themselves


def main(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    starter = os.getppid()
    sys.stdin.buffer.read()
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(processes_of(folder, starter)):
        time.sleep(0.2)
    for _ in range(10):  # a parent that ends may have started another meanwhile
        left = list(processes_of(folder, starter))
        if not left:
            break
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str, starter: int) -> Iterator[int]:
    """Processes with this folder on their command line, in their environment or among their open files; not the one
    that started it, which may live on."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) not in (os.getpid(), starter) and _uses(entry, folder):
            yield int(entry.name)


def _uses(process: Path, folder: str) -> bool:
    try:
        if process.stat().st_uid != os.getuid() or (process / "stat").read_text().rpartition(") ")[2][:1] == "Z":
            return False
        data = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
        return folder.encode() in data or any(_target(file).startswith(folder) for file in (process / "fd").iterdir())
    except OSError:  # it has ended, or is not ours
        return False


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])

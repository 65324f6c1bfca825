"""The running servers of this user: each writes a small file about itself while it runs.

The files are in the user's runtime directory (XDG_RUNTIME_DIR) or, without one, in the cache directory. The file of a
killed process is removed by the next reader.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from unspool.records import record
from unspool.weights.store import cache_dir


@record(frozen=True)
class Running:
    """A running server."""

    pid: int
    begun: float  # the process's start in clock ticks; 0: unknown. It detects a reused process id
    started: float  # when it began to serve, in seconds since 1970
    url: str
    models: tuple[str, ...]  # names that it was started with
    version: str

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return process_begun(self.pid) == self.begun


def directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "unspool" if runtime and Path(runtime).is_dir() else cache_dir() / "running"


def process_begun(pid: int) -> float:
    """A process's start in clock ticks since boot; 0 if the system does not report it."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0.0


@contextmanager
def registered(
    models: Sequence[str], then: Callable[[str], None] | None = None
) -> Iterator[Callable[[str], None]]:
    """Yields a function that a server calls with its address once it listens; it writes the file, and the end of the
    block removes it. `then` is called too. If the file cannot be written, the server still runs."""
    path = directory() / f"{os.getpid()}.json"

    def listens(url: str) -> None:
        from unspool.version import VERSION

        mine = Running(os.getpid(), process_begun(os.getpid()), time.time(), url, tuple(models), VERSION)
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(asdict(mine)), "utf-8")
            os.replace(fresh, path)
        if then is not None:
            then(url)

    try:
        yield listens
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def running() -> list[Running]:
    """The running servers, oldest first. Removes the files of servers that ended."""
    found = []
    for path in directory().glob("*.json"):
        one = _read(path)
        if one is not None and one.is_alive:
            found.append(one)
        else:
            with suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda one: one.started)


def _read(path: Path) -> Running | None:
    try:
        values = json.loads(path.read_text("utf-8"))
        return Running(**{**values, "models": tuple(values["models"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None

"""Which servers of this user run: each leaves a small file about itself while it does.

The files are in the user's runtime directory (XDG_RUNTIME_DIR) or, without one, in the cache directory. One whose
process is gone, because it was killed, is removed by whoever looks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from unspool.weights.store import cache_dir


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    pid: int
    begun: float  # when the process began, in the system's own count; 0: not known. A later process may have its number
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
    """When a process began, in clock ticks since the system did; 0 where the system does not tell."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0.0


@contextmanager
def registered(
    models: Sequence[str], then: Callable[[str], None] | None = None
) -> Iterator[Callable[[str], None]]:
    """Gives what a server is to call with its address once it listens; afterwards nothing is left of it. `then` is
    called too. A server runs as well where the file cannot be written."""
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
    """The servers that run, the oldest first. What others left behind is removed."""
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

"""Other engines for benchmarks: an environment of each one's own, and processes that are asked over their streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from unspool.errors import BackendError


def environment(
    root: Path, name: str, packages: Sequence[str], note: str = "", building: Mapping[str, str] | None = None
) -> Path:
    """The Python of an environment under the cache directory `root`; made with `packages` if it is not there.
    `building`: variables for packages that are built in their own way, and so not taken from what was built before.
    """
    home = root / "bench" / name
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        print(f"making {home} (once{note and f'; {note}'})", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *(["--no-cache-dir"] if building else []), *packages]
        subprocess.run(install, check=True, env={**os.environ, **(building or {})})
        (home / "complete").touch()
    return python


class Process:
    """A program that answers each line with a line of JSON. What it writes to stderr is shown only if it fails."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environ
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str) -> Any:
        stream = _open(self._process.stdin)
        stream.write(f"{line}\n")
        stream.flush()
        return self.answer()

    def answer(self) -> Any:
        line = _open(self._process.stdout).readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            tail = self._errors.read()[-2000:]
            raise BackendError(f"{self._process.args!r} ended with status {status}\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            _open(stream).close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # both were asked to be pipes
    return stream

"""Runs Python that a model wrote, in a child process that can harm nothing: see `confine`.

The child computes, reads files and says in one line whether the program ran to its end. It is killed when it takes too
long, and its answer is never printed. Where the system cannot confine it, nothing is run.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from unspool.errors import BackendError
from unspool.evaluation.confine import why_not
from unspool.isolation import PATIENCE

MEMORY = 1 << 30  # bytes of address space
SECONDS = 5.0  # of processor time, so that a busy machine fails no program that is right
_BOOT = "import sys; sys.path.append(sys.argv[1]); from unspool.evaluation.confine import serve; serve()"
# Succeeds only where everything that must fail does fail.
_PROBE = """
import os, socket
def refused(act):
    try:
        act()
    except PermissionError:
        return True
    return False
assert refused(lambda: socket.socket()), "it can open a socket"
assert refused(lambda: open("probe", "w")), "it can write a file"
assert refused(lambda: os.unlink("probe")), "it can remove a file"
assert refused(os.fork), "it can start a process"
assert refused(lambda: os.execv("/bin/true", ["true"])), "it can run another program"
assert refused(lambda: os.kill(os.getpid(), 0)), "it can send signals"
"""


@dataclass(frozen=True)
class Outcome:
    """`reason` is "passed", or in a few words why not."""

    passed: bool
    reason: str


def require_sandbox() -> None:
    """Raise a BackendError where model-written code cannot be confined. The answer is found once."""
    problem = _problem()
    if problem is not None:
        raise BackendError(f"code that a model wrote cannot be confined here, so it is not run: {problem}")


@cache
def _problem() -> str | None:
    problem = why_not()
    if problem is not None:
        return problem
    outcome = _run(_PROBE, 20.0, MEMORY)
    return None if outcome.passed else outcome.reason


def run_python(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Run a program to its end; it passes if it raises nothing. A BackendError where it cannot be confined."""
    require_sandbox()
    return _run(program, seconds, memory)


def _run(program: str, seconds: float, memory: int) -> Outcome:
    token = secrets.token_hex(16)
    cpu_seconds = ceil(seconds)
    patience = PATIENCE * cpu_seconds
    order = {"program": program, "token": token, "memory": memory, "seconds": cpu_seconds}
    with tempfile.TemporaryDirectory(prefix="unspool-") as empty:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=empty, env={}, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = child.communicate(json.dumps(order).encode(), timeout=patience)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"took more than {patience} s, most of them waiting")
        finally:
            _end(child)
    return _outcome(said, token, child.returncode, seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _outcome(said: bytes, token: str, status: int, seconds: float) -> Outcome:
    if said == token.encode() and status == 0:
        return Outcome(True, "passed")
    text = said.decode("utf-8", "replace")
    if text.startswith("failed "):
        return Outcome(False, text.removeprefix("failed "))
    if status == -signal.SIGXCPU:
        return Outcome(False, f"took more than {seconds:g} s")
    if status < 0:
        return Outcome(False, f"crashed ({signal.Signals(-status).name})")
    return Outcome(False, text[:200] if text.startswith("unconfined") else "left before its end")

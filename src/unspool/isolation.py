"""Programs and data from strangers, worked on in a child process that cannot harm this one.

    parent   call(request, seconds) ──► pipe ──► answer(request)   child
             answer                 ◄── pipe ◄──

A chat template is a program, and a tokenizer.json steers a native library: either can take all memory, never end or
crash. The child has a limit on memory, can open no file, has no environment variables of interest, and is killed when a
call takes too long; the next call starts another. Both sides exchange frames: 8 bytes of length, then the content.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import IO, TYPE_CHECKING, Any

from unspool.errors import EngineError

if TYPE_CHECKING:
    from subprocess import Popen

_BOOT = "import sys; sys.path += sys.argv[3:]; from unspool.isolation import serve; serve(sys.argv[1], sys.argv[2])"
_KEPT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # the time zone, and what Python itself may need to start
# One thread, one arena: address space is limited, and each thread of a library would reserve much of it.
_SET = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
_OUT_OF_MEMORY = 77  # exit status
PATIENCE = 6  # seconds that may pass for each one of processor time


class StoppedError(Exception):
    """The child did not answer: it was stopped at a limit, or it crashed. The message says which."""


class LimitedProcess:
    """A child that runs `module.answer(request)` for one request at a time, whichever thread asks.

    `packages` are the installed ones that the module imports; nothing else can be imported but Python's own library.
    """

    def __init__(self, module: str, packages: Sequence[str], memory: int, longest_answer: int) -> None:
        self._module, self._packages = module, tuple(packages)
        self._memory, self._longest_answer = memory, longest_answer
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._owner = 0  # a fork has this object too, but its pipes belong to the parent
        self._stop: Any = None

    def start(self) -> None:
        """Start the child without waiting for it, where a call is going to come soon."""
        with self._lock:
            self._running()

    def call(self, request: bytes, seconds: float) -> bytes:
        """The child's answer; a StoppedError where it took too long, took too much memory or crashed.

        `seconds` are of processor time, so that a busy machine stops nothing that is right; PATIENCE times as many may
        pass.
        """
        with self._lock:
            process, is_late = self._running(), threading.Event()

            def stop() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(PATIENCE * seconds, stop)
            timer.daemon = True
            timer.start()
            try:
                return self._exchange(process, ceil(seconds), request)
            except (OSError, EOFError):
                status = process.wait()
                self.close()
                raise StoppedError(self._reason(status, seconds, is_late=is_late.is_set())) from None
            except BaseException:  # an interrupt in the middle of a frame: whatever comes next would be misread
                self.close()
                raise
            finally:
                timer.cancel()

    def close(self) -> None:
        """End the child; the next call starts another."""
        if self._stop is not None:
            self._stop()
        self._process = None

    def _running(self) -> Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._process, self._owner = _start(self._module, self._packages, self._memory), os.getpid()
            self._stop = weakref.finalize(self, _end, self._process, self._owner)
        return self._process

    def _exchange(self, process: Popen[bytes], cpu_seconds: int, request: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        _write(process.stdin, cpu_seconds.to_bytes(4, "little") + request)
        length = _read_length(process.stdout)
        if length > self._longest_answer:
            process.kill()
            raise StoppedError(f"an answer of {length:,} bytes; at most {self._longest_answer:,} are taken")
        return _read_exactly(process.stdout, length)

    def _reason(self, status: int, seconds: float, *, is_late: bool) -> str:
        import signal

        if is_late or status == -signal.SIGXCPU:
            return f"it took more than {seconds:.2g} seconds"
        if status == _OUT_OF_MEMORY:
            return f"it took more than {self._memory >> 20:,} MiB of memory"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"it crashed, or took more than {self._memory >> 20:,} MiB of memory ({name})"


def _start(module: str, packages: Sequence[str], memory: int) -> Popen[bytes]:
    import subprocess

    if not sys.executable:
        raise EngineError("a Python interpreter cannot be started: sys.executable is not known")
    # Isolated and without site-packages: neither the working directory nor start-up files of the environment are read.
    command = [sys.executable, "-I", "-S", "-c", _BOOT, module, str(memory)]
    paths = dict.fromkeys(_directory_of(package) for package in ("unspool", *packages))
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _SET
    try:
        return subprocess.Popen(
            [*command, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=os.path.abspath(os.sep),
            start_new_session=True,  # Ctrl-C in the terminal is for the parent
        )
    except OSError as error:
        raise EngineError(f"{sys.executable} cannot be started: {error.strerror}") from error


def _end(process: Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written yet has no reader any more
                pipe.close()


def _directory_of(package: str) -> str:
    """Where a package is imported from; it need not be imported for that."""
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise EngineError(f"the Python package {package!r} is not installed")
    return os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))


# Frames -----------------------------------------------------------------------------------------------------------


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def _read_length(pipe: IO[bytes]) -> int:
    return int.from_bytes(_read_exactly(pipe, 8), "little")


def _read_exactly(pipe: IO[bytes], length: int) -> bytes:
    content = pipe.read(length)
    if len(content) != length:
        raise EOFError
    return content


# The child --------------------------------------------------------------------------------------------------------


def serve(module: str, memory: str) -> None:
    """The child's whole life: import, accept limits, answer until the parent closes the pipe."""
    import resource
    import time
    from importlib import import_module

    answer = import_module(module).answer
    time.localtime()  # reads the time zone's file while files can be opened
    for kind, limit in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 0)):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # a system that does not limit this; the parent still limits the time
            continue
    try:
        while True:
            request = _read_exactly(sys.stdin.buffer, _read_length(sys.stdin.buffer))
            _limit_cpu(int.from_bytes(request[:4], "little"))
            _write(sys.stdout.buffer, answer(request[4:]))
    except EOFError:
        status = 0
    except MemoryError:
        status = _OUT_OF_MEMORY
    os._exit(status)


def _limit_cpu(seconds: int) -> None:
    """SIGXCPU ends the child after so many more seconds, to within one. Where there is no such limit the parent's timer
    does."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard))

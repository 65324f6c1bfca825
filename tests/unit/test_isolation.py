"""A child process with limits: what it cannot see, and that its parent outlives it and not the other way round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unspool import isolation
from unspool.errors import EngineError
from unspool.isolation import LimitedProcess, StoppedError

PACKAGES = ("jinja2", "markupsafe")


@pytest.fixture
def process() -> Iterator[LimitedProcess]:
    process = LimitedProcess("unspool.chat.sandbox", PACKAGES, 256 << 20, 1 << 20)
    yield process
    process.close()


def render(process: LimitedProcess, source: str) -> str:
    request = json.dumps({"source": source, "variables": {"messages": []}}).encode()
    reply: dict[str, str] = json.loads(process.call(request, 300))
    return reply["text"] if "text" in reply else f"failed: {reply['failed']}"


def test_no_file_can_be_opened(process: LimitedProcess) -> None:
    assert render(process, "{{ 'a'.encode('cp1252') }}").startswith("failed: OSError: [Errno 24] Too many open files")


@pytest.mark.parametrize("filter", ["striptags", "pprint", "wordwrap(1)", "title"])
def test_what_jinja2_imports_late_is_there(process: LimitedProcess, filter: str) -> None:
    assert not render(process, f"{{{{ 'a b' | {filter} }}}}").startswith("failed")


def test_a_crash_is_told_and_the_next_call_answered(process: LimitedProcess) -> None:
    assert render(process, "1") == "1"
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert render(process, "2") == "2"
    with pytest.raises(StoppedError, match=r"it crashed, or took more than 256 MiB of memory \(status 1\)"):
        process.call(b"no JSON", 30)
    assert render(process, "3") == "3"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="the Python package 'no_such_package' is not installed"):
        LimitedProcess("unspool.chat.sandbox", ("no_such_package",), 1 << 28, 1).start()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineError, match="/no/such/python cannot be started: No such file"):
        LimitedProcess("unspool.chat.sandbox", PACKAGES, 1 << 28, 1).start()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(EngineError, match=r"sys\.executable is not known"):
        LimitedProcess("unspool.chat.sandbox", PACKAGES, 1 << 28, 1).start()


def test_an_interrupted_call_leaves_no_half_of_a_frame(
    process: LimitedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    assert render(process, "first") == "first"
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "_read_length", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render(process, "second")
    assert render(process, "third") == "third"


def test_a_child_sees_neither_the_directory_nor_the_environment(tmp_path: Path) -> None:
    """Python files in the working directory, or named by the environment, are not imported."""
    for name in ("jinja2", "json", "unspool", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    code = (
        "import sys; sys.path.remove(''); from unspool.chat.template import ChatTemplate;"
        "print(ChatTemplate('x').source)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout == "x\n", done.stderr
    code = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r}; {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=600)
    assert done.stdout == "x\n", done.stderr
    assert not (tmp_path / "executed").exists()


def test_a_program_that_ends_takes_its_child_along() -> None:
    code = (
        "from unspool.chat import template; template.ChatTemplate('x');"
        "print(template._renderer._process.pid, flush=True);"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    pid = int(done.stdout)
    for _ in range(60_000):
        if not _runs(pid):
            break
        threading.Event().wait(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Not counting a process that has ended and whose status nobody has taken."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_process_starts_its_own(process: LimitedProcess) -> None:
    assert render(process, "1") == "1"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if render(process, "2") == "2" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert render(process, "3") == "3"

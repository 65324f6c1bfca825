"""`unspool serve --replicas numa:2`, from the command line to the last process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.harness import LONG, write_model
from tests.cluster.test_processes import children, wait_until_gone

HANG = 600.0
STORY = {"prompt": "Once upon a time", "max_tokens": 1900} | LONG


def wait_for(test: Callable[[], Any], seconds: float = HANG) -> Any:
    until = time.monotonic() + seconds
    while not (found := test()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    @property
    def workers(self) -> list[int]:
        return [each for each in children(self.process.pid) if b"unspool.cluster.worker" in command_line(each)]

    def replicas(self) -> int:
        page = httpx.get(f"{self.url}/metrics", timeout=HANG).text
        return int(float(next(line for line in page.splitlines() if line.startswith("unspool:replicas{")).split()[-1]))


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    command = [
        "serve",
        "-m",
        str(model),
        "--replicas",
        "numa:2",
        "--port",
        "0",
        "--kv-tokens",
        "8192",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    line = next(each for each in lines if "unspool serves" in each)
    try:
        yield Server(process, line.split(" at ")[1].split("/v1")[0])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def text_of(server: Server, at: dict[int, Callable[[], None]] | None = None) -> str:
    text, count = "", 0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=STORY | {"stream": True}, timeout=HANG) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                count += 1
                if at and count in at:
                    at[count]()
    return text


def sockets_of(process: int) -> list[Path]:
    """The Unix sockets that a process listens on or is connected through, where they have a path."""
    open_files = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed
            open_files.append(os.readlink(entry))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [Path(line[7]) for line in lines if len(line) == 8 and f"socket:[{line[6]}]" in open_files]


def test_a_server_of_two_processes_from_start_to_end(model: Path) -> None:
    with serving(model) as server:
        wait_for(lambda: server.replicas() == 2)
        calm = text_of(server)
        assert len(calm) > 1000
        workers = server.workers
        assert len(workers) == 2

        def lose_all() -> None:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)

        assert text_of(server, {20: lose_all}) == calm
        lost = set(workers)

        def replaced() -> list[int]:
            found = server.workers
            return found if len(found) == 2 and not lost & set(found) and server.replicas() == 2 else []

        workers = wait_for(replaced)
        assert (folders := {path.parent for worker in workers for path in sockets_of(worker)})
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG) == 0
        wait_until_gone(workers)
        assert not any(folder.exists() for folder in folders)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", timeout=HANG)


@pytest.mark.slow
def test_workers_end_with_a_killed_server(model: Path) -> None:
    with serving(model) as server:
        workers = wait_for(lambda: server.replicas() == 2 and server.workers)
        server.process.kill()
        server.process.wait()
        wait_until_gone(workers)


def test_without_ray_the_flags_say_what_to_install(model: Path) -> None:
    block = "import sys; sys.modules['ray'] = None; from unspool.cli import main; sys.exit(main(sys.argv[1:]))"
    (app := model.parent / "app.yaml").write_text("{}")
    for arguments in (["serve", "-m", str(model), "--replicas", "2"], ["cluster", "--status"], ["cluster", str(app)]):
        ran = subprocess.run([sys.executable, "-c", block, *arguments], capture_output=True, text=True, timeout=HANG)
        assert ran.returncode == 2
        assert "needs Ray: pip install 'unspool[server,cluster]'" in ran.stderr

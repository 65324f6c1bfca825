"""`unspool serve --replicas 2`, from the command line to the last process: `make test-cluster`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="make test-cluster runs these, in an environment that has Ray")

from tests.cluster.harness import LONG, write_model
from tests.cluster.ray_harness import HANG, children_of, free_port, is_listening, kill, wait_for

pytestmark = pytest.mark.cluster
STORY = {"prompt": "Once upon a time", "max_tokens": 300} | LONG


class Served:
    """The command, and what it has on this machine."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port = free_port()
        command = ["serve", "-m", str(model), "--replicas", "2", "--port", str(self.port), "--threads", "1"]
        self._shared = set(Path("/dev/shm").iterdir())
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unspool", *command, "--kv-tokens", "8192"], stdin=subprocess.DEVNULL, stderr=log
            )
        wait_for("the server", lambda: "unspool serves" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        self.children = children_of(self.process.pid)
        self.folder = next(
            Path(word) for name in self.children.values() for word in name.split() if "/unspool-ray-" in word
        )
        while not self.folder.name.startswith("unspool-ray-"):
            self.folder = self.folder.parent

    def text(self) -> str:
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=STORY, timeout=HANG)
        text: str = answer.json()["choices"][0]["text"]
        return text

    def is_gone(self) -> bool:
        left = [pid for pid, name in self.children.items() if _name_of(pid) == name]
        shared = [each for each in set(Path("/dev/shm").iterdir()) - self._shared if "plasma" in each.name]
        return not (left or shared or self.folder.exists() or is_listening(self.port))


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def test_nothing_is_left_behind_however_it_ends(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf")
    texts = []
    for number, ending in enumerate((signal.SIGTERM, signal.SIGKILL)):
        (folder := tmp_path / str(number)).mkdir()
        served = Served(model, folder)
        try:
            texts.append(served.text())
            assert sum("ServeReplica:unspool:Engine" in name for name in served.children.values()) == 2
            served.process.send_signal(ending)
            assert served.process.wait(HANG) == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
            wait_for("the end of all that it started", served.is_gone)
        finally:
            kill(served.process.pid)
            served.process.wait()
    assert texts[0] == texts[1]
    assert len(texts[0]) > 100

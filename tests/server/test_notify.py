"""What a service tells systemd, as a fake of its socket hears it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import PATIENCE, Live, make_llm
from unspool.errors import EngineDiedError
from unspool.server import notify
from unspool.server.config import ServerConfig
from unspool.server.notify import Notifier


class Listener:
    """A service manager's socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)
        self.environment = {"NOTIFY_SOCKET": address}

    def hear(self) -> dict[str, str]:
        lines = self.socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def hear_until(self, name: str) -> list[dict[str, str]]:
        """Messages up to the first that has a variable of this name."""
        heard = [self.hear()]
        while name not in heard[-1]:
            heard.append(self.hear())
        return heard

    @property
    def is_silent(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(PATIENCE)
        return False


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may have 107 characters
        address = f"{folder}/notify" if request.param == "path" else f"@unspool-{secrets.token_hex(8)}"
        made = Listener(address)
        yield made
        made.socket.close()


def test_a_service_tells_its_life(listener: Listener) -> None:
    notifier = Notifier(listener.environment)
    with notifier.starting() as ready:
        first = listener.hear()
        assert first == {"EXTEND_TIMEOUT_USEC": "60000000", "STATUS": "loading"}
        ready("http://127.0.0.1:8000")
    assert listener.hear_until("READY")[-1] == {"READY": "1", "STATUS": "serving at http://127.0.0.1:8000"}
    notifier.stopping()
    assert listener.hear() == {"STOPPING": "1", "STATUS": "letting answers finish"}
    assert listener.is_silent


def test_a_long_load_is_told_again_and_again(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "LOADING_SECONDS", 0.001)
    with Notifier(listener.environment).starting():
        for _ in range(5):
            assert "EXTEND_TIMEOUT_USEC" in listener.hear()


def test_a_load_that_fails_is_never_ready(listener: Listener) -> None:
    def load() -> None:
        with Notifier(listener.environment).starting():
            listener.hear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load()
    assert listener.is_silent


def test_signs_of_life_end_when_something_has_died(listener: Listener) -> None:
    notifier = Notifier({**listener.environment, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())})
    assert notifier.watchdog_seconds == 0.002
    well = iter([True] * 4 + [False])
    asyncio.run(notifier.keep_alive(lambda: next(well)))
    assert [listener.hear() for _ in range(4)] == [{"WATCHDOG": "1"}] * 4
    assert listener.is_silent


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "1000"}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}],
    ids=["none", "no socket", "empty", "vsock"],
)
def test_where_nobody_listens_nothing_is_sent(environment: dict[str, str], said: list[str]) -> None:
    notifier = Notifier(environment)
    assert not notifier.is_wanted
    assert notifier.watchdog_seconds is None
    with notifier.starting() as ready:
        ready("http://127.0.0.1:1")
    notifier.stopping()
    asyncio.run(notifier.keep_alive(lambda: True))
    assert ("neither a path nor an abstract socket" in str(said)) == ("vsock" in str(environment))


@pytest.mark.parametrize("more", [{"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}])
def test_a_watchdog_that_is_not_ours(listener: Listener, more: dict[str, str]) -> None:
    assert Notifier({**listener.environment, **more}).watchdog_seconds is None


def test_a_manager_that_went_is_one_warning(tmp_path: Path, said: list[str]) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notifier.ready("x")
    notifier.stopping()
    assert said == ["the service manager cannot be told anything: No such file or directory"]


@pytest.mark.parametrize("listener", ["path"], indirect=True)
def test_a_process_tells_when_it_serves_lives_and_stops(listener: Listener) -> None:
    command = [sys.executable, "-m", "unspool", "serve", "--random", "tiny", "--device", "reference", "--port", "0"]
    environment = {**os.environ, **listener.environment, "WATCHDOG_USEC": "50000"}
    process = subprocess.Popen([*command, "--log", "off", "--drain", "0"], env=environment, stderr=subprocess.DEVNULL)
    starting = listener.hear_until("READY")
    assert all("EXTEND_TIMEOUT_USEC" in message for message in starting[:-1])
    assert starting[:-1]
    assert starting[-1]["STATUS"].startswith("serving at http://127.0.0.1:")
    for _ in range(3):
        assert listener.hear() == {"WATCHDOG": "1"}
    process.send_signal(signal.SIGTERM)
    assert "STOPPING" in listener.hear_until("STOPPING")[-1]
    assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("listener", ["path"], indirect=True)
def test_a_dead_engine_gives_no_signs_of_life(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """So systemd starts a service again whose engine failed."""
    for name, value in {**listener.environment, "WATCHDOG_USEC": "20000"}.items():
        monkeypatch.setenv(name, value)
    llm = make_llm()
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), llm)
    assert listener.hear() == {"WATCHDOG": "1"}
    llm.driver.failure = EngineDiedError("a fault")
    live.settle()
    while not listener.is_silent:  # what was sent before it failed
        pass
    listener.socket.settimeout(0.2)  # ten times as long as between two signs
    with pytest.raises(TimeoutError):
        listener.hear()
    listener.socket.settimeout(PATIENCE)
    live.stop()
    assert "STOPPING" in listener.hear()

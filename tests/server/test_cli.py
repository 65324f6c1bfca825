"""The command itself: a process that starts, serves, is told to stop, and stops well."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests import brake
from tests.server.harness import PATIENCE
from tests.server.test_load import LONG, raw_request, read_until
from unspool import web
from unspool.cli import inspect, main, serve
from unspool.cli.parser import UsageError
from unspool.models.random import SHAPES, write_random_gguf


class Process:
    def __init__(self, *arguments: str, command: Sequence[str] = (sys.executable, "-m", "unspool")) -> None:
        whole = [*command, "serve", "--port", "0", "--device", "reference", *arguments]
        self.process = subprocess.Popen(whole, stderr=subprocess.PIPE, text=True)
        self.said = ""
        assert self.process.stderr is not None
        while (found := re.search(r"http://\S+?:(\d+)/v1", self.said)) is None:
            line = self.process.stderr.readline()
            assert line, f"it ended: {self.said}"
            self.said += line
        self.port = int(found[1])

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(sent)
        return self.end()

    def end(self) -> tuple[int, str]:
        """Its status and all that it said. (`communicate` would miss what was read along with the first line.)"""
        assert self.process.stderr is not None
        self.said += self.process.stderr.read()
        return self.process.wait(timeout=PATIENCE), self.said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(path, SHAPES["tiny"])
    return path


def test_sigterm_ends_streams_and_the_process(model: Path) -> None:
    arguments = ["-m", str(model), "--drain", "0", "--log", "json", "--api-key", "sk-x", "--host", "127.0.0.1"]
    server = Process(*arguments, command=brake.COMMAND)
    assert httpx.get(f"http://127.0.0.1:{server.port}/v1/models", timeout=PATIENCE).status_code == 401
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        data = raw_request({**LONG, "max_tokens": 400})
        connection.sendall(data.replace(b"host: localhost", b"host: localhost\r\nauthorization: Bearer sk-x"))
        read_until(connection, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        rest = read_until(connection, b"[DONE]\n\n", 1 << 30)
    assert b'"finish_reason":"abort"' in rest
    status, said = server.end()
    assert status == 0, said
    logged = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert logged[-1]["finish"] == "abort"
    assert "sk-x" not in said


def test_an_open_door_is_told_loudly(model: Path) -> None:
    server = Process("-m", str(model), "--host", "0.0.0.0", "--drain", "0")
    status, said = server.stop()
    assert status == 0
    assert "WARNING" in said
    assert "--api-key" in said


def test_text_is_utf8_where_the_locale_has_no_encoding(model: Path) -> None:
    """What a model writes can be printed, and what is asked of it can be read."""
    command = [sys.executable, "-m", "unspool", "run", "--raw", "-m", str(model), "--device", "reference"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command += ["--seed", "1", "-n", "30", "Käse"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.decode().isascii(), "the answer was to hold more than ASCII"


def test_wrong_usage_is_one_line(model: Path) -> None:
    command = [sys.executable, "-m", "unspool", "serve", "-m", str(model), "--port", "99999"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert done.stderr == "unspool: port is 99999; allowed: 0 to 65535\n"


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unspool", "serve", "--device", "reference", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_told_before_a_model_is_loaded(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_serve("-m", "./missing.gguf", "--host", host, "--port", str(port))
    assert done.returncode == 2
    message = f"{host} port {port} is in use by another process; --port takes another one, 0 a free one"
    assert done.stderr == f"unspool: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "192.0.2.1"], "192.0.2.1 port 8000 cannot be listened on: this machine has no such address"),
        (["--host", "no such host"], "host is 'no such host', which has no address"),
        (["--api-key-file", "./missing.txt"], "missing.txt cannot be read: No such file or directory"),
        (["--drain", "nan"], "--drain: 'nan' is not a number"),
        (["--max-body-mb", "inf"], "--max-body-mb: 'inf' is not a number"),
        (["--max-body-mb", "0"], "max_body is 0; it must be above 0"),
        (["--stall-timeout", "-1"], "stall_timeout is -1.0; it must be above 0"),
        (["--port", "http"], "--port: 'http' is not a whole number"),
        (["--name", " "], "a name of the model is empty"),
        (["--log", "xml"], "log is 'xml'; allowed: text, json, off"),
        (["--metrics-prefix", "1 2"], "metrics_prefix is '1 2'; allowed: letters, digits, _ and :, no digit first"),
        (["--cors-origin", "example.org/x"], "cors_origin is 'example.org/x'; allowed: * or an origin"),
        (["--otel-endpoint", "localhost"], "otel_endpoint is 'localhost'; allowed: a URL"),
        (["--port", "1", "--port", "2"], "--port: given twice; it takes one value"),
        (["-m", "a.gguf", "--model", "b.gguf"], "a.gguf does not exist; a model is 'smollm2', a GGUF file"),
        (["-m", "smollm2", "--random", "tiny"], "--random and -m both say what is served; give one"),
        (["--random", "tiny", "--memory", "lots"], "--memory: 'lots' is not a size, as in 141GiB or 80GB"),
        (["--random", "tiny", "--memory", "1kB"], "more than the 0.0 MB that --memory allows; a smaller --kv-tokens"),
        (["--random", "tiny", "--memory", "1GB", "--replicas", "2"], "--replicas is for one model, without --memory"),
        (["--random", "tiny", "--memory-wait", "0"], "memory_wait is 0.0; it must be above 0"),
    ],
)
def test_wrong_usage_of_serve_is_told_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--device", "reference", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


def test_ctrl_c_says_that_it_stops(model: Path) -> None:
    server = Process("-m", str(model), "--host", "localhost")
    assert httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=PATIENCE).status_code == 200
    status, said = server.stop(signal.SIGINT)
    assert status == 0
    assert said.endswith("\nstopping\nstopped\n")


def test_inspect_names_the_command_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "ASSETS", tmp_path)
    with pytest.raises(UsageError, match="`make web`"):
        inspect.main([])


def test_inspect_tells_the_address_where_there_is_no_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text("page")
    monkeypatch.setattr(web, "ASSETS", tmp_path)
    monkeypatch.setattr(inspect, "open_browser", lambda url: False)
    monkeypatch.setattr(serve, "run", lambda namespace, on_start: on_start("http://127.0.0.1:1") or 0)
    assert inspect.main(["R & D"]) == 0
    assert "open http://127.0.0.1:1/?prompt=R+%26+D" in capsys.readouterr().err

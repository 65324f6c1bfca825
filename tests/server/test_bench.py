"""Benchmarks of servers: what they measure of ours, and what they say of servers that fail, break off or hang."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import PATIENCE, Live
from tests.unit.schemas import validate
from unspool.bench import determinism, serve
from unspool.cli import main as cli
from unspool.errors import RequestError
from unspool.openai_client import Endpoint, ask
from unspool.reporting import Progress

Capture = pytest.CaptureFixture[str]
MODELS = b'{"data":[{"id":"m"}]}'
Handler = Callable[[asyncio.StreamWriter], Any]


def reported(capsys: Capture) -> dict[str, Any]:
    value: dict[str, Any] = validate("bench", json.loads(capsys.readouterr().out.splitlines()[-1]))
    return value


def response(status: str, body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n".encode() + body


@contextmanager
def bad_server(answer: Callable[[asyncio.StreamWriter], Any]) -> Iterator[str]:
    """A server that lists a model and does to every POST what `answer` does."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    port: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(response("200 OK", MODELS))
        else:
            await answer(writer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port.append(server.sockets[0].getsockname()[1])
        started.set()
        await asyncio.Event().wait()

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.gather(task, return_exceptions=True)))
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(PATIENCE)
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(PATIENCE)


async def drip(writer: asyncio.StreamWriter) -> None:
    """A token now and then, without an end."""
    writer.write(response("200 OK", b"", 10**9))
    while True:
        writer.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        await asyncio.sleep(0.05)


async def fail(writer: asyncio.StreamWriter) -> None:
    writer.write(response("503 Service Unavailable", b"{}"))


async def break_off(writer: asyncio.StreamWriter) -> None:
    writer.write(response("200 OK", b'data: {"choices":[{"text":"a"}]}\n\n', 9999))


async def end_early(writer: asyncio.StreamWriter) -> None:
    writer.write(response("200 OK", b'data: {"choices":[{"text":"a"}]}\n\n'))


async def talk_nonsense(writer: asyncio.StreamWriter) -> None:
    writer.write(response("200 OK", b"data: {nonsense\n\n"))


async def no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (hang, "timeout"),
        (drip, "timeout"),
        (fail, "status 503"),
        (break_off, "the response broke off"),
        (end_early, "the stream broke off"),
        (talk_nonsense, "an event that is not JSON"),
        (no_http, "no HTTP response"),
    ],
)
def test_a_bad_server_is_a_result_and_never_a_hang(answer: Handler, error: str, capsys: Capture) -> None:
    seconds = 0.5 if error == "timeout" else PATIENCE
    with bad_server(answer) as url:
        status = serve.main(["--url", f"bad={url}", "--rate", "50", "--requests", "2", "--timeout", str(seconds)])
    assert status == 1
    [row] = reported(capsys)["rows"]
    assert (row["requests"], row["failed"], row["errors"]) == (2, 2, {error: 2})
    assert row["goodput"] == 0


def test_a_server_that_is_not_there(capsys: Capture) -> None:
    assert cli(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1 does not answer: connection refused" in capsys.readouterr().err


def test_nobody_asks_a_dead_server_a_thousand_times(capsys: Capture) -> None:
    dead = ["--url", "http://127.0.0.1:1", "--model", "m"]
    assert serve.main([*dead, "--rate", "1000", "--requests", "1000"]) == 1
    [row] = reported(capsys)["rows"]
    assert row["requests"] == row["failed"] < 1000
    assert determinism.main([*dead, "--runs", "1000", "--at-once", "4"]) == 1
    assert [sum(each["errors"].values()) for each in reported(capsys)["results"]] == [12, 12]


def test_repeating_a_request_ends_where_a_server_hangs(capsys: Capture) -> None:
    with bad_server(hang) as url:
        small = ["--url", url, "--runs", "1000", "--at-once", "1", "--only", "greedy", "--timeout", "0.1"]
        assert determinism.main(small) == 1
    [row] = reported(capsys)["results"]
    assert (row["answers"], row["errors"]) == (0, {"timeout": 3})


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(RequestError, match="is not the address of a server"):
        Endpoint(url)


def test_paths_of_the_api() -> None:
    assert Endpoint("http://host:1").path("models") == "/v1/models"
    assert Endpoint("https://host/v1/").path("models") == "/v1/models"
    assert Endpoint("https://host/base").path("models") == "/base/v1/models"


# Ours ---------------------------------------------------------------------------------------------------------------
def url_of(server: Live) -> str:
    return server.url


def test_an_open_load_on_our_server(server: Live, capsys: Capture) -> None:
    arguments = ["--url", f"ours={url_of(server)}", "--rate", "40", "80", "--requests", "4", "--mix", "short"]
    assert serve.main([*arguments, "--first", "600", "--between", "600"]) == 0
    rows = reported(capsys)["rows"]
    assert [(row["server"], row["rate"], row["requests"], row["failed"], row["met"]) for row in rows] == [
        ("ours", 40.0, 4, 0, 4), ("ours", 80.0, 4, 0, 4),
    ]  # fmt: skip
    assert all(row["goodput"] == pytest.approx(4 / row["seconds"]) for row in rows)


def test_what_others_used_is_told_where_the_servers_process_is_known(server: Live, capsys: Capture) -> None:
    arguments = ["--url", f"ours={url_of(server)}", "--rate", "40", "--requests", "2", "--mix", "short"]
    assert serve.main([*arguments, "--pid", f"ours={os.getpid()}"]) == 0
    assert reported(capsys)["rows"][0]["disturbed"] >= 0
    for wrong in ("ours=none", f"other={os.getpid()}", "0"):
        with pytest.raises(RequestError, match="--pid is"):
            serve.main([*arguments, "--pid", wrong])


def test_arrivals_have_the_rate_that_is_asked_for() -> None:
    options = serve.make_parser().parse_args(["--url", "http://127.0.0.1:1"])
    found = serve.Load(serve.Server("x", Endpoint("http://127.0.0.1:1"), "m", None), 4.0, options, Progress("", 1))
    times = found._arrivals(2000)
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= 500
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1), "as of a Poisson process"


def test_ctrl_c_and_going_on(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments = ["--url", f"ours={url_of(server)}", "--rate", "40", "80", "--requests", "2", "--mix", "short"]
    arguments += ["--keep", str(tmp_path / "rows.jsonl")]
    measure, asked = serve.measure, []

    def interrupted(server: Any, rate: float, options: Any) -> Any:
        asked.append(rate)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(server, rate, options)

    monkeypatch.setattr(serve, "measure", interrupted)
    assert serve.main(arguments) == 130
    output = capsys.readouterr()
    assert "goes on from" in output.err
    partial = validate("bench", json.loads(output.out.splitlines()[-1]))
    assert (partial["interrupted"], [row["rate"] for row in partial["rows"]]) == (True, [40.0])
    assert serve.main(arguments) == 0
    assert asked == [40.0, 80.0, 80.0], "what is kept is not measured again"
    whole = reported(capsys)
    assert [row["rate"] for row in whole["rows"]] == [40.0, 80.0]
    assert whole["rows"][0] == partial["rows"][0]


def test_targets_that_nothing_meets(server: Live, capsys: Capture) -> None:
    arguments = ["--url", url_of(server), "--rate", "40", "--requests", "2", "--mix", "short"]
    assert serve.main([*arguments, "--first", "0.0000001"]) == 0
    [row] = reported(capsys)["rows"]
    assert (row["met"], row["goodput"], row["failed"]) == (0, 0, 0)


def test_a_chat_has_turns(server: Live, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "THINKING", 0.001)
    asked: list[Any] = []

    async def noted(endpoint: Endpoint, name: str, body: Any) -> Any:
        asked.append((name, len(body["messages"])))
        return await ask(endpoint, name, body)

    monkeypatch.setattr(serve, "ask", noted)
    arguments = ["--url", url_of(server), "--rate", "40", "--requests", "1", "--mix", "short", "--turns", "3"]
    assert serve.main(arguments) == 0
    [row] = reported(capsys)["rows"]
    assert row["requests"] == 3
    assert [(each["turn"], each["requests"]) for each in row["turns"]] == [(1, 1), (2, 1), (3, 1)]
    assert all(each["first"]["p50"] > 0 for each in row["turns"])
    assert asked == [("chat/completions", 1), ("chat/completions", 3), ("chat/completions", 5)]


def test_our_server_gives_one_answer(server: Live, capsys: Capture) -> None:
    assert determinism.main(["--url", url_of(server), "--runs", "6", "--at-once", "3", "-n", "6"]) == 0
    assert [(row["answers"], row["distinct"]) for row in reported(capsys)["results"]] == [(6, 1), (6, 1)]


def test_a_server_that_gives_several(capsys: Capture) -> None:
    count = iter(range(100))

    async def vary(writer: asyncio.StreamWriter) -> None:
        text = "one two three" if next(count) % 2 else "one two four"
        writer.write(response("200 OK", json.dumps({"choices": [{"text": text}]}).encode()))

    with bad_server(vary) as url:
        determinism.main(["--url", url, "--runs", "8", "--at-once", "4", "--only", "greedy"])
    [row] = reported(capsys)["results"]
    assert (row["answers"], row["distinct"], row["first_divergence"]) == (8, 2, 2)

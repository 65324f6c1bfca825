"""What a stranger can do before any key is checked, with raw sockets: heads, time, numbers, and a flood of each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import random
import resource
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.brake import Brake
from tests.server.harness import PATIENCE, Live, make_llm, wait_until
from tests.server.test_cli import Process, model  # noqa: F401 (a fixture)
from tests.server.test_load import raw_request, read_until
from unspool.errors import EngineError
from unspool.server.config import ServerConfig
from unspool.server.connection import MAX_HEADERS, MAX_PIPELINED
from unspool.server.listener import SPARE_DESCRIPTORS, SURPLUS, Gate, LimitLog, Listener, fit_descriptors

KEY: dict[str, Any] = {"api_keys": ("sk-x",)}
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextmanager
def connected(server: Live, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which this is there when the server sees it: no time can run out before."""
    with ExitStack() as stack:
        with server.paused() if sent else nullcontext():
            connection = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE))
            connection.sendall(sent)
        yield connection


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of the next answer; nothing is taken of what comes behind it."""
    head = body = b""
    while not head.endswith(b"\r\n\r\n"):
        head += taken(connection, 1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += taken(connection, length - len(body))
    return int(head.split()[1]), json.loads(body)


def taken(connection: socket.socket, most: int) -> bytes:
    piece = connection.recv(most)
    assert piece, "it was closed"
    return piece


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends it, now or within the time that a test may hang."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def push(connection: socket.socket, piece: bytes, most: int) -> int:
    """Send pieces until the other side wants no more; how many bytes went out."""
    sent = 0
    while sent < most:
        readable, _, _ = select.select([connection], [], [], 0)
        if readable:
            break
        try:
            connection.sendall(piece)
        except OSError:
            break
        sent += len(piece)
    return sent


def drip(connection: socket.socket, piece: bytes) -> bool:
    """Send pieces slowly; whether the other side answers or closes within the time that a test may hang."""
    for _ in range(60_000):
        readable, _, _ = select.select([connection], [], [], 0.01)
        if readable:
            return True
        try:
            connection.sendall(piece)
        except ConnectionError:  # it was closed since we looked
            return True
    return False


@pytest.mark.parametrize(
    "piece",
    [b"a" * 4096, b"x: " + b"y" * 4093, b"n: v\r\n" * 512, b"x-long: " + b"v" * 4000 + b"\r\n"],
    ids=["a line without end", "a name without end", "many headers", "long headers"],
)
def test_a_head_is_bounded(make_server: Callable[..., Live], piece: bytes) -> None:
    server = make_server(**KEY, max_header=16_384)
    with connected(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n")
        assert push(connection, piece, 64 << 20) < 32 << 20
        status, body = answer_of(connection)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        assert "16,384" in body["error"]["message"]
        assert is_closed(connection)


def test_a_path_is_bounded(make_server: Callable[..., Live]) -> None:
    server = make_server(max_header=16_384)
    with connected(server) as connection:
        connection.sendall(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n")
        assert answer_of(connection)[0] == 431


def test_heads_within_the_bounds_are_taken(server: Live) -> None:
    headers = {f"x-{number}": "v" * 300 for number in range(MAX_HEADERS - 20)}
    assert httpx.get(f"{server.url}/health", headers=headers, timeout=PATIENCE).status_code == 200
    with connected(server) as connection:
        for byte in GET:  # one by one
            connection.sendall(bytes([byte]))
        assert answer_of(connection)[0] == 200


def test_a_second_answer_waits_for_no_acknowledgement(server: Live) -> None:
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert answer_of(connection)[0] == 200
        (open_one,) = server.server.server_state.connections
        taken_from = open_one.transport.get_extra_info("socket")
        assert taken_from.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_trailers_and_chunk_frames_are_bounded_and_not_headers(make_server: Callable[..., Live]) -> None:
    server = make_server(**KEY, max_header=16_384)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer sk-x\r\n"
    head += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    for start, piece in ((b"0\r\nx: ", b"y" * 4096), (b"0\r\n", b"x: y\r\n" * 600), (b"1;e=", b"y" * 4096)):
        with connected(server) as connection:
            connection.sendall(head + start)
            assert push(connection, piece, 64 << 20) < 32 << 20
            assert is_closed(connection)
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    with connected(server) as connection:
        connection.sendall(head + b"%x\r\n%s\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(body), body) + GET)
        assert answer_of(connection)[0] == 200
        assert answer_of(connection)[0] == 200


def test_a_head_has_a_time(make_server: Callable[..., Live]) -> None:
    server = make_server(header_timeout=0.3)
    head = b"GET /health HTTP/1.1\r\n"
    with connected(server, head) as slow, connected(server) as silent, connected(server) as blank:
        status, body = answer_of(slow)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert is_closed(slow)
        assert is_closed(silent)
        assert drip(blank, b"\r\n"), "line breaks are no request, and win no time"


def test_dripping_a_head_wins_no_time(make_server: Callable[..., Live]) -> None:
    server = make_server(header_timeout=0.3)
    with connected(server, b"GET /health HTTP/1.1\r\nx: ") as connection:
        assert drip(connection, b"y")
        assert answer_of(connection)[0] == 408


def test_idle_connections_are_closed_and_busy_ones_are_not(make_server: Callable[..., Live]) -> None:
    llm = make_llm()
    brake = Brake(llm.engine)
    server = make_server(llm, idle_timeout=0.3, header_timeout=0.3)
    asked = raw_request({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True})
    with connected(server, asked) as busy, connected(server, GET) as idle, connected(server, GET) as blank:
        for connection in (idle, blank):
            assert answer_of(connection)[0] == 200
        assert is_closed(idle)
        assert drip(blank, b"\r\n"), "line breaks are no request, and win no time"
        brake.release()
        assert b"[DONE]" in read_until(busy, b"[DONE]", 1 << 30)


def test_a_body_that_nobody_reads_wins_no_time(
    make_server: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is refused by its head; its body may end, so that its connection can be used again, but soon."""
    server = make_server(**KEY)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n"
    for linger in (PATIENCE, 0.5):
        monkeypatch.setattr("unspool.server.connection.LINGER", linger)
        with connected(server) as connection:
            connection.sendall(head)
            assert answer_of(connection)[0] == 401
            if linger == PATIENCE:
                connection.sendall(b"x" * 1000 + GET)
                assert answer_of(connection)[0] == 200
            else:
                assert is_closed(connection)


def test_pipelines_are_bounded(make_server: Callable[..., Live]) -> None:
    server = make_server()
    with connected(server) as connection:
        connection.sendall(GET * MAX_PIPELINED)
        assert [answer_of(connection)[0] for _ in range(MAX_PIPELINED)] == [200] * MAX_PIPELINED
    with connected(server) as connection:
        connection.sendall(GET * 100)
        assert read_until(connection, b"\0").count(b"HTTP/1.1 200") == MAX_PIPELINED + 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n", 200),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT example.com:80 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx y: 1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
    ],
    ids=["websocket", "h2c", "http2", "connect", "both lengths", "two lengths", "a bad name", "tls"],
)
def test_what_is_no_request_of_ours_is_answered_and_closed(server: Live, sent: bytes, status: int) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        found, body = answer_of(connection)
        assert found == status
        if status == 400:
            assert body["error"]["code"] == "invalid_http"
            assert is_closed(connection)
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200


def test_damaged_requests_harm_nobody(server: Live) -> None:
    """Valid requests with bytes changed, lost, repeated and cut anywhere."""
    rng = random.Random(5)
    whole = raw_request({"prompt": "a", "max_tokens": 1}) + GET
    whole += b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5;x=y\r\nabcde\r\n0\r\nt: 1\r\n\r\n"
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            end = min(len(data), at + rng.randrange(1, 20))
            data[at:end] = rng.choice([rng.randbytes(end - at), b"", data[at:end] * 2, b"\r\n"])
        with connected(server) as connection, contextlib.suppress(OSError):
            for piece in (data[: len(data) // 3], data[len(data) // 3 :]):
                connection.sendall(piece)
            if rng.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.02)
                connection.recv(65536)
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    wait_until(lambda: len(server.server.server_state.connections) <= 1)  # httpx's own may linger


def test_idle_connections_make_room_for_new_ones(make_server: Callable[..., Live]) -> None:
    server = make_server(max_connections=8)
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        assert is_closed(idle[0])


def test_beyond_the_limit_only_probes_are_answered(make_server: Callable[..., Live]) -> None:
    server = make_server(max_connections=4, read_timeout=PATIENCE)
    with ExitStack() as stack:
        for _ in range(4):  # busy: their bodies are awaited
            busy = stack.enter_context(connected(server))
            busy.sendall(raw_request({"prompt": "a"})[:-1])
        wait_until(lambda: len(server.server.server_state.tasks) == 4)
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert "4 connections" in refused.json()["error"]["message"]
        crowd = [stack.enter_context(connected(server)) for _ in range(SURPLUS + 20)]
        for connection in crowd[:3]:
            connection.close()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE).status_code == 200


def test_a_limit_is_logged_once(make_server: Callable[..., Live], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server = make_server(max_connections=4)
        with ExitStack() as stack:
            for number in range(60):
                connection = stack.enter_context(connected(server))
                if number % 2:
                    connection.sendall(b"garbage \0\r\n\r\n")
        httpx.get(f"{server.url}/health", timeout=PATIENCE)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("limit of 4 connections" in text for text in warnings) == 1
    assert sum("not HTTP" in text for text in warnings) == 1
    assert len(warnings) == 2


def test_the_log_tells_how_many_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 59.0, 60.0, 200.0, 200.0])
    log = LimitLog(lambda: next(times))
    for _ in range(5):
        log("%d connections", 7)
    log("another kind")
    assert [record.getMessage() for record in caplog.records] == [
        "7 connections",
        "7 connections (2 more since the last such line)",
        "7 connections",
        "another kind",
    ]


class Exhausted(socket.socket):
    """A listening socket in a process that has no descriptor left for some time."""

    num_failures = 3
    num_accepts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_accepts += 1
        if self.num_accepts <= self.num_failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_descriptors_it_waits_instead_of_looping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unspool.server.listener.RETRY_SECONDS", 0.05)

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(b"taken")

    async def test() -> None:
        listening = Exhausted()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        make: Any = Echo
        listener = Listener([listening], Gate(ServerConfig(), 10), make)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(reader.readexactly(5), PATIENCE) == b"taken"
        assert listening.num_accepts == Exhausted.num_failures + 2  # the one that was taken, and none behind it
        writer.close()
        listener.close()
        await listener.wait_closed()

    asyncio.run(test())
    assert [record.getMessage() for record in caplog.records] == ["connections must wait: Too many open files"]


def test_few_descriptors_are_neither_a_flood_nor_a_hang(model: Path) -> None:  # noqa: F811
    """Fewer than connections come: the cap is below them, probes are answered, the log stays short."""
    with ExitStack() as stack:
        process = limited_process(128, "-m", str(model), "--drain", "0", "--log", "off")
        stack.callback(process.process.kill)
        crowd = []
        for _ in range(200):
            crowd.append(stack.enter_context(socket.create_connection(("127.0.0.1", process.port), timeout=PATIENCE)))
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{process.port}/health", timeout=PATIENCE).status_code == 200
        status, said = process.stop()
        assert status == 0
        assert "this process may open 128 files" in said
        assert len(said.splitlines()) < 12, said


def limited_process(descriptors: int, *arguments: str) -> Process:
    """A server that may open so many files, from its start."""
    code = (
        f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors})); "
        "runpy.run_module('unspool', run_name='__main__')"
    )
    return Process(*arguments, command=[sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("limits", "fits", "raised"),
    [
        ((1 << 20, 1 << 20), 1000, None),
        ((100, 1 << 20), 1000, True),
        ((100, resource.RLIM_INFINITY), 1000, True),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, None),
        ((500, 500), 500 - 100 - SURPLUS - SPARE_DESCRIPTORS, None),
        ((400, 500), 500 - 100 - SURPLUS - SPARE_DESCRIPTORS, True),
    ],
)
def test_connections_fit_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], fits: int, raised: bool | None
) -> None:
    was_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, value: was_set.append(value))
    monkeypatch.setattr("unspool.server.listener._num_descriptors", lambda: 100)
    assert fit_descriptors(1000) == fits
    assert bool(was_set) == bool(raised)
    for soft, hard in was_set:
        assert soft >= fits + 100 + SURPLUS + SPARE_DESCRIPTORS
        assert hard == limits[1]


def test_too_few_descriptors_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    monkeypatch.setattr("unspool.server.listener._num_descriptors", lambda: 30)
    with pytest.raises(EngineError, match="may open 64 files"):
        fit_descriptors(1000)


def test_limits_that_make_no_sense_are_refused() -> None:
    for name in ("max_connections", "max_header", "header_timeout", "idle_timeout"):
        with pytest.raises(Exception, match=f"{name} is 0; it must be above 0"):
            ServerConfig(**{name: 0})

"""A load generator that costs little: raw sockets, one thread, and nothing is parsed until the round is over.

It shares the cores with the server that it loads, so whatever it spends is missing there. A client keeps its
connection, asks, reads its stream to the end and asks again; while a round runs, a piece that arrives is put aside with
the time of its arrival and no more. The processor time that this took is reported.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

END = b"\r\n0\r\n\r\n"  # of a body in chunks


@dataclass
class Sample:
    """One request: when its text came, in seconds after it was sent."""

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Round:
    seconds: float
    samples: list[Sample]
    cpu_seconds: float = 0.0  # of the load generator

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def first(self) -> list[float]:
        return [sample.arrivals[0] for sample in self.samples if sample.arrivals]

    def gaps(self) -> list[float]:
        return [b - a for s in self.samples for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]


@dataclass
class Exchange:
    """A request under way: what came of its response, and when."""

    request: bytes
    sent: float
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    tail: bytes = b""  # the last bytes that came


class Generator:
    """Clients of one server, each with one exchange at a time."""

    def __init__(self, port: int, requests: Iterator[bytes]) -> None:
        self._port, self._requests = port, requests
        self._poll = select.poll()
        self._current: dict[int, tuple[socket.socket, Exchange]] = {}
        self.done: list[Exchange] = []

    def connect(self, request: bytes) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(connection, select.POLLIN)
        self._ask(connection, request)

    def _ask(self, connection: socket.socket, request: bytes) -> None:
        self._current[connection.fileno()] = (connection, Exchange(request, time.perf_counter()))
        connection.sendall(request)

    def run(self) -> None:
        current, clock = self._current, time.perf_counter
        while current:
            for number, _ in self._poll.poll() if len(current) > 1 else [(next(iter(current)), 0)]:
                connection, exchange = current[number]
                piece = connection.recv(1 << 14)
                exchange.times.append(clock())
                exchange.pieces.append(piece)
                exchange.tail = (exchange.tail + piece)[-len(END) :]
                if not piece or exchange.tail == END:
                    self._end(connection, exchange)

    def _end(self, connection: socket.socket, exchange: Exchange) -> None:
        if exchange.pieces == [b""]:  # the server kept the connection for one request alone: ask again on another
            self.close(connection)
            self.connect(exchange.request)
            return
        self.done.append(exchange)
        following = next(self._requests, None)
        if following is None or not exchange.pieces[-1]:
            self.close(connection)
            if following is not None:
                self.connect(following)
        else:
            self._ask(connection, following)

    def close(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        del self._current[connection.fileno()]
        connection.close()


def drive(port: int, bodies: Sequence[dict[str, Any]], clients: int) -> Round:
    """Send every body, `clients` at a time, each to its end."""
    requests = iter([_request(body) for body in bodies])
    generator = Generator(port, requests)
    start, cpu = time.perf_counter(), time.process_time()
    for request in islice(requests, clients):
        generator.connect(request)
    generator.run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Round(seconds, [_sample(exchange) for exchange in generator.done], cpu)


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data


def _sample(exchange: Exchange) -> Sample:
    """What an exchange came to: a time for each event that brought text, and the usage."""
    raw = b"".join(exchange.pieces)
    head, _, _ = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {raw[:2000].decode(errors='replace')}")
    ends, total = [], 0
    for piece in exchange.pieces:
        total += len(piece)
        ends.append(total)
    sample = Sample()
    for event, end in _events(raw, len(head) + 4):
        if any(choice["text"] for choice in event["choices"]):
            sample.arrivals.append(exchange.times[bisect_left(ends, end)] - exchange.sent)
        if event.get("usage"):
            sample.tokens = event["usage"]["completion_tokens"]
    return sample


def _events(raw: bytes, at: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The JSON events of a chunked body that starts at `at`, each with where in `raw` it was whole."""
    line = b""
    while True:
        size_end = raw.index(b"\r\n", at)
        size = int(raw[at:size_end], 16)
        at = size_end + 2
        if size == 0:
            return
        line += raw[at : at + size]
        *whole, line = line.split(b"\n")
        for each in whole:
            if each.startswith(b"data: {"):
                yield json.loads(each[6:]), at + size
        at += size + 2


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    first = sorted(value for one in rounds for value in one.first())
    gaps = sorted(value for one in rounds for value in one.gaps())
    return {
        "tokens_per_second": statistics.median(one.rate for one in rounds),
        "ttft_p50_ms": 1000 * quantile(first, 0.5),
        "ttft_p99_ms": 1000 * quantile(first, 0.99),
        "tbt_p50_ms": 1000 * quantile(gaps, 0.5),
        "tbt_p99_ms": 1000 * quantile(gaps, 0.99),
        "generator_us_per_token": 1e6 * statistics.median(one.cpu_seconds / one.tokens for one in rounds),
    }


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")

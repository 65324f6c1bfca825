"""A load generator that costs little: raw sockets, one thread, and nothing is parsed until the round is over.

It shares the cores with the server that it loads, so whatever it spends is missing there. A client keeps its
connection, asks, reads its stream to the end and asks again; while a round runs, a piece that arrives is put aside with
the time of its arrival and no more. The processor time that this took is told.
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
from typing import Any

END = b"0\r\n\r\n"  # of a body in chunks


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

    sent: float
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def drive(port: int, bodies: Sequence[dict[str, Any]], clients: int) -> Round:
    """Send every body, `clients` at a time, each to its end."""
    requests = iter([_request(body) for body in bodies])
    done: list[Exchange] = []
    poll, clock = select.poll(), time.perf_counter
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
    try:
        start, cpu = clock(), time.process_time()
        current: dict[int, tuple[socket.socket, Exchange]] = {}
        for one, request in zip(sockets, requests, strict=False):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            poll.register(one, select.POLLIN)
            current[one.fileno()] = (one, Exchange(clock()))
            one.sendall(request)
        while current:
            for number, _ in poll.poll() if len(current) > 1 else [(next(iter(current)), 0)]:  # one alone just reads
                one, exchange = current[number]
                piece = one.recv(1 << 14)
                exchange.times.append(clock())
                exchange.pieces.append(piece)
                if piece and not piece.endswith(END):
                    continue
                done.append(exchange)
                following = next(requests, None) if piece else None
                if following is None:
                    poll.unregister(one)
                    del current[number]
                else:
                    current[number] = (one, Exchange(clock()))
                    one.sendall(following)
        seconds, cpu = clock() - start, time.process_time() - cpu
    finally:
        for one in sockets:
            one.close()
    return Round(seconds, [_sample(exchange) for exchange in done], cpu)


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

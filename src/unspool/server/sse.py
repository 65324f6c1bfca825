"""Server-sent events: framing, and a response that aborts its source when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]
Write = Callable[[bytes], None]

DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """JSON in UTF-8, without NaN or infinities. A lone surrogate, which UTF-8 cannot encode, stays escaped."""
    text = _encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. Encoded JSON has no line breaks, so the data is one line."""
    head = b"event: " + event.encode() + b"\n" if event is not None else b""
    return head + b"data: " + dumps(data) + b"\n\n"


class ChunkTemplate:
    """Renders events that differ only in one text: everything around the text is encoded once."""

    TEXT = "\0text\0"  # stands for the text in the event that the template is made from

    def __init__(self, event: bytes) -> None:
        self._before, self._after = event.split(dumps(self.TEXT))

    def render(self, text: str) -> bytes:
        return self._before + dumps(text) + self._after


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response. `feed` writes framed events and returns when there are no more, soon after `abort`.

    A write goes straight to the socket, whatever the event loop is running: most clients keep up, and waking a task for
    each token would cost more than everything else. If the socket is full, a task waits for it, and later writes are
    queued.
    """

    def __init__(
        self, feed: Callable[[Write], Awaitable[None]], abort: Callable[[], None], *, ping_interval: float
    ) -> None:
        self._feed, self._abort, self._ping_interval = feed, abort, ping_interval
        self._pending: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None  # waits for a slow client
        self._is_lost = False  # the client disconnected
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._now = scope.get("unspool.send", send), asyncio.get_running_loop().time
        watching = asyncio.create_task(self._watch(receive))
        pinging = asyncio.create_task(self._ping())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            self._last_write = self._now()
            await self._feed(self.write)
            if self._flushing is not None:
                await asyncio.wait([self._flushing])
            if not self._is_lost:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            self._is_lost = True
        finally:
            self._abort()
            for task in (watching, pinging, self._flushing):
                if task is not None:
                    task.cancel()

    def write(self, data: bytes) -> None:
        if self._is_lost or not data:
            return
        if self._flushing is not None:
            self._pending.append(data)
            return
        self._last_write = self._now()
        try:
            rest = begin(self._send(_body(data)))
        except OSError:
            self._lose()
            return
        if rest is not None:
            self._flushing = asyncio.create_task(self._flush(rest))

    async def _flush(self, rest: Awaitable[None]) -> None:
        try:
            await rest
            while self._pending:
                data, self._pending = b"".join(self._pending), []
                self._last_write = self._now()
                await self._send(_body(data))
        except OSError:
            self._lose()
        self._flushing = None

    def _lose(self) -> None:
        self._is_lost = True
        self._pending.clear()
        self._abort()

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._abort()

    async def _ping(self) -> None:
        """Send comments while there is no output, because proxies close silent connections."""
        while True:
            await asyncio.sleep(self._ping_interval / 2)
            if self._flushing is None and self._now() - self._last_write >= self._ping_interval:
                self.write(PING)


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer the stream
]


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def begin(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run a coroutine until it first waits. Returns the rest as an awaitable, or None if it has finished."""
    try:
        return Rest(coroutine, coroutine.send(None))
    except StopIteration:
        return None


class Rest:
    """A coroutine that was started outside any task, and the first thing that it waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        awaited = self._awaited
        while True:
            try:
                try:
                    yield awaited
                except BaseException as error:
                    awaited = self._coroutine.throw(error)
                else:
                    awaited = self._coroutine.send(None)
            except StopIteration:
                return

"""Server-sent events: framing, and a response that ends its source when its reader goes away or stands still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """JSON as it is sent: UTF-8, nothing that is not JSON. A lone surrogate, which UTF-8 lacks, stays escaped."""
    text = _encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. JSON holds no line break, so its data is one line."""
    head = b"event: " + event.encode() + b"\n" if event is not None else b""
    return head + b"data: " + dumps(data) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response. `source` gives framed events and ends by itself after `abort`."""

    def __init__(
        self,
        source: AsyncIterator[bytes],
        abort: Callable[[], None],
        *,
        stall_timeout: float,
        ping_interval: float,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self._source, self._abort = source, abort
        self._stall_timeout, self._ping_interval = stall_timeout, ping_interval
        self._headers = headers or []
        self._writing = asyncio.Lock()
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy that gathers the stream would defeat it
            *self._headers,
        ]
        watcher = asyncio.create_task(self._watch(receive))
        pinger = asyncio.create_task(self._ping(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._source:
                await self._write(send, data)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the reader left, or took nothing for too long: there is nobody to tell
            pass
        finally:
            self._abort()
            watcher.cancel()
            pinger.cancel()

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._writing:
            async with asyncio.timeout(self._stall_timeout):  # TimeoutError is an OSError
                await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_write = asyncio.get_running_loop().time()

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._abort()

    async def _ping(self, send: Send) -> None:
        """Proxies cut a connection that is silent for long; a comment is no event."""
        now = asyncio.get_running_loop().time
        self._last_write = now()
        while True:
            await asyncio.sleep(self._ping_interval)
            if now() - self._last_write >= self._ping_interval and not self._writing.locked():
                try:
                    await self._write(send, PING)
                except OSError:
                    self._abort()
                    return

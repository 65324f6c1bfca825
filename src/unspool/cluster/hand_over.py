"""What a server does when the application's model was replaced: requests that have no answer yet go to a newer server.

While a cluster's application is updated there are two servers for a moment: one with the tokenizer of the old model,
whose replicas are gone, and a newer one with replicas. A request that the first cannot have computed any more was not
answered in any part, so the second can answer it as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from typing import Any, Protocol

from unspool.errors import EngineError
from unspool.server.sse import Receive, Scope, Send

Message = MutableMapping[str, Any]  # of ASGI
UNAVAILABLE = 503
SENT_ON = ("method", "path", "raw_path", "query_string", "root_path", "scheme", "http_version", "client", "server")


class Successor(Protocol):
    """A newer server of the same application."""

    def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """The messages of a response. EngineError: the server did not answer, or was lost."""


class Find(Protocol):
    async def __call__(self) -> Successor | None:
        """The server that took the place of this one; None while this one is to answer by itself."""


class HandOver:
    """An ASGI application: another one, whose responses 503 to POSTs are replaced by a successor's answer."""

    def __init__(self, app: Any, find: Find) -> None:
        self._app, self._find = app, find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(receive, send)
        await self._app(scope, exchange.receive, exchange.send)
        if not exchange.held:
            return
        successor = await self._find() if exchange.is_whole else None
        if successor is None or not await _answered(successor, scope, exchange):
            for message in exchange.held:
                await send(message)


class Exchange:
    """One request and its response. A response 503 is held back, and so is known as a whole."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._parts: list[bytes] = []
        self._has_begun = False
        self.is_whole = False  # the request's body was read to its end, and the client is there
        self.held: list[Message] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_whole = False
        elif not self._has_begun:
            self._parts.append(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Any) -> None:
        if not self._has_begun and (self.held or message.get("status") == UNAVAILABLE):
            self.held.append(message)
            return
        await self.send_on(message)

    async def send_on(self, message: Any) -> None:
        """Send a part of the response; from now on it cannot be another one."""
        if not self._has_begun:
            self._has_begun = True
            self._parts.clear()
        await self._send(message)

    async def until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _answered(successor: Successor, scope: Scope, exchange: Exchange) -> bool:
    """Send a successor's response. False: it sent none, and the client is there."""
    sent_on = {name: scope[name] for name in SENT_ON if name in scope} | {"headers": list(scope["headers"])}
    messages = successor.answer(sent_on, exchange.body)
    leaving = asyncio.ensure_future(exchange.until_gone())
    sending = asyncio.ensure_future(_send_all(messages, exchange))
    try:
        await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
        return leaving.done() or await sending
    finally:
        for task in (leaving, sending):
            task.cancel()
        await asyncio.gather(leaving, sending, return_exceptions=True)
        await messages.aclose()


async def _send_all(messages: AsyncGenerator[Message], exchange: Exchange) -> bool:
    has_sent = False
    try:
        async for message in messages:
            await exchange.send_on(message)
            has_sent = True
    except EngineError:
        if has_sent:  # a broken connection says that the response is not whole
            raise
    return has_sent


async def messages_of(app: Any, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message]:
    """What an application responds to a request. Leaving the iterator disconnects the client."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message | None] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Message) -> None:
        outbox.put_nowait(message)

    running = asyncio.ensure_future(app({"type": "http", **scope}, inbox.get, send))
    running.add_done_callback(lambda _: outbox.put_nowait(None))
    try:
        while (message := await outbox.get()) is not None:
            yield message
        await running  # raises what it raised
    finally:
        inbox.put_nowait({"type": "http.disconnect"})
        with contextlib.suppress(Exception):
            await asyncio.wait_for(running, 5.0)

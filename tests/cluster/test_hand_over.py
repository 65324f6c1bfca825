"""Requests that a server cannot answer, for another model took the place of its own: a newer server answers them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import pytest

from unspool.cluster.hand_over import HandOver, Message, messages_of
from unspool.errors import ReplicaLostError

BODY = b'{"prompt": "Once"}'


def responding(status: int, *parts: bytes) -> Any:
    """An application that reads a request and responds with these parts, and its path and body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-path", scope["path"].encode())]})
        for part in (*parts, body):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


class Newer:
    """A successor that is an application of this process."""

    def __init__(self, app: Any, messages: int | None = None) -> None:
        self.app, self.left = app, messages
        self.num_asked = 0

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message]:
        self.num_asked += 1
        async with contextlib.aclosing(messages_of(self.app, scope, body)) as messages:
            async for message in messages:
                if self.left == 0:
                    raise ReplicaLostError("the newer server was lost")
                self.left = None if self.left is None else self.left - 1
                yield message

    async def find(self) -> Newer:
        return self


async def nobody() -> None:
    return None


async def ask(app: Any, method: str = "POST", content: Any = BODY) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return await client.request(method, "/v1/completions", content=content)


def test_a_newer_server_answers_what_this_one_cannot() -> None:
    newer = Newer(responding(200, b"one ", b"two "))
    answer = asyncio.run(ask(HandOver(responding(503, b"no replica"), newer.find)))
    assert (answer.status_code, answer.content) == (200, b"one two " + BODY)
    assert answer.headers["x-path"] == "/v1/completions"
    assert newer.num_asked == 1


def test_a_body_in_parts_is_sent_on_as_a_whole() -> None:
    async def parts() -> AsyncGenerator[bytes]:
        yield BODY[:5]
        yield BODY[5:]

    newer = Newer(responding(200))
    answer = asyncio.run(ask(HandOver(responding(503), newer.find), content=parts()))
    assert (answer.status_code, answer.content) == (200, BODY)


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_what_this_server_answers_is_its_answer(status: int) -> None:
    newer = Newer(responding(200))
    answer = asyncio.run(ask(HandOver(responding(status, b"mine "), newer.find)))
    assert (answer.status_code, answer.content) == (status, b"mine " + BODY)
    assert newer.num_asked == 0


def test_without_a_newer_server_the_error_is_told() -> None:
    answer = asyncio.run(ask(HandOver(responding(503, b"no replica "), nobody)))
    assert (answer.status_code, answer.content) == (503, b"no replica " + BODY)


def test_a_servers_own_pages_are_its_own() -> None:
    newer = Newer(responding(200))
    answer = asyncio.run(ask(HandOver(responding(503, b"not ready "), newer.find), "GET"))
    assert answer.status_code == 503
    assert newer.num_asked == 0


def test_a_newer_server_that_is_lost_before_its_response_leaves_the_first_error() -> None:
    answer = asyncio.run(ask(HandOver(responding(503, b"no replica "), Newer(responding(200), messages=0).find)))
    assert (answer.status_code, answer.content) == (503, b"no replica " + BODY)


def test_a_newer_server_that_is_lost_within_its_response_breaks_the_connection() -> None:
    with pytest.raises(ReplicaLostError, match="newer server was lost"):
        asyncio.run(ask(HandOver(responding(503), Newer(responding(200, b"one"), messages=2).find)))


def test_a_client_that_leaves_ends_the_request_on_the_newer_server() -> None:
    seen: list[str] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append("response")
        seen.append((await receive())["type"])

    async def check() -> None:
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": BODY, "more_body": False})
        started = asyncio.Event()

        async def send(message: Any) -> None:
            assert message["status"] == 200
            started.set()

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        running = asyncio.ensure_future(HandOver(responding(503), Newer(endless).find)(scope, inbox.get, send))
        async with asyncio.timeout(600):
            await started.wait()
            inbox.put_nowait({"type": "http.disconnect"})
            await running

    asyncio.run(check())
    assert seen == ["response", "http.disconnect"]


def test_an_error_of_the_newer_server_is_raised() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(ask(HandOver(responding(503), Newer(broken).find)))

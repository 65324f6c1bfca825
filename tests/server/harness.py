"""A server on a tiny random model: in process, or on a socket of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from unspool.llm import LLM
from unspool.models.random import SHAPES, random_checkpoint
from unspool.server.app import build
from unspool.server.config import ServerConfig
from unspool.server.host import ModelHost
from unspool.server.run import Server, uvicorn_config
from unspool.server.service import Service

# ChatML, with tools told and called as Hermes' models do it.
TEMPLATE = """\
{%- if tools %}<s>tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call with <tool_call>{"name": …, "arguments": …}</tool_call></s>{% endif %}
{%- for message in messages %}<s>{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>
{%- endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"""


CONTEXT = 2048
PATIENCE = 600.0  # seconds until a test that hangs is given up


def make_llm(template: str | None = TEMPLATE, context: int = CONTEXT, **options: Any) -> LLM:
    shape = dataclasses.replace(SHAPES["tiny"], context_length=context)
    checkpoint = dataclasses.replace(random_checkpoint(shape), chat_template=template)
    return LLM(checkpoint, **({"device": "cpu", "threads": 1, "kv_tokens": 8192} | options))


class Client:
    """Talks to the application without a socket. An answer is returned when it has ended; `sent` has by path what came
    of it so far."""

    def __init__(self, service: Service, app: Any = None) -> None:
        self.service, self._app = service, app or build(service)
        self.sent: dict[str, bytearray] = defaultdict(bytearray)
        transport = httpx.ASGITransport(self._noted, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)

    async def _noted(self, scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            self.sent[scope["path"]] += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, note)

    async def has_sent(self, path: str, text: bytes, count: int = 1) -> None:
        """Wait until so much has come."""
        while self.sent[path].count(text) < count:
            await asyncio.sleep(0.005)

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        return await self.http.post(path, content=json.dumps(body), headers=headers, **more)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.http.get(path, **more)

    async def ok(self, path: str, body: Any) -> dict[str, Any]:
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        value: dict[str, Any] = response.json()
        return value

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    async def events(self, path: str, body: Any) -> list[tuple[str | None, Any]]:
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.content)


def parse_events(data: bytes) -> list[tuple[str | None, Any]]:
    """Server-sent events, strictly: every block is fields, every data line JSON or [DONE]."""
    assert data.endswith(b"\n\n")
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = None, None
        for line in block.split("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                assert payload is None, "data in two lines"
                payload = value if value == "[DONE]" else json.loads(value)
            else:
                assert line.startswith(":"), f"a line that is no field: {line!r}"
        events.append((name, payload))
    return events


def in_process(
    test: Callable[[Client], Awaitable[None]], config: ServerConfig | None = None, llm: LLM | None = None
) -> None:
    """Run a test against a fresh service; afterwards every block is free and nobody is left."""

    async def run(llm: LLM) -> None:
        service = await open_service(llm, config or ServerConfig(log_format="off"))
        client = Client(service)
        try:
            async with asyncio.timeout(PATIENCE):
                await test(client)
                await idle(llm)
                await llm.driver.call_async(lambda engine: engine.check())
        finally:
            await client.http.aclose()
            await service.engine.shutdown()

    asyncio.run(run(llm or make_llm()))


async def open_service(llm: LLM, config: ServerConfig) -> Service:
    """The service of a model. `pytest -p tests.cluster.pooled_server` puts a pool of replicas in its place."""
    return Service(llm, config)


async def idle(llm: LLM) -> None:
    """Wait until the engine has nothing left to do."""
    while await llm.driver.call_async(lambda engine: engine.has_work):
        await asyncio.sleep(0.01)
    stats = llm.engine.stats
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["blocks_free"] == stats["blocks"]


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.005)


class Live:
    """A server on 127.0.0.1, in a thread."""

    def __init__(self, config: ServerConfig, llm: LLM | None = None, *, host: ModelHost | None = None) -> None:
        """Serves a model, or the models of a host."""
        self.service: Service
        self._ready = threading.Event()
        self._config, self._llm, self._host = config, llm, host
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the server did not start"
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._host is None:
            assert self._llm is not None
            self.service = await open_service(self._llm, self._config)
        served = self._host or self.service
        config: uvicorn.Config = uvicorn_config(build(served), self._config)
        self.server = Server(config, served)
        serving = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving

    def wait_idle(self) -> None:
        assert self._llm is not None
        driver = self._llm.driver
        wait_until(lambda: driver.call(lambda engine: not engine.has_work))
        stats = driver.call(lambda engine: dict(engine.stats))
        assert (stats["running"], stats["waiting"]) == (0, 0), stats
        assert stats["blocks_free"] == stats["blocks"], stats

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile the server does nothing, and no time runs out in it."""
        stands, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            stands.set()
            assert go_on.wait(PATIENCE)

        self._loop.call_soon_threadsafe(pause)
        assert stands.wait(PATIENCE)
        try:
            yield
        finally:
            go_on.set()

    def settle(self) -> None:
        """Wait until what the event loop is at has been done."""
        with self.paused():
            pass

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not stop"

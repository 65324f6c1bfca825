"""From HTTP requests to endpoints and back: one handler for all paths that take a body, one for those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from unspool.server.dialect import Body, Writer
from unspool.server.endpoints import ENDPOINTS, PAGES, Endpoint, Generation, Page, prepare
from unspool.server.faults import fault_of
from unspool.server.http import BodyReader, parse_object
from unspool.server.job import Job, Run
from unspool.server.pages import json_response
from unspool.server.service import LARGE, Service
from unspool.server.sse import EventStream, Write, until_gone
from unspool.server.tracing import Span, Tracer

Handler = Callable[[Request], Awaitable[Any]]


class Routes:
    def __init__(self, service: Service, tracer: Tracer) -> None:
        self.service, self.tracer = service, tracer
        self.reader = BodyReader(service.config)

    def table(self) -> list[Route]:
        posts = [Route(path, self._endpoint(endpoint), methods=["POST"]) for path, endpoint in ENDPOINTS.items()]
        # A model's name may hold slashes.
        gets = [
            Route(path.replace("{name}", "{name:path}"), self._page(page), methods=["GET"])
            for path, page in PAGES.items()
        ]
        return [*posts, *gets]

    def _page(self, page: Page) -> Handler:
        async def handle(request: Request) -> Any:
            request.scope["unspool.route"] = page.path
            if page.of_engine and self.service.local is None:
                return await self.service.ask_engine(request)
            return await page.answer(self.service, request)

        return handle

    def _endpoint(self, endpoint: Endpoint) -> Handler:
        async def handle(request: Request) -> Any:
            request.scope["unspool.route"] = endpoint.path  # for metrics and logs
            async with self.reader.read(request) as data:
                prepare = partial(self._prepare, endpoint, data)
                body, prepared = await self.service.offload(len(data), prepare)
            if isinstance(prepared, Response):
                return prepared
            assert isinstance(endpoint.answers, Generation)
            return await self._generate(request, endpoint.answers, body, prepared)

        return handle

    def _prepare(self, endpoint: Endpoint, data: bytes) -> tuple[Body, Job | Response]:
        """In another thread: the body, and the job that it asks for or the answer to it."""
        body = parse_object(data)
        prepared = prepare(self.service, endpoint, body)
        return body, prepared if isinstance(prepared, Job) else json_response(prepared)

    async def _generate(self, request: Request, generation: Generation, body: Body, job: Job) -> Any:
        span = self.tracer.begin(generation.operation, request, job)
        job.traceparent = span.traceparent
        try:
            run = await self.service.start(job)
        except BaseException as error:
            span.fail(error)
            raise
        span.start(run)
        writer = generation.writer(self.service, run, body)
        if job.stream and isinstance(writer, Writer):
            feed = partial(self._feed, request, run, writer, span)
            return EventStream(feed, run.abort, ping_interval=self.service.config.ping_interval)
        try:
            await self._finish(request, run)
        finally:
            span.end(run)
        if run.size <= LARGE:
            return json_response(writer.body())
        return await self.service.offload(run.size, lambda: json_response(writer.body()))

    async def _feed(self, request: Request, run: Run, writer: Writer, span: Span, write: Write) -> None:
        """Write an answer's events. What one of the engine's events gives goes out in one write."""
        try:
            write(b"".join(writer.begin()))
            run.listen(lambda delta: write(b"".join(writer.write(delta))))
            await self.service.finish(run)
            write(b"".join(writer.end()))
        except Exception as error:
            write(b"".join(writer.fail(fault_of(error))))
        finally:
            request.scope["unspool.facts"] = _facts(run)
            span.end(run)

    async def _finish(self, request: Request, run: Run) -> None:
        """Run to the end, or until nobody waits for it."""
        watcher = asyncio.create_task(until_gone(request.receive))
        watcher.add_done_callback(lambda task: run.abort() if not task.cancelled() else None)
        try:
            await self.service.finish(run)
        finally:
            watcher.cancel()
            request.scope["unspool.facts"] = _facts(run)


def _facts(run: Run) -> dict[str, Any]:
    """What the access log says of an answer."""
    facts: dict[str, Any] = {"prompt_tokens": sum(len(ids) for ids, _ in run.job.prompts)}
    facts["completion_tokens"] = sum(len(choice.tokens) for choice in run.choices)
    facts["finish"] = ",".join(end.reason for end in run.ends)
    return facts

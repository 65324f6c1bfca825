"""From HTTP requests to endpoints and back: one handler for all paths with a body, one for those without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from unspool.server.dialect import WholeWriter, Writer
from unspool.server.endpoints import (
    ENDPOINTS,
    PAGES,
    Checked,
    Endpoint,
    EnginePage,
    Generation,
    OfHost,
    Page,
    check,
    prepare,
)
from unspool.server.faults import HTTPFault, fault_of
from unspool.server.host import Lease, ModelHost
from unspool.server.http import BodyReader, parse_object
from unspool.server.job import Job, Run
from unspool.server.pages import json_response
from unspool.server.quotas import Account, Admission
from unspool.server.service import LARGE, Service
from unspool.server.sse import EventStream, Write, until_gone
from unspool.server.tracing import Span, Tracer

Handler = Callable[[Request], Awaitable[Any]]


class Routes:
    def __init__(self, host: ModelHost, tracer: Tracer) -> None:
        self.host, self.tracer = host, tracer
        self.reader = BodyReader(host.config)

    def table(self) -> list[Route]:
        posts = [
            Route(path, self._endpoint(endpoint), methods=["POST"])
            for endpoint in ENDPOINTS.values()
            for path in (endpoint.path, *endpoint.also)
        ]
        # A model's name may contain slashes.
        gets = [
            Route(path.replace("{name}", "{name:path}"), self._page(page), methods=["GET"])
            for page in PAGES.values()
            for path in (page.path, *page.also)
        ]
        return [*posts, *gets]

    def _page(self, page: Page | EnginePage) -> Handler:
        async def handle(request: Request) -> Any:
            request.scope["unspool.route"] = page.path
            if isinstance(page, Page):
                return await page.answer(self.host, request)
            service = self.host.loaded(request.query_params.get("model"))
            if service.local is None:
                return await service.ask_engine(request)
            return await page.answer(service, request)

        return handle

    def _endpoint(self, endpoint: Endpoint) -> Handler:
        async def handle(request: Request) -> Any:
            request.scope["unspool.route"] = endpoint.path  # for metrics and logs
            self._admit(request)
            async with self.reader.read(request) as data:
                checked = await self.host.workers.offload(len(data), partial(self._check, endpoint, data))
                if isinstance(endpoint.answers, OfHost):
                    return json_response(endpoint.answers.answer(self.host, checked.body))
                model = self.host.find(checked.model)
                lease = request.scope["unspool.lease"] = Lease(self.host, model)  # the guard releases it
                service = lease.service or await self._load(request, lease, streams=checked.streams)
                if service is not None:
                    return await self._answer(request, checked, service, len(data))
            return self._stream_late(request, checked, lease, len(data))

        return handle

    def _admit(self, request: Request) -> None:
        """Count the request against its key's limits, if there are keys; a fault if it exceeds them."""
        account: Account | None = request.scope.get("unspool.account")
        if account is not None:
            request.scope["unspool.admission"] = account.admit(self.host.retry_after())  # the guard ends it

    def _check(self, endpoint: Endpoint, data: bytes) -> Checked:
        """In another thread: the body."""
        return check(endpoint, parse_object(data), lenient=self.host.config.lenient)

    async def _load(self, request: Request, lease: Lease, *, streams: bool) -> Service | None:
        """Wait until the model is loaded or the client leaves. None: its stream must start now with comments."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(lease.wait()),
            asyncio.create_task(until_gone(request.receive)),
        ]
        loading, leaving = tasks
        try:
            limit = self.host.config.ping_interval if streams else None
            await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                return lease.service if loading.exception() is None else loading.result()
            if leaving.done():
                raise HTTPFault(400, "the client left before the model was loaded", code="client_disconnected")
            return None
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: Request, checked: Checked, service: Service, size: int) -> Any:
        prepared = await service.offload(size, partial(self._prepare, service, checked))
        if isinstance(prepared, Response):
            return prepared
        run, writer, span = await self._start(request, service, checked, prepared)
        if prepared.stream and isinstance(writer, Writer):
            feed = partial(self._feed, request, service, run, writer, span)
            return EventStream(feed, run.abort, ping_interval=service.config.ping_interval)
        try:
            await self._finish(request, service, run)
        finally:
            span.end(run)
        if run.size <= LARGE:
            return json_response(writer.body())
        return await service.offload(run.size, lambda: json_response(writer.body()))

    def _prepare(self, service: Service, checked: Checked) -> Job | Response:
        """In another thread: the job that a body asks for, or the answer to it."""
        prepared = prepare(service, checked)
        return prepared if isinstance(prepared, Job) else json_response(prepared)

    async def _start(
        self, request: Request, service: Service, checked: Checked, job: Job
    ) -> tuple[Run, WholeWriter, Span]:
        generation = checked.endpoint.answers
        assert isinstance(generation, Generation)
        span = self.tracer.begin(generation.operation, request, job, service.name)
        job.traceparent = span.traceparent
        admission: Admission | None = request.scope.get("unspool.admission")
        try:
            if admission is not None:
                admission.reserve(job.prompts, service.llm.engine.context_length)
            run = await service.start(job)
            if admission is not None:
                admission.run = run
        except BaseException as error:
            if admission is not None:
                admission.settle()
            span.fail(error)
            raise
        span.start(run)
        return run, generation.writer(service, run, checked.body), span

    def _stream_late(self, request: Request, checked: Checked, lease: Lease, size: int) -> EventStream:
        """A stream whose model is still being loaded: comments report the progress."""
        generation, runs, model = checked.endpoint.answers, list[Run](), lease.model
        assert isinstance(generation, Generation)
        tasks: list[asyncio.Task[Service]] = []

        def abort() -> None:
            for task in tasks:
                task.cancel()
            for run in runs:
                run.abort()

        async def feed(write: Write) -> None:
            loading = asyncio.create_task(lease.wait())
            tasks.append(loading)
            try:
                while not loading.done():
                    write(b": loading %d%%\n\n" % int(100 * model.progress))
                    await asyncio.wait([loading], timeout=self.host.config.ping_interval)
                service = loading.result()
                job = await service.offload(size, partial(self._prepare, service, checked))
                assert isinstance(job, Job)
                run, writer, span = await self._start(request, service, checked, job)
            except Exception as error:
                write(b"".join(generation.writer.refuse(fault_of(error, retry_after=self.host.retry_after(model)))))
                return
            runs.append(run)
            assert isinstance(writer, Writer)
            await self._feed(request, service, run, writer, span, write)

        return EventStream(feed, abort, ping_interval=self.host.config.ping_interval)

    async def _feed(
        self, request: Request, service: Service, run: Run, writer: Writer, span: Span, write: Write
    ) -> None:
        """Write an answer's events. The output of one engine event goes out in one write."""
        try:
            write(b"".join(writer.begin()))
            run.listen(lambda delta: write(b"".join(writer.write(delta))))
            await service.finish(run)
            write(b"".join(writer.end()))
        except Exception as error:
            write(b"".join(writer.fail(fault_of(error))))
        finally:
            _settle(request, run)
            span.end(run)

    async def _finish(self, request: Request, service: Service, run: Run) -> None:
        """Run to the end, or until the client disconnects."""
        watcher = asyncio.create_task(until_gone(request.receive))
        watcher.add_done_callback(lambda task: run.abort() if not task.cancelled() else None)
        try:
            await service.finish(run)
        finally:
            watcher.cancel()
            _settle(request, run)


def _settle(request: Request, run: Run) -> None:
    """After an answer has ended: note its result for the access log, and return unused tokens to its key."""
    request.scope["unspool.facts"] = _facts(run)
    admission: Admission | None = request.scope.get("unspool.admission")
    if admission is not None:
        admission.settle()


def _facts(run: Run) -> dict[str, Any]:
    """The access log's fields of an answer."""
    facts: dict[str, Any] = {"prompt_tokens": sum(len(ids) for ids, _ in run.job.prompts)}
    facts["completion_tokens"] = sum(len(choice.tokens) for choice in run.choices)
    facts["finish"] = ",".join(end.reason for end in run.ends)
    return facts

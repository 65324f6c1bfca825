"""Which path does what: a table. Generating endpoints share one handler, for they differ in dialect alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from unspool.server import messages, plain, schema
from unspool.server.chat import ChatDialect
from unspool.server.completions import CompletionDialect
from unspool.server.dialect import Body, Dialect, Writer, check_stream_options
from unspool.server.faults import HTTPFault, fault_of
from unspool.server.http import BodyReader
from unspool.server.kinds import Checker, Schema
from unspool.server.messages import MessageDialect
from unspool.server.responses import ResponseDialect
from unspool.server.service import Run, Service
from unspool.server.sse import EventStream, Write, dumps, until_gone
from unspool.server.tracing import Tracer

Handler = Callable[[Request], Awaitable[Any]]

GENERATING: dict[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionDialect(),
    "/v1/responses": ResponseDialect(),
    "/v1/messages": MessageDialect(),
}
PLAIN: dict[str, tuple[Schema, Callable[[Service, Body], Awaitable[Body]]]] = {
    "/v1/messages/count_tokens": (schema.COUNT_TOKENS, messages.count_tokens),
    "/v1/embeddings": (schema.EMBEDDINGS, plain.embeddings),
    "/tokenize": (schema.TOKENIZE, plain.tokenize),
    "/detokenize": (schema.DETOKENIZE, plain.detokenize),
}


class Routes:
    def __init__(self, service: Service, tracer: Tracer) -> None:
        self.service, self.tracer = service, tracer
        self.reader = BodyReader(service.config)

    def table(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        routes = [Route(path, self._generating(path, dialect), methods=post) for path, dialect in GENERATING.items()]
        routes += [Route(path, self._plain(path, *about), methods=post) for path, about in PLAIN.items()]
        routes += [
            Route("/v1/score", self._marked("/v1/score", self._score), methods=post),
            Route("/v1/models", self._marked("/v1/models", self._models), methods=get),
            Route("/v1/models/{name:path}", self._marked("/v1/models/{name}", self._model), methods=get),
            Route("/health", self._marked("/health", self._health), methods=get),
            Route("/ready", self._marked("/ready", self._ready), methods=get),
            Route("/metrics", self._marked("/metrics", self._metrics), methods=get),
            Route("/openapi.json", self._marked("/openapi.json", self._openapi), methods=get),
            Route("/docs", self._marked("/docs", self._docs), methods=get),
        ]
        return routes

    def _marked(self, path: str, handler: Handler) -> Handler:
        """The route's pattern goes with the request, for metrics and logs."""

        async def handle(request: Request) -> Any:
            request.scope["unspool.route"] = path
            return await handler(request)

        return handle

    # Generating -----------------------------------------------------------------------------------------------------
    def _generating(self, path: str, dialect: Dialect) -> Handler:
        async def handle(request: Request) -> Any:
            body, warnings = await self._checked(request, dialect.schema)
            check_stream_options(body)
            job = await dialect.prepare(self.service, body)
            job.warnings = [*warnings, *job.warnings]
            run = await self.service.start(job)
            writer = dialect.writer(self.service, run, body)
            span = self.tracer.begin(dialect.operation, request, run)
            if job.stream:
                return self._stream(request, run, writer, span)
            await self._finish(request, run)
            span.end(run)
            return self._json(writer.body())

        return self._marked(path, handle)

    def _stream(self, request: Request, run: Run, writer: Writer, span: Any) -> EventStream:
        feed = partial(self._feed, request, run, writer, span)
        return EventStream(feed, run.abort, ping_interval=self.service.config.ping_interval)

    async def _feed(self, request: Request, run: Run, writer: Writer, span: Any, write: Write) -> None:
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

    async def _checked(self, request: Request, schema: Schema) -> tuple[Body, list[str]]:
        try:
            body = await self.reader.read(request)
        except ClientDisconnect:
            raise HTTPFault(400, "the client left before its body was whole", code="client_disconnected") from None
        checker = Checker(lenient=self.service.config.lenient)
        checker.check(schema, body)
        self.service.check_model(body.get("model"))
        return body, checker.warnings

    # In one piece ---------------------------------------------------------------------------------------------------
    def _plain(self, path: str, schema: Schema, answer: Callable[[Service, Body], Awaitable[Body]]) -> Handler:
        async def handle(request: Request) -> Response:
            body, warnings = await self._checked(request, schema)
            result = await answer(self.service, body)
            return self._json(result | ({"unspool": {"warnings": warnings}} if warnings else {}))

        return self._marked(path, handle)

    async def _score(self, request: Request) -> Response:
        body, warnings = await self._checked(request, schema.SCORE)
        job = await plain.prepare_score(self.service, body)
        job.warnings = warnings
        run = await self.service.start(job)
        await self._finish(request, run)
        return self._json(plain.score_body(self.service, run))

    async def _models(self, request: Request) -> Response:
        return self._json({"object": "list", "data": [plain.model_entry(self.service, self.service.name)]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.service.check_model(name)
        return self._json(plain.model_entry(self.service, name))

    async def _health(self, request: Request) -> Response:
        failure = self.service.engine.failure
        if failure is not None:
            return self._json({"status": "failed", "message": str(failure)}, 503)
        return self._json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        state = self.service.state
        return self._json({"status": state}, 200 if state == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        from unspool.server.openapi import document

        return self._json(document())

    async def _docs(self, request: Request) -> Response:
        from unspool.web import docs_page

        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return Response(docs_page(), media_type="text/html", headers={"content-security-policy": policy})

    def _json(self, value: Any, status: int = 200) -> Response:
        return Response(dumps(value), status, media_type="application/json")


def _facts(run: Run) -> dict[str, Any]:
    """What the access log says of an answer."""
    ends = [choice.end for choice in run.answer.choices if choice.end is not None]
    facts: dict[str, Any] = {"prompt_tokens": sum(len(ids) for ids, _ in run.job.prompts)}
    facts["completion_tokens"] = sum(len(choice.tokens) for choice in run.answer.choices)
    facts["finish"] = ",".join(end.reason for end in ends)
    return facts

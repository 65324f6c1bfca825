"""Every endpoint, in one table: routes, /openapi.json, the documents' tables, the try-out page and batches read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unspool.errors import RequestError
from unspool.server import anthropic, chat_completions, completions, pages, responses, schema, scores, tokens
from unspool.server.dialect import Body, WholeWriter
from unspool.server.kinds import Checker, Schema
from unspool.server.service import Job, Run, Service


@dataclass(frozen=True)
class Generation:
    """An endpoint that asks the engine: how a body becomes a job, and what writes the answer."""

    prepare: Callable[[Service, Body], Awaitable[Job]]
    writer: type[WholeWriter]
    operation: str  # the name that OpenTelemetry's conventions have for it


Direct = Callable[[Service, Body], Awaitable[Body]]  # an endpoint that answers at once


@dataclass(frozen=True)
class Endpoint:
    """A path that takes a body."""

    path: str
    id: str  # of the operation in /openapi.json
    summary: str
    schema: Schema
    answers: Generation | Direct
    example: Body

    @property
    def streams(self) -> bool:
        return "stream" in self.schema["properties"]


@dataclass(frozen=True)
class Page:
    """A path that is read. `statuses`: what it can answer with besides 200."""

    path: str
    id: str
    summary: str
    answer: Callable[[Service, Request], Awaitable[Response]]
    media_type: str = "application/json"
    statuses: tuple[int, ...] = ()


_HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Why is the sky blue?"}]
ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(
            "/v1/chat/completions",
            "createChatCompletion",
            "Answer a conversation.",
            schema.CHAT,
            Generation(chat_completions.prepare, chat_completions.ChatWriter, "chat"),
            {"messages": _HELLO, "max_completion_tokens": 64},
        ),
        Endpoint(
            "/v1/completions",
            "createCompletion",
            "Continue texts.",
            schema.COMPLETIONS,
            Generation(completions.prepare, completions.CompletionWriter, "text_completion"),
            {"prompt": "Once upon a time", "max_tokens": 32},
        ),
        Endpoint(
            "/v1/responses",
            "createResponse",
            "Answer, in the form of OpenAI's responses.",
            schema.RESPONSES,
            Generation(responses.prepare, responses.ResponseWriter, "chat"),
            {"input": "Why is the sky blue?", "max_output_tokens": 64},
        ),
        Endpoint(
            "/v1/messages",
            "createMessage",
            "Answer, in Anthropic's form.",
            schema.MESSAGES,
            Generation(anthropic.prepare, anthropic.MessageWriter, "chat"),
            {"max_tokens": 64, "messages": _HELLO},
        ),
        Endpoint(
            "/v1/messages/count_tokens",
            "countMessageTokens",
            "How long a prompt is.",
            schema.COUNT_TOKENS,
            anthropic.count_tokens,
            {"messages": _HELLO},
        ),
        Endpoint(
            "/v1/embeddings",
            "createEmbedding",
            "Refused by models that write text.",
            schema.EMBEDDINGS,
            tokens.embeddings,
            {"input": "The sky is blue."},
        ),
        Endpoint(
            "/v1/score",
            "createScore",
            "The logprob of every token of given texts, in one pass.",
            schema.SCORE,
            Generation(scores.prepare, scores.ScoreWriter, "score"),
            {"input": "The sky is blue.", "top_logprobs": 2},
        ),
        Endpoint(
            "/tokenize",
            "tokenize",
            "Text or a conversation to token ids.",
            schema.TOKENIZE,
            tokens.tokenize,
            {"prompt": "The sky is blue.", "return_token_strs": True},
        ),
        Endpoint(
            "/detokenize",
            "detokenize",
            "Token ids to text.",
            schema.DETOKENIZE,
            tokens.detokenize,
            {"tokens": [1, 2, 3]},
        ),
    )
}
PAGES: dict[str, Page] = {
    page.path: page
    for page in (
        Page("/v1/models", "listModels", "The models served.", pages.models),
        Page("/v1/models/{name}", "getModel", "One model.", pages.model, statuses=(404,)),
        Page("/health", "health", "Whether the process lives and its engine runs.", pages.health, statuses=(503,)),
        Page("/ready", "ready", "Whether requests are taken.", pages.ready, statuses=(503,)),
        Page("/metrics", "metrics", "Prometheus metrics.", pages.metrics, "text/plain"),
        Page("/openapi.json", "openapi", "This document.", pages.openapi),
        Page("/docs", "docs", "This document, to be read.", pages.docs, "text/html"),
    )
}


def check(service: Service, endpoint: Endpoint, body: Body) -> list[str]:
    """Raises a RequestError for the first thing wrong; returns what a lenient server left out."""
    checker = Checker(lenient=service.config.lenient)
    checker.check(endpoint.schema, body)
    if "stream_options" in body and not body.get("stream"):
        raise RequestError("stream_options needs stream: true", "stream_options")
    service.check_model(body.get("model"))
    return checker.warnings


async def start(
    service: Service, generation: Generation, body: Body, warnings: list[str]
) -> tuple[Run, WholeWriter]:
    """Begin a checked request; the writer writes what comes of it."""
    job = await generation.prepare(service, body)
    job.warnings = [*warnings, *job.warnings]
    run = await service.start(job)
    return run, generation.writer(service, run, body)


async def answer_at_once(service: Service, direct: Direct, body: Body, warnings: list[str]) -> Body:
    answer = await direct(service, body)
    return answer | ({"unspool": {"warnings": warnings}} if warnings else {})


async def answer(service: Service, endpoint: Endpoint, body: Body) -> Body:
    """The whole answer to a body."""
    warnings = check(service, endpoint, body)
    if not isinstance(endpoint.answers, Generation):
        return await answer_at_once(service, endpoint.answers, body, warnings)
    run, writer = await start(service, endpoint.answers, body, warnings)
    await service.finish(run)
    return writer.body()

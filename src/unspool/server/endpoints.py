"""Every endpoint, in one table. Routes, /openapi.json, the tables in the documents, /docs and batches come from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from unspool.errors import RequestError
from unspool.server import (
    anthropic,
    chat_completions,
    completions,
    engine_view,
    forks,
    llamacpp,
    pages,
    responses,
    schema,
    scores,
    tokens,
)
from unspool.server.dialect import Body, WholeWriter
from unspool.server.engines import translate
from unspool.server.host import ModelHost
from unspool.server.job import Job
from unspool.server.kinds import Checker, Schema
from unspool.server.service import Service


@dataclass(frozen=True)
class Generation:
    """An endpoint that generates: how a body becomes a job, and what writes the answer."""

    prepare: Callable[[Service, Body], Job]
    writer: type[WholeWriter]
    operation: str  # the name that OpenTelemetry's conventions have for it


Direct = Callable[[Service, Body], Body]  # an endpoint that answers at once


@dataclass(frozen=True)
class OfHost:
    """An endpoint that loads or unloads a model and returns without waiting."""

    answer: Callable[[ModelHost, Body], Body]


@dataclass(frozen=True)
class Endpoint:
    """A path that takes a body."""

    path: str
    id: str  # of the operation in /openapi.json
    summary: str
    schema: Schema
    answers: Generation | Direct | OfHost
    example: Body
    also: tuple[str, ...] = ()  # other paths of the same

    @property
    def has_aliases(self) -> bool:
        """Whether it accepts other engines' fields."""
        return "n_predict" in self.schema["properties"]

    @property
    def streams(self) -> bool:
        return isinstance(self.answers, Generation) and "stream" in self.schema["properties"]


@dataclass(frozen=True)
class Page:
    """A path for GET. `statuses`: its possible statuses in addition to 200."""

    path: str
    id: str
    summary: str
    answer: Callable[[ModelHost, Request], Awaitable[Any]]
    media_type: str = "application/json"
    statuses: tuple[int, ...] = ()
    parameters: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # of the query: type and description
    also: tuple[str, ...] = ()  # other paths of the same


@dataclass(frozen=True)
class EnginePage:
    """A path that reports on an engine: that of the loaded model in `?model=`, in whichever process it runs."""

    path: str
    id: str
    summary: str
    answer: Callable[[Service, Request], Awaitable[Any]]
    statuses: tuple[int, ...] = ()
    parameters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    media_type: str = "application/json"
    also: tuple[str, ...] = ()


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
            also=("/chat/completions",),
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
            also=("/responses",),
        ),
        Endpoint(
            "/v1/chat/completions/input_tokens",
            "countChatTokens",
            "How long the prompt of a conversation is.",
            schema.CHAT,
            chat_completions.count_tokens,
            {"messages": _HELLO},
            also=("/chat/completions/input_tokens",),
        ),
        Endpoint(
            "/v1/responses/input_tokens",
            "countResponseTokens",
            "How long the prompt of a response is.",
            schema.RESPONSES,
            responses.count_tokens,
            {"input": "Why is the sky blue?"},
            also=("/responses/input_tokens",),
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
            also=("/embeddings",),
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
            "/v1/fork",
            "createFork",
            "Continue an answer from the tokens that it begins with, on the cached prefix; several ways with n.",
            schema.FORK,
            Generation(forks.prepare_fork, forks.ForkWriter, "text_completion"),
            {"prompt": "Once upon a time", "output_text": ", there", "max_tokens": 16, "logprobs": 2},
        ),
        Endpoint(
            "/v1/whatif",
            "createWhatIf",
            "Choose one token again, with these parameters, and tell what every stage did to the whole vocabulary.",
            schema.WHATIF,
            Generation(forks.prepare_whatif, forks.WhatIfWriter, "text_completion"),
            {"prompt": "Once upon a time", "temperature": 0.7, "top_p": 0.9, "seed": 7, "trace_top": 4},
        ),
        Endpoint(
            "/v1/replay",
            "createReplay",
            "Answer a request again in a batch with random others, to compare ids and logprob bits.",
            schema.REPLAY,
            Generation(forks.prepare_replay, forks.ReplayWriter, "text_completion"),
            {"prompt": "Once upon a time", "seed": 7, "max_tokens": 8, "logprobs": 0, "crowd": 4},
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
        Endpoint(
            "/completion",
            "createNativeCompletion",
            "Continue texts, in llama.cpp's own form.",
            llamacpp.COMPLETION,
            Generation(llamacpp.prepare, llamacpp.NativeWriter, "text_completion"),
            {"prompt": "Once upon a time", "n_predict": 32},
            also=("/completions",),
        ),
        Endpoint(
            "/apply-template",
            "applyTemplate",
            "A conversation as the text that the model reads.",
            llamacpp.APPLY_TEMPLATE,
            llamacpp.apply_template,
            {"messages": _HELLO},
        ),
        Endpoint(
            "/models/load",
            "loadModel",
            "Begin to load a model; /v1/models tells how far that is.",
            schema.NAMED_MODEL,
            OfHost(pages.load),
            {"model": "smollm2"},
        ),
        Endpoint(
            "/models/unload",
            "unloadModel",
            "Unload a model that nobody uses.",
            schema.NAMED_MODEL,
            OfHost(pages.unload),
            {"model": "smollm2"},
        ),
    )
}
PAGES: dict[str, Page | EnginePage] = {
    page.path: page
    for page in (
        Page("/v1/models", "listModels", "The models served, their states and sizes.", pages.models, also=("/models",)),
        Page("/v1/models/{name}", "getModel", "One model.", pages.model, statuses=(404,)),
        EnginePage(
            "/v1/capabilities",
            "getCapabilities",
            "The model, every parameter with its range and its value in force, the receipt.",
            engine_view.capabilities,
        ),
        EnginePage(
            "/v1/engine/steps",
            "listSteps",
            "The engine's latest steps: how many tokens of which request, when, how long. Never a token.",
            engine_view.steps,
            statuses=(400,),
            parameters={
                "since": ("integer", "Only steps after this number."),
                "follow": ("boolean", "With 1 or true: server-sent events, as the steps come."),
            },
        ),
        EnginePage(
            "/v1/engine/cache",
            "getCache",
            "What each cache block and each state of recurrent layers is used for, by which request. Never a token.",
            engine_view.cache,
        ),
        EnginePage("/v1/machine", "getMachine", "The machine, and its measured ceilings.", engine_view.machine),
        EnginePage(
            "/tokenizer_info",
            "getTokenizerInfo",
            "Control tokens and the chat template, by the names of tokenizer_config.json, as vLLM's server tells them.",
            tokens.tokenizer_info,
        ),
        EnginePage(
            "/props", "getProps", "The model and its defaults, as llama.cpp's server tells them.", llamacpp.props
        ),
        EnginePage(
            "/slots",
            "listSlots",
            "As llama.cpp's server tells them: one slot for each request that may run at once, and which are in use.",
            llamacpp.slots,
            statuses=(503,),
            parameters={"fail_on_no_slot": ("boolean", "With 1: status 503 when all are in use.")},
        ),
        Page("/", "inspector", "The inspector, a web page.", pages.inspector, "text/html", statuses=(503,)),
        Page(
            "/assets/{name}",
            "getAsset",
            "A part of a page.",
            pages.asset,
            "application/octet-stream",
            statuses=(404,),
        ),
        Page(
            "/health",
            "health",
            "Whether the process lives and its engines run.",
            pages.health,
            statuses=(503,),
            also=("/v1/health",),
        ),
        Page("/ready", "ready", "Whether requests are taken.", pages.ready, statuses=(503,)),
        Page("/version", "version", "The server's version.", pages.version),
        Page("/metrics", "metrics", "Prometheus metrics.", pages.metrics, "text/plain"),
        Page("/openapi.json", "openapi", "This document.", pages.openapi),
        Page("/docs", "docs", "This document, to be read.", pages.docs, "text/html"),
    )
}


@dataclass(frozen=True)
class Checked:
    """A body with valid fields under unspool's names. `sent`: the other engines' names that the client used."""

    endpoint: Endpoint
    body: Body
    sent: Mapping[str, str]
    warnings: list[str]

    @property
    def model(self) -> str | None:
        name: str | None = self.body.get("model")
        return name

    @property
    def streams(self) -> bool:
        return self.endpoint.streams and bool(self.body.get("stream"))


def check(endpoint: Endpoint, body: Body, *, lenient: bool) -> Checked:
    """Check everything that does not need the model; raises a RequestError for the first error."""
    checker = Checker(lenient=lenient)
    checker.check(endpoint.schema, body)
    sent = translate(body) if endpoint.has_aliases else {}
    if "stream_options" in body and not body.get("stream"):
        raise RequestError("stream_options needs stream: true", "stream_options")
    return Checked(endpoint, body, sent, checker.warnings)


# The endpoints that a batch may use.
BATCHED = tuple(path for path, endpoint in ENDPOINTS.items() if not isinstance(endpoint.answers, OfHost))


def prepare(service: Service, checked: Checked) -> Job | Body:
    """Do all work of a request that needs no engine; returns the job to run, or the whole answer. It may take long for
    large bodies; raises a RequestError for the first error."""
    endpoint, body = checked.endpoint, checked.body
    assert not isinstance(endpoint.answers, OfHost), "it needs no model"
    if not isinstance(endpoint.answers, Generation):
        warnings = {"unspool": {"warnings": checked.warnings}} if checked.warnings else {}
        return endpoint.answers(service, body) | warnings
    try:
        job = endpoint.answers.prepare(service, body)
    except RequestError as error:
        error.param = checked.sent.get(error.param or "", error.param)
        raise
    job.sent = dict(checked.sent)
    job.warnings = [*checked.warnings, *job.warnings]
    return job


async def answer(service: Service, endpoint: Endpoint, body: Body) -> Body:
    """The whole answer to a body."""
    checked = check(endpoint, body, lenient=service.config.lenient)
    service.check_model(checked.model)
    prepared = await service.offload(0, partial(prepare, service, checked))
    if not isinstance(prepared, Job):
        return prepared
    assert isinstance(endpoint.answers, Generation)
    run = await service.start(prepared)
    await service.finish(run)
    return endpoint.answers.writer(service, run, body).body()

"""/openapi.json, made from the very tables that requests are checked with."""

from __future__ import annotations

from typing import Any

from unspool.server import schema
from unspool.server.kinds import Schema, published
from unspool.version import VERSION

# path: (operation, what it does, the body's schema, whether it can stream)
POSTS: dict[str, tuple[str, str, Schema, bool]] = {
    "/v1/chat/completions": ("createChatCompletion", "Answer a conversation.", schema.CHAT, True),
    "/v1/completions": ("createCompletion", "Continue texts.", schema.COMPLETIONS, True),
    "/v1/responses": ("createResponse", "Answer, in the form of OpenAI's responses.", schema.RESPONSES, True),
    "/v1/messages": ("createMessage", "Answer, in Anthropic's form.", schema.MESSAGES, True),
    "/v1/messages/count_tokens": ("countMessageTokens", "How long a prompt is.", schema.COUNT_TOKENS, False),
    "/v1/embeddings": ("createEmbedding", "Refused by models that write text.", schema.EMBEDDINGS, False),
    "/v1/score": ("createScore", "The logprob of every token of given texts, in one pass.", schema.SCORE, False),
    "/tokenize": ("tokenize", "Text or a conversation to token ids.", schema.TOKENIZE, False),
    "/detokenize": ("detokenize", "Token ids to text.", schema.DETOKENIZE, False),
}
GETS: dict[str, tuple[str, str, str, tuple[int, ...]]] = {
    "/v1/models": ("listModels", "The models served.", "application/json", ()),
    "/v1/models/{name}": ("getModel", "One model.", "application/json", (404,)),
    "/health": ("health", "Whether the process lives and its engine runs.", "application/json", (503,)),
    "/ready": ("ready", "Whether requests are taken.", "application/json", (503,)),
    "/metrics": ("metrics", "Prometheus metrics.", "text/plain", ()),
    "/openapi.json": ("openapi", "This document.", "application/json", ()),
    "/docs": ("docs", "This document, to be read.", "text/html", ()),
}
STATUSES = {
    400: "A field cannot be honoured; the error names it.",
    401: "No valid key.",
    403: "A host that is not served.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The engine failed.",
    503: "The server is shutting down, or its engine has failed.",
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, (operation, summary, body, streams) in POSTS.items():
        paths[path] = {"post": _post(operation, summary, body, streams)}
    for path, (operation, summary, media, others) in GETS.items():
        paths[path] = {"get": _get(path, operation, summary, media, others)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "unspool",
            "version": VERSION,
            "description": "Every field is honoured or refused by name; fields that are not listed are refused.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _post(operation: str, summary: str, body: Schema, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": operation,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": published(body)}}},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(tuple(STATUSES)),
    }


def _get(path: str, operation: str, summary: str, media: str, others: tuple[int, ...]) -> dict[str, Any]:
    kind = {"type": "object"} if media == "application/json" else {"type": "string"}
    described: dict[str, Any] = {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": {media: {"schema": kind}}}}
        | _errors((401, 403, *others), is_plain=path in ("/health", "/ready")),
    }
    if "{name}" in path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _errors(statuses: tuple[int, ...], *, is_plain: bool = False) -> dict[str, Any]:
    shape = {"type": "object"} if is_plain else {"anyOf": [{"$ref": "#/components/schemas/Error"}]}
    return {
        str(status): {"description": STATUSES[status], "content": {"application/json": {"schema": shape}}}
        for status in statuses
    }

"""/openapi.json, generated from the same tables that requests are checked with."""

from __future__ import annotations

from typing import Any

from unspool.server.endpoints import ENDPOINTS, PAGES, Endpoint, EnginePage, Page
from unspool.server.kinds import Schema, published
from unspool.version import VERSION

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
    paths: dict[str, Any] = {path: {"post": _post(endpoint)} for path, endpoint in ENDPOINTS.items()}
    for path, page in PAGES.items():
        paths.setdefault(path, {})["get"] = _get(page)
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


def _post(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"schema": published(endpoint.schema), "example": endpoint.example}
    return {
        "operationId": endpoint.id,
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(tuple(STATUSES)),
    }


def _get(page: Page | EnginePage) -> dict[str, Any]:
    kind = {"type": "object"} if page.media_type == "application/json" else {"type": "string"}
    described: dict[str, Any] = {
        "operationId": page.id,
        "summary": page.summary,
        "responses": {"200": {"description": "The answer.", "content": {page.media_type: {"schema": kind}}}}
        | _errors((401, 403, *page.statuses), is_plain=page.path in ("/health", "/ready")),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "description": about, "schema": {"type": type}}
        for name, (type, about) in page.parameters.items()
    ]
    if "{name}" in page.path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    return described


def _errors(statuses: tuple[int, ...], *, is_plain: bool = False) -> dict[str, Any]:
    shape = {"type": "object"} if is_plain else {"anyOf": [{"$ref": "#/components/schemas/Error"}]}
    return {
        str(status): {"description": STATUSES[status], "content": {"application/json": {"schema": shape}}}
        for status in statuses
    }

"""What is read and takes no body: models, health, metrics, the API's own description."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unspool.server.service import Service
from unspool.server.sse import dumps


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


async def models(service: Service, request: Request) -> Response:
    return json_response({"object": "list", "data": [_entry(service, service.name)]})


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_entry(service, name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "unspool",
        "root": service.llm.checkpoint.name,
        "aliases": [other for other in service.names if other != name],
        "max_model_len": service.llm.engine.context_length,
    }


async def health(service: Service, request: Request) -> Response:
    failure = service.engine.failure
    if failure is not None:
        return json_response({"status": "failed", "message": str(failure)}, 503)
    return json_response({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    state = service.state
    return json_response({"status": state}, 200 if state == "ready" else 503)


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(service: Service, request: Request) -> Response:
    from unspool.server.openapi import document

    return json_response(document())


async def docs(service: Service, request: Request) -> Response:
    from unspool.web import docs_page

    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    return Response(docs_page(), media_type="text/html", headers={"content-security-policy": policy})

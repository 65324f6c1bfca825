"""Paths for GET: models, health, metrics, the API's own description."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unspool.server.faults import HTTPFault
from unspool.server.host import ModelHost
from unspool.server.sse import dumps
from unspool.version import VERSION


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


async def models(host: ModelHost, request: Request) -> Response:
    return json_response({"object": "list", "data": [model.as_dict() for model in host.models]})


async def model(host: ModelHost, request: Request) -> Response:
    name = request.path_params["name"]
    found = host.find(name)
    entry = found.as_dict()
    others = [other for other in (entry["id"], *entry["aliases"]) if other != name]
    return json_response(entry | {"id": name, "aliases": others})


def load(host: ModelHost, body: dict[str, Any]) -> dict[str, Any]:
    host.load(host.find(body["model"]))
    return {"success": True}


def unload(host: ModelHost, body: dict[str, Any]) -> dict[str, Any]:
    host.unload(host.find(body["model"]))
    return {"success": True}


async def health(host: ModelHost, request: Request) -> Response:
    if host.failure is not None:
        return json_response({"status": "failed", "message": str(host.failure)}, 503)
    return json_response({"status": "ok"})


async def ready(host: ModelHost, request: Request) -> Response:
    state = host.state
    return json_response({"status": state}, 200 if state == "ready" else 503)


async def version(host: ModelHost, request: Request) -> Response:
    return json_response({"version": VERSION})


async def metrics(host: ModelHost, request: Request) -> Response:
    return Response(await host.metrics_page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(host: ModelHost, request: Request) -> Response:
    from unspool.server.openapi import document

    return json_response(document())


async def docs(host: ModelHost, request: Request) -> Response:
    from unspool.web import docs_page, docs_policy

    return Response(docs_page(), media_type="text/html", headers=_page_headers(docs_policy()))


INSPECTOR_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def inspector(host: ModelHost, request: Request) -> Response:
    from unspool.web import inspector_page

    page, is_built = inspector_page()
    return Response(page, 200 if is_built else 503, media_type="text/html", headers=_page_headers(INSPECTOR_POLICY))


async def asset(host: ModelHost, request: Request) -> Response:
    from unspool.web import find_asset

    found = find_asset(request.path_params["name"])
    if found is None:
        raise HTTPFault(404, f"there is nothing at {request.url.path[:200]}")
    data, media_type, tag = found
    # Revalidated each time, and sent only when it has changed, so that a page never mixes two versions.
    headers = {"etag": tag, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=media_type, headers=headers)


def _page_headers(policy: str) -> dict[str, str]:
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

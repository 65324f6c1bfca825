"""Builds the ASGI application."""

from __future__ import annotations

from typing import Any

from starlette.routing import Router

from unspool.server.host import ModelHost, host_of
from unspool.server.http import Guard
from unspool.server.quotas import HEADERS
from unspool.server.routes import Routes
from unspool.server.service import Service
from unspool.server.tracing import Tracer, make_tracer


def build(served: Service | ModelHost, tracer: Tracer | None = None) -> Any:
    """The complete ASGI application."""
    host = host_of(served)
    config = host.config
    tracer = tracer or make_tracer(config.otel_endpoint, host.default.name)
    app: Any = Guard(Router(Routes(host, tracer).table(), redirect_slashes=False), host)
    if config.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        # Outermost, so that a refusal can be read across origins too, and a preflight needs no key.
        app = CORSMiddleware(
            app,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", *HEADERS],
        )
    return app

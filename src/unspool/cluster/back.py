"""A replica as its process makes it: the engine, and what it reports about itself."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request

from unspool.cluster import wire
from unspool.cluster.models import ModelSource, load_model, open_source
from unspool.cluster.replica import Pages, Replica
from unspool.llm import LLM
from unspool.server.config import ServerConfig
from unspool.server.endpoints import PAGES, EnginePage
from unspool.server.faults import fault_of
from unspool.server.metrics import EngineCollector
from unspool.server.service import Service
from unspool.server.sse import dumps
from unspool.server.tracing import make_tracer


def replica_options(config: ServerConfig) -> dict[str, Any]:
    """What a replica has to know of its server's configuration."""
    return {"names": config.names, "metrics_prefix": config.metrics_prefix, "otel_endpoint": config.otel_endpoint}


def load_replica(name: str, source: ModelSource, options: Mapping[str, Any]) -> Replica:
    """`options` are those of `replica_options`, perhaps as they come out of JSON."""
    checkpoint = open_source(source)
    llm = load_model(checkpoint, source.options)
    names = tuple(options.get("names", ()))
    service = Service(llm, ServerConfig(**{**options, "names": names, "log_format": "off"}))
    tracer = make_tracer(service.config.otel_endpoint, service.name)
    threading.Thread(target=_prepare, args=(service,), daemon=True).start()
    pages = engine_pages(llm, service)
    return Replica(llm, pages, name=name, source=checkpoint.fingerprint, tracer=tracer, meter=service.meter)


def _prepare(service: Service) -> None:
    """What would hold up the first requests, beside them."""
    assert service.meter is not None
    service.meter.measure(is_alone=False)
    service.warm_up()


def engine_pages(llm: LLM, service: Service) -> Pages:
    """What a replica's engine reports: the answers of a server's pages, and the engine's part of /metrics."""
    registry = CollectorRegistry()
    assert service.meter is not None
    registry.register(EngineCollector(service.config.metrics_prefix, service.name, llm.driver, service.meter))

    async def answer(asked: wire.PageRequest) -> wire.PageAnswer:
        if asked.path == "/metrics":
            return wire.PageAnswer(200, "text/plain", generate_latest(registry).decode())
        page = PAGES[asked.path]
        assert isinstance(page, EnginePage)
        query = urlencode(dict(asked.query)).encode()
        scope = {"type": "http", "method": "GET", "path": asked.path, "headers": [], "query_string": query}
        try:
            response = await page.answer(service, Request(scope))
        except Exception as error:
            fault = fault_of(error)
            return wire.PageAnswer(fault.status, "application/json", dumps(fault.openai()).decode())
        return wire.PageAnswer(response.status_code, page.media_type, bytes(response.body).decode())

    return answer

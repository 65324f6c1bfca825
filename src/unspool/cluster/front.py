"""A server in front of a pool: the model's text side in this process, its engines in others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from unspool.cluster import wire
from unspool.cluster.models import ModelSource, open_source, resolver
from unspool.cluster.pool import ReplicaPool, Transport
from unspool.cluster.replica import Pages
from unspool.config import EngineConfig
from unspool.errors import ModelError, ReplicaLostError, RequestError
from unspool.llm import LLM, TextModel
from unspool.results import Receipt
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault, fault_of
from unspool.server.service import Service
from unspool.server.sse import dumps

log = logging.getLogger("unspool.cluster")


@dataclass(frozen=True)
class PooledEngine:
    """The engines of all replicas, as numbers."""

    context_length: int
    config: EngineConfig
    transport: Transport

    @property
    def stats(self) -> Mapping[str, float]:
        """Of all replicas that can be reached, added up."""
        total: dict[str, float] = {}
        for status in self.transport.statuses().values():
            for name, value in status.stats.items():
                total[name] = total.get(name, 0) + value
        return total


class PooledModel(TextModel):
    """A model whose engines are replicas in other processes. No weights are loaded here."""

    def __init__(self, source: ModelSource, transport: Transport, status: wire.Status) -> None:
        checkpoint = open_source(source)
        super().__init__(checkpoint, checkpoint.tokenizer())
        if source.options.get("quantize", "none") == "none" and status.receipt.model != checkpoint.fingerprint:
            raise ModelError(
                f"{checkpoint.name} here is not the model of the replicas: its fingerprint is "
                f"{checkpoint.fingerprint}, theirs is {status.receipt.model}"
            )
        notes = (*checkpoint.notes, *self.tokenizer.notes)
        self.driver = ReplicaPool(transport, status, resolver(checkpoint, notes))
        kv_tokens = int(status.stats["blocks"]) * status.block_size
        config = EngineConfig(**{**source.options, "block_size": status.block_size, "kv_tokens": kv_tokens})
        self.engine = PooledEngine(status.context_length, config, transport)

    def receipt(self, seed: int) -> Receipt:
        return self.driver.receipt(seed)


class PooledService(Service):
    """The service of an ingress. What only an engine can tell is asked of a replica (`?replica=NAME`: of that one)."""

    def __init__(self, model: PooledModel, config: ServerConfig) -> None:
        self._transport = model.driver.transport
        name = config.names[0] if config.names else model.checkpoint.name
        super().__init__(model, config, PoolCollector(config.metrics_prefix, name, model.driver))

    async def ask_engine(self, request: Request) -> Response:
        query = dict(request.query_params)
        name = query.pop("replica", None)
        known = self._transport.statuses()
        if name is not None and name not in known:
            raise HTTPFault(404, f"there is no replica {name!r:.80}; there are {', '.join(known)}", code="not_found")
        if query.get("follow") in ("1", "true"):
            raise RequestError("follow needs the server of one engine; ask replicas again and again instead", "follow")
        if not known:
            raise ReplicaLostError("no replica can be asked now")
        name = name or min(known)
        page = await self._transport.page(name, wire.PageRequest(request.url.path, query))
        return Response(page.body, page.status, {"x-unspool-replica": name}, page.media_type)


class PoolCollector(Collector):
    """Metrics of replicas, each with its name as a label, and of the pool itself."""

    def __init__(self, prefix: str, model: str, pool: ReplicaPool) -> None:
        self._prefix, self._model, self._pool = prefix, model, pool

    def collect(self) -> Iterator[Metric]:
        statuses = self._pool.transport.statuses()
        shares = {
            name: {**status.stats, "usage": 1 - status.stats["blocks_free"] / status.stats["blocks"]}
            for name, status in statuses.items()
        }
        for name, key, text, kind in (
            ("num_requests_running", "running", "Answers being computed.", GaugeMetricFamily),
            ("num_requests_waiting", "waiting", "Requests in the queue.", GaugeMetricFamily),
            ("kv_cache_usage_perc", "usage", "Share of KV blocks in use, 0 to 1.", GaugeMetricFamily),
            ("num_preemptions", "preemptions", "Answers that lost their blocks for a while.", CounterMetricFamily),
            ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up.", CounterMetricFamily),
            ("prefix_cache_hits", "prefix_hits", "Prompt tokens found computed.", CounterMetricFamily),
        ):
            family = kind(self._prefix + name, text, labels=("model_name", "replica"))
            for replica, values in shares.items():
                family.add_metric([self._model, replica], values[key])
            yield family
        info = GaugeMetricFamily(
            self._prefix + "cache_config_info",
            "The cache of each replica; the value is always 1.",
            labels=("model_name", "replica", "block_size", "num_gpu_blocks"),
        )
        for replica, status in statuses.items():
            info.add_metric([self._model, replica, str(status.block_size), str(int(status.stats["blocks"]))], 1)
        yield info
        up = GaugeMetricFamily(self._prefix + "replicas", "Replicas that can be reached.", labels=("model_name",))
        up.add_metric([self._model], len(statuses))
        yield up
        replays = CounterMetricFamily(
            self._prefix + "replays", "Answers computed again because their replica was lost.", labels=("model_name",)
        )
        replays.add_metric([self._model], self._pool.num_replays)
        yield replays


def make_service(source: ModelSource, config: ServerConfig, transport: Transport, status: wire.Status) -> PooledService:
    return PooledService(PooledModel(source, transport, status), config)


def engine_pages(llm: LLM, names: tuple[str, ...]) -> Pages:
    """What a replica's engine tells of itself: the answers of a server's pages."""
    from unspool.server.endpoints import PAGES

    service = Service(llm, ServerConfig(names=names, log_format="off"))

    async def answer(asked: wire.PageRequest) -> wire.PageAnswer:
        page = PAGES[asked.path]
        query = urlencode(dict(asked.query)).encode()
        scope = {"type": "http", "method": "GET", "path": asked.path, "headers": [], "query_string": query}
        try:
            response = await page.answer(service, Request(scope))
        except Exception as error:
            fault = fault_of(error)
            return wire.PageAnswer(fault.status, "application/json", dumps(fault.openai()).decode())
        return wire.PageAnswer(response.status_code, page.media_type, bytes(response.body).decode())

    return answer

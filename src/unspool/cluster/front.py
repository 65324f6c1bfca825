"""A server in front of a pool: the model's text side in this process, its engines in others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from unspool.cluster import wire
from unspool.cluster.metrics import ReplayCounter, labelled, page_of, summed
from unspool.cluster.models import ModelSource, open_source, resolver
from unspool.cluster.pool import Patience, ReplicaPool, Transport
from unspool.config import EngineConfig
from unspool.errors import EngineError, ModelError, ReplicaLostError
from unspool.llm import TextModel
from unspool.models.checkpoint import Checkpoint
from unspool.results import Receipt
from unspool.server.config import ServerConfig
from unspool.server.engine_view import POLL_SECONDS
from unspool.server.faults import HTTPFault
from unspool.server.host import host_of
from unspool.server.job import Run
from unspool.server.service import Service
from unspool.server.sse import EventStream, Write, frame

if TYPE_CHECKING:
    from unspool.ceilings import Utilization

PAGE_SECONDS = 3.0  # that a replica has for what a page asks of all of them
PEER_SECONDS = 1.0  # the same of another server
Peers = Callable[[], Awaitable[list[str]]]  # what each server of the application has counted, this one too


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

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: Mapping[str, Any],
        transport: Transport,
        status: wire.Status,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(checkpoint, checkpoint.tokenizer())
        if status.source != checkpoint.fingerprint:
            raise ModelError(
                f"{checkpoint.name} here is not the model of the replicas: its fingerprint is "
                f"{checkpoint.fingerprint}, theirs is {status.source}"
            )
        notes = (*checkpoint.notes, *self.tokenizer.notes)
        self.driver = ReplicaPool(transport, status, resolver(checkpoint, notes), patience)
        kv_tokens = int(status.stats["blocks"]) * status.block_size
        config = EngineConfig(**{**options, "block_size": status.block_size, "kv_tokens": kv_tokens})
        self.engine = PooledEngine(status.context_length, config, transport)

    def receipt(self, seed: int) -> Receipt:
        return self.driver.receipt(seed)


class PooledService(Service):
    """The service of a server that has no engine. What only an engine knows is asked of a replica (`?replica=NAME`:
    of that one)."""

    def __init__(self, model: PooledModel, config: ServerConfig, peers: Peers | None = None) -> None:
        self.pool, self._transport, self._peers = model.driver, model.driver.transport, peers
        name = config.names[0] if config.names else model.checkpoint.name
        super().__init__(model, config, ReplayCounter(config.metrics_prefix, name, lambda: self.pool.num_replays))

    # Pages of one replica -------------------------------------------------------------------------------------------
    async def ask_engine(self, request: Request) -> Any:
        query = dict(request.query_params)
        name = self._chosen(query.pop("replica", None))
        follows = query.pop("follow", None) in ("1", "true")
        asked = wire.PageRequest(request.url.path, query)
        page = await self._page(name, asked)
        if follows and page.status == 200:
            return self._follow(name, asked, page)
        headers = {"x-unspool-replica": name, "x-unspool-replicas": ",".join(sorted(self._transport.statuses()))}
        return Response(page.body, page.status, headers, page.media_type)

    def _chosen(self, name: str | None) -> str:
        known = self._transport.statuses()
        if name is not None and name not in known:
            raise HTTPFault(404, f"there is no replica {name!r:.80}; there are {', '.join(known)}", code="not_found")
        if not known:
            raise ReplicaLostError("no replica can be asked now")
        return name or min(known)

    async def _page(self, name: str, asked: wire.PageRequest) -> wire.PageAnswer:
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await self._transport.page(name, asked)
        except TimeoutError:
            raise ReplicaLostError(f"replica {name} did not answer within {PAGE_SECONDS:g} s") from None

    def _follow(self, name: str, asked: wire.PageRequest, first: wire.PageAnswer) -> EventStream:
        """A replica's steps as they come. The stream ends with its replica."""
        stop = asyncio.Event()

        async def feed(write: Write) -> None:
            page, query = first, dict(asked.query)
            while not stop.is_set() and self.state == "ready":
                news = json.loads(page.body)
                if news["steps"]:
                    query["since"] = str(news["steps"][-1]["number"])
                    write(frame(news))
                try:
                    await asyncio.wait_for(stop.wait(), POLL_SECONDS)
                except TimeoutError:
                    try:
                        page = await self._page(name, wire.PageRequest(asked.path, query))
                    except EngineError:
                        return

        return EventStream(feed, stop.set, ping_interval=self.config.ping_interval)

    def utilization(self, run: Run) -> Utilization | None:
        return run.submissions[0].utilization

    # Metrics of all -------------------------------------------------------------------------------------------------
    async def metrics_page(self) -> bytes:
        names = list(self._transport.statuses())
        answers = await asyncio.gather(*map(self._metrics_of, names))
        pages = {name: page for name, page in zip(names, answers, strict=True) if page is not None}
        return page_of([*summed(await self._ask_peers()), *labelled(pages), self._num_replicas(len(pages))])

    def counters(self) -> str:
        """What this server has counted."""
        return host_of(self).metrics.page().decode()

    async def _ask_peers(self) -> list[str]:
        if self._peers is not None:
            try:
                async with asyncio.timeout(PEER_SECONDS):
                    return await self._peers() or [self.counters()]
            except TimeoutError:
                pass
        return [self.counters()]

    async def _metrics_of(self, name: str) -> str | None:
        try:
            page = await self._page(name, wire.PageRequest("/metrics"))
        except EngineError:
            return None
        return page.body if page.status == 200 else None

    def _num_replicas(self, count: int) -> Metric:
        text = "Replicas that answered; the metrics with the label replica are theirs."
        family = GaugeMetricFamily(self.config.metrics_prefix + "replicas", text, labels=("model_name",))
        family.add_metric([self.name], count)
        return family


async def start_service(
    source: ModelSource,
    config: ServerConfig,
    transport: Transport,
    *,
    peers: Peers | None = None,
    patience: Patience | None = None,
) -> PooledService:
    """The service over a transport's replicas, once one of them is there."""
    checkpoint = open_source(source)
    status = await transport.start(checkpoint.fingerprint)
    return PooledService(PooledModel(checkpoint, source.options, transport, status, patience), config, peers)

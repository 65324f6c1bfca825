"""`unspool serve --replicas numa`: one server in this process, engines in processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from unspool.cluster import numa
from unspool.cluster.back import replica_options
from unspool.cluster.front import start_service
from unspool.cluster.local import LocalTransport, local_nodes
from unspool.cluster.models import ModelSource
from unspool.cluster.numa import Node
from unspool.cluster.routing import RULE, Rule
from unspool.machine import num_cores
from unspool.server.app import build
from unspool.server.config import ServerConfig
from unspool.server.listener import bind
from unspool.server.run import Server, set_up_logging, uvicorn_config

log = logging.getLogger("unspool.cluster")


def serve_local(
    source: ModelSource,
    config: ServerConfig,
    replicas: int | None = None,
    on_start: Callable[[str], None] | None = None,
    rule: Rule = RULE,
) -> None:
    """Serve until a signal. Without a number of replicas: one on each NUMA node. `on_start` is called with the
    server's address once it listens."""
    set_up_logging()
    sockets = bind(config.host, config.port)  # a port that cannot be had is known before a model is loaded
    found = numa.nodes()
    count = replicas or len(found)
    places = local_nodes(count, lambda: found)
    log.info("%d replicas on %d NUMA nodes", count, len(found))
    asyncio.run(_serve(with_threads(source, places), config, places, sockets, on_start, rule))


def with_threads(source: ModelSource, places: Sequence[Node | None]) -> ModelSource:
    """The model with as many threads for each engine as keep replicas out of each other's way."""
    if "threads" in source.options:
        return source
    on_one_node = max(sum(1 for each in places if each == place) for place in places)
    cores = [num_cores() if place is None else len(place.processors) for place in places]
    return replace(source, options={**source.options, "threads": max(1, min(cores) // on_one_node)})


async def _serve(
    source: ModelSource,
    config: ServerConfig,
    places: Sequence[Node | None],
    sockets: list[socket.socket],
    on_start: Callable[[str], None] | None,
    rule: Rule,
) -> None:
    transport = LocalTransport(source, places, rule, options=replica_options(config))
    try:
        service = await start_service(source, config, transport)
        await Server(uvicorn_config(build(service), config), service, on_start).serve(sockets)
    finally:
        await transport.close()

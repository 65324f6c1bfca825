"""unspool as a Ray Serve application: an ingress with the server's routes in front of engine replicas.

    import_path: unspool.cluster.ray_app:build
    args: {model: smollm2, num_replicas: 2}

`build` is what a Serve configuration file names; `unspool serve --replicas N` and `unspool cluster` use it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from unspool.cluster import watchdog, wire
from unspool.cluster.app_options import AppOptions
from unspool.cluster.back import load_replica, replica_options
from unspool.cluster.front import start_service
from unspool.cluster.hand_over import HandOver, Message, messages_of
from unspool.cluster.log_relay import LogSender
from unspool.cluster.models import ModelSource
from unspool.cluster.ray_ingresses import STRANGER, Ingresses, IngressSuccessor
from unspool.cluster.ray_router import PrefixRouter, name_of
from unspool.cluster.ray_transport import RayTransport
from unspool.events import FinishReason
from unspool.server.app import build as build_app
from unspool.server.host import host_of
from unspool.server.run import set_up_logging

HANGS = 3  # times the silence after which a replica counts as lost, its process is killed if it is still hung
MANY = 100_000  # requests that Serve lets through: the engines' own queues decide, and answer 429


class Engine:
    """A replica: one engine behind Serve's calls. The first argument of each is for the router."""

    def __init__(
        self, source: Mapping[str, Any], options: Mapping[str, Any], hang: float, log_socket: str | None
    ) -> None:
        _log_to(log_socket)
        self._name = name_of(serve.get_replica_context().replica_id)
        self._replica = load_replica(self._name, ModelSource(**source), options)
        self._num_reports = 0
        watchdog.start(hang)

    async def stream(self, route: Mapping[str, Any], data: bytes) -> AsyncIterator[bytes]:
        """The replica's name, then the messages of one request."""
        yield self._name.encode()
        messages = self._replica.stream(data)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()  # type: ignore[attr-defined]

    async def abort(self, route: Mapping[str, Any], id: str, reason: FinishReason) -> None:
        self._replica.abort(id, reason)

    async def status(self, route: Mapping[str, Any]) -> bytes:
        return wire.dump(await self._replica.status())

    async def page(self, route: Mapping[str, Any], data: bytes) -> bytes:
        return wire.dump(await self._replica.page(wire.load(data)))

    async def record_routing_stats(self) -> dict[str, Any]:
        self._num_reports += 1
        return {"status": wire.dump(await self._replica.status()), "number": self._num_reports}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        stats = (await self._replica.status()).stats
        return {"waiting": stats["waiting"], "cache_usage": stats["cache_usage"]}

    async def check_health(self) -> None:
        self._replica.check_health()


class Ingress:
    """The server's routes over a pool of replicas."""

    async def __init__(self, engine: DeploymentHandle, options: Mapping[str, Any]) -> None:  # type: ignore[misc]
        asked = AppOptions.of(options)
        _log_to(asked.log_socket)
        self._ingresses = Ingresses(asked.silence)
        transport = RayTransport(engine, self._ingresses, silence=asked.silence)
        peers = self._ingresses.counters if asked.num_ingresses > 1 else None
        self._service = await start_service(
            asked.source, asked.server_config(), transport, peers=peers, patience=asked.endurance
        )
        self._pool = self._service.pool
        self._app = build_app(self._service)
        self._tasks = [
            asyncio.create_task(host_of(self._service).keys.watch()),
            asyncio.create_task(self._ingresses.end_in_time(asked.drain, self._pool.end_all)),
        ]

    async def counters(self) -> str:
        """What this ingress has counted, for the metrics of all."""
        return self._service.counters()

    async def standing(self) -> dict[str, Any]:
        return self._ingresses.standing(self._pool.status.source, self._pool.is_ready)

    async def answer(self, source: str, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """Respond to a request that an ingress of another model has taken."""
        if source != self._pool.status.source:
            yield STRANGER
            return
        messages = messages_of(self._app, scope, body)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()

    def __serve_build_asgi_app__(self) -> Any:
        return HandOver(self._app, self._find_successor)

    async def _find_successor(self) -> IngressSuccessor | None:
        return await self._ingresses.successor(self._pool.status.source)

    async def check_health(self) -> None:
        if self._pool.failure is not None:
            raise self._pool.failure


def _log_to(path: str | None) -> None:
    set_up_logging(None if path is None else LogSender(path))


def build(options: Mapping[str, Any]) -> serve.Application:
    """The application. An unknown option or a wrong value is refused by name before anything is started."""
    asked = AppOptions.of(options)
    engine = serve.deployment(
        Engine,
        name="Engine",
        num_replicas="auto" if asked.is_autoscaled else asked.num_replicas,
        autoscaling_config=_autoscaling(asked) if asked.is_autoscaled else None,
        max_ongoing_requests=MANY,
        ray_actor_options={**asked.resources(), "runtime_env": dict(asked.runtime_env)},
        max_surge_percent=asked.surge,
        health_check_period_s=asked.health_check_period,
        health_check_timeout_s=asked.silence,
        graceful_shutdown_timeout_s=asked.drain,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs=asked.rule(),
            request_routing_stats_period_s=asked.report_period,
            request_routing_stats_timeout_s=asked.silence,
        ),
    ).bind(asked.source.as_dict(), replica_options(asked.server_config()), HANGS * asked.silence, asked.log_socket)
    return serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=asked.num_ingresses,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0, "runtime_env": dict(asked.runtime_env)},
        max_surge_percent=100,
        health_check_period_s=asked.health_check_period,
        health_check_timeout_s=asked.silence,
        graceful_shutdown_timeout_s=asked.drain,
    ).bind(engine, dict(options))


def _autoscaling(asked: AppOptions) -> AutoscalingConfig:
    from ray.serve.config import AutoscalingPolicy

    return AutoscalingConfig(
        min_replicas=asked.min_replicas,
        max_replicas=asked.max_replicas,
        target_ongoing_requests=asked.target_requests,
        upscale_delay_s=asked.upscale_delay,
        downscale_delay_s=asked.downscale_delay,
        policy=AutoscalingPolicy(policy_function="unspool.cluster.autoscaling:policy"),
    )

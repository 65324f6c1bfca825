"""unspool as a Ray Serve application: an ingress with the server's routes in front of engine replicas.

    import_path: unspool.cluster.ray_app:build
    args: {model: smollm2, num_replicas: 2}

`build` is what a Serve configuration file names; `unspool serve --replicas N` and `unspool cluster` use it as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from unspool.cluster import wire
from unspool.cluster.app_options import AppOptions
from unspool.cluster.front import engine_pages, make_service
from unspool.cluster.models import ModelSource, load_model
from unspool.cluster.ray_router import PrefixRouter, name_of
from unspool.cluster.ray_transport import RayTransport
from unspool.cluster.replica import Replica
from unspool.events import FinishReason

MANY = 100_000  # requests that Serve lets through: the engines' own queues decide, and answer 429


class Engine:
    """A replica: one engine behind Serve's calls. The first argument of each is for the router."""

    def __init__(self, source: Mapping[str, Any], names: Sequence[str]) -> None:
        self._name = name_of(serve.get_replica_context().replica_id)
        llm = load_model(ModelSource(**source))
        self._replica = Replica(llm, engine_pages(llm, tuple(names)))

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
        status = await self._replica.status()
        load = status.stats["running"] + status.stats["waiting"]
        return {"status": wire.dump(status), "prefixes": list(status.prefixes), "load": load}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        stats = (await self._replica.status()).stats
        return {"waiting": stats["waiting"], "cache_usage": 1 - stats["blocks_free"] / stats["blocks"]}

    async def check_health(self) -> None:
        self._replica.check_health()


class Ingress:
    """The server's routes over a pool of replicas."""

    async def __init__(self, engine: DeploymentHandle, options: Mapping[str, Any]) -> None:  # type: ignore[misc]
        asked = AppOptions.of(options)
        transport = RayTransport(engine, silence=asked.silence)
        self._service = make_service(asked.source, asked.server_config(), transport, await transport.start())

    def __serve_build_asgi_app__(self) -> Any:
        from unspool.server.app import build as build_app

        return build_app(self._service)

    async def check_health(self) -> None:
        if self._service.engine.failure is not None:
            raise self._service.engine.failure


def build(options: Mapping[str, Any]) -> serve.Application:
    """The application. An unknown option or a wrong value is refused by name before anything is started."""
    asked = AppOptions.of(options)
    engine = serve.deployment(
        Engine,
        name="Engine",
        num_replicas="auto" if asked.is_autoscaled else asked.num_replicas,
        autoscaling_config=_autoscaling(asked) if asked.is_autoscaled else None,
        max_ongoing_requests=MANY,
        ray_actor_options=asked.resources(),
        health_check_period_s=asked.health_check_period,
        health_check_timeout_s=asked.silence,
        graceful_shutdown_timeout_s=asked.drain,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs=asked.rule(),
            request_routing_stats_period_s=asked.report_period,
            request_routing_stats_timeout_s=asked.silence,
        ),
    ).bind(asked.source.as_dict(), asked.server_config().names)
    return serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=asked.num_ingresses,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
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

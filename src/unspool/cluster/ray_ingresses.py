"""The ingresses of an application, as one of them sees them: what they counted, and which of them took its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from unspool.cluster.hand_over import Message
from unspool.cluster.ray_router import name_of
from unspool.errors import ReplicaLostError

LOST = (RayError, RayServeException, TimeoutError)
LOOK_PERIOD = 0.5  # seconds that a look at the others is good for
LOOK_SECONDS = 2.0  # that they have to answer it
MARGIN = 0.25  # of the time to drain is left when the last requests are ended
TRIES = 20  # to reach an ingress of the new model: Serve may choose one of the old model
STRANGER: Message = {"type": "unspool.stranger"}  # the first message of an ingress that has another model


class Ingresses:
    """Made in an ingress, whose name is that of its replica."""

    def __init__(self, silence: float) -> None:
        context = serve.get_replica_context()
        self._name, self._silence = name_of(context.replica_id), silence
        self._names = context.deployment, context.app_name
        self._handle: DeploymentHandle | None = None
        self._looked, self._looking = -LOOK_PERIOD, asyncio.Lock()
        self._running: list[dict[str, Any]] = []  # as they reported last
        self._was_running = False
        self._gone_since: float | None = None

    async def counters(self) -> list[str]:
        answers = await self._ask_all("counters", None)
        return [each for each in answers if isinstance(each, str)]

    def standing(self, source: str, is_ready: bool) -> dict[str, Any]:
        """What this ingress reports to the others."""
        return {"name": self._name, "source": source, "is_ready": is_ready}

    async def successor(self, source: str) -> IngressSuccessor | None:
        """An ingress of another model that has replicas. While it runs, no replica of this model will come: Serve
        starts replicas of the application's newest model only."""
        await self._look()
        models = {each["source"] for each in self._running if each["is_ready"]}
        if source in models or not models:
            return None
        return IngressSuccessor(self._ingresses(), min(models), self._silence)

    async def end_in_time(self, drain: float, end: Callable[[], None]) -> None:
        """Once Serve has taken this ingress out: call `end` shortly before the time to drain ends, and it is killed."""
        period = min(1.0, MARGIN * drain / 2)
        while True:
            await asyncio.sleep(period)
            await self._look()
            if self._gone_since is not None and time.monotonic() - self._gone_since > (1 - MARGIN) * drain:
                end()
                return

    async def _look(self) -> None:
        async with self._looking:
            if time.monotonic() - self._looked < LOOK_PERIOD:
                return
            answers = await self._ask_all("standing", LOOK_SECONDS)
            self._looked = time.monotonic()
            self._running = [each for each in answers if isinstance(each, dict)]
            is_running = self._name in {each["name"] for each in self._running}
            self._was_running = self._was_running or is_running
            if is_running or not self._was_running or not self._running:
                self._gone_since = None
            elif self._gone_since is None:
                self._gone_since = self._looked

    async def _ask_all(self, method: str, seconds: float | None) -> list[Any]:
        try:
            asked = self._ingresses().broadcast(method)
            return list(await asked.results_async(timeout_s=seconds, return_exceptions=True))
        except LOST:
            return []

    def _ingresses(self) -> DeploymentHandle:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(*self._names)
        return self._handle


class IngressSuccessor:
    """The ingresses of a model, as the successors of one of another model."""

    def __init__(self, handle: DeploymentHandle, source: str, silence: float) -> None:
        self._handle, self._source, self._silence = handle, source, silence

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message]:
        for _ in range(TRIES):
            responses = self._handle.options(stream=True).answer.remote(self._source, dict(scope), body)
            try:
                first = await anext(responses)
                if first == STRANGER:
                    continue
                yield first
                async for message in responses:
                    yield message
                return
            except (*LOST, StopAsyncIteration) as error:
                raise ReplicaLostError(f"the ingress that took a request over was lost: {error}") from None
            finally:
                responses.cancel()
        raise ReplicaLostError("no ingress of the new model could be reached")

"""Replicas of a Ray Serve deployment, as a pool reaches them: through its handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from unspool.cluster import wire
from unspool.cluster.ray_ingresses import LOST, Ingresses
from unspool.cluster.ray_router import PrefixRouter
from unspool.cluster.routers import ROUTERS
from unspool.cluster.streams import SILENCE
from unspool.errors import EngineError, ReplicaLostError
from unspool.events import FinishReason

log = logging.getLogger("unspool.cluster")
START_PAUSE = 0.5  # seconds between two looks for a first replica
LOG_EVERY = 30.0  # seconds between two lines of the log about that


def route(
    chain: Sequence[str] = (),
    avoid: Collection[str] = (),
    *,
    attempt: str | None = None,
    source: str | None = None,
    to: str | None = None,
) -> dict[str, Any]:
    """The first argument of every call: what the router decides by. `to`: this replica, if it is there. `attempt`: a
    name by which the call counts as load until it ends."""
    return {"chain": list(chain), "avoid": sorted(avoid), "attempt": attempt, "source": source, "to": to}


class RayTransport:
    """Reaches the replicas of the deployment behind a handle."""

    def __init__(self, handle: DeploymentHandle, ingresses: Ingresses, *, silence: float = SILENCE) -> None:
        self._handle, self._ingresses, self._silence = handle, ingresses, silence
        self._source: str | None = None

    async def start(self, source: str) -> wire.Status:
        """Wait for a replica of a model; returns what it reports about itself. While the application changes its
        model there are replicas of others."""
        self._source, waited = source, 0.0
        while True:
            found = await self._ask_all()
            for status in found:
                if status.source == source:
                    return status
            if found and waited % LOG_EVERY < START_PAUSE:
                log.warning("there are replicas, and none has the model with the fingerprint %s", source)
            waited += START_PAUSE
            await asyncio.sleep(START_PAUSE)

    async def _ask_all(self) -> list[wire.Status]:
        try:
            asked = self._handle.broadcast("status", route())
            answers = await asked.results_async(timeout_s=self._silence, return_exceptions=True)
        except LOST:
            return []
        return [wire.load(answer) for answer in answers if isinstance(answer, bytes)]

    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> RayStream:
        router = _router()
        if router is not None and not set(router.names(self._source)) - set(avoid):
            raise ReplicaLostError("no replica can take the request now")
        attempt = uuid4().hex
        asked = route(chain, avoid, attempt=attempt, source=self._source)
        responses = self._handle.options(stream=True).stream.remote(asked, request)
        try:
            async with asyncio.timeout(self._silence):
                name = (await anext(responses)).decode()
        except BaseException as error:
            responses.cancel()
            asyncio.get_running_loop().call_later(self._silence, _end, attempt)  # it may just be on its way
            if isinstance(error, (*LOST, StopAsyncIteration)):
                raise ReplicaLostError(f"a replica was lost before it took a request: {_first_line(error)}") from None
            raise
        return RayStream(name, responses, self._handle, wire.load(request).id, attempt, self._silence)

    async def page(self, replica: str, asked: wire.PageRequest) -> wire.PageAnswer:
        try:
            answer: wire.PageAnswer = wire.load(await self._handle.page.remote(route(to=replica), wire.dump(asked)))
        except LOST as error:
            raise ReplicaLostError(f"replica {replica} does not answer: {_first_line(error)}") from None
        return answer

    async def is_replaced(self) -> bool:
        return self._source is not None and await self._ingresses.successor(self._source) is not None

    def statuses(self) -> dict[str, wire.Status]:
        router = _router()
        return {} if router is None else router.statuses()

    def reports(self) -> dict[str, int]:
        router = _router()
        return {} if router is None else router.reports()

    async def close(self) -> None:
        """Nothing: Serve ends replicas."""


class RayStream:
    """One request on one replica."""

    def __init__(
        self, replica: str, responses: Any, handle: DeploymentHandle, id: str, attempt: str, silence: float
    ) -> None:
        self.replica = replica
        self._responses, self._handle, self._id = responses, handle, id
        self._attempt, self._silence = attempt, silence

    def __aiter__(self) -> RayStream:
        return self

    async def __anext__(self) -> wire.Message:
        try:
            async with asyncio.timeout(self._silence):
                data = await anext(self._responses)
        except TimeoutError:
            raise ReplicaLostError(f"replica {self.replica} was silent for {self._silence:g} s") from None
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"replica {self.replica} was lost: {_first_line(error)}") from None
        message: wire.Message = wire.load(data)
        return message

    async def abort(self, reason: FinishReason) -> None:
        try:
            await self._handle.abort.remote(route(to=self.replica), self._id, reason)
        except (RayError, RayServeException) as error:
            raise EngineError(f"replica {self.replica} did not take an abort: {_first_line(error)}") from None

    async def close(self) -> None:
        _end(self._attempt)
        self._responses.cancel()


def _router() -> PrefixRouter | None:
    return next(iter(ROUTERS), None)


def _end(attempt: str) -> None:
    router = _router()
    if router is not None:
        router.end(attempt)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__

"""Replicas of a Ray Serve deployment, as a pool reaches them: through its handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from unspool.cluster import wire
from unspool.cluster.ray_router import PrefixRouter
from unspool.cluster.routers import ROUTERS
from unspool.cluster.streams import SILENCE
from unspool.errors import EngineError, ReplicaLostError
from unspool.events import FinishReason


def route(chain: Sequence[str] = (), avoid: Collection[str] = (), to: str | None = None) -> dict[str, Any]:
    """The first argument of every call: what the router decides by. `to`: this replica, if it is there."""
    return {"chain": list(chain), "avoid": sorted(avoid), "to": to}


class RayTransport:
    """Reaches the replicas of the deployment behind a handle."""

    def __init__(self, handle: DeploymentHandle, *, silence: float = SILENCE) -> None:
        self._handle, self._silence = handle, silence

    async def start(self) -> wire.Status:
        """Wait for a replica; what it tells about the model."""
        status: wire.Status = wire.load(await self._handle.status.remote(route()))
        return status

    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> RayStream:
        router = _router()
        if router is not None and not set(router.names()) - set(avoid):
            raise ReplicaLostError("no replica can take the request now")
        responses = self._handle.options(stream=True).stream.remote(route(chain, avoid), request)
        try:
            async with asyncio.timeout(self._silence):
                name = (await anext(responses)).decode()
        except (RayError, RayServeException, TimeoutError, StopAsyncIteration) as error:
            responses.cancel()
            raise ReplicaLostError(f"a replica was lost before it took a request: {_first_line(error)}") from None
        return RayStream(name, responses, self._handle, wire.load(request).id, self._silence)

    async def page(self, replica: str, asked: wire.PageRequest) -> wire.PageAnswer:
        try:
            answer: wire.PageAnswer = wire.load(await self._handle.page.remote(route(to=replica), wire.dump(asked)))
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"replica {replica} does not answer: {_first_line(error)}") from None
        return answer

    def statuses(self) -> dict[str, wire.Status]:
        router = _router()
        return {} if router is None else router.statuses()

    async def close(self) -> None:
        """Nothing: Serve ends replicas."""


class RayStream:
    """One request on one replica."""

    def __init__(self, replica: str, responses: Any, handle: DeploymentHandle, id: str, silence: float) -> None:
        self.replica = replica
        self._responses, self._handle, self._id, self._silence = responses, handle, id, silence
        self._router = _router()
        if self._router is not None:
            self._router.begin(replica)

    def __aiter__(self) -> AsyncIterator[wire.Message]:
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
        if self._router is not None:
            self._router.end(self.replica)
            self._router = None
        self._responses.cancel()


def _router() -> PrefixRouter | None:
    return next(iter(ROUTERS), None)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__

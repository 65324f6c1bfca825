"""Replicas of a Ray Serve deployment, as a pool reaches them: through a deployment handle and a router of our own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from unspool.cluster import wire
from unspool.cluster.prefixes import Expected
from unspool.cluster.routing import ReplicaView, Rule, rank
from unspool.cluster.streams import SILENCE
from unspool.errors import EngineError, ReplicaLostError
from unspool.events import FinishReason

# Routers of this process. Serve makes them, one for each handle, and has no public way to ask a handle for its own.
_routers: weakref.WeakSet[PrefixRouter] = weakref.WeakSet()


def route(chain: Sequence[str] = (), avoid: Collection[str] = (), to: str | None = None) -> dict[str, Any]:
    """The first argument of every call: what the router decides by. `to`: this replica, if it is there."""
    return {"chain": list(chain), "avoid": sorted(avoid), "to": to}


class PrefixRouter(RequestRouter):
    """Serve's interface to `routing.rank`."""

    def initialize_state(self, **rule: Any) -> None:
        self._rule = Rule(**rule)
        self._expected: dict[str, Expected] = {}
        self._load: dict[str, int] = {}  # requests that this router sent and that have not ended
        _routers.add(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        asked = pending_request.args[0]
        by_name = {name_of(replica.replica_id): replica for replica in candidate_replicas}
        if asked["to"] is not None:
            return [[by_name[asked["to"]]]] if asked["to"] in by_name else [candidate_replicas]
        views = [self.view(name, replica) for name, replica in by_name.items()]
        names = rank(asked["chain"], views, self._rule, asked["avoid"]) or rank(asked["chain"], views, self._rule)
        return [[by_name[name]] for name in names]

    def view(self, name: str, replica: RunningReplica) -> ReplicaView:
        stats = replica.routing_stats or {}
        load = max(self._load.get(name, 0), int(stats.get("load", 0)))
        expected = self._expected[name].keys() if name in self._expected else ()
        return ReplicaView(name, load, {*stats.get("prefixes", ()), *expected})

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        asked = pending_request.args[0]
        if asked["to"] is None:
            self._expected.setdefault(name_of(replica_id), Expected()).add(asked["chain"])

    def statuses(self) -> dict[str, wire.Status]:
        """What each running replica reported last."""
        reported = {name_of(id): replica.routing_stats for id, replica in self.curr_replicas.items()}
        return {name: wire.load(stats["status"]) for name, stats in reported.items() if stats}

    def names(self) -> list[str]:
        return [name_of(id) for id in self.curr_replicas]

    def begin(self, name: str) -> None:
        self._load[name] = self._load.get(name, 0) + 1

    def end(self, name: str) -> None:
        self._load[name] -= 1
        if not self._load[name]:
            del self._load[name]


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


def name_of(id: ReplicaID) -> str:
    return str(id.unique_id)


def _router() -> PrefixRouter | None:
    return next(iter(_routers), None)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__

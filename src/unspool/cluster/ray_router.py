"""Serve's interface to `routing.rank`. Serve copies this module's objects to every process that has a handle."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from unspool.cluster import routers, wire
from unspool.cluster.prefixes import Expected
from unspool.cluster.routing import ReplicaView, Rule, rank


class PrefixRouter(RequestRouter):
    """Serve's interface to `routing.rank`."""

    def initialize_state(self, **rule: Any) -> None:
        self._rule = Rule(**rule)
        self._expected: dict[str, Expected] = {}
        self._load: dict[str, int] = {}  # requests that this router sent and that have not ended
        routers.ROUTERS.add(self)

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


def name_of(id: ReplicaID) -> str:
    return str(id.unique_id)

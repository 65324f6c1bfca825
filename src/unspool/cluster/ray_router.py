"""Serve's interface to `routing.rank`. Serve copies this module's objects to every process that has a handle."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from unspool.cluster import routers, wire
from unspool.cluster.prefixes import Expected, Holdings
from unspool.cluster.routing import ReplicaView, Rule, rank


class PrefixRouter(RequestRouter):
    """Ranks replicas by what they reported last and by what this process has sent them since.

    Serve runs it in a thread of its own; `statuses`, `reports` and `end` are called by others, and copy what they read.
    """

    def initialize_state(self, **rule: Any) -> None:
        self._rule = Rule(**rule)
        self._expected: dict[str, Expected] = {}
        self._open: dict[str, str] = {}  # attempts that were sent and have not ended: on which replica
        self._read: dict[str, tuple[bytes, wire.Status]] = {}  # each replica's last report, as it came and as it reads
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
        views = self._views(by_name, asked["source"])
        names = rank(asked["chain"], views, self._rule, asked["avoid"]) or rank(asked["chain"], views, self._rule)
        return [[by_name[name]] for name in names]

    def _views(self, replicas: dict[str, RunningReplica], source: str | None) -> list[ReplicaView]:
        """The replicas that have this model, or may have it: a new one has not reported yet."""
        loads: dict[str, int] = {}
        for name in list(self._open.values()):
            loads[name] = loads.get(name, 0) + 1
        views = []
        for name, replica in replicas.items():
            status = self._status(name, replica)
            if status is not None and source not in (None, status.source):
                continue
            reported = 0 if status is None else int(status.stats["running"] + status.stats["waiting"])
            held = Holdings(() if status is None else status.held, self._expected.get(name, ()))
            views.append(ReplicaView(name, max(loads.get(name, 0), reported), held))
        return views

    def _status(self, name: str, replica: RunningReplica) -> wire.Status | None:
        data = (replica.routing_stats or {}).get("status")
        if data is None:
            return None
        known = self._read.get(name)
        if known is None or known[0] is not data:
            known = self._read[name] = (data, wire.load(data))
        return known[1]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        asked, name = pending_request.args[0], name_of(replica_id)
        if asked["attempt"] is not None:
            self._open[asked["attempt"]] = name
            self._expected.setdefault(name, Expected()).add(asked["chain"])

    def end(self, attempt: str) -> None:
        self._open.pop(attempt, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {name_of(replica.replica_id) for replica in replicas}
        for known in (self._expected, self._read):
            for name in known.keys() - names:
                del known[name]

    def names(self, source: str | None) -> list[str]:
        """The replicas that may have this model."""
        known = {name_of(id): self._status(name_of(id), replica) for id, replica in self._running()}
        return [name for name, status in known.items() if status is None or source in (None, status.source)]

    def statuses(self) -> dict[str, wire.Status]:
        """What each running replica reported last."""
        known = {name_of(id): self._status(name_of(id), replica) for id, replica in self._running()}
        return {name: status for name, status in known.items() if status is not None}

    def reports(self) -> dict[str, int]:
        return {name_of(id): int((replica.routing_stats or {}).get("number", 0)) for id, replica in self._running()}

    def _running(self) -> list[tuple[ReplicaID, RunningReplica]]:
        return list(self.curr_replicas.items())


def name_of(id: ReplicaID) -> str:
    return str(id.unique_id)

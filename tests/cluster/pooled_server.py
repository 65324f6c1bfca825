"""A pytest plugin: `python -m pytest -p tests.cluster.pooled_server tests/server` runs the server's tests against a
server in front of two replicas. With `--lose N` every N-th request loses its replica within its answer.

Requests, events and pages go through the same bytes as between processes. What is left out are tests of one process's
engine: those that stop it, break it or read its counters.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import pytest

import tests.server.harness
from tests.cluster.harness import Fake, FakeStream, FakeTransport
from unspool.cluster.back import engine_pages
from unspool.cluster.front import PooledModel, PooledService
from unspool.cluster.replica import Replica
from unspool.errors import ReplicaLostError
from unspool.llm import LLM
from unspool.server.config import ServerConfig
from unspool.server.service import Service

LOST_AFTER = 4  # messages of a stream that loses its replica
# Tests that hold for one engine in the server's process alone, and why.
OF_ONE_ENGINE: dict[str, str] = {
    "test_responses_tell_how_near_they_came_to_the_ceilings": "measures the engine of its process; test_front has ours",
    "test_a_replay_has_the_same_bits_in_any_crowd": "the crowd is spread over the replicas",
    "test_steps_add_up_to_what_was_computed": "a fork's number is null, for each engine counts its own",
    "test_the_cache_map_tells_counts_of_a_running_request_and_none_of_its_tokens": "the same: it looks the number up",
    "test_no_step_is_faster_than_the_memory": "sets the meter of its process's engine",
    "test_metrics_and_answers_tell_what_came_of_drafts": "what engines count has the label `replica`",
    "test_metrics_count": "what engines count has the label `replica`; test_front has ours",
    "test_a_failing_step_is_told_and_the_server_lives": "breaks the engine",
    "test_a_dead_engine_is_told_to_everyone": "ends the engine, which a pool replaces",
}


class Replicas(FakeTransport):
    """Two replicas on one engine of this process, which take turns."""

    def __init__(self, llm: LLM, fakes: Sequence[Fake], lose: int) -> None:
        super().__init__(fakes)
        self._llm, self._lose, self._count = llm, lose, itertools.count(1)

    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> FakeStream:
        number = next(self._count)
        able = [fake for fake in self.fakes if fake.name not in avoid]
        if not able:
            raise ReplicaLostError("no replica can take the request now")
        fake = able[number % len(able)]
        if self._lose and number % self._lose == 0 and not avoid:
            fake.dies_after.append(LOST_AFTER)
        return FakeStream(fake, request)

    async def close(self) -> None:
        await self._llm.driver.shutdown()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lose", type=int, default=0, metavar="N", help="every N-th request loses its replica")


def pytest_configure(config: pytest.Config) -> None:
    lose: int = config.getoption("--lose")

    async def open_service(llm: LLM, config: ServerConfig) -> Service:
        single = Service(llm, config)
        pages = engine_pages(llm, single)
        fakes = [Fake(name, Replica(llm, pages, name=name, meter=single.meter)) for name in ("one", "two")]
        transport = Replicas(llm, fakes, lose)
        status = await transport.start(llm.checkpoint.fingerprint)
        return PooledService(PooledModel(llm.checkpoint, {}, transport, status), config)

    tests.server.harness.open_service = open_service


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.name.split("[")[0] in OF_ONE_ENGINE]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

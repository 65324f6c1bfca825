"""Replicas on NUMA nodes, on an injected topology: this asks for no machine with several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import PATIENCE
from unspool.cluster import numa
from unspool.cluster.local import LocalTransport, local_nodes
from unspool.cluster.models import ModelSource, open_source
from unspool.cluster.serve_local import with_threads
from unspool.errors import BackendError

CPU = min(os.sched_getaffinity(0))
NODES = [numa.Node(0, (CPU,)), numa.Node(1, (max(os.sched_getaffinity(0)),))]


@pytest.mark.parametrize(("text", "expected"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set())])
def test_the_kernels_lists_of_processors(text: str, expected: set[int]) -> None:
    assert numa.parse_list(text) == expected


def test_nodes_are_those_with_memory_and_processors_that_may_be_used(tmp_path: Path) -> None:
    for number, processors, total in ((0, "0-3", 1000), (1, "4-7", 1000), (2, "", 1000), (3, "8-9", 0)):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(processors + "\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:       {total} kB\n")
    found = numa.nodes(tmp_path, allowed=range(2, 10))
    assert found == [numa.Node(0, (2, 3)), numa.Node(1, (4, 5, 6, 7))]
    assert local_nodes(3, lambda: found) == [found[0], found[1], found[0]]
    assert numa.nodes(tmp_path / "missing", allowed=[1, 0]) == [numa.Node(0, (0, 1))]
    assert local_nodes(2, lambda: found[:1]) == [None, None], "one node binds nobody"


def test_threads_are_those_of_a_nodes_processors() -> None:
    source = ModelSource(random="tiny")
    wide = [numa.Node(0, tuple(range(8))), numa.Node(1, tuple(range(8, 14)))]
    assert with_threads(source, wide).options == {"threads": 6}
    assert with_threads(source, [wide[0], wide[1], wide[0]]).options == {"threads": 3}
    assert with_threads(ModelSource(random="tiny", options={"threads": 2}), wide).options == {"threads": 2}


def test_each_replica_runs_on_its_node() -> None:
    source = ModelSource(random="tiny", options={"threads": 1, "kv_tokens": 1024})

    async def check() -> list[set[int]]:
        transport = LocalTransport(source, NODES, silence=PATIENCE)
        try:
            await transport.start(open_source(source).fingerprint)
            async with asyncio.timeout(PATIENCE):
                while len(transport.statuses()) < 2:
                    await asyncio.sleep(0.05)
            found = []
            for place in transport.places:
                assert place.process is not None
                allowed: set[int] = set()
                for thread in Path(f"/proc/{place.process.pid}/task").iterdir():
                    with contextlib.suppress(ProcessLookupError):  # it has ended since
                        allowed |= os.sched_getaffinity(int(thread.name))
                found.append(allowed)
            return found
        finally:
            await transport.close()

    assert asyncio.run(check()) == [set(node.processors) for node in NODES]


def test_memory_is_taken_from_the_node(tmp_path: Path) -> None:
    """As the kernel tells it, of a process that believes in two nodes."""
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
    code = f"""
from pathlib import Path
from unspool.cluster import numa
numa.bind(numa.Node(0, ({CPU},)), Path({str(tmp_path)!r}))
memory = bytearray(1 << 24)
print(Path("/proc/self/numa_maps").read_text().count("bind:0"))
"""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel does not tell where memory comes from")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    if "Operation not permitted" in ran.stderr:
        pytest.skip("this container may not bind memory")
    assert int(ran.stdout) > 0, ran.stderr


def test_a_node_that_cannot_be_bound_is_told(tmp_path: Path) -> None:
    for number in (0, 63):
        (tmp_path / f"node{number}").mkdir()
    before = os.sched_getaffinity(0)
    try:
        with pytest.raises(BackendError, match="memory cannot be bound to NUMA node 63"):
            numa.bind(numa.Node(63, (CPU,)), tmp_path)
    finally:
        os.sched_setaffinity(0, before)

"""A real Ray cluster of several processes on this machine, for tests: applications on it, and their processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.harness import Asked, folded, same
from unspool.cluster.app_options import AppOptions

HANG = 240.0  # seconds after which a wait is a failure


def wait_for(what: str, test: Callable[[], Any], seconds: float = HANG) -> Any:
    until = time.monotonic() + seconds
    while True:
        found = test()
        if found:
            return found
        assert time.monotonic() < until, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# Processes -----------------------------------------------------------------------------------------------------------
def children_of(root: int) -> dict[int, str]:
    """The processes below one, by what they call themselves; those that have ended and were not waited for apart."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return {process: names[process] for process in found - {root}}


def replicas_of(deployment: str, root: int | None = None) -> list[int]:
    """The processes of a deployment's replicas, the oldest first."""
    mark = f"ServeReplica:unspool:{deployment}"
    return sorted(process for process, name in children_of(root or os.getpid()).items() if mark in name)


def is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "T"
    return False


def processor_time(process: int) -> int:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def kill(process: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


# The application -----------------------------------------------------------------------------------------------------
@dataclass
class Cluster:
    """A Ray of this process, and an application on it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, **options: Any) -> None:
        """Run the application, or update it."""
        from unspool.cluster.ray_deploy import deploy

        defaults = {"health_check_period": 0.5, "silence": 4.0, "report_period": 0.3, "cpus": 0.01, "drain": 20.0}
        defaults |= {"patience": HANG, "max_attempts": 100}  # replicas may come back slowly, and are killed often
        server = {"log_format": "off", "names": ["tiny"]} | options.pop("server", {})
        deploy(AppOptions.of(defaults | options | {"server": server}), "127.0.0.1", self.port)

    def stop(self) -> None:
        from unspool.cluster.ray_deploy import stop

        stop("unspool")

    def client(self, timeout: float = HANG) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def ask(self, asked: Asked) -> httpx.Response:
        with self.client() as client:
            return client.post(asked[0], json=asked[1])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        page = httpx.get(f"{self.url}/metrics", timeout=HANG).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == f"unspool:{name}" and labels.items() <= sample.labels.items()
        )

    def wait_for_replicas(self, count: int) -> None:
        wait_for(f"{count} replicas", lambda: self.metric("replicas") == count)


@contextlib.contextmanager
def ray_cluster() -> Iterator[Cluster]:
    from unspool.cluster.serve_ray import local_ray

    with local_ray(8):
        yield Cluster(free_port())


# Streams -------------------------------------------------------------------------------------------------------------
def stream(client: httpx.Client, asked: Asked, after: dict[int, Callable[[], None]] | None = None) -> bytes:
    """The bytes of a stream; `after` so many chunks functions are called."""
    data, count = b"", 0
    with client.stream("POST", asked[0], json=asked[1] | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for chunk in response.iter_bytes():
            data += chunk
            count += 1
            if after and count in after:
                after[count]()
    return data


def text_of(data: bytes) -> str:
    """The text of a completion's stream."""
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert not [event for event in events if "error" in event], events[-1]
    return "".join(choice["text"] for event in events for choice in event["choices"])


# Load ----------------------------------------------------------------------------------------------------------------
class Load:
    """Requests from several threads, each compared with what an undisturbed server answers."""

    def __init__(self, cluster: Cluster, expected: dict[str, tuple[Asked, int, Any, Any]], seed: int) -> None:
        self._cluster, self._expected, self._rng = cluster, expected, random.Random(seed)
        self._names = sorted(expected)
        self._lock = threading.Lock()
        self.wrong: list[str] = []
        self.num_right = 0

    def run(self, total: int, threads: int) -> None:
        left = [self._draw() for _ in range(total)]

        def work() -> None:
            with self._cluster.client() as client:
                while True:
                    with self._lock:
                        if not left:
                            return
                        name, streams = left.pop()
                    problem = self._check(client, name, streams)
                    with self._lock:
                        if problem is None:
                            self.num_right += 1
                        else:
                            self.wrong.append(problem)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _draw(self) -> tuple[str, bool]:
        name = self._rng.choice(self._names)
        return name, self._expected[name][3] is not None and self._rng.random() < 0.5

    def _check(self, client: httpx.Client, name: str, streams: bool) -> str | None:
        asked, status, body, streamed = self._expected[name]
        try:
            if streams:
                found = folded(stream(client, asked))
                return None if found == streamed else f"{name}, streamed: {found}"[:600]
            answer = client.post(asked[0], json=asked[1])
        except (httpx.HTTPError, AssertionError) as error:
            return f"{name}{', streamed' if streams else ''}: {type(error).__name__}: {error}"[:600]
        is_right = answer.status_code == status and same(answer.json()) == body
        return None if is_right else f"{name}: {answer.status_code} {answer.text[:400]}"

"""Replicas as processes of this machine: started, watched, replaced, and reached through Unix sockets. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unspool.cluster import wire
from unspool.cluster.models import ModelSource
from unspool.cluster.numa import Node
from unspool.cluster.prefixes import Expected, Holdings
from unspool.cluster.routing import RULE, ReplicaView, Rule, rank
from unspool.cluster.streams import ASK_STATUS, SILENCE, FrameStream, read_frame, write_frame
from unspool.cluster.worker import READY
from unspool.errors import EngineError, ReplicaLostError

log = logging.getLogger("unspool.cluster")
STATUS_SECONDS = 0.5  # between two looks at a replica
MAX_PAUSE = 30.0  # between two starts of a replica that keeps dying
STEADY_SECONDS = 60.0  # a replica that lived so long starts again at once


@dataclass(eq=False)
class Process:
    """A place for a replica: the process that fills it now, and what is known of it."""

    name: str
    node: Node | None
    process: asyncio.subprocess.Process | None = None
    socket: Path | None = None
    status: wire.Status | None = None  # None: it cannot be reached
    num_reports: int = 0
    load: int = 0  # requests that were sent to it and have not ended
    num_starts: int = 0
    started: float = 0.0
    expected: Expected = field(default_factory=Expected)

    @property
    def is_up(self) -> bool:
        return self.status is not None


class LocalTransport:
    """Keeps a process alive in each of its places. It belongs to one event loop."""

    def __init__(
        self,
        source: ModelSource,
        nodes: Sequence[Node | None],
        rule: Rule = RULE,
        *,
        options: Mapping[str, Any] | None = None,
        silence: float = SILENCE,
    ) -> None:
        self._source, self._rule, self._options, self._silence = source, rule, dict(options or {}), silence
        self.places = [Process(f"replica-{index}", node) for index, node in enumerate(nodes)]
        self._watchers: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self, source: str) -> wire.Status:
        """Start every replica and wait for the first one; return what it reports about the model."""
        self._folder = tempfile.TemporaryDirectory(prefix="unspool-")
        try:
            await self._launch(self.places[0])  # alone: if the model is unusable, that is said once
        except BaseException:
            await self.close()
            raise
        self._watchers = [asyncio.create_task(self._watch(place)) for place in self.places]
        assert self.places[0].status is not None
        return self.places[0].status

    # Requests -------------------------------------------------------------------------------------------------------
    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> FrameStream:
        up = {place.name: place for place in self.places if place.is_up}
        for name in rank(chain, [_view(place) for place in up.values()], self._rule, avoid):
            place = up[name]
            try:
                reader, writer = await asyncio.open_unix_connection(place.socket)
                await write_frame(writer, request)
            except OSError:
                place.status = None
                continue
            place.expected.add(chain)
            place.load += 1
            return CountedStream(place, reader, writer, self._silence)
        raise ReplicaLostError("no replica can take the request now")

    async def page(self, replica: str, asked: wire.PageRequest) -> wire.PageAnswer:
        place = next((each for each in self.places if each.name == replica and each.is_up), None)
        if place is None:
            raise ReplicaLostError(f"{replica} cannot be reached now")
        answer: wire.PageAnswer = await self._exchange(place, wire.dump(asked))
        return answer

    def statuses(self) -> dict[str, wire.Status]:
        return {place.name: place.status for place in self.places if place.status is not None}

    def reports(self) -> dict[str, int]:
        return {place.name: place.num_reports for place in self.places}

    # Processes ------------------------------------------------------------------------------------------------------
    async def _launch(self, place: Process) -> None:
        place.num_starts += 1
        place.started, place.load, place.expected = time.monotonic(), 0, Expected()
        place.socket = Path(self._folder.name) / f"{place.name}.{place.num_starts}"
        place.process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "unspool.cluster.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert place.process.stdin is not None
        assert place.process.stdout is not None
        node = None if place.node is None else asdict(place.node)
        asked = {
            "name": place.name,
            "socket": str(place.socket),
            "node": node,
            "source": self._source.as_dict(),
            "options": self._options,
        }
        place.process.stdin.write(json.dumps(asked).encode() + b"\n")
        if await place.process.stdout.readline() != READY:
            code = await place.process.wait()
            raise EngineError(f"{place.name} could not start; it ended with status {code}, and its error is above")
        place.status = await self._ask(place)
        log.info("%s is up (process %d)", place.name, place.process.pid)

    async def _ask(self, place: Process) -> wire.Status:
        status: wire.Status = await self._exchange(place, ASK_STATUS)
        place.num_reports += 1
        return status

    async def _exchange(self, place: Process, question: bytes) -> Any:
        """One question and its answer."""
        try:
            reader, writer = await asyncio.open_unix_connection(place.socket)
            try:
                await write_frame(writer, question)
                async with asyncio.timeout(self._silence):
                    return wire.load(await read_frame(reader))
            finally:
                writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise ReplicaLostError(f"{place.name} does not answer: {error or type(error).__name__}") from None

    async def _watch(self, place: Process) -> None:
        """Look at a replica again and again; replace it when it died or does not answer."""
        pause = 0.0
        while not self._is_closing:
            try:
                if place.process is None or place.process.returncode is not None:
                    await asyncio.sleep(pause)
                    pause = min(MAX_PAUSE, 2 * pause + 0.5)
                    await self._launch(place)
                await asyncio.sleep(STATUS_SECONDS)
                place.status = await self._ask(place)
                if time.monotonic() - place.started > STEADY_SECONDS:
                    pause = 0.0
            except (OSError, EngineError) as error:
                place.status = None
                if not self._is_closing:
                    log.warning("%s is replaced: %s", place.name, error)
                await _kill(place)

    async def is_replaced(self) -> bool:
        return False  # one process starts and ends with its replicas

    async def close(self) -> None:
        self._is_closing = True
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for place in self.places:
            await _kill(place)
        self._folder.cleanup()


class CountedStream(FrameStream):
    """A stream that counts as load of its replica until it is closed."""

    def __init__(
        self, place: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float
    ) -> None:
        super().__init__(place.name, reader, writer, silence)
        self._place: Process | None = place
        self._generation = place.num_starts

    async def close(self) -> None:
        await super().close()
        place, self._place = self._place, None
        if place is not None and place.num_starts == self._generation:
            place.load -= 1


def local_nodes(replicas: int, nodes: Callable[[], Sequence[Node]]) -> list[Node | None]:
    """Where that many replicas go: spread over the nodes in turn. A machine with one node binds none."""
    found = list(nodes())
    if len(found) == 1:
        return [None] * replicas
    return [found[index % len(found)] for index in range(replicas)]


def _view(place: Process) -> ReplicaView:
    assert place.status is not None
    return ReplicaView(place.name, place.load, Holdings(place.status.held, place.expected))


async def _kill(place: Process) -> None:
    process = place.process
    if process is None:
        return
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # also one that was stopped
    await process.wait()
    place.process = None

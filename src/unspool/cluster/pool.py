"""What a server submits requests to where several replicas answer: a Driver's methods, over any transport.

    server ── Submission ──► ReplicaPool ── rank, open ──► replica A      lost: replica B, from the beginning
       ▲                         │                            │
       └──────── events ◄── Replay: compare, pass on ◄────────┘

Invariants:

- Each request runs on one replica at a time. If that one is lost, the request is sent to another one with the same
  seed; what was passed on already is compared and not passed on again.
- A request ends exactly once for each choice: with the replica's ending, or with a named failure.
- A seed that the caller left open is drawn here, once, so that every attempt has the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import uuid4

from unspool.cluster import wire
from unspool.cluster.prefixes import prompt_chain
from unspool.cluster.replay import Replay, with_timings
from unspool.engine.driver import Submission, call_soon
from unspool.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    QueueFullError,
    ReplayError,
    ReplicaLostError,
)
from unspool.events import Event, Failed, Finished, FinishReason, Text, Timings, Usage
from unspool.params import ResolvedParams, SamplingParams
from unspool.results import Receipt

log = logging.getLogger("unspool.cluster")
RETRY_PAUSE = 0.25
REPLACED = "another model took the place of the one that this request was sent to; send the request again"
ENDED = "this server was replaced, and the answer was not done in the time to drain; send the request again"
ELSEWHERE = (EngineClosedError, EngineDiedError, ReplicaLostError)  # of one replica; another may take the request


class ReplicaStream(Protocol):
    """One request on one replica. Reading raises ReplicaLostError if the replica is gone or silent."""

    replica: str

    def __aiter__(self) -> AsyncIterator[wire.Message]: ...

    async def abort(self, reason: FinishReason) -> None:
        """Have the replica end the request; its last events still come."""

    async def close(self) -> None:
        """Read no further; the replica forgets the request."""


class Transport(Protocol):
    """How replicas are found and reached."""

    async def start(self, source: str) -> wire.Status:
        """Wait for a replica of the model with this fingerprint; returns what it reports about itself."""

    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> ReplicaStream:
        """Send a request to the best replica that is not to be avoided. ReplicaLostError: there is none now."""

    async def page(self, replica: str, asked: wire.PageRequest) -> wire.PageAnswer:
        """What a replica's engine reports about itself."""

    async def is_replaced(self) -> bool:
        """Whether no replica of this model will come any more, for the application serves another one."""

    def statuses(self) -> dict[str, wire.Status]:
        """What each replica that can be reached reported last."""

    def reports(self) -> dict[str, int]:
        """The number of each replica's last report."""

    async def close(self) -> None: ...


Resolve = Callable[[SamplingParams], ResolvedParams]


@dataclass(frozen=True)
class Patience:
    """What a request endures."""

    attempts: int = 5  # one that kills whatever computes it must not kill every replica
    seconds: float = 60.0  # that it waits for a replica that can take it


@dataclass(eq=False)
class Job:
    """A submission under way."""

    submission: Submission
    request: wire.WireRequest
    chain: list[str]
    replay: Replay
    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    stream: ReplicaStream | None = None
    task: asyncio.Task[None] | None = None  # which reads the answer
    aborted: FinishReason | None = None

    @property
    def num_lost(self) -> int:
        return max(0, self.replay.num_attempts - 1)


class ReplicaPool:
    """Takes submissions as a Driver does. It belongs to one event loop."""

    def __init__(
        self, transport: Transport, status: wire.Status, resolve: Resolve, patience: Patience | None = None
    ) -> None:
        self.transport, self.status = transport, status
        self.failure: EngineDiedError | None = None  # a replica that dies is replaced: the pool itself goes on
        self.num_replays = 0
        self._resolve, self._patience = resolve, patience or Patience()
        self._suspects: dict[str, int] = {}  # replicas that were lost, and the number of their last report then
        self._jobs: dict[Submission, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def is_ready(self) -> bool:
        return not self._is_closing and bool(self.transport.statuses())

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._jobs)

    def receipt(self, seed: int) -> Receipt:
        return replace(self.status.receipt, seed=seed)

    # Coming in ------------------------------------------------------------------------------------------------------
    async def start_async(self, submissions: Sequence[Submission]) -> None:
        """Have replicas take requests, all or none. What is wrong with one is raised here."""
        if self._is_closing:
            raise EngineClosedError("the server is closed, or closing; no new requests are taken")
        started: list[Job] = []
        try:
            for one in submissions:
                started.append(await self._start(one))
        except BaseException:
            for job in started:
                self.abort(job.submission)
            raise

    async def _start(self, submission: Submission) -> Job:
        resolved = self._resolve(submission.params)
        params = replace(submission.params, seed=resolved.seed)
        request = wire.WireRequest(
            f"c{uuid4().hex}",
            tuple(submission.prompt),
            params,
            tuple(submission.output),
            submission.is_chat,
            submission.traceparent,
            self.status.source,
        )
        receipt = self.status.receipt
        chain = prompt_chain(
            submission.prompt,
            model=receipt.model,
            layout=self.status.layout,
            salt=resolved.cache_salt,
            block_size=self.status.block_size,
        )
        job = Job(submission, request, chain, Replay(params.n), time.monotonic())
        submission.id, submission.resolved = request.id, resolved
        await self._attempt(job, set(), until=job.arrived + self._patience.seconds)
        self._jobs[submission] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job))
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        return job

    async def _attempt(self, job: Job, avoid: set[str], until: float) -> None:
        """Queue a request on a replica: the best one, or the next one where that has no room or is lost."""
        full: QueueFullError | None = None
        request = wire.dump(self._within_deadline(job))
        while True:
            try:
                stream = await self._open(request, job.chain, avoid)
            except ReplicaLostError:
                if full is not None:
                    raise full from None
                if time.monotonic() >= until or self._is_closing:
                    raise
                if await self.transport.is_replaced():
                    raise ReplicaLostError(REPLACED) from None
                avoid.clear()  # what was lost may have been replaced by now
                await asyncio.sleep(RETRY_PAUSE)
                continue
            try:
                message: wire.Message = wire.Events()
                while isinstance(message, wire.Events):  # it is alive, and its engine is in a long step
                    message = await anext(aiter(stream))
            except (ReplicaLostError, StopAsyncIteration):
                await stream.close()
                self._suspect(stream.replica)
                avoid.add(stream.replica)
                continue
            self._suspects.pop(stream.replica, None)
            if isinstance(message, wire.Accepted):
                job.replay.begin(message.receipt)
                job.submission.receipt = message.receipt
                job.stream = stream
                return
            await stream.close()
            error = message.error if isinstance(message, wire.Refused) else EngineError("a replica sent no answer")
            if isinstance(error, QueueFullError):
                full = error
            elif not isinstance(error, ELSEWHERE):
                raise error
            avoid.add(stream.replica)

    async def _open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> ReplicaStream:
        """A stream on the best replica; one that has not reported since it was lost is taken last: it may be hung."""
        reports = self.transport.reports()
        self._suspects = {name: last for name, last in self._suspects.items() if reports.get(name) == last}
        suspects = self._suspects.keys() - set(avoid)
        if suspects:
            try:
                return await self.transport.open(request, chain, {*avoid, *suspects})
            except ReplicaLostError:
                pass
        return await self.transport.open(request, chain, avoid)

    def _suspect(self, replica: str) -> None:
        self._suspects[replica] = self.transport.reports().get(replica, -1)

    def _within_deadline(self, job: Job) -> wire.WireRequest:
        """The request with what is left of its deadline: the caller's clock goes on when a replica is lost."""
        deadline = job.request.params.deadline_ms
        if deadline is None:
            return job.request
        left = max(1.0, deadline - 1000 * (time.monotonic() - job.arrived))
        return replace(job.request, params=replace(job.request.params, deadline_ms=left))

    # Running --------------------------------------------------------------------------------------------------------
    async def _run(self, job: Job) -> None:
        lost: set[str] = set()
        try:
            while not job.replay.is_done:
                assert job.stream is not None
                name = job.stream.replica
                try:
                    await self._read(job)
                    if not job.replay.is_done:
                        raise ReplicaLostError(f"replica {name} closed a stream before its answer was whole")
                except ReplicaLostError as error:
                    lost.add(name)
                    self._suspect(name)
                    await self._replace(job, lost, error)
        except Exception as error:
            self._fail(job, error)
        finally:
            del self._jobs[job.submission]
            if job.stream is not None:
                await job.stream.close()

    async def _read(self, job: Job) -> None:
        assert job.stream is not None
        async for message in job.stream:
            assert isinstance(message, wire.Events)
            job.submission.utilization = message.utilization or job.submission.utilization
            for event in message.events:
                _check_alive(job, event)
                fresh = job.replay.push(event)
                if fresh is not None:
                    self._pass_on(job, fresh)
            if job.replay.is_done:
                return

    async def _replace(self, job: Job, lost: set[str], error: ReplicaLostError) -> None:
        """Start a request again whose replica was lost."""
        if job.aborted is not None:  # nobody waits for more of it
            self._end(job, job.aborted)
            return
        if job.replay.num_attempts >= self._patience.attempts:
            raise ReplicaLostError(f"{job.replay.num_attempts} replicas were lost while they computed this answer")
        log.warning("%s; its request %s goes to another replica", error, job.request.id)
        self.num_replays += 1
        assert job.stream is not None
        await job.stream.close()
        job.stream = None
        await self._attempt(job, set(lost), until=time.monotonic() + self._patience.seconds)

    def _pass_on(self, job: Job, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Text) and event.tokens:
            job.first_token = job.first_token if job.first_token is not None else now
            job.last_token = now
        if isinstance(event, Finished) and job.num_lost:
            event = with_timings(event, _waited(job, event.choice, now))
        submission, event = job.submission, event._replace(request=job.request.id) if isinstance(event, Text) else event
        if submission.loop is None or submission.loop is asyncio.get_running_loop():
            submission.sink(event)
        else:
            call_soon(submission.loop, submission.sink, event)

    def _fail(self, job: Job, error: Exception) -> None:
        known = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        if isinstance(error, ReplayError):
            log.error("request %s: %s", job.request.id, error)
        for choice in job.replay.open_choices():
            self._pass_on(job, Failed(job.request.id, choice, known))

    def _end(self, job: Job, reason: FinishReason) -> None:
        """End what a lost replica can no longer end itself."""
        now = time.monotonic()
        for choice in job.replay.open_choices():
            usage = Usage(len(job.request.prompt), job.replay.tokens_of(choice))
            timings = _waited(job, choice, now)
            event = Finished(job.request.id, choice, reason, usage, timings, seed=job.request.params.seed)
            job.replay.end(event)
            self._pass_on(job, event)

    # Ending ---------------------------------------------------------------------------------------------------------
    def abort(self, submission: Submission, reason: FinishReason = "abort") -> None:
        """End a request soon; its sink gets the ending. Harmless when it has ended, or was never taken."""
        job = self._jobs.get(submission)
        if job is None or job.aborted is not None:
            return
        job.aborted = reason
        if job.stream is not None:
            self._spawn(job.stream.abort(reason))

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except EngineError as error:
                log.info("a replica could not be told to end a request: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end_all(self) -> None:
        """Take no new requests, and fail the others by name: the process ends, and their connections with it."""
        self._is_closing = True
        for job in list(self._jobs.values()):
            self._fail(job, ReplicaLostError(ENDED))
            if job.task is not None:
                job.task.cancel()

    async def shutdown(self, drain: float = 0.0) -> None:
        """Take no new requests, let the others run for `drain` seconds, and end what is left."""
        self._is_closing = True
        if self._jobs and drain > 0:
            await asyncio.wait(set(self._tasks), timeout=drain)
        for submission in list(self._jobs):
            self.abort(submission)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5.0)
        for task in list(self._tasks):
            task.cancel()
        await self.transport.close()


def _check_alive(job: Job, event: Event) -> None:
    """Raises a ReplicaLostError for an ending that says that the replica ended, and not the answer."""
    is_ending = isinstance(event, Failed) and isinstance(event.error, EngineClosedError | EngineDiedError)
    if is_ending or (isinstance(event, Finished) and event.reason == "abort" and job.aborted is None):
        assert job.stream is not None
        why = str(event.error) if isinstance(event, Failed) else "its engine was closed"
        raise ReplicaLostError(f"replica {job.stream.replica} ended within an answer: {why}")


def _waited(job: Job, choice: int, now: float) -> Timings:
    """The times that the caller waited, lost replicas included. Which part was queueing is not known."""
    first = None if job.first_token is None else job.first_token - job.arrived
    decode = 0.0 if job.first_token is None or job.last_token is None else job.last_token - job.first_token
    num_tokens = job.replay.tokens_of(choice)
    return Timings(
        queue=0.0,
        prefill=first if first is not None else now - job.arrived,
        decode=decode,
        total=now - job.arrived,
        first_token=first,
        tokens_per_second=(num_tokens - 1) / decode if num_tokens > 1 and decode > 0 else None,
    )

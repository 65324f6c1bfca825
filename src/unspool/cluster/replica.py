"""One engine as a pool sees it: requests in and events out as bytes, and a status for routers and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from unspool.cluster import wire
from unspool.cluster.prefixes import MAX_REPORTED, short
from unspool.engine.driver import Submission
from unspool.errors import EngineError, ReplicaLostError, UnspoolError
from unspool.events import Event, Finished, FinishReason, Text
from unspool.server.tracing import Tracer

if TYPE_CHECKING:
    from unspool.ceilings import Utilization
    from unspool.engine.engine import Engine
    from unspool.llm import LLM
    from unspool.server.meter import Meter
    from unspool.server.tracing import ReplicaSpan

log = logging.getLogger("unspool.cluster")
Pages = Callable[[wire.PageRequest], Awaitable[wire.PageAnswer]]
STEP_SECONDS = 2.0  # that a report waits for the end of a step
HEARTBEAT = 1.0  # seconds of silence after which a stream says that its replica is alive


class Replica:
    """Serves the requests of one or more pools. It belongs to one event loop."""

    def __init__(
        self,
        llm: LLM,
        pages: Pages | None = None,
        *,
        name: str = "replica",
        source: str | None = None,
        tracer: Tracer | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.llm, self._pages, self._name, self._meter = llm, pages, name, meter
        self._source = source or llm.checkpoint.fingerprint
        self._tracer = tracer or Tracer()
        self._submissions: dict[str, Submission] = {}
        self._status: wire.Status = llm.driver.call(self._examine)
        self._asking: asyncio.Future[wire.Status] | None = None

    async def stream(self, data: bytes) -> AsyncIterator[bytes]:
        """The messages of one request: Accepted and its events, or Refused; before them, signs of life while the engine
        is in a long step. Leaving the iterator aborts the request."""
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        starting = asyncio.ensure_future(self._start(data, inbox))
        try:
            while not (await asyncio.wait({starting}, timeout=HEARTBEAT))[0]:
                yield wire.dump(wire.Events())
        except BaseException:
            starting.cancel()
            raise
        try:
            request, submission = starting.result()
        except Exception as error:
            if not isinstance(error, UnspoolError):
                log.error("a defect: %s: %s", type(error).__name__, error, exc_info=error)
            yield wire.dump(wire.Refused(error))
            return
        self._submissions[request.id] = submission
        span = AttemptSpan(self._tracer.begin_attempt(self._name, request.id, request.traceparent))
        try:
            assert submission.resolved is not None
            yield wire.dump(wire.Accepted(self.llm.receipt(submission.resolved.seed)))
            async for events in _batches(inbox, request.params.n):
                span.add(events)
                yield wire.dump(wire.Events(events, self._utilization(events)))
        finally:
            del self._submissions[request.id]
            self.llm.driver.abort(submission)
            span.end()

    def _utilization(self, events: tuple[Event, ...]) -> Utilization | None:
        end = next((each for each in events if isinstance(each, Finished) and each.choice == 0), None)
        return None if end is None or self._meter is None else self._meter.answer(end)

    async def _start(self, data: bytes, inbox: asyncio.Queue[Event]) -> tuple[wire.WireRequest, Submission]:
        """Have the engine take a request, whose events go to `inbox`."""
        request = wire.load(data)
        if not isinstance(request, wire.WireRequest):
            raise EngineError(f"a request was expected, not a {type(request).__name__}")
        if request.source not in (None, self._source):
            raise ReplicaLostError(f"replica {self._name} serves another model than the one that was asked for")
        submission = Submission(
            request.prompt,
            request.params,
            inbox.put_nowait,
            output=request.output,
            is_chat=request.is_chat,
            loop=asyncio.get_running_loop(),
        )
        await self.llm.driver.start_async([submission])
        return request, submission

    def abort(self, id: str, reason: FinishReason) -> None:
        """End a request soon; its stream gets the last events. Harmless when there is no such request."""
        submission = self._submissions.get(id)
        if submission is not None:
            self.llm.driver.abort(submission, reason)

    async def status(self) -> wire.Status:
        """What it reports to routers. During a long step this is the last report: a long step is no sign of death."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self.llm.driver.call_async(self._examine))
        await asyncio.wait({self._asking}, timeout=STEP_SECONDS)
        if self._asking.done():
            self._status = self._asking.result()
        return self._status

    def _examine(self, engine: Engine) -> wire.Status:
        return wire.Status(
            receipt=engine.receipt(0),
            source=self._source,
            context_length=engine.context_length,
            block_size=engine.config.block_size,
            layout=engine.runner.kv.layout,
            stats=dict(engine.stats),
            prefixes="".join(map(short, engine.scheduler.blocks.registered_keys(MAX_REPORTED))),
        )

    async def page(self, asked: wire.PageRequest) -> wire.PageAnswer:
        """What the engine reports about itself."""
        if self._pages is None:
            raise EngineError("this replica has no pages")
        return await self._pages(asked)

    def check_health(self) -> None:
        """Raises what killed the engine, if it is dead."""
        if self.llm.driver.failure is not None:
            raise self.llm.driver.failure


class AttemptSpan:
    """What the span of an attempt says at its end."""

    def __init__(self, span: ReplicaSpan) -> None:
        self._span, self._num_tokens = span, 0
        self._ends: list[Finished] = []

    def add(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Text):
                self._num_tokens += len(event.tokens)
            elif isinstance(event, Finished):
                self._ends.append(event)

    def end(self) -> None:
        timings = self._ends[0].timings if self._ends else None
        self._span.end(tokens=self._num_tokens, reasons=[end.reason for end in self._ends], timings=timings)


async def _batches(inbox: asyncio.Queue[Event], num_choices: int) -> AsyncIterator[tuple[Event, ...]]:
    """Events as they come, those together that came together; an empty batch after each silence."""
    while num_choices:
        try:
            batch = [await asyncio.wait_for(inbox.get(), HEARTBEAT)]
        except TimeoutError:
            yield ()
            continue
        while not inbox.empty():
            batch.append(inbox.get_nowait())
        num_choices -= sum(not isinstance(event, Text) for event in batch)
        yield tuple(batch)

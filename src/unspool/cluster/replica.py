"""One engine as a pool sees it: requests in and events out as bytes, and a status for routers and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from unspool.cluster import wire
from unspool.cluster.prefixes import MAX_REPORTED, short
from unspool.engine.driver import Submission
from unspool.errors import EngineError, UnspoolError
from unspool.events import Event, FinishReason, Text

if TYPE_CHECKING:
    from unspool.engine.engine import Engine
    from unspool.llm import LLM

Pages = Callable[[wire.PageRequest], Awaitable[wire.PageAnswer]]
HEARTBEAT = 1.0  # seconds of silence after which a stream says that its replica is alive


class Replica:
    """Serves the requests of one or more pools. It belongs to one event loop."""

    def __init__(self, llm: LLM, pages: Pages | None = None) -> None:
        self.llm, self._pages = llm, pages
        self._submissions: dict[str, Submission] = {}

    async def stream(self, data: bytes) -> AsyncIterator[bytes]:
        """The messages of one request: Accepted and its events, or Refused. Leaving the iterator aborts the request."""
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        request: wire.WireRequest | None = None
        try:
            loaded = wire.load(data)
            if not isinstance(loaded, wire.WireRequest):
                raise EngineError(f"a request was expected, not a {type(loaded).__name__}")
            request = loaded
            submission = Submission(
                request.prompt,
                request.params,
                inbox.put_nowait,
                output=request.output,
                is_chat=request.is_chat,
                loop=asyncio.get_running_loop(),
            )
            await self.llm.driver.start_async([submission])
        except UnspoolError as error:
            yield wire.dump(wire.Refused(error))
            return
        self._submissions[request.id] = submission
        try:
            assert submission.resolved is not None
            yield wire.dump(wire.Accepted(self.llm.receipt(submission.resolved.seed)))
            async for events in _batches(inbox, request.params.n):
                yield wire.dump(wire.Events(events))
        finally:
            del self._submissions[request.id]
            self.llm.driver.abort(submission)

    def abort(self, id: str, reason: FinishReason) -> None:
        """End a request soon; its stream gets the last events. Harmless when there is no such request."""
        submission = self._submissions.get(id)
        if submission is not None:
            self.llm.driver.abort(submission, reason)

    async def status(self) -> wire.Status:
        return await self.llm.driver.call_async(_status)

    async def page(self, asked: wire.PageRequest) -> wire.PageAnswer:
        """What the engine tells of itself."""
        if self._pages is None:
            raise EngineError("this replica has no pages")
        return await self._pages(asked)

    def check_health(self) -> None:
        """Raises what killed the engine, if it is dead."""
        if self.llm.driver.failure is not None:
            raise self.llm.driver.failure


def _status(engine: Engine) -> wire.Status:
    return wire.Status(
        receipt=engine.receipt(0),
        context_length=engine.context_length,
        block_size=engine.config.block_size,
        layout=engine.runner.kv.layout,
        stats=dict(engine.stats),
        prefixes=tuple(short(key) for key in engine.scheduler.blocks.registered_keys(MAX_REPORTED)),
    )


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

"""The engine in a thread of its own, for any number of asyncio consumers.

    asyncio task ──start──► commands ──► engine thread: add · step · abort
         ▲                                       │ events, a step's worth at a time
         └────────── a sink each ◄───────────────┘

A sink is a function that the event loop calls with each event of its request: a step costs one wake-up of the loop
however many streams it feeds, and no task has to be woken to take an event on. The engine thread never waits for a
reader. What a slow reader has not read stays with its own stream, so it costs memory bounded by its own answer and
nobody else's time.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from unspool.engine.engine import Engine
from unspool.errors import EngineClosedError, EngineDiedError
from unspool.events import Event, Failed, Finished, FinishReason, Text
from unspool.params import ResolvedParams, SamplingParams

log = logging.getLogger("unspool.engine")
T = TypeVar("T")
Sink = Callable[[Event], None]  # called in the event loop; must not raise


@dataclass(slots=True)
class Reader:
    """Who takes a request's events, and where."""

    loop: asyncio.AbstractEventLoop
    sink: Sink
    num_left: int  # choices that have not ended


@dataclass(frozen=True)
class Ticket:
    """A request that was taken."""

    id: str
    params: ResolvedParams
    owner: AsyncEngine

    def abort(self, reason: FinishReason = "abort") -> None:
        self.owner.abort(self.id, reason)


class Stream:
    """One request's events. Iterate to the end, or `abort`; leaving early through `async with` aborts too."""

    def __init__(self, ticket: Ticket, inbox: asyncio.Queue[Event]) -> None:
        self.id, self.params, self.abort = ticket.id, ticket.params, ticket.abort
        self._inbox, self._num_left = inbox, ticket.params.n

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event; a failure is raised."""
        if self._num_left == 0:
            raise StopAsyncIteration
        event = await self._inbox.get()
        if isinstance(event, Failed):
            self._num_left = 0
            self.abort()
            raise event.error
        self._num_left -= isinstance(event, Finished)
        return event

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._num_left:
            self.abort()


class AsyncEngine:
    """Owns an Engine: after this, nobody else may call it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: EngineDiedError | None = None  # why the thread died, if it did
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers: dict[str, Reader] = {}
        self._is_closing = self._is_stopped = False
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="unspool-engine", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self.failure is None and not self._is_closing

    # Called from asyncio --------------------------------------------------------------------------------------------
    async def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, id: str | None = None
    ) -> Stream:
        """Queue a prompt, to iterate over what comes of it. What is wrong with it is raised here."""
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        return Stream(await self.start(prompt, params or SamplingParams(), inbox.put_nowait, id=id), inbox)

    async def start(
        self, prompt: Sequence[int], params: SamplingParams, sink: Sink, *, id: str | None = None
    ) -> Ticket:
        """Queue a prompt whose events go to `sink`. What is wrong with it is raised before anything is computed."""
        self._check_open()
        if params.constraint is not None and self.engine.tokenizer is not None:
            from unspool.sampling.constraint import compile_async

            # Aside and bounded, so that a slow schema delays its own request alone; the engine then finds it compiled.
            await compile_async(params.constraint, self.engine.tokenizer)
        reader = Reader(asyncio.get_running_loop(), sink, params.n)

        def add() -> tuple[str, ResolvedParams]:
            name = self.engine.add(prompt, params, id=id)
            self._readers[name] = reader
            return name, self.engine.params_of(name)

        future = self._call(add)
        try:
            name, resolved = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._commands.put(lambda: self._forget(future))
            raise
        return Ticket(name, resolved, self)

    def abort(self, id: str, reason: FinishReason = "abort") -> None:
        """End a request soon; its stream gets its ending. Harmless when it has ended."""
        self._commands.put(lambda: self._abort(id, reason))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Run a function on the engine between two steps."""
        self._check_open()
        return await asyncio.wrap_future(self._call(lambda: question(self.engine)))

    async def shutdown(self, drain: float = 0.0) -> None:
        """Take no more, let what runs finish for `drain` seconds, abort the rest, end the thread."""
        self._is_closing = True
        if drain > 0:
            await asyncio.to_thread(self._idle.wait, drain)
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # The engine's thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._obey(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._hand_out(self.engine.step())
                if not self.engine.has_work:
                    self._idle.set()
        except BaseException as error:  # a panic of a Rust library is no Exception
            self._die(error)

    def _obey(self, *, wait: bool) -> None:
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _call(self, act: Callable[[], T]) -> Future[T]:
        """Have the engine's thread do something, and its result or error come back."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():  # whoever asked has gone
                return
            try:
                self._check_open()
                self._idle.clear()
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # ends the thread, so whoever asked must be told before
                future.set_exception(_failure(error))
                raise

        self._commands.put(command)
        if self.failure is not None:  # the thread died while we queued
            self._refuse_commands()
        return future

    def _forget(self, future: Future[tuple[str, ResolvedParams]]) -> None:
        """Whoever asked went away while the request was being added."""
        if not future.cancelled() and future.exception() is None:
            self._abort(future.result()[0], "abort")

    def _abort(self, id: str, reason: FinishReason) -> None:
        self.engine.abort(id, reason)

    def _stop(self) -> None:
        self._hand_out(self.engine.close())
        self._is_stopped = True

    def _hand_out(self, events: Sequence[Event]) -> None:
        """One wake-up for each event loop, however many events the step had."""
        mail: dict[asyncio.AbstractEventLoop, list[tuple[Sink, Event]]] = {}
        for event in events:
            reader = self._readers.get(event.request)
            if reader is None:  # was told that the engine died
                continue
            mail.setdefault(reader.loop, []).append((reader.sink, event))
            if not isinstance(event, Text):
                reader.num_left -= 1
                if reader.num_left == 0:
                    del self._readers[event.request]
        for loop, letters in mail.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, letters)

    def _die(self, error: BaseException) -> None:
        """The engine cannot be repaired: every request ends with the reason, and new ones are refused with it."""
        log.critical("the engine stopped and takes no more requests; restart the process", exc_info=error)
        self.failure = failure = _failure(error)
        self._hand_out([Failed(id, 0, failure) for id in self._readers])
        self._readers.clear()
        self._idle.set()
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._is_closing:
            raise EngineClosedError("the engine is shutting down; no new requests are taken")


def _failure(error: BaseException) -> EngineDiedError:
    failure = EngineDiedError(f"the engine stopped: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _deliver(letters: Sequence[tuple[Sink, Event]]) -> None:
    for sink, event in letters:
        sink(event)

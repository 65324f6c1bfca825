"""The driver: one thread that owns an engine, for callers in any number of threads and event loops.

    caller ──start · abort · call──► queue of calls ──► engine thread: add · abort · step
       ▲                                                     │ the events of a step
       └──────────────── one sink for each request ◄─────────┘

Invariants:

- Only the engine thread uses the engine. A step is never interrupted by another caller, nor by Ctrl-C, which Python
  raises in the main thread.
- Calls run one by one, between steps, in the order in which they were sent. So an abort that is sent after a start
  finds that request, even if no caller waited for the start.
- Every call gets exactly one reply: its result, its error, or the reason why the engine takes no more calls.
- A sink gets the events of its request in order, and none after the ending of the last choice. `_submissions` holds
  the requests that still have such an ending to come.
- The engine thread never waits for a reader, and readers hold no lock that it needs. Unread events wait with their
  reader.
- While the engine thread is idle it holds no reference to the driver, so a model without references is freed.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from unspool.engine.engine import Engine
from unspool.errors import EngineClosedError, EngineDiedError, EngineError
from unspool.events import Event, Failed, FinishReason, Text
from unspool.params import ResolvedParams, SamplingParams
from unspool.records import record
from unspool.results import Receipt

if TYPE_CHECKING:
    import asyncio

    from unspool.ceilings import Utilization

T = TypeVar("T")
Sink = Callable[[Event], None]  # must not raise and must not block


@record(eq=False, slots=True)
class Submission:
    """A request for the engine and where its events go: to `sink`, called in `loop` or, without one, by the engine
    thread. `id`, `resolved` and `receipt` are there once the engine has taken it."""

    prompt: Sequence[int]
    params: SamplingParams
    sink: Sink
    output: Sequence[int] = ()  # how the answer begins: see Engine.add
    is_chat: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    traceparent: str | None = None  # of the request's span, for an engine in another process
    id: str | None = None
    resolved: ResolvedParams | None = None
    receipt: Receipt | None = None  # of the engine that took it
    utilization: Utilization | None = None  # that another process reports: how near the answer came to its ceilings
    num_left: int = field(init=False)  # choices whose ending has not been delivered

    def __post_init__(self) -> None:
        self.num_left = self.params.n


@record(frozen=True, slots=True)
class Reply:
    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@record(frozen=True, slots=True)
class Call:
    function: Callable[[Engine], Any]
    reply: Callable[[Reply], None]


class Driver:
    """Runs an engine in a thread of its own. Every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # others may read its configuration and statistics, no more
        self.failure: EngineDiedError | None = None  # why the engine died, if it did
        self._process = os.getpid()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._submissions: dict[str, Submission] = {}
        self._is_closing = False  # no new requests
        self._has_ended = False  # no new calls
        self._idle = threading.Event()
        self._idle.set()
        weakref.finalize(self, self._calls.put, None).atexit = False
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, weakref.ref(self)), name="unspool-engine", daemon=True
        )
        self._thread.start()
        _drivers.add(self)

    @property
    def is_ready(self) -> bool:
        return self._refusal() is None

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._submissions)

    # From any thread ------------------------------------------------------------------------------------------------
    def start(self, submissions: Sequence[Submission]) -> None:
        """Submit requests, all or none. An error in one of them is raised here."""
        self.check_open()
        for one in submissions:
            if one.params.constraint is not None and self.engine.tokenizer is not None:
                from unspool.sampling.constraint import compile_constraint

                # Here and not in the engine thread, where others would wait; the engine finds it compiled.
                compile_constraint(one.params.constraint, self.engine.tokenizer)
        try:
            self.call(lambda engine: self._add(engine, submissions))
        except BaseException:  # a caller that was interrupted here never learns that they were taken
            self._abort_all(submissions)
            raise

    async def start_async(self, submissions: Sequence[Submission]) -> None:
        """`start` for an event loop."""
        self.check_open()
        for one in submissions:
            if one.params.constraint is not None and self.engine.tokenizer is not None:
                from unspool.sampling.constraint import compile_async

                await compile_async(one.params.constraint, self.engine.tokenizer)
        try:
            await self.call_async(lambda engine: self._add(engine, submissions))
        except BaseException:
            self._abort_all(submissions)
            raise

    def _abort_all(self, submissions: Sequence[Submission]) -> None:
        for one in submissions:
            self.abort(one)

    def abort(self, submission: Submission, reason: FinishReason = "abort") -> None:
        """End a request soon; its sink gets the ending. Harmless when it has ended, or was never taken."""
        if self._is_foreign:
            return

        def abort(engine: Engine) -> None:
            if submission.id is not None:
                engine.abort(submission.id, reason)

        self._send(Call(abort, _ignore))

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of the engine between two steps and return its result."""
        replies: SimpleQueue[Reply] = SimpleQueue()
        self._send(Call(function, replies.put))
        return cast("T", replies.get().unwrap())

    async def call_async(self, function: Callable[[Engine], T]) -> T:
        """`call` for an event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()

        def reply(value: Reply) -> None:
            call_soon(loop, _resolve, future, value)

        self._send(Call(function, reply))
        return cast("T", (await future).unwrap())

    def close(self, drain: float = 0.0) -> None:
        """Take no new requests, let the others run for `drain` seconds, abort what is left and end the thread."""
        self._is_closing = True
        if self._is_foreign:
            return
        if drain > 0:
            self._idle.wait(drain)
        self._send(Call(self._stop, _ignore))
        self._thread.join()

    async def shutdown(self, drain: float = 0.0) -> None:
        """`close` for an event loop."""
        import asyncio

        self._is_closing = True  # at once, not when a thread is free
        await asyncio.to_thread(self.close, drain)

    def _send(self, call: Call) -> None:
        if self._is_foreign:
            self.check_open()
        self._calls.put(call)
        if self._has_ended:  # set before the thread looked into the queue for the last time
            self._refuse_calls()

    # In the engine thread -------------------------------------------------------------------------------------------
    def work(self, call: Call) -> bool:
        """Answer a call, then step until nothing is left to compute; whether the thread goes on."""
        self._idle.clear()
        try:
            self._answer(call)
            while not self._has_ended and self.engine.has_work:
                self._deliver(self.engine.step())
                while not self._has_ended and not self._calls.empty():
                    waiting = self._calls.get()
                    assert waiting is not None, "the driver was freed while it works"
                    self._answer(waiting)
        except BaseException as error:  # Rust libraries report a panic as one
            self._die(error)
        if self._has_ended:
            self._refuse_calls()
        self._idle.set()
        return not self._has_ended

    def _answer(self, call: Call) -> None:
        try:
            value = call.function(self.engine)
        except Exception as error:
            call.reply(Reply(error=error))
        except BaseException as error:
            call.reply(Reply(error=_died(error)))
            raise
        else:
            call.reply(Reply(value))

    def _add(self, engine: Engine, submissions: Sequence[Submission]) -> None:
        self.check_open()
        try:
            for one in submissions:
                one.id = engine.add(one.prompt, one.params, output=one.output, is_chat=one.is_chat)
                one.resolved = engine.params_of(one.id)
                one.receipt = engine.receipt(one.resolved.seed)
                self._submissions[one.id] = one
        except BaseException:
            for one in submissions:
                if one.id is not None and self._submissions.pop(one.id, None) is not None:
                    engine.abort(one.id)
            raise

    def _deliver(self, events: Sequence[Event]) -> None:
        """Each event to its sink; an event loop is woken once, however many of its readers the step has events for."""
        mail: dict[asyncio.AbstractEventLoop, list[tuple[Submission, Event]]] = {}
        for event in events:
            submission = self._submissions.get(event.request)
            if submission is None:  # it was refused together with another
                continue
            if not isinstance(event, Text):
                submission.num_left -= 1
                if submission.num_left == 0:
                    del self._submissions[event.request]
            if submission.loop is None:
                submission.sink(event)
            else:
                mail.setdefault(submission.loop, []).append((submission, event))
        for loop, letters in mail.items():
            if not call_soon(loop, _hand_over, letters):  # the reader's loop is closed
                for submission, _ in letters:
                    assert submission.id is not None
                    self.engine.abort(submission.id)

    def _stop(self, engine: Engine) -> None:
        self._deliver(engine.close())
        self._has_ended = True

    def _die(self, error: BaseException) -> None:
        """The engine has failed for good: end every request with the reason, and refuse new ones with it."""
        import logging

        logging.getLogger("unspool.engine").critical(
            "the engine stopped and takes no more requests; restart the process", exc_info=error
        )
        self.failure = _died(error)
        self._has_ended = True
        left, self._submissions = self._submissions, {}
        for id, submission in left.items():
            event = Failed(id, 0, self.failure)
            if submission.loop is None:
                submission.sink(event)
            else:
                call_soon(submission.loop, _hand_over, [(submission, event)])

    def _refuse_calls(self) -> None:
        """Refuse every call that is still queued. Several threads may do so at once: each call goes to one of them."""
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call.reply(Reply(error=self._refusal()))

    # Whether it takes requests --------------------------------------------------------------------------------------
    @property
    def _is_foreign(self) -> bool:
        """Whether this is a fork of the process that has the engine thread."""
        return self._process != os.getpid()

    def _refusal(self) -> EngineError | None:
        if self._is_foreign:
            return EngineError(
                f"the model was loaded in process {self._process}, and its fork {os.getpid()} has none of its threads; "
                "load the model after the fork, or start processes with the method 'spawn'"
            )
        if self.failure is not None:  # a new error each time: one that is raised collects tracebacks
            assert self.failure.__cause__ is not None
            return _died(self.failure.__cause__)
        if self._is_closing:
            return EngineClosedError("the engine is closed, or closing; no new requests are taken")
        return None

    def check_open(self) -> None:
        """Raise the error that any new request would get."""
        refusal = self._refusal()
        if refusal is not None:
            raise refusal


def _serve(calls: SimpleQueue[Call | None], reference: weakref.ref[Driver]) -> None:
    """The engine thread. None in the queue: the driver was freed."""
    while (call := calls.get()) is not None:
        driver = reference()
        if driver is None or not driver.work(call):
            return
        del driver, call


def _died(error: BaseException) -> EngineDiedError:
    failure = EngineDiedError(f"the engine stopped: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _ignore(reply: Reply) -> None: ...


def _hand_over(letters: Sequence[tuple[Submission, Event]]) -> None:
    for submission, event in letters:
        submission.sink(event)


def _resolve(future: asyncio.Future[Reply], value: Reply) -> None:
    if not future.done():  # else the waiting caller was cancelled
        future.set_result(value)


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Have an event loop call a function; False when the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At exit: native code must not run while Python unloads its modules."""
    for driver in list(_drivers):
        driver.close()

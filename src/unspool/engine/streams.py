"""A request's events as an iterator, for threads (`Stream`) and for event loops (`AsyncStream`).

A stream holds no lock between events. The engine continues while no one reads, and unread events wait here. Closing a
stream, leaving its `with` block or dropping it aborts its request.

With `whole` the events are passed on together after the last one, so that no thread wakes up for each token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from unspool.chat.answers import AnswerSyntax, Message
from unspool.engine.driver import Driver, Sink, Submission, call_soon
from unspool.errors import RequestError
from unspool.events import Event, Failed, Finished, FinishReason, Text
from unspool.params import ResolvedParams, SamplingParams
from unspool.records import record
from unspool.results import Fold, Result

if TYPE_CHECKING:
    import asyncio

Put = Callable[[Sequence[Event]], object]


@record(frozen=True)
class Generation:
    """What is to be generated."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output: Sequence[int] = ()  # how the answer begins: see Engine.add
    is_chat: bool = False  # as well
    prompt_warnings: tuple[str, ...] = ()  # about how a conversation became the prompt
    syntax: AnswerSyntax | None = None  # of reasoning and tool calls, if there may be any
    parse: Callable[[str], Any] | None = None  # what its text becomes, where a schema was given


class _Events:
    """What both kinds of stream have: the request, and the events that arrived and were not read."""

    def __init__(self, driver: Driver, generation: Generation) -> None:
        self._driver, self._generation = driver, generation
        self._arrived: deque[Event] = deque()
        self._num_left = generation.params.n  # choices whose ending was not read
        self._submission = Submission(
            generation.prompt_ids, generation.params, _nowhere, generation.output, generation.is_chat
        )
        self._fold: Fold | None = None
        self.messages: tuple[Message, ...] = ()  # each choice as content and tool calls so far, where there are tools
        tokenizer = driver.engine.tokenizer
        if generation.syntax is not None and tokenizer is not None:
            self.messages = tuple(Message(tokenizer, generation.syntax) for _ in range(generation.params.n))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self._generation.prompt_ids

    @property
    def params(self) -> ResolvedParams:
        """The parameters in force, once the engine has taken the request."""
        assert self._submission.resolved is not None, "the request has not been taken yet"
        return self._submission.resolved

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request soon. Its last events still come: the text that was held back, and Finished."""
        self._driver.abort(self._submission, reason)

    def _stop(self) -> None:
        """Read no further."""
        if self._num_left:
            self._num_left = 0
            self.abort()
        self._arrived.clear()

    def _next(self) -> Event:
        event = self._arrived.popleft()
        if isinstance(event, Failed):
            self._stop()
            raise event.error
        if self._fold is None:
            receipt = self._driver.engine.receipt(self.params.seed)
            warnings, is_chat = self._generation.prompt_warnings, self._generation.is_chat
            self._fold = Fold(self.prompt_ids, self.params, receipt, warnings, self.messages, is_chat=is_chat)
        self._fold.push(event)
        if self._fold.wants_no_more:
            self.abort("stop")
        self._num_left -= isinstance(event, Finished)
        return event

    def _result(self) -> Result:
        if self._fold is None or not self._fold.is_done:
            raise RequestError("the stream was closed before its answer was whole; there is no result")
        tokenizer = self._driver.engine.tokenizer
        spell = None if tokenizer is None else tokenizer.token_text
        return replace(self._fold.result(), token_text=spell, parse=self._generation.parse)

    def __del__(self) -> None:
        self._stop()


class Stream(_Events):
    """The events of one request: Text as it comes, then Finished for each choice. A failure is raised."""

    def __init__(self, driver: Driver, generation: Generation, *, whole: bool = False) -> None:
        super().__init__(driver, generation)
        self._inbox: SimpleQueue[Sequence[Event]] = SimpleQueue()
        self._submission.sink = _sink(self._inbox.put, generation.params.n, whole)

    @classmethod
    def start(cls, driver: Driver, streams: Iterable[Stream]) -> None:
        """Have the engine take the requests of these streams, all or none."""
        driver.start([stream._submission for stream in streams])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._num_left == 0:
            raise StopIteration
        if not self._arrived:
            self._arrived.extend(self._inbox.get())
        return self._next()

    def result(self) -> Result:
        """Read what is left; the whole answer, with what was read before."""
        for _ in self:
            pass
        return self._result()

    def close(self) -> None:
        """Abort the request, if it still runs."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()


class AsyncStream(_Events):
    """A `Stream` for the event loop it is first read in. Its request is taken when it is first read, or by `start`."""

    def __init__(self, driver: Driver, generation: Generation, *, whole: bool = False) -> None:
        super().__init__(driver, generation)
        self._whole = whole
        self._inbox: asyncio.Queue[Sequence[Event]] | None = None

    async def start(self) -> Self:
        """Have the engine take the request, and raise what is wrong with it."""
        if self._inbox is None:
            await start_async(self._driver, [self])
        return self

    def _connect(self) -> Submission:
        import asyncio

        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Sequence[Event]]()
        self._inbox = inbox
        if self._whole:  # gathered by the engine thread: the loop is woken once
            put: Put = lambda events: call_soon(loop, inbox.put_nowait, events)  # noqa: E731
        else:
            self._submission.loop, put = loop, inbox.put_nowait
        self._submission.sink = _sink(put, self._num_left, self._whole)
        return self._submission

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._num_left == 0:
            raise StopAsyncIteration
        if self._inbox is None:
            await self.start()
        assert self._inbox is not None
        if not self._arrived:
            self._arrived.extend(await self._inbox.get())
        return self._next()

    async def result(self) -> Result:
        """Read what is left; the whole answer, with what was read before."""
        async for _ in self:
            pass
        return self._result()

    async def aclose(self) -> None:
        """Abort the request, if it still runs."""
        self._stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        self._stop()


async def start_async(driver: Driver, streams: Sequence[AsyncStream]) -> None:
    """Have the engine take the requests of these streams, all or none."""
    await driver.start_async([stream._connect() for stream in streams])


def _sink(put: Put, num_choices: int, whole: bool) -> Sink:
    """Passes a request's events on: each at once, or all of them with the last."""

    def pass_on(event: Event) -> None:
        put((event,))

    held: list[Event] = []
    num_left = num_choices

    def gather(event: Event) -> None:
        nonlocal num_left
        held.append(event)
        num_left -= not isinstance(event, Text)
        if num_left == 0 or isinstance(event, Failed):
            put(tuple(held))
            held.clear()

    return gather if whole else pass_on


def _nowhere(event: Event) -> None: ...

"""What an endpoint requests from the engine, and the answer while it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unspool.chat.answers import AnswerSyntax, Message
from unspool.chat.model_chat import NO_TOOLS
from unspool.chat.tools import Toolbox
from unspool.engine.driver import Submission
from unspool.events import Event, Finished, FinishReason, Text
from unspool.params import ResolvedParams, SamplingParams
from unspool.results import Choice, Delta, Receipt
from unspool.server.metrics import Metrics
from unspool.server.model import Submitter
from unspool.text.tokenizer import Tokenizer

TOKEN_BYTES, LOGPROB_BYTES, TRACE_BYTES = 5, 120, 4000  # approximate, in a written answer
Listener = Callable[[Delta], None]


@dataclass
class Job:
    """What an endpoint requests from the engine."""

    prompts: list[tuple[list[int], SamplingParams]]
    stream: bool = False
    is_chat: bool = False
    syntax: AnswerSyntax | None = None  # of reasoning and tool calls in the answers
    warnings: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)  # values that the API set, not the caller
    sent: dict[str, str] = field(default_factory=dict)  # the other engines' names that the client used for fields
    echo: str = ""  # text that an answer begins with before the generated text
    prompt_field: str = "prompt"  # the endpoint's names for the prompt and the answer's length
    length_field: str = "max_tokens"
    format_field: str = "constraint"  # the endpoint's name for the constraint
    toolbox: Toolbox = NO_TOOLS
    outputs: list[list[int]] = field(default_factory=list)  # given beginnings of the answers, by prompt
    asked: int = 0  # the prompt whose answer was requested, if random ones run with it
    traceparent: str | None = None  # of the request's span


class Run:
    """A running job: `choices` grow from its requests' events; `done` when they are complete or the job failed."""

    def __init__(self, job: Job, driver: Submitter, metrics: Metrics, tokenizer: Tokenizer) -> None:
        self.job = job
        self.created = int(time.time())
        self.choices: list[Choice] = []  # of all prompts, in order
        self.submissions: list[Submission] = []
        loop = asyncio.get_running_loop()
        outputs = job.outputs or [[]] * len(job.prompts)
        for (ids, params), output in zip(job.prompts, outputs, strict=True):
            first = len(self.choices)
            self.choices += [Choice(first + n, Message(tokenizer, job.syntax)) for n in range(params.n)]
            receive = partial(self.receive, first)
            self.submissions.append(
                Submission(
                    ids, params, receive, output, is_chat=job.is_chat, loop=loop, traceparent=job.traceparent
                )
            )
        self.done: asyncio.Future[None] = loop.create_future()
        self.done.add_done_callback(_retrieve)
        self._driver, self._metrics = driver, metrics
        self._started = time.perf_counter()
        self._first_text: list[float | None] = [None] * len(self.choices)  # when it came
        self._last_text: list[float | None] = [None] * len(self.choices)  # when the last text of each choice came
        self._num_left = len(self.choices)
        self._listener: Listener | None = None
        self._early: list[tuple[int, Event]] | None = [] if job.stream else None  # events before `listen`

    @property
    def params(self) -> list[ResolvedParams]:
        return [one.resolved for one in self.submissions if one.resolved is not None]

    @property
    def receipt(self) -> Receipt:
        """The receipt of the first answer."""
        receipt = self.submissions[0].receipt
        assert receipt is not None, "the job has not been taken yet"
        return receipt

    @property
    def ends(self) -> list[Finished]:
        return [choice.end for choice in self.choices if choice.end is not None]

    @property
    def is_whole(self) -> bool:
        return self._num_left == 0

    @property
    def usage(self) -> tuple[int, int, int]:
        """(prompt, completion, cached) tokens; a prompt counts once, however many answers it has."""
        first = [end.usage for end in self.ends if end.choice == 0]
        completion = sum(choice.num_tokens for choice in self.choices if choice.end is not None)
        return sum(usage.prompt_tokens for usage in first), completion, sum(usage.cached_tokens for usage in first)

    @property
    def size(self) -> int:
        """The approximate size of the whole answer in bytes."""
        params = self.params[0]
        per_token = TOKEN_BYTES + (TRACE_BYTES if params.trace else 0)
        if params.logprobs is not None:
            per_token += LOGPROB_BYTES * (1 + params.logprobs)
        total = per_token * sum(len(choice.tokens) for choice in self.choices)
        if params.prompt_logprobs is not None:
            total += LOGPROB_BYTES * (1 + params.prompt_logprobs) * sum(len(ids) for ids, _ in self.job.prompts)
        return total

    def clock(self, index: int) -> tuple[float, float]:
        """Seconds until a choice's first text came, and since then."""
        first, now = self._first_text[index], time.perf_counter()
        return (now - self._started, 0.0) if first is None else (first - self._started, now - first)

    def abort(self, reason: FinishReason = "abort") -> None:
        for one in self.submissions:
            self._driver.abort(one, reason)

    def listen(self, listener: Listener) -> None:
        """Pass every delta to a listener: those of earlier events now, the others as they arrive."""
        self._listener = listener
        early, self._early = self._early or [], None
        for first, event in early:
            self.receive(first, event)

    def receive(self, first: int, event: Event) -> None:
        """Handle an event of the request whose first choice is number `first`. An error fails only this job."""
        if self._early is not None:
            self._early.append((first, event))
            return
        if self.done.done():
            return
        try:
            delta = self._push(first + event.choice, event)
            if self._listener is not None:
                self._listener(delta)
        except Exception as error:
            self.abort()
            self.done.set_exception(error)
            return
        if delta.end is not None and self.is_whole:
            self.done.set_result(None)

    def _push(self, index: int, event: Event) -> Delta:
        choice = self.choices[index]
        delta = choice.push(event)
        if isinstance(event, Text):
            if self._first_text[index] is None:
                self._first_text[index] = time.perf_counter()
            self._last_text[index] = self._metrics.on_text(len(event.tokens), self._last_text[index])
        elif isinstance(event, Finished):
            self._metrics.on_finished(event, is_first=event.choice == 0)
            self._num_left -= 1
        if choice.message.is_full and not self.is_whole and all(one.wants_no_more for one in self.choices):
            self.abort("stop")
        return delta


def _retrieve(done: asyncio.Future[None]) -> None:
    """Retrieve a run's error, so that asyncio does not report it if no caller waits any more."""
    if not done.cancelled():
        done.exception()

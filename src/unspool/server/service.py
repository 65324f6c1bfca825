"""The model behind all endpoints: prompts and parameters in, answers out. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from unspool.chat.answers import CallSyntax, Message
from unspool.chat.model_chat import RenderedPrompt
from unspool.chat.tools import Toolbox
from unspool.engine.driver import Submission
from unspool.errors import ContextLengthError, RequestError
from unspool.events import Event, Finished, FinishReason, Text
from unspool.llm import LLM
from unspool.params import Constraint, ResolvedParams, SamplingParams
from unspool.sampling.resolve import jsonable
from unspool.server.answer import Answer, Delta
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault
from unspool.server.meter import attach
from unspool.server.metrics import Metrics

LARGE = 32 * 1024  # bytes of a body or an answer from which on it is handled apart from smaller ones
SMALL_WORKERS, LARGE_WORKERS = 8, 2  # threads that prepare requests and write long answers
TOKEN_BYTES, LOGPROB_BYTES, TRACE_BYTES = 5, 120, 4000  # of an answer, about
T = TypeVar("T")
Listener = Callable[[Delta], None]


@dataclass
class Job:
    """What an endpoint asks of the engine."""

    prompts: list[tuple[list[int], SamplingParams]]
    stream: bool = False
    is_chat: bool = False
    syntax: CallSyntax | None = None  # of tool calls in the answers
    warnings: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)  # values that the API set, not the caller
    prompt_field: str = "prompt"  # what the endpoint calls the prompt and the answer's length
    length_field: str = "max_tokens"


class Run:
    """A job under way: the answer that grows from its requests' events, and `done` when it is whole or has failed."""

    def __init__(self, service: Service, job: Job) -> None:
        self.job = job
        self.submissions: list[Submission] = []
        self.num_choices = sum(params.n for _, params in job.prompts)
        self.answer = Answer([Message(service.llm.tokenizer, job.syntax) for _ in range(self.num_choices)])
        self.created = int(time.time())
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(_retrieve)
        self._metrics, self._driver = service.metrics, service.engine
        self._num_left = self.num_choices
        self._listener: Listener | None = None
        self._early: list[tuple[int, Event]] | None = [] if job.stream else None  # came before somebody listened

    @property
    def params(self) -> list[ResolvedParams]:
        return [one.resolved for one in self.submissions if one.resolved is not None]

    @property
    def size(self) -> int:
        """About how many bytes the whole answer has."""
        params = self.params[0]
        per_token = TOKEN_BYTES + (TRACE_BYTES if params.trace else 0)
        if params.logprobs is not None:
            per_token += LOGPROB_BYTES * (1 + params.logprobs)
        total = per_token * sum(len(choice.tokens) for choice in self.answer.choices)
        if params.prompt_logprobs is not None:
            total += LOGPROB_BYTES * (1 + params.prompt_logprobs) * sum(len(ids) for ids, _ in self.job.prompts)
        return total

    def abort(self, reason: FinishReason = "abort") -> None:
        for one in self.submissions:
            self._driver.abort(one, reason)

    def listen(self, listener: Listener) -> None:
        """Have every delta told: those of events that came already at once, the others as they come."""
        self._listener = listener
        early, self._early = self._early or [], None
        for offset, event in early:
            self.receive(offset, event)

    def receive(self, offset: int, event: Event) -> None:
        """Take in an event of the request whose first choice is number `offset`. What fails, fails this job alone."""
        if self._early is not None:
            self._early.append((offset, event))
            return
        if self.done.done():
            return
        try:
            delta = self._push(offset + event.choice, event)
            if self._listener is not None:
                self._listener(delta)
        except Exception as error:
            self.abort()
            self.done.set_exception(error)
            return
        if delta.end is not None:
            self._num_left -= 1
            if self._num_left == 0:
                self.done.set_result(None)

    def _push(self, index: int, event: Event) -> Delta:
        if isinstance(event, Text):
            self._metrics.on_text(self.answer.choices[index], event)
        elif isinstance(event, Finished):
            self._metrics.on_finished(event, is_first=event.choice == 0)
        delta = self.answer.push(index, event)
        if delta.end is None and self.answer.wants_no_more:
            self.abort("stop")
        return delta


def _retrieve(done: asyncio.Future[None]) -> None:
    """Whoever asked may have gone: a failure that nobody waits for is no news."""
    if not done.cancelled():
        done.exception()


class Service:
    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config, self.chat = llm, config, llm.model_chat
        self.chat.prepare()  # before anything is started: a template that goes over a limit ends the start
        self.meter = attach(llm.engine)
        self.engine = llm.driver
        self.name = config.names[0] if config.names else llm.checkpoint.name
        self.names = tuple(dict.fromkeys([self.name, *config.names, llm.checkpoint.name]))
        self.created = int(time.time())
        self._small = ThreadPoolExecutor(SMALL_WORKERS, "unspool-small")
        self._large = ThreadPoolExecutor(LARGE_WORKERS, "unspool-large")
        self.metrics = Metrics(config.metrics_prefix, self.name, self.engine, self.meter)
        receipt = llm.receipt(0)
        about = f"{receipt.model} {receipt.version} {receipt.kernels}"
        self.fingerprint = f"fp_{hashlib.sha256(about.encode()).hexdigest()[:12]}"

    @property
    def state(self) -> str:
        """ready | draining | failed: what the engine's thread does with a new request."""
        if self.engine.failure is not None:
            return "failed"
        return "ready" if self.engine.is_ready else "draining"

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise HTTPFault(404, f"the model {name!r:.80} is not served here; known: {known}", code="model_not_found")

    # Prompts --------------------------------------------------------------------------------------------------------
    async def offload(self, size: int, act: Callable[[], T]) -> T:
        """Run what takes time in another thread, so that the event loop goes on. What is large waits for what is
        large, and leaves threads to the others."""
        return await asyncio.get_running_loop().run_in_executor(self._large if size > LARGE else self._small, act)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the vocabulary's longest token."""
        tokenizer = self.llm.tokenizer
        return max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size))

    def check_length(self, texts: Iterable[str], param: str) -> None:
        """Refuse texts that no number of tokens within the context could hold, before time is spent on them."""
        context, texts = self.llm.engine.context_length, list(texts)
        if 4 * sum(map(len, texts)) <= context:  # no character has more than four bytes, and no token less than one
            return
        size, longest = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), self.longest_token
        if size > context * longest:
            raise ContextLengthError(
                f"This model's maximum context length is {context} tokens of at most {longest} bytes each, "
                f"{context * longest} bytes together. {param} has {size} bytes",
                param,
            )

    def encode(self, text: str, param: str) -> list[int]:
        self.check_length([text], param)
        return self.llm.encode(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        toolbox: Toolbox,
        options: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        param: str = "messages",
    ) -> RenderedPrompt:
        """A conversation's token ids. `param`: the field that it came in."""
        self.check_length((m["content"] for m in messages if isinstance(m.get("content"), str)), param)
        return self.chat.prompt(messages, toolbox, options, add_generation_prompt=add_generation_prompt)

    # Running --------------------------------------------------------------------------------------------------------
    async def start(self, job: Job) -> Run:
        """Queue a job's prompts, all or none."""
        limit = self.llm.engine.context_length
        for ids, params in job.prompts:
            total = len(ids) + (params.max_tokens or 0)
            if len(ids) < limit < total:
                raise ContextLengthError(
                    f"This model's maximum context length is {limit} tokens. The prompt has {len(ids)} and "
                    f"{job.length_field} is {params.max_tokens}: {total} together",
                    job.length_field,
                )
        run, offset, loop = Run(self, job), 0, asyncio.get_running_loop()
        for ids, params in job.prompts:
            receive = partial(run.receive, offset)
            run.submissions.append(Submission(ids, params, receive, is_chat=job.is_chat, loop=loop))
            offset += params.n
        try:
            await self.engine.start_async(run.submissions)
        except RequestError as error:
            if error.param == "prompt":
                error.param = job.prompt_field
            raise
        return run

    async def finish(self, run: Run) -> None:
        """Run to the end; the answer is then whole."""
        try:
            await run.done
        except BaseException:
            run.abort()
            raise

    def warm_up(self) -> None:
        """What the first requests would wait for otherwise: the vocabulary as constraints see it takes a second for
        large ones."""
        from unspool.sampling.constraint import compile_constraint

        compile_constraint(Constraint("json_object"), self.llm.tokenizer)

    @property
    def retry_after(self) -> int:
        """Seconds after which the queue has likely moved on."""
        return self.metrics.typical_wait()

    # What every answer tells ----------------------------------------------------------------------------------------
    def report(self, run: Run) -> dict[str, Any]:
        """The `unspool` object of a response."""
        params = run.params[0].as_dict()
        for name, value in run.job.defaults.items():
            params[name] = {"value": value, "origin": "api"}
        ends = [choice.end for choice in run.answer.choices if choice.end is not None]
        about = [
            {
                "index": index,
                "finish_reason": end.reason,
                "stop": end.stop,
                "seed": end.seed,
                **_timings(end),
                **_details(end),
            }
            for index, end in enumerate(ends)
        ]
        warnings = [*run.job.warnings, *run.params[0].warnings]
        return {
            "params": params,
            "timings": about[0]["timings"] if about else None,
            "cached_tokens": sum(end.usage.cached_tokens for end in ends if end.choice == 0),
            "receipt": self.llm.receipt(run.params[0].seed).as_dict(),
            "choices": about,
            "warnings": list(dict.fromkeys(warnings)),
        }


def usage_of(run: Run) -> tuple[int, int, int]:
    """(prompt, completion, cached) tokens of a finished job; a prompt counts once, however many answers it has."""
    prompt = completion = cached = 0
    for choice in run.answer.choices:
        if choice.end is not None:
            # Of a full message the engine computed some more before it stopped.
            completion += len(choice.tokens) if choice.message.is_full else choice.end.usage.completion_tokens
            if choice.end.choice == 0:
                prompt += choice.end.usage.prompt_tokens
                cached += choice.end.usage.cached_tokens
    return prompt, completion, cached


def _timings(end: Finished) -> dict[str, Any]:
    t = end.timings
    seconds = {name: getattr(t, name) for name in ("queue", "prefill", "decode", "total", "first_token")}
    rounded = {name: None if value is None else round(value, 6) for name, value in seconds.items()}
    return {"timings": {**rounded, "tokens_per_second": t.tokens_per_second}}


def _details(end: Finished) -> dict[str, Any]:
    """What extensions add: a beam's score, what speculation came to. RenderedPrompt logprobs have their own place."""
    details = {name: jsonable(value) for name, value in end.details.items() if name != "prompt_logprobs"}
    return {"details": details} if details else {}

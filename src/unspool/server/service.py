"""The model behind all endpoints: prompts and parameters in, answers out. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unspool.engine.async_engine import AsyncEngine, Ticket
from unspool.errors import ContextLengthError, RequestError
from unspool.events import Event, Finished, FinishReason, Text
from unspool.llm import LLM
from unspool.params import BeamParams, Constraint, RepetitionDetector, ResolvedParams, SamplingParams
from unspool.sampling.resolve import jsonable
from unspool.server.answer import Answer, Calling, Delta
from unspool.server.calls import GENERIC, format_of
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault
from unspool.server.fields import EXTRA, MAX_SCHEMA_BYTES
from unspool.server.meter import attach
from unspool.server.metrics import Metrics
from unspool.server.tools import Toolbox, check_schema_size, constraint_for, with_description

ASIDE = 32 * 1024  # characters of a prompt from which on it is rendered and tokenized in another thread
PLAIN = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "n", "best_of", "logit_bias", "stop")
Listener = Callable[[Delta], None]


@dataclass
class Job:
    """What an endpoint asks of the engine."""

    prompts: list[tuple[list[int], SamplingParams]]
    stream: bool = False
    calling: Calling | None = None
    warnings: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)  # values that the API set, not the caller
    prompt_field: str = "prompt"  # what the endpoint calls the prompt and the answer's length
    length_field: str = "max_tokens"


class Run:
    """A job under way: the answer that grows from its requests' events, and `done` when it is whole or has failed."""

    def __init__(self, service: Service, job: Job) -> None:
        self.job = job
        self.tickets: list[Ticket] = []
        self.num_choices = sum(params.n for _, params in job.prompts)
        self.answer = Answer(self.num_choices, service.llm.tokenizer, job.calling)
        self.created = int(time.time())
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(_retrieve)
        self._metrics = service.metrics
        self._num_left = self.num_choices
        self._listener: Listener | None = None
        self._early: list[tuple[int, Event]] | None = [] if job.stream else None  # came before somebody listened

    @property
    def params(self) -> list[ResolvedParams]:
        return [ticket.params for ticket in self.tickets]

    def abort(self, reason: FinishReason = "abort") -> None:
        for ticket in self.tickets:
            ticket.abort(reason)

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
        if delta.end is None and self.answer.is_full(delta.choice):
            self.abort("stop")
        return delta


def _retrieve(done: asyncio.Future[None]) -> None:
    """Whoever asked may have gone: a failure that nobody waits for is no news."""
    if not done.cancelled():
        done.exception()


class Service:
    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.meter = attach(llm.engine)
        self.engine = AsyncEngine(llm.engine)
        self.name = config.names[0] if config.names else llm.checkpoint.name
        self.names = tuple(dict.fromkeys([self.name, *config.names, llm.checkpoint.name]))
        self.created = int(time.time())
        self.metrics = Metrics(config.metrics_prefix, self.name, self.engine, self.meter)
        receipt = llm.receipt(0)
        about = f"{receipt.model} {receipt.version} {receipt.kernels}"
        self.fingerprint = f"fp_{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        self.call_format = format_of(llm.template.source) if llm.template is not None else GENERIC
        self.takes_tools = self._shows(tools=[_PROBE])
        self.takes_names = self._shows(name=_PROBE_NAME)
        self.takes_developer = llm.template is not None and "developer" in llm.template.source

    def _shows(self, tools: list[Any] | None = None, **message: str) -> bool:
        """Whether the model's template has a place for something: it is tried."""
        if self.llm.template is None:
            return False
        try:
            text = self.llm.template.render([{"role": "user", "content": "?", **message}], tools=tools)
        except RequestError:
            return False
        return _PROBE_NAME in text

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
    async def encode(self, text: str) -> list[int]:
        if len(text) > ASIDE:
            return await asyncio.to_thread(self.llm.encode, text)
        return self.llm.encode(text)

    async def render(
        self,
        messages: list[dict[str, Any]],
        toolbox: Toolbox,
        options: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], list[str]]:
        """A conversation's token ids, and what the caller should know about how they came to be."""
        warnings: list[str] = []
        if add_generation_prompt and messages[-1]["role"] == "assistant":
            raise RequestError(
                "the conversation ends with an assistant message; to continue such a message is not supported: "
                "end with a user or tool message",
                "messages",
            )
        if not self.takes_names and any("name" in message and message["role"] != "tool" for message in messages):
            warnings.append("the model's chat template shows no names: messages' names have no effect")
        if not self.takes_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        reserved = options.keys() & {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
        if reserved:
            name = sorted(reserved)[0]
            raise RequestError(f"chat_template_kwargs may not set {name}", f"chat_template_kwargs.{name}")
        tools = list(toolbox.tools) if toolbox.callable else []
        speaks_tools = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        options = {**options, "add_generation_prompt": add_generation_prompt}
        if speaks_tools and not self.takes_tools:
            messages = with_description(messages, tools) if tools else messages
            if tools:
                warnings.append("the model's chat template has no place for tools; the system's message tells them")
        elif tools:
            options["tools"] = [tool.as_template() for tool in tools]
        size = sum(len(str(message.get("content", ""))) for message in messages)
        if size > ASIDE:
            return await asyncio.to_thread(self.llm.render, messages, **options), warnings
        return self.llm.render(messages, **options), warnings

    # Parameters -----------------------------------------------------------------------------------------------------
    def sampling(self, body: Mapping[str, Any], **more: Any) -> SamplingParams:
        """SamplingParams from a checked body; `more` are those that an endpoint names differently."""
        values = {name: body[name] for name in (*PLAIN, *EXTRA) if name in body}
        if values.get("seed", 0) < 0:
            values["seed"] %= 2**53  # as any reported seed, it then survives JSON in every language
        if "constraint" in values:
            given = values["constraint"]
            check_schema_size(given.get("value"), "constraint.value")
            values["constraint"] = Constraint(given["kind"], given.get("value"))
        if "beam" in values:
            values["beam"] = BeamParams(**values["beam"])
        if "repetition_detector" in values:
            values["repetition_detector"] = RepetitionDetector(**values["repetition_detector"])
        return SamplingParams(**values | {name: value for name, value in more.items() if value is not None})

    def bind(
        self, body: Mapping[str, Any], toolbox: Toolbox, answer: Constraint | None, param: str
    ) -> tuple[Constraint | None, Calling | None]:
        """What the answer must look like by its format and its tools, and how calls are read from it."""
        own = body.get("constraint")
        if own is not None and (answer is not None or toolbox.binds):
            raise RequestError(
                f"constraint and {param if answer is not None else 'tools'} bind the answer twice", "constraint"
            )
        if answer is not None and answer.value is not None:
            check_schema_size(answer.value, param)
        if not toolbox.callable:
            return answer, None
        format, tokenizer = self.call_format if self.takes_tools else GENERIC, self.llm.tokenizer
        constraint = constraint_for(toolbox, format, answer, tokenizer)
        if constraint is not None and constraint.kind == "grammar" and len(constraint.value) > 4 * MAX_SCHEMA_BYTES:
            raise RequestError(f"the tools' schemas have {len(constraint.value):,} characters together", "tools")
        marks = {}
        for mark in format.marks:
            ids = tokenizer.encode(mark, add_special=False, parse_special=True)
            if len(ids) == 1 and ids[0] in tokenizer.special_ids:
                marks[ids[0]] = mark
        names = frozenset(tool.name for tool in toolbox.callable)
        return constraint, Calling(format, names, toolbox.parallel, marks)

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
        run, offset = Run(self, job), 0
        try:
            for ids, params in job.prompts:
                run.tickets.append(await self.engine.start(ids, params, partial(run.receive, offset)))
                offset += params.n
        except BaseException as error:
            run.abort()
            if isinstance(error, RequestError) and error.param == "prompt":
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
            completion += choice.end.usage.completion_tokens
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
    """What extensions add: a beam's score, what speculation came to. Prompt logprobs have their own place."""
    details = {name: jsonable(value) for name, value in end.details.items() if name != "prompt_logprobs"}
    return {"details": details} if details else {}


_PROBE_NAME = "qx_probe_zk"
_PROBE = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}

"""The model behind all endpoints: prompts and parameters in, answers out. Independent of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from unspool.chat.call_grammar import refusal_of
from unspool.chat.guard import texts_in
from unspool.chat.model_chat import RenderedPrompt
from unspool.chat.tools import Toolbox
from unspool.engine.building import check_length
from unspool.errors import ContextLengthError, RequestError
from unspool.events import Finished
from unspool.llm import LLM
from unspool.params import Constraint
from unspool.params.resolve import jsonable
from unspool.results import figures
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault
from unspool.server.job import Job, Run
from unspool.server.meter import Meter
from unspool.server.metrics import EngineCollector, Metrics
from unspool.server.model import ServedModel

if TYPE_CHECKING:
    from unspool.ceilings import Utilization

LARGE = 32 * 1024  # bytes from which a body or an answer is handled by separate threads
SMALL_WORKERS, LARGE_WORKERS = 8, 2  # threads that prepare requests and write long answers
MOST_NAMES = 20  # of models in an error
T = TypeVar("T")


class Workers:
    """Threads for work outside the event loop."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(SMALL_WORKERS, "unspool-small")
        self._large = ThreadPoolExecutor(LARGE_WORKERS, "unspool-large")

    async def offload(self, size: int, act: Callable[[], T]) -> T:
        """Run a slow function in another thread, so that the event loop continues. Large jobs have their own threads
        and do not delay small ones."""
        return await asyncio.get_running_loop().run_in_executor(self._large if size > LARGE else self._small, act)


class Service:
    """One model, perhaps in another process: then `local` is None and `statistics` has its metrics."""

    def __init__(
        self,
        llm: ServedModel,
        config: ServerConfig,
        statistics: Collector | None = None,
        *,
        metrics: Metrics | None = None,
        workers: Workers | None = None,
    ) -> None:
        """`metrics` and `workers`: those of a server that loads this model again, or that has several models."""
        self.llm, self.config, self.chat = llm, config, llm.model_chat
        self.local = llm if isinstance(llm, LLM) else None
        self.chat.prepare()  # before anything is started: a template that exceeds a limit fails the start
        self.meter = Meter(self.local.engine) if self.local is not None else None
        self.engine = llm.driver
        self.name = config.names[0] if config.names else llm.checkpoint.name
        self.names = tuple(dict.fromkeys([self.name, *config.names, llm.checkpoint.name]))
        self.created = int(time.time())
        self.workers = workers or Workers()
        if self.local is not None and self.meter is not None:
            statistics = EngineCollector(config.metrics_prefix, self.name, self.local.driver, self.meter)
        self.statistics = statistics
        self.metrics = metrics or Metrics()
        self.host: Any = None  # the host of a server with only this model: see host.host_of
        receipt = llm.receipt(0)
        about = f"{receipt.model} {receipt.version} {receipt.kernels}"
        self.fingerprint = f"fp_{hashlib.sha256(about.encode()).hexdigest()[:12]}"

    @property
    def here(self) -> tuple[LLM, Meter]:
        """The model in this process, and its meter."""
        if self.local is None or self.meter is None:
            raise HTTPFault(501, "the engine is in another process", code="not_here")
        return self.local, self.meter

    async def ask_engine(self, request: Request) -> Response:
        """The engine's report on itself, if it is in another process."""
        raise HTTPFault(501, "the engine is in another process", code="not_here")

    async def metrics_page(self) -> bytes:
        """The body of /metrics if this is the only model."""
        from unspool.server.host import host_of

        return host_of(self).metrics.page()

    @property
    def state(self) -> str:
        """ready | draining | failed: what the engine's thread does with a new request."""
        if self.engine.failure is not None:
            return "failed"
        return "ready" if self.engine.is_ready else "draining"

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise unknown_model(name, self.names)

    # Prompts --------------------------------------------------------------------------------------------------------
    async def offload(self, size: int, act: Callable[[], T]) -> T:
        """See Workers.offload."""
        return await self.workers.offload(size, act)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the vocabulary's longest token."""
        tokenizer = self.llm.tokenizer
        return max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size))

    def check_length(self, texts: Iterable[str], param: str) -> None:
        """Refuse texts that cannot fit in the context, before they are tokenized."""
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

    def encode(self, text: str, param: str, *, add_special: bool = True) -> list[int]:
        self.check_length([text], param)
        return self.llm.tokenizer.encode(text, add_special=add_special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        toolbox: Toolbox,
        options: Mapping[str, Any],
        *,
        how: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> RenderedPrompt:
        """A conversation's token ids. `how` are ModelChat.prompt's other arguments; `param`: the field that the
        messages came in."""
        fields = ("content", "reasoning_content", "tool_calls")
        written = [[message.get(field) for field in fields] for message in messages]
        for value, field in ((written, param), (options, "chat_template_kwargs")):
            try:
                self.check_length(texts_in(value), field)
            except RecursionError:
                raise RequestError(f"{field}: nested too deep", field) from None
        return self.chat.prompt(messages, toolbox, options, **(how or {}))

    # Running --------------------------------------------------------------------------------------------------------
    async def start(self, job: Job) -> Run:
        """Queue a job's prompts, all or none."""
        limit = self.llm.engine.context_length
        for ids, params in job.prompts:
            check_length(len(ids), params.max_tokens, limit, job.length_field)
        run = Run(job, self.engine, self.metrics, self.llm.tokenizer)
        try:
            await self.engine.start_async(run.submissions)
        except RequestError as error:
            if error.param == "prompt":
                error.param = job.prompt_field
            if error.param == "constraint":
                field = job.sent.get("constraint", job.format_field)
                raise refusal_of(error, field, job.toolbox, self.llm.tokenizer) from None
            error.param = job.sent.get(error.param or "", error.param)
            raise
        return run

    async def finish(self, run: Run) -> None:
        """Run to the end; the answer is then complete."""
        try:
            await run.done
        except BaseException:
            run.abort()
            raise

    def warm_up(self) -> None:
        """Do work that the first requests would wait for otherwise: constraints need a second to prepare a large
        vocabulary."""
        from unspool.sampling.constraint import compile_constraint

        compile_constraint(Constraint("json_object"), self.llm.tokenizer)

    # Report of every answer ----------------------------------------------------------------------------------------
    def report(self, run: Run) -> dict[str, Any]:
        """The `unspool` object of a response."""
        params = run.params[0].as_dict()
        for name, value in run.job.defaults.items():
            params[name] = {"value": value, "origin": "api"}
        ends = run.ends
        about = [
            {
                "index": index,
                "finish_reason": end.reason,
                "stop": end.stop,
                "seed": end.seed,
                **_timings(end),
                **({"details": jsonable(details)} if (details := figures(end)) else {}),
            }
            for index, end in enumerate(ends)
        ]
        warnings = [*run.job.warnings, *run.params[0].warnings]
        used = self.utilization(run) if ends else None
        return {
            "params": params,
            "timings": about[0]["timings"] if about else None,
            "utilization": None if used is None else used.as_dict(),
            "cached_tokens": sum(end.usage.cached_tokens for end in ends if end.choice == 0),
            "receipt": run.receipt.as_dict(),
            "choices": about,
            "warnings": list(dict.fromkeys(warnings)),
        }

    def utilization(self, run: Run) -> Utilization | None:
        """The shares of the machine's ceilings that the first answer reached; None: they are unknown."""
        return None if self.meter is None else self.meter.answer(run.ends[0])


def unknown_model(name: str, known: Sequence[str]) -> HTTPFault:
    """The error for an unknown model; it suggests the nearest name."""
    from difflib import get_close_matches

    lowered = {each.lower(): each for each in known}
    close = get_close_matches(name.lower()[:200], lowered, n=1)
    hint = f"did you mean {lowered[close[0]]!r}? " if close else ""
    listed = ", ".join(known[:MOST_NAMES]) + (f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else "")
    message = f"the model {name!r:.80} is not served here; {hint}known: {listed}"
    return HTTPFault(404, message, code="model_not_found")


def _timings(end: Finished) -> dict[str, Any]:
    t = end.timings
    seconds = {name: getattr(t, name) for name in ("queue", "prefill", "decode", "total", "first_token")}
    rounded = {name: None if value is None else round(value, 6) for name, value in seconds.items()}
    return {"timings": {**rounded, "tokens_per_second": t.tokens_per_second}}

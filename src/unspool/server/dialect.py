"""Code that the generating endpoints share: from a body to a job, and from its result to an API's format."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unspool.chat.tools import Toolbox, check_schema_size
from unspool.errors import RequestError
from unspool.events import Token
from unspool.params import MAX_SEED, Constraint, SamplingParams
from unspool.params.kinds import Record
from unspool.params.registry import BY_NAME
from unspool.results import Choice, Delta
from unspool.server.fields import MAX_PROMPTS, MAX_STRING_CHARS, SAMPLING
from unspool.server.job import Job, Run
from unspool.server.service import Service
from unspool.server.sse import DONE, frame

if TYPE_CHECKING:
    from unspool.server.faults import Fault
    from unspool.text.tokenizer import Tokenizer

Body = dict[str, Any]
CUT_SHORT = ("length", "deadline", "repetition", "abort")  # endings that the model did not choose
NEVER = -9999.0  # JSON has no minus infinity; OpenAI writes this for the logprob of an impossible token


class WholeWriter:
    """Writes an answer in one piece."""

    prefix: ClassVar[str] = ""  # of the answer's id

    def __init__(self, service: Service, run: Run, body: Body) -> None:
        self.service, self.run, self.asked = service, run, body
        self.id = f"{self.prefix}{body.get('request_id') or secrets.token_hex(12)}"
        self.tokenizer = service.llm.tokenizer

    def body(self) -> Body:
        raise NotImplementedError

    @classmethod
    def refuse(cls, fault: Fault) -> Iterable[bytes]:
        """An error before the answer has begun, in a stream that has already started."""
        yield frame(fault.openai())
        yield DONE

    def prompt_of(self, choice: Choice) -> int:
        """The index of the prompt that a choice answers."""
        return choice.index // self.run.params[0].n

    def scored(self, number: int) -> Sequence[Token | None]:
        """The logprobs of a prompt's tokens, if requested."""
        first = self.run.choices[number * self.run.params[0].n].end
        return first.prompt_logprobs if first is not None else ()


class Writer(WholeWriter):
    """Writes an answer in one piece or as framed events: `begin`, `write` for each delta, `end`."""

    def begin(self) -> Iterable[bytes]:
        return ()

    def write(self, delta: Delta) -> Iterable[bytes]:
        raise NotImplementedError

    def end(self) -> Iterable[bytes]:
        return ()

    def fail(self, fault: Fault) -> Iterable[bytes]:
        """An error after the answer has begun."""
        return self.refuse(fault)


# From a body to a job -----------------------------------------------------------------------------------------------
def sampling_params(body: Body, **more: Any) -> SamplingParams:
    """Parameters from a checked body; `more` are those that the endpoint has under other names."""
    values = {name: body[name] for name in (*SAMPLING, "prompt_logprobs") if name in body}
    if not 0 <= values.get("seed", 0) <= MAX_SEED:
        values["seed"] %= MAX_SEED + 1
    if "constraint" in values:
        check_schema_size(values["constraint"].get("value"), "constraint.value")
    for name in values:
        kind = BY_NAME[name].kind
        if isinstance(kind, Record):
            values[name] = kind.cls(**values[name])
    values |= {name: value for name, value in more.items() if value is not None}
    for name in ("stop", "bad_words"):
        check_strings(values.get(name, ()), name)
    return SamplingParams(**values)


def check_strings(strings: str | Sequence[str], param: str) -> None:
    """Refuse too many characters of stop strings or bad words: matching them costs the engine thread time and
    memory."""
    size = len(strings) if isinstance(strings, str) else sum(map(len, strings))
    if size > MAX_STRING_CHARS:
        raise RequestError(f"{param} has {size:,} characters together; at most {MAX_STRING_CHARS:,} are taken", param)


@dataclass(frozen=True)
class ChatRequest:
    """A chat request in one form for all chat APIs."""

    messages: list[Body]  # as templates read them
    toolbox: Toolbox
    max_tokens: int | None = None
    logprobs: int | None = None
    stop: Any = None
    format: Constraint | None = None  # what the answer must look like
    how: Mapping[str, Any] = field(default_factory=dict)  # how the prompt ends and whether the model thinks: see how_of
    thinking_budget: int | None = None
    format_field: str = "response_format"  # the API's names for the format, the messages and the answer's length
    prompt_field: str = "messages"
    length_field: str = "max_tokens"


HOW = ("add_generation_prompt", "continue_final_message", "reasoning_effort", "enable_thinking")


def how_of(body: Mapping[str, Any], **more: Any) -> Body:
    """A body's options for the end of the prompt and for thinking, for ModelChat.prompt; `more` overrides them."""
    return {name: body[name] for name in HOW if name in body} | {k: v for k, v in more.items() if v is not None}


def prepare_chat(service: Service, body: Body, request: ChatRequest) -> Job:
    toolbox, chat = request.toolbox, service.chat
    if "constraint" in body and (request.format is not None or toolbox.binds):
        other = request.format_field if request.format is not None else "tools"
        raise RequestError(f"constraint and {other} bind the answer twice", "constraint")
    if request.format is not None and request.format.value is not None:
        check_schema_size(request.format.value, request.format_field)
    params = sampling_params(
        body,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        stop=request.stop,
        constraint=chat.constraint(toolbox, request.format),
        thinking_budget=request.thinking_budget,
    )
    options = body.get("chat_template_kwargs", {})
    prompt = service.render(request.messages, toolbox, options, param=request.prompt_field, how=request.how)
    echoes = body.get("echo") and prompt.is_continued
    return Job(
        [(truncated(service, prompt.ids, body), chat.with_thinking(params, prompt, toolbox))],
        stream=bool(body.get("stream")),
        is_chat=not prompt.is_continued,
        syntax=chat.syntax(toolbox, prompt.begins, keeps_marks=not params.skip_special_tokens),
        echo=request.messages[-1].get("content") or "" if echoes else "",
        warnings=list(prompt.warnings),
        prompt_field=request.prompt_field,
        length_field=request.length_field,
        format_field="constraint" if request.format is None else request.format_field,
        toolbox=toolbox,
    )


# Words that several APIs share --------------------------------------------------------------------------------------
def finish_reason(choice: Choice) -> str | None:
    """OpenAI's finish reason. `length` means cut short; the `unspool` object has the exact reason."""
    if choice.end is None:
        return None
    if choice.end.reason in CUT_SHORT:
        return "length"
    return "tool_calls" if choice.message.calls else "stop"


def ending(choice: Choice) -> Body:
    """How a choice ended: OpenAI's finish reason, and the stop string or stop token that ended it, under vLLM's name
    and under SGLang's. SGLang's field also has the model's own end token."""
    end = choice.end
    stop = end.stop if end is not None and end.reason == "stop" else None
    matched = end.stop if end is not None and end.reason in ("stop", "eos") else None
    return {"finish_reason": finish_reason(choice), "stop_reason": stop, "matched_stop": matched}


def usage(run: Run) -> Body:
    """Token counts; for a run in progress, those so far."""
    prompt, completion, cached = run.usage
    if not run.is_whole:
        prompt = sum(len(ids) for ids, _ in run.job.prompts)
        completion = sum(len(choice.tokens) for choice in run.choices)
    thought = sum(choice.message.num_reasoning_tokens for choice in run.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def timings(run: Run, choice: Choice | None = None) -> Body:
    """llama.cpp's `timings` of a choice (default: the first); for a run in progress, those so far."""
    choice = choice or run.choices[0]
    prompt = len(run.job.prompts[choice.index // run.params[0].n][0])
    count = len(choice.tokens)
    if choice.end is not None:
        measured = choice.end.timings
        cached, read, wrote = choice.end.usage.cached_tokens, measured.prefill, measured.decode
    else:
        cached, read, wrote = 0, *run.clock(choice.index)
    return {
        "cache_n": cached,
        "prompt_n": prompt - cached,
        "prompt_ms": 1e3 * read,
        "prompt_per_token_ms": 1e3 * read / max(1, prompt - cached),
        "prompt_per_second": (prompt - cached) / read if read else 0.0,
        "predicted_n": count,
        "predicted_ms": 1e3 * wrote,
        "predicted_per_token_ms": 1e3 * wrote / max(1, count),
        "predicted_per_second": max(0, count - 1) / wrote if wrote else 0.0,
    }


def prompt_ids(service: Service, body: Body, param: str) -> list[list[int]]:
    """The token ids of each of a request's prompts, which are in its field `param`."""
    special = body.get("add_special_tokens", True)
    ids = [
        service.encode(prompt, param, add_special=special) if isinstance(prompt, str) else prompt
        for prompt in _prompts(body[param], param)
    ]
    return [truncated(service, each, body) for each in ids]


def truncated(service: Service, ids: list[int], body: Mapping[str, Any]) -> list[int]:
    """A prompt's tokens, truncated as the request asks."""
    most = body.get("truncate_prompt_tokens")
    if most is None:
        return ids
    if most < 0:
        lengths = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
        answer = next((length for length in lengths if length is not None), 0)
        most = max(1, service.llm.engine.context_length - max(1, answer))
    if most == 0:
        raise RequestError("truncate_prompt_tokens is 0; a prompt has at least one token", "truncate_prompt_tokens")
    return ids[:most] if body.get("truncation_side") == "right" else ids[-most:]


def _prompts(prompt: Any, param: str) -> list[str | list[int]]:
    """OpenAI's four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if any(isinstance(item, int) for item in prompt):
        raise RequestError(f"{param} mixes token ids with prompts; give one list of ids, or a list of prompts", param)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"{param} has {len(prompt):,} prompts; at most {MAX_PROMPTS:,} are taken", param)
    return list(prompt)


def answer_format(format: Mapping[str, Any] | None, schema: Any) -> Constraint | None:
    """The constraint that a response format means; `schema` is where the API keeps it."""
    if format is None or format["type"] == "text":
        return None
    if format["type"] == "json_object":
        return Constraint("json_object")
    return Constraint("json_schema", schema if schema is not None else {"type": "object"})


def response_format(format: Mapping[str, Any] | None) -> Constraint | None:
    """The constraint that a `response_format` means: OpenAI's schema is in `json_schema`, llama.cpp's in `schema`."""
    if format is None:
        return None
    schema = format.get("schema")
    if format["type"] == "json_object" and schema is not None:
        return Constraint("json_schema", schema)
    if format["type"] == "json_schema":
        if (schema is None) == ("json_schema" not in format):
            raise RequestError("response_format needs json_schema, or schema in its place", "response_format")
        schema = format.get("json_schema", {}).get("schema", schema)
    return answer_format(format, schema)


def logprob(value: float | None) -> float | None:
    return NEVER if value is not None and not math.isfinite(value) else value


def prompt_logprobs(ids: Sequence[int], scored: Sequence[Token | None], tokenizer: Tokenizer) -> list[Any]:
    """A prompt's logprobs as vLLM writes them: for each token its own and the likeliest, by id; the first is None."""

    def entry(id: int, value: float | None, rank: int | None) -> Body:
        return {"logprob": logprob(value), "rank": rank, "decoded_token": tokenizer.token_text(id)}

    written: list[Any] = []
    for token in scored or [None] * len(ids):
        if token is None or token.logprob is None:
            written.append(None)
            continue
        top = {str(id): entry(id, value, rank) for rank, (id, value) in enumerate(token.top, 1)}
        written.append({str(token.id): entry(token.id, token.logprob, token.rank), **top})
    return written


def token_entry(token: Token, tokenizer: Tokenizer, *, as_ids: bool = False) -> Body:
    """A token as chat completions write it: text, bytes, logprob and alternatives. `as_ids`: ids in place of texts."""

    def entry(id: int, value: float | None) -> Body:
        return {
            "token": f"token_id:{id}" if as_ids else tokenizer.token_text(id),
            "logprob": logprob(value),
            "bytes": list(tokenizer.token_bytes(id)),
            "id": id,
        }

    return {
        **entry(token.id, token.logprob),
        "top_logprobs": [entry(other, value) for other, value in token.top],
    }


def traces(tokens: Sequence[Token]) -> list[Any]:
    return [token.trace.as_dict() for token in tokens if token.trace is not None]

"""What the generating endpoints have in common: a body becomes a job, its deltas become a dialect's words."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from unspool.errors import RequestError
from unspool.events import Token
from unspool.params import Constraint
from unspool.server.answer import Choice, Delta
from unspool.server.fields import MAX_PROMPTS
from unspool.server.kinds import Schema
from unspool.server.service import Job, Run, Service, usage_of

if TYPE_CHECKING:
    from unspool.server.faults import Fault
    from unspool.text.tokenizer import Tokenizer

Body = dict[str, Any]
CUT_SHORT = ("length", "deadline", "repetition", "abort")  # endings that are not the model's own
NEVER = -9999.0  # JSON has no minus infinity; this is how OpenAI writes the logprob of what cannot be


class Writer:
    """Writes one answer: `begin`, `write` for each delta and `end` as framed events, or `body` as a whole."""

    prefix: ClassVar[str]

    def __init__(self, service: Service, run: Run, body: Body) -> None:
        self.service, self.run, self.asked = service, run, body
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self.tokenizer = service.llm.tokenizer

    def begin(self) -> Iterable[bytes]:
        return ()

    def write(self, delta: Delta) -> Iterable[bytes]:
        raise NotImplementedError

    def end(self) -> Iterable[bytes]:
        return ()

    def fail(self, fault: Fault) -> Iterable[bytes]:
        """The answer broke off after it had begun."""
        raise NotImplementedError

    def body(self) -> Body:
        raise NotImplementedError


class Dialect:
    """One endpoint's language."""

    schema: ClassVar[Schema]
    writer: ClassVar[type[Writer]]
    operation: ClassVar[str] = "chat"  # the name that OpenTelemetry's conventions have for what the endpoint does

    async def prepare(self, service: Service, body: Body) -> Job:
        raise NotImplementedError


def check_stream_options(body: Body) -> None:
    if "stream_options" in body and not body.get("stream"):
        raise RequestError("stream_options needs stream: true", "stream_options")


def finish_reason(choice: Choice) -> str | None:
    """In OpenAI's words. `length`: it was cut short, by its length or (see the `unspool` object) by something else."""
    if choice.end is None:
        return None
    if choice.end.reason in CUT_SHORT:
        return "length"
    return "tool_calls" if choice.calls else "stop"


def ending(choice: Choice) -> Body:
    """How a choice ended: OpenAI's word, and the stop string or stop token that ended it, under vLLM's name."""
    end = choice.end
    stop = end.stop if end is not None and end.reason == "stop" else None
    return {"finish_reason": finish_reason(choice), "stop_reason": stop}


def usage(run: Run) -> Body:
    prompt, completion, cached = usage_of(run)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def text_prompts(prompt: Any, param: str) -> list[str | list[int]]:
    """OpenAI's four ways of giving prompts: a text, texts, token ids, lists of token ids."""
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
    """The constraint that a response format means; `schema` is where the dialect keeps it."""
    if format is None or format["type"] == "text":
        return None
    if format["type"] == "json_object":
        return Constraint("json_object")
    return Constraint("json_schema", schema if schema is not None else {"type": "object"})


def logprob(value: float | None) -> float | None:
    return NEVER if value is not None and not math.isfinite(value) else value


def token_entry(token: Token, tokenizer: Tokenizer) -> Body:
    """A token as chat completions tell it: text, bytes, logprob and alternatives."""

    def entry(id: int, value: float | None) -> Body:
        return {
            "token": tokenizer.token_text(id),
            "logprob": logprob(value),
            "bytes": list(tokenizer.token_bytes(id)),
            "id": id,
        }

    return {
        **entry(token.id, token.logprob),
        "top_logprobs": [entry(other, value) for other, value in token.top],
    }


def traces(tokens: Sequence[Token]) -> list[Any]:
    return [_finite(token.trace.as_dict()) for token in tokens if token.trace is not None]


def _finite(value: Any) -> Any:
    """JSON has no infinities; a trace may."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return getattr(value, "item", lambda: str(value))()

"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unspool.chat.answers import ToolCall
from unspool.chat.messages import for_template
from unspool.chat.parts import Arguments, Begin, Content, Reasoning
from unspool.chat.tools import Toolbox, read_toolbox
from unspool.errors import RequestError
from unspool.events import Token
from unspool.results import Choice, Delta
from unspool.server.dialect import (
    Body,
    ChatRequest,
    Writer,
    ending,
    how_of,
    prepare_chat,
    prompt_logprobs,
    response_format,
    timings,
    token_entry,
    traces,
    usage,
)  # fmt: skip
from unspool.server.job import Job
from unspool.server.service import Service
from unspool.server.sse import DONE, ChunkTemplate, frame

_SENT_WITH_TOKENS = ("logprobs", "trace", "return_token_ids", "timings_per_token")  # of each chunk


class ChatWriter(Writer):
    prefix = "chatcmpl-"

    def begin(self) -> Iterable[bytes]:
        self._templates: dict[int, ChunkTemplate] = {}  # by choice: chunks with content and nothing else
        self._text_only = not any(self.asked.get(name) for name in _SENT_WITH_TOKENS) and not self._wants_usage_so_far
        for choice in self.run.choices:
            more = {"prompt_token_ids": self.run.job.prompts[0][0]} if self.asked.get("return_token_ids") else {}
            yield self._chunk(choice, {"role": "assistant", "content": self.run.job.echo}, more=more)

    def write(self, delta: Delta) -> Iterable[bytes]:
        choice, parts = delta.choice, delta.parts
        if self._text_only and delta.end is None and len(parts) == 1 and isinstance(parts[0], Content):
            return (self._content_chunk(choice, parts[0].text),)
        return self._write(delta)

    def _write(self, delta: Delta) -> Iterable[bytes]:
        choice, tokens = delta.choice, delta.tokens
        for part in delta.parts:
            if isinstance(part, Content):
                yield self._chunk(choice, {"content": part.text}, tokens)
            elif isinstance(part, Reasoning):
                if self.asked.get("include_reasoning") is False:
                    continue
                yield self._chunk(choice, reasoning_fields(part.text), tokens)
            elif isinstance(part, Begin):
                call = choice.message.calls[part.index]
                function = {"name": part.name, "arguments": ""}
                yield self._call_chunk(
                    choice, {"id": call.id, "type": "function", "function": function}, part.index, tokens
                )
            elif isinstance(part, Arguments):
                yield self._call_chunk(choice, {"function": {"arguments": part.text}}, part.index, tokens)
            tokens = ()
        if tokens and not self._text_only:
            yield self._chunk(choice, {}, tokens)
        if delta.end is not None:
            yield self._last_chunk(choice)

    def end(self) -> Iterable[bytes]:
        if self._wants_usage:
            more = {"choices": [], "usage": usage(self.run), "timings": timings(self.run)}
            yield frame(self._head("chat.completion.chunk") | more)
        yield DONE

    def body(self) -> Body:
        choices = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice.tokens),
                **ending(choice),
                "token_ids": None,
                **self._ids(choice.tokens),
                **({"trace": traces(choice.tokens)} if self._wants_trace else {}),
            }
            for choice in self.run.choices
        ]
        more: Body = {"choices": choices, "usage": usage(self.run), "unspool": self.service.report(self.run)}
        more["timings"] = timings(self.run)
        prompt = self.run.job.prompts[0][0]
        is_scored = self.asked.get("prompt_logprobs") is not None
        more["prompt_logprobs"] = prompt_logprobs(prompt, self.scored(0), self.tokenizer) if is_scored else None
        more["prompt_token_ids"] = prompt if self.asked.get("return_token_ids") else None
        return self._head("chat.completion") | more

    @property
    def _wants_usage(self) -> bool:
        return bool(self.asked.get("stream_options", {}).get("include_usage"))

    @property
    def _wants_usage_so_far(self) -> bool:
        return self._wants_usage and bool(self.asked["stream_options"].get("continuous_usage_stats"))

    @property
    def _wants_logprobs(self) -> bool:
        return bool(self.asked.get("logprobs"))

    @property
    def _wants_trace(self) -> bool:
        return bool(self.asked.get("trace"))

    def _head(self, object: str) -> Body:
        return {
            "id": self.id,
            "object": object,
            "created": self.run.created,
            "model": self.service.name,
            "system_fingerprint": self.service.fingerprint,
            "service_tier": "default",
        }

    def _content_chunk(self, choice: Choice, text: str) -> bytes:
        template = self._templates.get(choice.index)
        if template is None:
            template = ChunkTemplate(self._chunk(choice, {"content": ChunkTemplate.TEXT}))
            self._templates[choice.index] = template
        return template.render(text)

    def _ids(self, tokens: Sequence[Token]) -> Body:
        return {"token_ids": [token.id for token in tokens]} if self.asked.get("return_token_ids") else {}

    def _chunk(
        self,
        choice: Choice,
        delta: Body,
        tokens: Iterable[Token] = (),
        *,
        is_last: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        tokens = list(tokens)
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            **(ending(choice) if is_last else {"finish_reason": None}),
        }
        if tokens:
            entry |= self._ids(tokens)
            entry |= {"trace": traces(tokens)} if self._wants_trace else {}
        chunk = self._head("chat.completion.chunk") | {"choices": [entry]} | dict(more or {})
        if self._wants_usage:
            chunk["usage"] = None
        if self._wants_usage_so_far:
            chunk["usage"] = usage(self.run)
        if self.asked.get("timings_per_token") or (is_last and self.run.is_whole):
            chunk["timings"] = timings(self.run)
        if is_last and self.run.is_whole:
            chunk["unspool"] = self.service.report(self.run)
        return frame(chunk)

    def _call_chunk(self, choice: Choice, call: Body, index: int, tokens: Iterable[Token]) -> bytes:
        return self._chunk(choice, {"tool_calls": [{"index": index, **call}]}, tokens)

    def _last_chunk(self, choice: Choice) -> bytes:
        return self._chunk(choice, {}, is_last=True)

    def _logprobs(self, tokens: Iterable[Token]) -> Body | None:
        if not self._wants_logprobs:
            return None
        as_ids = bool(self.asked.get("return_tokens_as_token_ids"))
        return {"content": [token_entry(token, self.tokenizer, as_ids=as_ids) for token in tokens], "refusal": None}

    def _message(self, choice: Choice) -> Body:
        text = self.run.job.echo + choice.message.content
        message: Body = {"role": "assistant", "content": text, "refusal": None}
        if choice.message.reasoning and self.asked.get("include_reasoning") is not False:
            message |= reasoning_fields(choice.message.reasoning)
        if choice.message.calls:
            message["content"] = text or None
            message["tool_calls"] = [call_entry(call) for call in choice.message.calls]
        return message


def reasoning_fields(text: str) -> Body:
    """A model's reasoning, under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def call_entry(call: ToolCall) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def prepare(service: Service, body: Body) -> Job:
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    if body.get("stream") and body.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs come with the whole answer; they cannot be streamed", "prompt_logprobs")
    limit, length_field = _length(body)
    request = ChatRequest(
        messages=conversation(body["messages"]),
        toolbox=toolbox_of(body),
        max_tokens=limit,
        logprobs=body.get("top_logprobs", 0) if body.get("logprobs") else None,
        format=response_format(body.get("response_format")),
        how=how_of(body),
        length_field=length_field,
    )
    return prepare_chat(service, body, request)


def count_tokens(service: Service, body: Body) -> Body:
    """The number of tokens in a conversation's prompt."""
    [(ids, _)] = prepare(service, body).prompts
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _length(body: Mapping[str, Any]) -> tuple[int | None, str]:
    new, old = body.get("max_completion_tokens"), body.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_tokens is {old:,} but max_completion_tokens is {new:,}; they are one limit", "max_tokens"
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def toolbox_of(body: Mapping[str, Any]) -> Toolbox:
    parallel = body.get("parallel_tool_calls", True)
    return read_toolbox(body.get("tools", ()), body.get("tool_choice", "auto"), parallel=parallel)


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[Body]:
    """Checked messages as templates read them."""
    for index, message in enumerate(messages):
        others = ("tool_calls", "reasoning_content", "reasoning", "token_ids")
        is_empty = message.get("content") is None and not any(message.get(field) for field in others)
        if message["role"] == "assistant" and is_empty:
            raise RequestError(f"messages[{index}] has neither content nor tool_calls", f"messages[{index}].content")
    return for_template(messages)

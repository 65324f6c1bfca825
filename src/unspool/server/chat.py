"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from unspool.errors import RequestError
from unspool.events import Token
from unspool.server import schema
from unspool.server.answer import Call, Choice, Delta
from unspool.server.calls import Arguments, Begin, Content
from unspool.server.dialect import (
    Body,
    Dialect,
    Writer,
    answer_format,
    ending,
    token_entry,
    traces,
    usage,
)  # fmt: skip
from unspool.server.faults import Fault
from unspool.server.service import Job, Service
from unspool.server.sse import DONE, Mould, frame
from unspool.server.tools import Tool, Toolbox, make_toolbox


class ChatWriter(Writer):
    prefix = "chatcmpl-"

    def begin(self) -> Iterable[bytes]:
        self._moulds: dict[int, Mould] = {}  # by choice: of a chunk that brings content and nothing else
        self._is_plain = not self._wants_logprobs and not self._wants_trace
        for choice in self.run.answer.choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def write(self, delta: Delta) -> Iterable[bytes]:
        choice, parts = delta.choice, delta.parts
        if self._is_plain and delta.end is None and len(parts) == 1 and isinstance(parts[0], Content):
            return (self._cast(choice, parts[0].text),)
        return self._write(delta)

    def _write(self, delta: Delta) -> Iterable[bytes]:
        choice, tokens = delta.choice, delta.tokens
        for part in delta.parts:
            if isinstance(part, Content):
                yield self._chunk(choice, {"content": part.text}, tokens)
            elif isinstance(part, Begin):
                call = choice.calls[part.index]
                function = {"name": part.name, "arguments": ""}
                yield self._call_chunk(
                    choice, {"id": call.id, "type": "function", "function": function}, part.index, tokens
                )
            elif isinstance(part, Arguments):
                yield self._call_chunk(choice, {"function": {"arguments": part.text}}, part.index, tokens)
            tokens = ()
        if tokens and not self._is_plain:
            yield self._chunk(choice, {}, tokens)
        if delta.end is not None:
            yield self._last_chunk(choice)

    def end(self) -> Iterable[bytes]:
        if self._wants_usage:
            yield frame(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(self.run)})
        yield DONE

    def fail(self, fault: Fault) -> Iterable[bytes]:
        yield frame(fault.openai())
        yield DONE

    def body(self) -> Body:
        choices = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice.tokens),
                **ending(choice),
                **({"trace": traces(choice.tokens)} if self._wants_trace else {}),
            }
            for choice in self.run.answer.choices
        ]
        more = {"choices": choices, "usage": usage(self.run), "unspool": self.service.report(self.run)}
        return self._head("chat.completion") | more

    @property
    def _wants_usage(self) -> bool:
        return bool(self.asked.get("stream_options", {}).get("include_usage"))

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

    def _cast(self, choice: Choice, text: str) -> bytes:
        mould = self._moulds.get(choice.index)
        if mould is None:
            mould = self._moulds[choice.index] = Mould(self._chunk(choice, {"content": Mould.TEXT}))
        return mould.cast(text)

    def _chunk(self, choice: Choice, delta: Body, tokens: Iterable[Token] = (), *, is_last: bool = False) -> bytes:
        tokens = list(tokens)
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            **(ending(choice) if is_last else {"finish_reason": None}),
        }
        if tokens and self._wants_trace:
            entry["trace"] = traces(tokens)
        chunk = self._head("chat.completion.chunk") | {"choices": [entry]}
        if self._wants_usage:
            chunk["usage"] = None
        if is_last and all(each.end is not None for each in self.run.answer.choices):
            chunk["unspool"] = self.service.report(self.run)
        return frame(chunk)

    def _call_chunk(self, choice: Choice, call: Body, index: int, tokens: Iterable[Token]) -> bytes:
        return self._chunk(choice, {"tool_calls": [{"index": index, **call}]}, tokens)

    def _last_chunk(self, choice: Choice) -> bytes:
        return self._chunk(choice, {}, is_last=True)

    def _logprobs(self, tokens: Iterable[Token]) -> Body | None:
        if not self._wants_logprobs:
            return None
        return {"content": [token_entry(token, self.tokenizer) for token in tokens], "refusal": None}

    def _message(self, choice: Choice) -> Body:
        message: Body = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [call_entry(call) for call in choice.calls]
        return message


def call_entry(call: Call) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatDialect(Dialect):
    schema = schema.CHAT
    writer = ChatWriter

    async def prepare(self, service: Service, body: Body) -> Job:
        if body.get("top_logprobs") is not None and not body.get("logprobs"):
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        limit, field = _length(body)
        toolbox = toolbox_of(body)
        format = body.get("response_format")
        schema_ = (format or {}).get("json_schema", {}).get("schema")
        constraint, calling = service.bind(body, toolbox, answer_format(format, schema_), "response_format")
        top = body.get("top_logprobs", 0) if body.get("logprobs") else None
        params = service.sampling(body, max_tokens=limit, logprobs=top, constraint=constraint)
        messages = conversation(body["messages"])
        ids, warnings = await service.render(messages, toolbox, body.get("chat_template_kwargs", {}))
        return Job(
            [(ids, params)], bool(body.get("stream")), calling, warnings, length_field=field, prompt_field="messages"
        )


def _length(body: Mapping[str, Any]) -> tuple[int | None, str]:
    new, old = body.get("max_completion_tokens"), body.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_tokens is {old:,} but max_completion_tokens is {new:,}; they are one limit", "max_tokens"
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def toolbox_of(body: Mapping[str, Any]) -> Toolbox:
    tools = [
        Tool(
            tool["function"]["name"],
            tool["function"].get("description", ""),
            tool["function"].get("parameters"),
            bool(tool["function"].get("strict")),
        )
        for tool in body.get("tools", ())
    ]
    choice: Any = body.get("tool_choice", "auto")
    mode, names = choice, None
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        allowed = choice["allowed_tools"]
        mode, names = allowed["mode"], [tool["function"]["name"] for tool in allowed["tools"]]
    elif isinstance(choice, dict):
        mode, names = "required", [choice["function"]["name"]]
    return make_toolbox(tools, mode, allowed=names, parallel=body.get("parallel_tool_calls", True))


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: content as one text, a call's arguments as an object."""
    out = []
    names: dict[str, str] = {}  # of calls, by id
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        told = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        told["content"] = text_of(message.get("content"))
        if message.get("tool_calls"):
            told["tool_calls"] = [template_call(call) for call in message["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if "id" in call}
        elif message["role"] == "assistant" and message.get("content") is None:
            raise RequestError(f"{path} has neither content nor tool_calls", f"{path}.content")
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            told.setdefault("name", names[message["tool_call_id"]])
        out.append(told)
    return out


def text_of(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def template_call(call: Mapping[str, Any]) -> Body:
    arguments = call["function"]["arguments"]
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": call["function"]["name"], "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"type": "function", "function": function, **({"id": call["id"]} if "id" in call else {})}

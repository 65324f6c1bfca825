"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from unspool.chat.messages import text_of
from unspool.chat.parts import Arguments, Begin, Content, Reasoning
from unspool.chat.tools import Tool, Toolbox, make_toolbox
from unspool.errors import RequestError
from unspool.results import Choice, Delta
from unspool.server.chat_completions import reasoning_fields
from unspool.server.dialect import CUT_SHORT, Body, ChatRequest, Writer, answer_format, how_of, prepare_chat, traces
from unspool.server.faults import Fault
from unspool.server.job import Job
from unspool.server.service import Service
from unspool.server.sse import frame

SIGNATURE = "unspool"  # thinking is accepted back unchecked; the API requires some signature


class MessageWriter(Writer):
    prefix = "msg_"

    def __init__(self, service: Service, run: Any, body: Body) -> None:
        super().__init__(service, run, body)
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that is open

    def begin(self) -> Iterable[bytes]:
        message = self._message([], None)
        message["usage"] = {"input_tokens": len(self.run.job.prompts[0][0]), "output_tokens": 0}
        yield self._event("message_start", message=message)

    def write(self, delta: Delta) -> Iterable[bytes]:
        for part in delta.parts:
            if isinstance(part, Content):
                if self._open != "text":
                    yield from self._start_block({"type": "text", "text": ""})
                yield self._block_delta({"type": "text_delta", "text": part.text})
            elif isinstance(part, Reasoning):
                if self._open != "thinking":
                    yield from self._start_block({"type": "thinking", "thinking": "", "signature": ""})
                yield self._block_delta({"type": "thinking_delta", "thinking": part.text})
            elif isinstance(part, Begin):
                call = delta.choice.message.calls[part.index]
                yield from self._start_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            elif isinstance(part, Arguments):
                yield self._block_delta({"type": "input_json_delta", "partial_json": part.text})

    def end(self) -> Iterable[bytes]:
        yield from self._stop_block()
        choice = self.run.choices[0]
        delta = {"stop_reason": stop_reason(choice), "stop_sequence": _stop_sequence(choice)}
        yield self._event("message_delta", delta=delta, usage=self._usage(), unspool=self._report())
        yield self._event("message_stop")

    @classmethod
    def refuse(cls, fault: Fault) -> Iterable[bytes]:
        yield frame(fault.anthropic(), "error")

    def body(self) -> Body:
        choice = self.run.choices[0]
        content: list[Body] = []
        if choice.message.reasoning:
            content.append({"type": "thinking", "thinking": choice.message.reasoning, "signature": SIGNATURE})
        for piece in choice.message.pieces:
            if isinstance(piece, str):
                content.append({"type": "text", "text": piece})
            else:
                about = {"id": piece.id, "name": piece.name, "input": _input(piece.arguments)}
                content.append({"type": "tool_use", **about})
        return self._message(content, choice) | {"usage": self._usage(), "unspool": self._report()}

    def _message(self, content: list[Body], choice: Choice | None) -> Body:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.name,
            "content": content,
            "stop_reason": stop_reason(choice) if choice is not None else None,
            "stop_sequence": _stop_sequence(choice) if choice is not None else None,
        }

    def _start_block(self, block: Body) -> Iterable[bytes]:
        yield from self._stop_block()
        self._open = block["type"]
        yield self._event("content_block_start", index=self._num_blocks, content_block=block)

    def _stop_block(self) -> Iterable[bytes]:
        if self._open == "thinking":
            yield self._block_delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield self._event("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = None

    def _block_delta(self, delta: Body) -> bytes:
        return self._event("content_block_delta", index=self._num_blocks, delta=delta)

    def _event(self, kind: str, **more: Any) -> bytes:
        return frame({"type": kind, **more}, kind)

    def _usage(self) -> Body:
        """As Anthropic counts: cached tokens are not part of the input tokens."""
        prompt, completion, cached = self.run.usage
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": completion,
        }

    def _report(self) -> Body:
        report = self.service.report(self.run)
        if self.asked.get("trace"):
            report["trace"] = traces(self.run.choices[0].tokens)
        return report


def stop_reason(choice: Choice) -> str | None:
    """Anthropic's stop reason; the `unspool` object has the exact one (deadline, repetition, abort)."""
    if choice.end is None:
        return None
    if choice.end.reason in CUT_SHORT:
        return "max_tokens"
    return "tool_use" if choice.message.calls else "stop_sequence" if _stop_sequence(choice) is not None else "end_turn"


def _stop_sequence(choice: Choice) -> str | None:
    return choice.end.stop if choice.end is not None and isinstance(choice.end.stop, str) else None


def _input(arguments: str) -> Any:
    """A call's arguments as an object. If they were cut short and are no valid JSON, an object with their text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"_incomplete": arguments}


def prepare(service: Service, body: Body) -> Job:
    thinking = body.get("thinking", {})
    if "budget_tokens" in thinking and "thinking_budget" in body:
        raise RequestError("thinking.budget_tokens and thinking_budget are one limit; give one", "thinking_budget")
    format = body.get("output_config", {}).get("format")
    request = ChatRequest(
        messages=conversation(body),
        toolbox=toolbox_of(body),
        max_tokens=body["max_tokens"],
        stop=body.get("stop_sequences"),
        format=answer_format(format, (format or {}).get("schema")),
        format_field="output_config.format",
        how=thinking_of(body),
        thinking_budget=thinking.get("budget_tokens"),
    )
    return prepare_chat(service, body, request)


def thinking_of(body: Mapping[str, Any]) -> Body:
    """How much the model should think. `adaptive` leaves it to the model, which is what templates do by default."""
    enabled = {"enabled": True, "disabled": False}.get(body.get("thinking", {}).get("type", ""))
    return how_of(body, enable_thinking=enabled, reasoning_effort=body.get("output_config", {}).get("effort"))


def count_tokens(service: Service, body: Body) -> Body:
    options = body.get("chat_template_kwargs", {})
    prompt = service.render(conversation(body), toolbox_of(body), options, how=thinking_of(body))
    return {"input_tokens": len(prompt.ids)}


def toolbox_of(body: Mapping[str, Any]) -> Toolbox:
    tools = [
        Tool(tool["name"], tool.get("description", ""), tool["input_schema"], bool(tool.get("strict")))
        for tool in body.get("tools", ())
    ]
    choice = body.get("tool_choice", {"type": "auto"})
    mode = {"any": "required", "tool": "required"}.get(choice["type"], choice["type"])
    named = [choice["name"]] if choice["type"] == "tool" else None
    return make_toolbox(tools, mode, allowed=named, parallel=not choice.get("disable_parallel_tool_use", False))


def conversation(body: Mapping[str, Any]) -> list[Body]:
    """Anthropic's messages as templates read them: each tool result becomes a message of its own."""
    messages: list[Body] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"])})
    names: dict[str, str] = {}
    for index, message in enumerate(body["messages"]):
        if isinstance(message["content"], str):
            messages.append({"role": message["role"], "content": message["content"]})
        elif message["role"] == "assistant":
            messages.append(_assistant(message["content"], names, f"messages[{index}].content"))
        else:
            messages += _user(message["content"], names, f"messages[{index}].content")
    return messages


def _assistant(blocks: list[Body], names: dict[str, str], path: str) -> Body:
    text, thought, calls = "", "", []
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            text += block["text"]
        elif block["type"] == "thinking":
            thought += block["thinking"]
        elif block["type"] == "tool_use":
            names[block["id"]] = block["name"]
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            raise RequestError(f"{path}[{index}]: an assistant gives no tool_result", f"{path}[{index}].type")
    more = ({"tool_calls": calls} if calls else {}) | (reasoning_fields(thought) if thought else {})
    return {"role": "assistant", "content": text, **more}


def _user(blocks: list[Body], names: dict[str, str], path: str) -> list[Body]:
    messages: list[Body] = []
    for index, block in enumerate(blocks):
        if block["type"] == "tool_result":
            content = text_of(block.get("content"))
            content = f"Error: {content}" if block.get("is_error") else content
            id = block["tool_use_id"]
            name = {"name": names[id]} if id in names else {}
            messages.append({"role": "tool", "content": content, "tool_call_id": id, **name})
        elif block["type"] == "text":
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block["text"]
            else:
                messages.append({"role": "user", "content": block["text"]})
        else:
            raise RequestError(f"{path}[{index}]: a user makes no {block['type']}", f"{path}[{index}].type")
    return messages

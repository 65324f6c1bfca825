"""POST /v1/responses: text and function calls; nothing is stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from unspool.chat.answers import ToolCall
from unspool.chat.messages import call_for_template, text_of
from unspool.chat.parts import Arguments, Begin, Content, Part, Reasoning
from unspool.chat.tools import Toolbox, make_toolbox, read_tool
from unspool.errors import RequestError
from unspool.results import Delta
from unspool.server.chat_completions import reasoning_fields
from unspool.server.dialect import (
    CUT_SHORT,
    Body,
    ChatRequest,
    Writer,
    answer_format,
    how_of,
    prepare_chat,
    token_entry,
    traces,
)
from unspool.server.faults import Fault
from unspool.server.job import Job
from unspool.server.service import Service
from unspool.server.sse import frame

# Request fields that a response repeats, and their values where the request has none.
ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class ResponseWriter(Writer):
    prefix = "resp_"

    def __init__(self, service: Service, run: Any, body: Body) -> None:
        super().__init__(service, run, body)
        self._number = 0  # of the next event
        self._items: list[Body] = []  # finished, in order
        self._message: Body | None = None  # the message item that is open
        self._part_text = ""  # its text so far
        self._thought: Body | None = None  # the reasoning item that is open
        self._call: tuple[Body, ToolCall] | None = None  # the call item that is open
        self._logprobs: list[Body] = []

    # Streaming ------------------------------------------------------------------------------------------------------
    def begin(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def write(self, delta: Delta) -> Iterable[bytes]:
        logprobs = [token_entry(token, self.tokenizer) for token in delta.tokens] if self._wants_logprobs else []
        for part in delta.parts:
            if isinstance(part, Reasoning):
                yield from self._close_call()
                yield from self._close_message()
                yield from self._open_thought()
                self._part_text += part.text
                yield self._part_event("response.reasoning_text.delta", delta=part.text)
            elif isinstance(part, Content):
                yield from self._close_thought()
                yield from self._close_call()
                yield from self._open_message()
                self._part_text += part.text
                self._logprobs += logprobs
                yield self._part_event("response.output_text.delta", delta=part.text, logprobs=logprobs)
                logprobs = []
            elif isinstance(part, Begin):
                yield from self._close_thought()
                yield from self._close_message()
                yield from self._close_call()
                yield from self._open_call(delta.choice.message.calls[part.index])
            elif isinstance(part, Arguments):
                assert self._call is not None
                yield self._event(
                    "response.function_call_arguments.delta",
                    item_id=self._call[0]["id"],
                    output_index=len(self._items),
                    delta=part.text,
                )
        self._logprobs += logprobs

    def end(self) -> Iterable[bytes]:
        yield from self._finish()
        response = self.body()
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        yield self._event(kind, response=response)

    @classmethod
    def refuse(cls, fault: Fault) -> Iterable[bytes]:
        details = {"code": fault.code or "server_error", "message": fault.message, "param": fault.param}
        yield frame({"type": "error", **details, "sequence_number": 0}, "error")

    def fail(self, fault: Fault) -> Iterable[bytes]:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": fault.message}
        yield self._event("response.failed", response=response)

    def _finish(self) -> Iterable[bytes]:
        yield from self._close_thought()
        if not self._items and self._message is None and self._call is None:
            yield from self._open_message()
        yield from self._close_message()
        yield from self._close_call()

    def _open_thought(self) -> Iterable[bytes]:
        if self._thought is not None:
            return
        self._thought = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": []}
        self._part_text = ""
        yield self._event("response.output_item.added", output_index=len(self._items), item=dict(self._thought))
        yield self._part_event("response.content_part.added", part={"type": "reasoning_text", "text": ""})

    def _close_thought(self) -> Iterable[bytes]:
        if self._thought is None:
            return
        part = {"type": "reasoning_text", "text": self._part_text}
        yield self._part_event("response.reasoning_text.done", text=self._part_text)
        yield self._part_event("response.content_part.done", part=part)
        yield from self._close(self._thought | {"status": self._item_status, "content": [part]})
        self._thought = None

    def _open_message(self) -> Iterable[bytes]:
        if self._message is not None:
            return
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self._part_text, self._logprobs = "", []
        yield self._event("response.output_item.added", output_index=len(self._items), item=dict(self._message))
        yield self._part_event("response.content_part.added", part=_text_part("", []))

    def _close_message(self) -> Iterable[bytes]:
        if self._message is None:
            return
        part = _text_part(self._part_text, self._logprobs)
        yield self._part_event("response.output_text.done", text=self._part_text, logprobs=self._logprobs)
        yield self._part_event("response.content_part.done", part=part)
        yield from self._close(self._message | {"status": self._item_status, "content": [part]})
        self._message = None

    def _open_call(self, call: ToolCall) -> Iterable[bytes]:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        self._call = (item, call)
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _close_call(self) -> Iterable[bytes]:
        if self._call is None:
            return
        item, call = self._call
        self._call = None
        yield self._event(
            "response.function_call_arguments.done",
            item_id=item["id"],
            output_index=len(self._items),
            name=call.name,
            arguments=call.arguments,
        )
        yield from self._close(item | {"status": self._item_status, "arguments": call.arguments})

    def _close(self, item: Body) -> Iterable[bytes]:
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _part_event(self, kind: str, **more: Any) -> bytes:
        item = self._message or self._thought
        assert item is not None
        place = {"item_id": item["id"], "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return frame({"type": kind, "sequence_number": number, **more}, kind)

    # As a whole -----------------------------------------------------------------------------------------------------
    def body(self) -> Body:
        """The whole response, with the same items as the stream's events."""
        if not self._items:
            self._replay()
        response = self._response(self._item_status)
        if response["status"] == "incomplete":  # the `unspool` object has the exact reason
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        prompt, completion, cached = self.run.usage
        response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.run.choices[0].message.num_reasoning_tokens},
            "total_tokens": prompt + completion,
        }
        response["unspool"] = self.service.report(self.run)
        if self.asked.get("trace"):
            response["unspool"]["trace"] = traces(self.run.choices[0].tokens)
        return response

    def _replay(self) -> None:
        """The answer was not streamed: make the items as a stream would have."""
        choice = self.run.choices[0]
        parts: list[Part] = [Reasoning(choice.message.reasoning)] if choice.message.reasoning else []
        for piece in choice.message.pieces:
            if isinstance(piece, str):
                parts.append(Content(piece))
            else:
                index = choice.message.calls.index(piece)
                parts += [Begin(index, piece.name), Arguments(index, piece.arguments)]
        for _ in (*self.write(Delta(choice, parts, choice.tokens)), *self._finish()):
            pass

    @property
    def _wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.asked.get("include", ())

    @property
    def _item_status(self) -> str:
        end = self.run.choices[0].end
        return "completed" if end is None or end.reason not in CUT_SHORT else "incomplete"

    def _response(self, status: str) -> Body:
        params = self.run.params[0]
        repeated = {name: self.asked.get(name, default) for name, default in ECHOED.items()}
        repeated |= {"temperature": params.temperature, "top_p": params.top_p}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.run.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.service.name,
            "output": list(self._items),
            "usage": None,
            "previous_response_id": None,
            "reasoning": {"effort": self.asked.get("reasoning", {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "background": False,
            **repeated,
        }


def _text_part(text: str, logprobs: list[Body]) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def count_tokens(service: Service, body: Body) -> Body:
    """The number of tokens in a response's prompt."""
    [(ids, _)] = prepare(service, body).prompts
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def prepare(service: Service, body: Body) -> Job:
    wants_logprobs = "message.output_text.logprobs" in body.get("include", ())
    if body.get("top_logprobs") and not wants_logprobs:
        raise RequestError('top_logprobs needs include: ["message.output_text.logprobs"]', "top_logprobs")
    format = body.get("text", {}).get("format")
    request = ChatRequest(
        messages=conversation(body),
        toolbox=_toolbox(body),
        max_tokens=body.get("max_output_tokens"),
        logprobs=body.get("top_logprobs", 0) if wants_logprobs else None,
        format=answer_format(format, (format or {}).get("schema")),
        how=how_of(body, reasoning_effort=body.get("reasoning", {}).get("effort")),
        format_field="text.format",
        prompt_field="input",
        length_field="max_output_tokens",
    )
    return prepare_chat(service, body, request)


def _toolbox(body: Mapping[str, Any]) -> Toolbox:
    """The tools of the Responses API, where a function's fields are the tool's own."""
    choice: Any = body.get("tool_choice", "auto")
    mode, names, parallel = choice, None, body.get("parallel_tool_calls", True)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        mode, names = choice["mode"], [tool["name"] for tool in choice["tools"]]
    elif isinstance(choice, dict):
        mode, names, parallel = "required", [choice["name"]], False
    tools = [read_tool(tool) for tool in body.get("tools", ())]
    return make_toolbox(tools, mode, allowed=names, parallel=parallel)


def conversation(body: Mapping[str, Any]) -> list[Body]:
    """Instructions and input items as messages for the template."""
    messages: list[Body] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(body["input"], str):
        return [*messages, {"role": "user", "content": body["input"]}]
    names: dict[str, str] = {}
    thought = ""  # of the assistant's next item
    for item in body["input"]:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += text_of(item.get("content"))
            continue
        if kind == "message":
            messages.append({"role": item["role"], "content": text_of(item["content"])})
        elif kind == "function_call":
            names[item["call_id"]] = item["name"]
            call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call_for_template(call))
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call_for_template(call)]})
        else:
            name = {"name": names[item["call_id"]]} if item["call_id"] in names else {}
            output = text_of(item["output"])
            messages.append({"role": "tool", "content": output, "tool_call_id": item["call_id"], **name})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1] |= reasoning_fields(thought)
            thought = ""
    if not messages:
        raise RequestError("input has no message, only reasoning", "input")
    return messages

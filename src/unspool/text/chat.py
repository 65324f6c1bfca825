"""Chat templates: messages in, the one text a model was taught to continue out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unspool.errors import ModelError, RequestError
from unspool.isolation import LimitedProcess, StoppedError

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint
    from unspool.text.tokenizer import Tokenizer

MAX_SOURCE = 1024 * 1024  # the longest template in the wild has some tens of thousands of characters
MAX_RENDERED = 16 * 1024 * 1024
MAX_SECONDS = 5.0  # a usual prompt takes a thousandth of one
MAX_MEMORY = 512 * 1024 * 1024  # of the process that renders
# A limit that a conversation of fewer bytes meets is the template's fault, else it is the conversation's.
SMALL = 64 * 1024

_renderer = LimitedProcess("unspool.text.sandbox", ("jinja2", "markupsafe"), MAX_MEMORY, 5 * MAX_RENDERED)


def start_renderer() -> None:
    """Start the process that renders templates, so that it is ready when the weights are; nothing waits for it."""
    _renderer.start()


def template_of(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    """A model's chat template with its tokenizer's tokens; None where the model has none."""
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(checkpoint.chat_template, tokenizer.named_tokens, tool_use=checkpoint.tool_template)


class ChatTemplate:
    """A model's own template (jinja2), rendered in a process with limits.

    A template that does not parse or goes over a limit is the model's fault (ModelError); one that refuses or cannot
    take the messages is the request's (RequestError on `messages`, with the template's own words). `tokens` are the
    variables that the tokenizer names (`bos_token`, `eos_token`, …). `tool_use` is the template for conversations with
    tools, where the model has one of its own for them.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any] | None = None, *, tool_use: str | None = None) -> None:
        self.source = source
        self.tool_source = source if tool_use is None else tool_use
        self._tokens = {"bos_token": "", "eos_token": "", **(tokens or {})}
        for each in {source, self.tool_source}:
            if len(each) > MAX_SOURCE:
                raise ModelError(f"chat template: {len(each):,} characters; at most {MAX_SOURCE:,} are read")
            if "syntax" in (reply := _ask({"source": each})):
                raise ModelError(f"chat template: {reply['syntax']}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages. Other keyword arguments are the template's own (`enable_thinking`, …)."""
        variables = {
            **self._tokens,
            **kwargs,
            "messages": validate_messages(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        reply = _ask({"source": self.tool_source if tools else self.source, "variables": variables})
        if "text" in reply:
            return reply["text"]
        if "refused" in reply:
            raise RequestError(f"messages: the model's chat template refuses them: {reply['refused']}", "messages")
        raise RequestError(f"messages: the chat template failed on them: {reply['failed']}", "messages")


def _ask(request: Mapping[str, Any]) -> dict[str, str]:
    """The renderer's reply."""
    try:
        content = json.dumps(request, default=_as_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages: they cannot be written as JSON: {error}", "messages") from error
    try:
        reply: dict[str, str] = json.loads(_renderer.call(content, MAX_SECONDS))
        if "stopped" not in reply:
            return reply
        reason = reply["stopped"]
    except StoppedError as error:
        reason = str(error)
    if len(content) - len(request["source"]) > SMALL:
        raise RequestError(f"messages: too much for the model's chat template, which was stopped: {reason}", "messages")
    raise ModelError(f"chat template: it was stopped: {reason}")


def _as_json(value: Any) -> Any:
    """Mappings and sequences of other types than JSON's own."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def validate_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as templates expect them; a RequestError names the first field that is wrong.

    Content may be a string, or a list of text parts (joined here, since most templates know only strings), or absent
    (None) where the message carries tool calls instead: a template that does not test for none gets an empty text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: expected a list of messages, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages: must not be empty", "messages")
    return [_validate_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _validate_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}: expected an object, got {type(message).__name__}", name)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role: expected a string, got {role!r:.40}", f"{name}.role")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls)):
        raise RequestError(f"{name}.tool_calls: expected a list of objects, got {calls!r:.40}", f"{name}.tool_calls")
    content = message.get("content")
    if content is None and not calls:
        raise RequestError(f"{name}.content: missing", f"{name}.content")
    return {**message, "content": None if content is None else _content_text(content, f"{name}.content")}


def _content_text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{name}: expected a string or a list of parts, got {type(content).__name__}", name)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{name}[{index}].type: only 'text' can be read, got {kind!r}", f"{name}[{index}].type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{index}].text: expected a string", f"{name}[{index}].text")
        texts.append(part["text"])
    return "".join(texts)

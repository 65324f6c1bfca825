"""Chat templates: from messages to the one text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unspool.errors import ModelError, RequestError
from unspool.isolation import LimitedProcess, StoppedError

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint
    from unspool.text.tokenizer import Tokenizer

MAX_SOURCE = 1024 * 1024  # the longest known template has tens of thousands of characters
MAX_RENDERED = 16 * 1024 * 1024
MAX_SECONDS = 5.0  # a typical prompt takes a millisecond
MAX_MEMORY = 512 * 1024 * 1024  # of the process that renders
# If a conversation with fewer bytes exceeds a limit, the error blames the template, else the conversation.
SMALL = 64 * 1024

_renderer = LimitedProcess("unspool.chat.sandbox", ("jinja2", "markupsafe"), MAX_MEMORY, 5 * MAX_RENDERED)


def start_renderer() -> None:
    """Start the process that renders templates, without waiting, so that it is ready when the weights are."""
    _renderer.start()


def template_of(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    """A model's chat template with its tokenizer's tokens; None if the model has none."""
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(checkpoint.chat_template, tokenizer.named_tokens, tool_use=checkpoint.tool_template)


class ChatTemplate:
    """A model's own template (jinja2), rendered in a process with limits.

    A template that does not parse or exceeds a limit raises a ModelError. One that refuses or cannot render the
    messages raises a RequestError on `messages` with the template's own message. `tokens` are the tokenizer's named
    tokens (`bos_token`, `eos_token`, …). `tool_use` is the template for conversations with tools, if the model has a
    separate one.
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
        """The prompt for checked messages. Other keyword arguments are the template's own (`enable_thinking`, …)."""
        variables = {
            **self._tokens,
            **kwargs,
            "messages": messages,
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

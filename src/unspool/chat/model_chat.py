"""How one model holds a conversation: its template, its format of tool calls, its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unspool.chat.answers import CallSyntax, Message
from unspool.chat.call_formats import GENERIC, CallFormat, format_of
from unspool.chat.call_grammar import constraint_for
from unspool.chat.tools import Toolbox, with_description
from unspool.errors import RequestError
from unspool.params import Constraint

if TYPE_CHECKING:
    from unspool.chat.template import ChatTemplate
    from unspool.text.tokenizer import Tokenizer

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
NO_TOOLS = Toolbox()


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as token ids, and what the caller should know about how it was rendered."""

    ids: list[int]
    warnings: tuple[str, ...] = ()


class ModelChat:
    def __init__(self, name: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._name, self.tokenizer, self._template = name, tokenizer, template

    def prepare(self) -> None:
        """Find out now what the template shows, so that the first conversation need not wait for it."""
        _ = self.shows_tools, self.shows_names

    # What the template has a place for ------------------------------------------------------------------------------
    @cached_property
    def shows_tools(self) -> bool:
        return self._renders_probe(tools=[_PROBE_TOOL])

    @cached_property
    def shows_names(self) -> bool:
        return self._renders_probe(name=_PROBE)

    def _renders_probe(self, tools: list[Any] | None = None, **message: str) -> bool:
        """Whether a made-up tool or name appears in what the template makes of it."""
        if self._template is None:
            return False
        try:
            return _PROBE in self._template.render([{"role": "user", "content": "?", **message}], tools=tools)
        except RequestError:
            return False

    @cached_property
    def call_format(self) -> CallFormat:
        """The format of calls that the model is asked for."""
        return format_of(self._template.tool_source) if self._template is not None and self.shows_tools else GENERIC

    # Messages to a prompt -------------------------------------------------------------------------------------------
    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        toolbox: Toolbox = NO_TOOLS,
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """The token ids of valid messages. `options` are variables of the model's template."""
        from unspool.chat.guard import encode_chat

        if self._template is None:
            raise RequestError(
                f"{self._name} has no chat template, so it can only continue text; use a plain prompt", "messages"
            )
        taken = RESERVED & (options or {}).keys()
        if taken:
            name = min(taken)
            raise RequestError(f"chat_template_kwargs may not set {name}", f"chat_template_kwargs.{name}")
        if add_generation_prompt and messages[-1]["role"] == "assistant":
            raise RequestError(
                "the conversation ends with an assistant message; to continue such a message is not supported: "
                "end with a user or tool message",
                "messages",
            )
        warnings: list[str] = []
        if not self.shows_names and any("name" in message and message["role"] != "tool" for message in messages):
            warnings.append("the model's chat template shows no names: messages' names have no effect")
        for name in options or ():
            if not re.search(rf"\b{re.escape(name)}\b", self._template.source):
                warnings.append(f"the model's chat template does not read {name}: it has no effect")
        if "developer" not in self._template.source:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = {**(options or {}), "add_generation_prompt": add_generation_prompt}
        tools = toolbox.tools if toolbox.callable else ()
        if self.shows_tools:
            if tools:
                variables["tools"] = [tool.for_template() for tool in tools]
        elif tools:
            messages = with_description(messages, tools)
            warnings.append("the model's chat template has no place for tools; the system message describes them")
        return RenderedPrompt(encode_chat(self.tokenizer, self._template, messages, variables), tuple(warnings))

    # What answers look like -----------------------------------------------------------------------------------------
    def constraint(self, toolbox: Toolbox, answer: Constraint | None = None) -> Constraint | None:
        """What an answer is held to: its tools' calls, or `answer`, or both."""
        return constraint_for(toolbox, self.call_format, answer, self.tokenizer)

    def syntax(self, toolbox: Toolbox) -> CallSyntax | None:
        """How calls are found in an answer; None: it may make none."""
        if not toolbox.callable:
            return None
        marks = {}
        for mark in self.call_format.marks:
            ids = self.tokenizer.encode(mark, add_special=False, parse_special=True)
            if len(ids) == 1 and ids[0] in self.tokenizer.special_ids:
                marks[ids[0]] = mark
        names = frozenset(tool.name for tool in toolbox.callable)
        return CallSyntax(self.call_format, names, toolbox.parallel, marks)

    def message(self, toolbox: Toolbox) -> Message:
        """An answer to be filled."""
        return Message(self.tokenizer, self.syntax(toolbox))


_PROBE = "qx_probe_zk"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}

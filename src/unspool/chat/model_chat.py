"""The chat format of one model: its template, its format of tool calls, its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unspool.chat.answers import AnswerSyntax, Message, reasoning_parser
from unspool.chat.call_formats import GENERIC, CallFormat, format_of
from unspool.chat.call_grammar import constraint_for
from unspool.chat.reasoning import HARMONY, ReasoningFormat, reasoning_format_of
from unspool.chat.tools import Toolbox, with_description
from unspool.errors import RequestError
from unspool.params import Constraint, SamplingParams
from unspool.params.values import ThinkingMarks
from unspool.records import record

if TYPE_CHECKING:
    from unspool.chat.template import ChatTemplate
    from unspool.text.tokenizer import Tokenizer

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
NO_TOOLS = Toolbox()


@record(frozen=True)
class RenderedPrompt:
    """A conversation as token ids, with notes on how it was rendered. `begins` is the part of the answer that the
    prompt already contains; `is_continued`: the answer continues the last message."""

    ids: list[int]
    warnings: tuple[str, ...] = ()
    begins: str = ""
    is_continued: bool = False


class ModelChat:
    def __init__(self, name: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._name, self.tokenizer, self._template = name, tokenizer, template

    def prepare(self) -> None:
        """Probe the template now, so that the first conversation does not wait for it."""
        _ = self.shows_tools, self.shows_names

    # What the template has a place for ------------------------------------------------------------------------------
    @cached_property
    def shows_tools(self) -> bool:
        return self._renders_probe(tools=[_PROBE_TOOL])

    @cached_property
    def shows_names(self) -> bool:
        return self._renders_probe(name=_PROBE)

    def _renders_probe(self, tools: list[Any] | None = None, **message: str) -> bool:
        """Whether a made-up tool or name appears in the rendered text."""
        if self._template is None:
            return False
        try:
            return _PROBE in self._template.render([{"role": "user", "content": "?", **message}], tools=tools)
        except RequestError:
            return False

    @cached_property
    def call_format(self) -> CallFormat:
        """The format of calls that the model uses."""
        return format_of(self._template.tool_source) if self._template is not None and self.shows_tools else GENERIC

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The model's reasoning format; None if its template has none."""
        return None if self._template is None else reasoning_format_of(self._template.source)

    def _reads(self, variable: str) -> bool:
        """Whether the template reads a variable."""
        source = "" if self._template is None else self._template.source
        return re.search(rf"(?<![.\w'\"]){re.escape(variable)}\b", source) is not None

    def thinking_options(self, effort: str | None = None, enabled: bool | None = None) -> dict[str, Any]:
        """The template's variables for the amount of thinking; a RequestError if the template does not support the
        choice."""
        options: dict[str, Any] = {}
        if effort is not None:
            if self._reads("reasoning_effort"):
                options["reasoning_effort"] = effort
            if enabled is None and (effort == "none" or not options):
                enabled = effort != "none"
        if enabled is None:
            return options
        field = "reasoning_effort" if effort is not None else "enable_thinking"
        for name in ("enable_thinking", "thinking"):
            if self._reads(name):
                return {**options, name: enabled}
        if not options and enabled and self.reasoning_format is None:
            why = f"{field}: {self._name} does not think before it answers"
            raise RequestError(why, field, "unsupported_parameter")
        if not options and not enabled and self.reasoning_format is not None:
            raise RequestError(
                f"{field}: {self._name}'s chat template has no way to turn thinking off", field, "unsupported_parameter"
            )
        return options

    # Messages to a prompt -------------------------------------------------------------------------------------------
    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        toolbox: Toolbox = NO_TOOLS,
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
    ) -> RenderedPrompt:
        """The token ids of valid messages. `options` are variables of the model's template.

        If the last message is the assistant's, it is continued, unless `add_generation_prompt` or
        `continue_final_message` says otherwise.
        """
        from unspool.chat.prefill import Prefill, wants_continuation

        if self._template is None:
            raise RequestError(
                f"{self._name} has no chat template, so it can only continue text; use a plain prompt", "messages"
            )
        taken = RESERVED & (options or {}).keys()
        if taken:
            name = min(taken)
            raise RequestError(f"chat_template_kwargs may not set {name}", f"chat_template_kwargs.{name}")
        is_continued = wants_continuation(messages, add_generation_prompt, continue_final_message)
        warnings = [
            f"the model's chat template does not read {name}: it has no effect"
            for name in options or ()
            if not re.search(rf"\b{re.escape(name)}\b", self._template.source)
        ]
        if not self.shows_names and any("name" in message and message["role"] != "tool" for message in messages):
            warnings.insert(0, "the model's chat template shows no names: messages' names have no effect")
        if "developer" not in self._template.source:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = {**self.thinking_options(reasoning_effort, enable_thinking), **(options or {})}
        variables["add_generation_prompt"] = add_generation_prompt is not False
        tools = toolbox.tools if toolbox.callable else ()
        if self.shows_tools:
            if tools:
                variables["tools"] = [tool.for_template() for tool in tools]
        elif tools:
            messages = with_description(messages, tools)
            warnings.append("the model's chat template has no place for tools; the first user message describes them")
        prefill = Prefill(self.tokenizer, self._template, self.reasoning_format)
        ids, begins = (prefill.continued if is_continued else prefill.fresh)(messages, variables)
        return RenderedPrompt(ids, tuple(warnings), begins, is_continued)

    # What answers look like -----------------------------------------------------------------------------------------
    def constraint(self, toolbox: Toolbox, answer: Constraint | None = None) -> Constraint | None:
        """The constraint of an answer: its tools' calls, or `answer`, or both."""
        return constraint_for(toolbox, self.call_format, answer, self.tokenizer)

    def with_thinking(
        self, params: SamplingParams, prompt: RenderedPrompt, toolbox: Toolbox = NO_TOOLS
    ) -> SamplingParams:
        """The parameters with the marks around thinking, if they need them: a constraint begins after the thinking, and
        the thinking may have a budget."""
        format, budget = self.reasoning_format, params.thinking_budget
        if format is HARMONY and toolbox.callable and params.constraint is not None:  # the grammar has the thinking
            if budget is not None:
                raise RequestError(
                    "thinking_budget: it cannot be had with tools that bind the answer", "thinking_budget"
                )
            return params
        if budget is not None and format is None:
            raise RequestError(f"thinking_budget: {self._name} does not think before it answers", "thinking_budget")
        if format is None or (budget is None and params.constraint is None):
            return params
        state = reasoning_parser(format, begins=prompt.begins).state
        if state in ("after", "content"):
            return replace(params, thinking_budget=None)
        marks = (format.opens, format.closes, format.written_close, format.before_answer)
        return replace(params, thinking_marks=ThinkingMarks(*marks, is_open=state == "reasoning"))

    def syntax(self, toolbox: Toolbox, begins: str = "", *, keeps_marks: bool = False) -> AnswerSyntax | None:
        """How reasoning and calls are found in an answer; None if it can have neither. `begins` is the prompt's;
        `keeps_marks`: the answer's text includes its control tokens."""
        has_calls, reasoning = bool(toolbox.callable), self.reasoning_format
        if not has_calls and reasoning is None:
            return None
        marks = {}
        for mark in (*(self.call_format.marks if has_calls else ()), *(reasoning.marks if reasoning else ())):
            ids = self.tokenizer.encode(mark, add_special=False, parse_special=True)
            if len(ids) == 1 and ids[0] in self.tokenizer.special_ids and not keeps_marks:
                marks[ids[0]] = mark
        schemas = {tool.name: tool.parameters or {} for tool in toolbox.callable}
        format = self.call_format if has_calls else None
        names = frozenset(schemas)
        return AnswerSyntax(format, names, toolbox.parallel, marks, reasoning, begins, keeps_marks, schemas)

    def message(self, toolbox: Toolbox) -> Message:
        """An empty answer."""
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

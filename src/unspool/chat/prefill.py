"""Prompts that end within an answer: the last message is the assistant's, and the model continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unspool.chat.guard import encode_chat, unused_end
from unspool.chat.messages import REASONING_FIELDS
from unspool.chat.reasoning import HARMONY, ReasoningFormat
from unspool.errors import RequestError

if TYPE_CHECKING:
    from unspool.chat.template import ChatTemplate
    from unspool.text.tokenizer import Tokenizer


class Beginning(NamedTuple):
    """A prompt's token ids, and the part of the answer that it already contains, as text for the answer parser."""

    ids: list[int]
    begins: str


def wants_continuation(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> bool:
    """Whether to continue the last message: by default if it is the assistant's."""
    last = messages[-1]
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: an answer either goes on with the "
            "last message or begins a new one",
            "continue_final_message",
        )
    if continue_final_message is None:
        continue_final_message = last["role"] == "assistant" and add_generation_prompt is None
    if not continue_final_message:
        return False
    if last["role"] != "assistant":
        raise RequestError("continue_final_message: the last message is not the assistant's", "continue_final_message")
    if last.get("tool_calls"):
        raise RequestError(
            "the conversation ends with tool calls, which cannot be continued: end it with their results", "messages"
        )
    return True


class Prefill:
    """Renders conversations up to the position where the model continues."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, format: ReasoningFormat | None) -> None:
        self._tokenizer, self._template, self._format = tokenizer, template, format

    def fresh(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Beginning:
        """A prompt for a new answer, or without the beginning of one if the variables say so."""
        found = encode_chat(self._tokenizer, self._template, messages, variables)
        assert found is not None  # no end was given
        ids, text = found
        return Beginning(ids, self._begun_by(text))

    def continued(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Beginning:
        """A prompt that ends with the last message's own end.

        A message's token ids are appended unchanged to the prompt that their answer had. Text is rendered as a past
        answer, and the prompt ends right after it.
        """
        *before, last = messages
        opened = {**variables, "add_generation_prompt": True}
        if last.get("token_ids"):
            start = self.fresh(before, opened)
            written = self._tokenizer.decode(last["token_ids"], skip_special=False)
            return Beginning([*start.ids, *last["token_ids"]], start.begins + written)
        end = unused_end(messages)
        content, reasoning = last.get("content") or "", last.get("reasoning_content") or ""
        if content or not reasoning:
            marked = {**last, "content": content + end}
        else:
            marked = {**last, "content": "", **dict.fromkeys(REASONING_FIELDS, reasoning + end)}
        closed = {**variables, "add_generation_prompt": False}
        found = encode_chat(self._tokenizer, self._template, [*before, marked], closed, end)
        if found is not None:
            return Beginning(found[0], self._begun_with(content, reasoning))
        return self._appended(self.fresh(before, opened), content, reasoning)

    def _appended(self, start: Beginning, content: str, reasoning: str) -> Beginning:
        """For a template that changes the last message."""
        ids, encode = start.ids, self._tokenizer.encode
        if self._format is not None and reasoning and not content:
            if not start.begins:
                ids = [*ids, *encode(self._format.opens, add_special=False, parse_special=True)]
            return Beginning([*ids, *encode(reasoning, add_special=False)], self._begun_with("", reasoning))
        return Beginning([*ids, *encode(content, add_special=False)], self._begun_with(content, ""))

    def _begun_by(self, text: str) -> str:
        """The part of the answer at a prompt's end: an open or a closed reasoning block, or nothing."""
        format, text = self._format, text.rstrip()
        if format is None or format is HARMONY:
            return ""
        if text.endswith(format.opens.rstrip()):
            return format.opens
        return format.opens + format.closes if text.endswith(format.closes) else ""

    def _begun_with(self, content: str, reasoning: str) -> str:
        format = self._format
        if format is None:
            return content
        if reasoning and not content:
            return format.opens + reasoning
        return (format.closes if format is HARMONY else format.opens + format.closes) + content

"""An answer while it grows: takes the engine's events and returns what each adds. A whole answer is their fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unspool.chat.answers import Message, ToolCall
from unspool.chat.call_parser import Part
from unspool.events import Event, Finished, Text, Token


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has been delivered."""

    index: int
    message: Message
    tokens: list[Token] = field(default_factory=list)
    end: Finished | None = None
    last_text: float | None = None  # when the last text came

    @property
    def text(self) -> str:
        return self.message.content

    @property
    def calls(self) -> list[ToolCall]:
        return self.message.calls


@dataclass(slots=True)
class Delta:
    """What one event adds to a choice."""

    choice: Choice
    parts: Sequence[Part] = ()
    tokens: Sequence[Token] = ()
    end: Finished | None = None


class Answer:
    """All choices of a job, over all of its prompts. What comes after a message is full is left out."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.choices = [Choice(index, message) for index, message in enumerate(messages)]

    def push(self, index: int, event: Event) -> Delta:
        choice = self.choices[index]
        if isinstance(event, Text):
            if choice.message.is_full:
                return Delta(choice)
            choice.tokens += event.tokens
            return Delta(choice, choice.message.push(event.text, event.tokens), event.tokens)
        if isinstance(event, Finished):
            choice.end = event
            return Delta(choice, choice.message.flush(), end=event)
        raise event.error

    @property
    def wants_no_more(self) -> bool:
        """Whether each choice has ended, or has all that the request wants of it."""
        return all(choice.end is not None or choice.message.is_full for choice in self.choices)

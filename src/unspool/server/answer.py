"""An answer as it grows: the engine's events in, what they mean to any dialect out. A whole answer is the fold."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unspool.events import Event, Finished, Text, Token
from unspool.server.calls import MISTRAL, Arguments, Begin, CallFormat, CallParser, Content, Part

if TYPE_CHECKING:
    from unspool.text.tokenizer import Tokenizer


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One answer: what has been given of it so far."""

    index: int
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    pieces: list[str | Call] = field(default_factory=list)  # both, in the order in which they came
    tokens: list[Token] = field(default_factory=list)
    end: Finished | None = None
    last_text: float | None = None  # when text came last


@dataclass(slots=True)
class Delta:
    """What one event adds to a choice."""

    choice: Choice
    parts: Sequence[Part] = ()
    tokens: Sequence[Token] = ()
    end: Finished | None = None


@dataclass(frozen=True)
class Calling:
    """How calls are found in an answer's text."""

    format: CallFormat
    names: frozenset[str]
    parallel: bool
    marks: dict[int, str]  # control tokens of a call's framing, which have no text of their own


class Answer:
    def __init__(self, num_choices: int, tokenizer: Tokenizer, calling: Calling | None = None) -> None:
        self.choices = [Choice(index) for index in range(num_choices)]
        self._tokenizer, self._calling = tokenizer, calling
        self._parsers: dict[int, CallParser] = {}
        if calling is not None:
            self._parsers = {index: CallParser(calling.format, calling.names) for index in range(num_choices)}

    def push(self, index: int, event: Event) -> Delta:
        """`index`: the choice over all prompts of the request."""
        choice = self.choices[index]
        if isinstance(event, Text):
            parts = self._parse(choice, event.text, event.tokens)
            choice.tokens += event.tokens
            self._take(choice, parts)
            return Delta(choice, parts, event.tokens)
        if isinstance(event, Finished):
            parser = self._parsers.get(index)
            parts = parser.flush() if parser is not None and not self.is_full(choice) else []
            choice.end = event
            self._take(choice, parts)
            return Delta(choice, parts, end=event)
        raise event.error

    def is_full(self, choice: Choice) -> bool:
        """Whether a request that wants one call at most has it: the rest of the answer is not wanted."""
        if self._calling is None or self._calling.parallel:
            return False
        parser = self._parsers[choice.index]
        return parser.num_calls > 0 and not parser.is_inside

    def _parse(self, choice: Choice, text: str, tokens: Sequence[Token]) -> list[Part]:
        if self._calling is None:
            return [Content(text)] if text else []
        if self.is_full(choice):
            return []
        parts = self._parsers[choice.index].push(self._with_marks(text, tokens))
        if self.is_full(choice):
            parts = [part for part in parts if isinstance(part, Content) or part.index == 0]
        return parts

    def _with_marks(self, text: str, tokens: Sequence[Token]) -> str:
        """The text with the control tokens in it that frame a call, where they stood."""
        assert self._calling is not None
        marks = self._calling.marks
        for position in range(len(tokens) - 1, -1, -1):
            mark = marks.get(tokens[position].id)
            if mark is not None:
                before = len(self._tokenizer.decode([token.id for token in tokens[:position]]))
                text = text[:before] + mark + text[before:]
        return text

    def _take(self, choice: Choice, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, Content):
                choice.text += part.text
                if choice.pieces and isinstance(choice.pieces[-1], str):
                    choice.pieces[-1] += part.text
                else:
                    choice.pieces.append(part.text)
            elif isinstance(part, Begin):
                choice.calls.append(Call(self._new_call_id(), part.name))
                choice.pieces.append(choice.calls[-1])
            elif isinstance(part, Arguments):
                choice.calls[part.index].arguments += part.text

    def _new_call_id(self) -> str:
        if self._calling is not None and self._calling.format.name == MISTRAL.name:
            return secrets.token_hex(5)[:9]  # its template takes ids of nine characters alone
        return f"call_{secrets.token_hex(12)}"

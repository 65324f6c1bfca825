"""How families of models write their reasoning, and how it is separated from the answer while the text streams.

    "<think>\\nTwo and two…\\n</think>\\n\\nFour."
            └─ reasoning ─┘             └ content

Reasoning comes at the beginning of an answer, or the prompt has already begun it. Whitespace around the marks belongs
to neither part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unspool.chat.call_parser import SPACE, overlap
from unspool.chat.parts import Content, Part, Reasoning
from unspool.records import record


@record(frozen=True)
class ReasoningFormat:
    """The marks around reasoning. `written_close` closes reasoning that must end; the model continues with its answer.
    `before_answer` is the text between the mark and the answer in training."""

    name: str
    opens: str
    closes: str
    written_close: str
    before_answer: str = ""
    marks: tuple[str, ...] = ()  # those that a vocabulary may have as control tokens
    is_always_open: bool = False  # an answer begins in reasoning unless it says otherwise


THINK = ReasoningFormat("think", "<think>", "</think>", "\n</think>\n\n", "\n\n", ("<think>", "</think>"))
SEED = ReasoningFormat(
    "seed", "<seed:think>", "</seed:think>", "</seed:think>", marks=("<seed:think>", "</seed:think>")
)
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]", "[/THINK]", marks=("[THINK]", "[/THINK]"))
GEMMA = ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>", "<channel|>", marks=("<|channel>", "<channel|>"))
COMMAND = ReasoningFormat(
    "command",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|END_THINKING|>",
    marks=("<|START_THINKING|>", "<|END_THINKING|>"),
)
HARMONY = ReasoningFormat(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    marks=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    is_always_open=True,
)


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The format in a chat template's text; None if it has no reasoning."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    for format in (MISTRAL, GEMMA, SEED, COMMAND):
        if any(mark in template for mark in format.marks):
            return format
    return THINK if "<think>" in template or "</think>" in template else None


class AnswerParser(Protocol):
    """Parses an answer piece by piece. The result does not depend on how the text is divided."""

    @property
    def num_calls(self) -> int: ...

    @property
    def is_inside(self) -> bool:
        """Whether a call has been begun and not ended."""
        ...

    @property
    def state(self) -> str:
        """start | reasoning | after: before the answer's first character | content"""
        ...

    def push(self, text: str) -> Sequence[Part]: ...

    def flush(self) -> Sequence[Part]: ...


class ReasoningParser:
    """Separates the reasoning from an answer. The text after it goes to `rest`, which finds the calls.

    `begins` is the part of the answer that the prompt already contains; the model's text continues it.
    """

    def __init__(self, format: ReasoningFormat, rest: AnswerParser | None = None, begins: str = "") -> None:
        self._format, self._rest = format, None
        self._pending = ""  # received, not yet parsed
        self._space = ""  # whitespace that is sent if more reasoning follows
        self._has_reasoning = False
        self.state = "start"  # start | reasoning | after: before the answer's first character | content
        if begins:
            self.push(begins)
        self._rest = rest

    @property
    def num_calls(self) -> int:
        return 0 if self._rest is None else self._rest.num_calls

    @property
    def is_inside(self) -> bool:
        return self._rest is not None and self._rest.is_inside

    def push(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        while self._pending and self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The answer ended: held text becomes part of the current state."""
        parts: list[Part] = []
        pending, self._pending = self._pending, ""
        if self.state == "reasoning":
            self._reason(parts, pending)
        elif self.state != "after":
            self._pass(parts, pending)
        if self._rest is not None:
            parts += self._rest.flush()
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Parse some of the pending text; False if more text is needed first."""
        if self.state == "start":
            return self._advance_start()
        if self.state == "reasoning":
            return self._advance_reasoning(parts)
        if self.state == "after":
            self._pending = self._pending.lstrip(SPACE)
            if self._pending:
                self.state = "content"
            return bool(self._pending)
        text, self._pending = self._pending, ""
        self._pass(parts, text)
        return False

    def _advance_start(self) -> bool:
        stripped = self._pending.lstrip(SPACE)
        if stripped.startswith(self._format.opens):
            self._pending, self.state = stripped[len(self._format.opens) :], "reasoning"
            return True
        if self._format.opens.startswith(stripped):
            return False
        self.state = "content"
        return True

    def _advance_reasoning(self, parts: list[Part]) -> bool:
        at = self._pending.find(self._format.closes)
        if at >= 0:
            self._reason(parts, self._pending[:at])
            self._pending = self._pending[at + len(self._format.closes) :]
            self._space, self.state = "", "after"
            return True
        held = overlap(self._pending, self._format.closes)
        self._reason(parts, self._pending[: len(self._pending) - held])
        self._pending = self._pending[len(self._pending) - held :]
        return False

    def _reason(self, parts: list[Part], text: str) -> None:
        text = self._space + text
        if not self._has_reasoning:
            text = text.lstrip(SPACE)
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._has_reasoning = True
            parts.append(Reasoning(shown))

    def _pass(self, parts: list[Part], text: str) -> None:
        if self._rest is not None:
            parts += self._rest.push(text)
        elif text:
            parts.append(Content(text))

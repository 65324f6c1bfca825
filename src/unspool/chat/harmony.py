"""gpt-oss' answers: messages in channels, read while they stream."""

from __future__ import annotations

from collections.abc import Collection

from unspool.chat.call_parser import overlap
from unspool.chat.parts import Arguments, Begin, Content, Part, Reasoning


class HarmonyParser:
    """gpt-oss' channels: analysis is reasoning, a message to a function is a call, other messages are content.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant to=functions.look<|channel|>commentary<|message|>{…}
        └────── header ──────────────┘           └──────────── header ───────────────────────────────┘

    A header has a message's recipient. A message ends at a control token. `begins` is as for ReasoningParser.
    """

    def __init__(self, names: Collection[str] = (), begins: str = "") -> None:
        self.num_calls = 0
        self._names = names
        self._pending = ""
        self._kind = "header"  # header | reasoning | content | call | skip: what the pending text is of
        self._is_first = True  # nothing has been parsed yet
        self._gave = False  # the call that is read has arguments
        if begins:
            self.push(begins)
            self.num_calls = 0

    @property
    def is_inside(self) -> bool:
        return self._kind == "call"

    @property
    def state(self) -> str:
        """As ReasoningParser's: whether the answer proper has begun."""
        return "content" if self._kind in ("content", "call") else "reasoning"

    def push(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        while self._pending and (self._read_header(parts) if self._kind == "header" else self._read_body(parts)):
            pass
        return parts

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        pending, self._pending = self._pending, ""
        if self._kind != "header":
            self._give(parts, pending)
        self._end_call(parts)
        return parts

    def _read_header(self, parts: list[Part]) -> bool:
        head = self._pending.lstrip()
        if self._is_first and not any(head.startswith(mark) or mark.startswith(head) for mark in _HEADS):
            self._kind, self._is_first = "content", False  # a plain text, without any header
            return True
        at = self._pending.find("<|message|>")
        if at < 0:
            return False
        header, self._pending = self._pending[:at], self._pending[at + len("<|message|>") :]
        self._is_first = False
        channel, name = _word_after(header, "<|channel|>"), _word_after(header, "to=functions.")
        if name is not None and name in self._names:
            self._kind, self._gave = "call", False
            parts.append(Begin(self.num_calls, name))
        else:
            self._kind = "reasoning" if channel == "analysis" else "content"
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        ends = [(found, mark) for mark in _ENDS if (found := self._pending.find(mark)) >= 0]
        if ends:
            at, mark = min(ends)
            self._give(parts, self._pending[:at])
            self._pending = self._pending[at if mark in _HEADS else at + len(mark) :]
            self._end_call(parts)
            self._kind = "header"
            return True
        held = max(overlap(self._pending, mark) for mark in _ENDS)
        self._give(parts, self._pending[: len(self._pending) - held])
        self._pending = self._pending[len(self._pending) - held :]
        return False

    def _give(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._gave = True
            parts.append(Arguments(self.num_calls, text))
        else:
            parts.append(Reasoning(text) if self._kind == "reasoning" else Content(text))

    def _end_call(self, parts: list[Part]) -> None:
        if self._kind == "call":
            if not self._gave:
                parts.append(Arguments(self.num_calls, "{}"))
            self.num_calls += 1
            self._kind = "header"


_HEADS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


def _word_after(header: str, mark: str) -> str | None:
    _, found, rest = header.partition(mark)
    words = rest.split("<|")[0].split()
    return words[0] if found and words else None

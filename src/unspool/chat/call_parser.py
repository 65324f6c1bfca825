"""Finds tool calls in a model's text while it streams: content and arguments are passed on as they are written.

    "Let me see.\\n<tool_call>\\n{"name": "look", "arguments": {"at": 3}}\\n</tool_call>"
     └─ content ┘              └──────── begin ──────┘ └ arguments ┘

Only text that could still become a mark is held back, and whitespace that may turn out to surround a call. Text that
looks like a call but is not one (broken JSON, an unknown function) is content, unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unspool.chat.call_formats import BareCall, CallFormat, NamedCall, ObjectCall, PythonCall
from unspool.chat.call_python import PythonReader
from unspool.chat.call_readers import SPACE, CallReader, NamedReader, ObjectReader
from unspool.chat.call_tags import BareReader, TaggedReader, overlap
from unspool.chat.parts import Arguments, Begin, Content, Part


class CallParser:
    """Parses one answer. The result does not depend on how the text is divided into pieces."""

    def __init__(
        self, format: CallFormat, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.num_calls = 0
        self._format, self._names = format, names
        self._schemas = schemas or {}
        self._pending = ""  # received, not yet parsed
        self._space = ""  # whitespace that is content if more content follows
        self._framing = ""  # marks and joins since the last part: content, if no call follows
        self._reader: CallReader | None = None
        self._began = self._gave = False  # the reader's call was reported; it had arguments
        self._state = "start"  # start | text | between

    @property
    def is_inside(self) -> bool:
        """Whether a call has been begun and not ended."""
        return self._reader is not None

    @property
    def state(self) -> str:
        return "content"

    def push(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        while self._pending and self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The answer ended. A call that was cut is still a call, also within its closing mark; all other held text is
        content."""
        parts: list[Part] = []
        if self._reader is not None:
            reader, self._reader = self._reader, None
            if not self._began:
                self._emit(parts, self._framing + reader.raw)
        elif self._state == "between" and not self.num_calls:
            self._emit(parts, self._framing)
        is_closing = self._state == "between" and self.num_calls and self._format.closes.startswith(self._pending)
        if not is_closing:
            self._emit(parts, self._pending)
        if self._space and not self.num_calls:
            parts.append(Content(self._space))
        self._pending = self._space = self._framing = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Parse some of the pending text; False if more text is needed first."""
        if self._reader is not None:
            return self._advance_call(self._reader, parts)
        if self._state == "start":
            return self._advance_start()
        if self._state == "between":
            return self._advance_between(parts)
        at = self._pending.find(self._format.opens)
        if at >= 0:
            self._emit(parts, self._pending[:at])
            self._pending = self._pending[at + len(self._format.opens) :]
            self._framing, self._state = self._format.opens, "between"
            return True
        held = overlap(self._pending, self._format.opens)
        self._emit(parts, self._pending[: len(self._pending) - held])
        self._pending = self._pending[len(self._pending) - held :]
        return False

    def _advance_start(self) -> bool:
        stripped = self._pending.lstrip(SPACE)
        if not stripped:
            return False
        is_call = self._format.is_bare and stripped[0] == "{"
        if is_call:
            self._framing = self._pending[: len(self._pending) - len(stripped)]
            self._pending = stripped
        self._state = "between" if is_call else "text"
        return True

    def _advance_between(self, parts: list[Part]) -> bool:
        first = self._pending[0]
        if first in SPACE or first in self._format.joins:
            self._framing += first
            self._pending = self._pending[1:]
            return True
        begins = self._format.call.begins
        follows = self._framing.startswith(self._format.opens) or (self.num_calls > 0 and "," in self._framing)
        if self._pending.startswith(begins) if begins else follows:
            self._reader = self._new_reader()
            self._began = self._gave = False
            return True
        closes = self._format.closes
        if closes and self._pending.startswith(closes) and self.num_calls:
            self._pending, self._framing, self._state = self._pending[len(closes) :], "", "text"
            return True
        if (closes and closes.startswith(self._pending) and self.num_calls) or (
            begins and begins.startswith(self._pending)
        ):
            return False
        is_space = not closes and not self._framing.strip(SPACE)
        if not self.num_calls or self._framing.startswith(self._format.opens) or is_space:
            self._emit(parts, self._framing)
        self._framing, self._state = "", "text"
        return True

    def _new_reader(self) -> CallReader:
        call = self._format.call
        if isinstance(call, ObjectCall):
            return ObjectReader(self._names, call)
        if isinstance(call, NamedCall):
            return NamedReader(self._names, call)
        if isinstance(call, BareCall):
            return BareReader(self._names, call)
        if isinstance(call, PythonCall):
            return PythonReader(self._names)
        return TaggedReader(self._names, call, self._schemas)

    def _advance_call(self, reader: CallReader, parts: list[Part]) -> bool:
        taken = reader.push(self._pending)
        self._pending = self._pending[taken:]
        if reader.is_wrong and not self._began and not reader.arguments:
            self._reader, self._state = None, "text"
            self._emit(parts, self._framing + reader.raw)
            self._framing = ""
            return True
        if not self._began and reader.name is not None and (reader.arguments or reader.is_done):
            self._began, self._space, self._framing = True, "", ""
            parts.append(Begin(self.num_calls, reader.name))
        if reader.arguments:
            self._gave = True
            parts.append(Arguments(self.num_calls, "".join(reader.arguments)))
            reader.arguments.clear()
        if reader.is_done or reader.is_wrong:
            if not self._gave:
                parts.append(Arguments(self.num_calls, "{}"))
            self._reader, self._state = None, "text" if reader.is_wrong else "between"
            self.num_calls += 1
            if reader.is_wrong:  # the arguments were complete; what follows them is unknown
                self._emit(parts, reader.raw[reader.given :])
        return bool(self._pending)

    def _emit(self, parts: list[Part], text: str) -> None:
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            parts.append(Content(shown))

"""Finds tool calls in a model's text while it streams: content passes through, arguments come out as they are written.

    "Let me see.\\n<tool_call>\\n{"name": "look", "arguments": {"at": 3}}\\n</tool_call>"
     └─ content ┘              └──────── begin ──────┘ └ arguments ┘

Only text that could still become a mark is held back, and whitespace that may turn out to surround a call. Text that
looks like a call but is not one (broken JSON, an unknown function) is content, every character of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from unspool.chat.call_formats import CallFormat
from unspool.chat.parts import Arguments, Begin, Content, Part

SPACE = " \t\r\n"


class CallReader:
    """One call's JSON object, character by character. `push` returns how many characters it took."""

    def __init__(self, names: Collection[str], name_key: str = "name") -> None:
        self.raw = ""
        self.given = 0  # how much of it was there when arguments last came
        self.name: str | None = None
        self.is_done = self.is_wrong = False
        self.arguments: list[str] = []  # pieces that are ready to go out
        self._names = names
        self._name_keys = ("name", name_key)
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_key = False  # the next value at depth 1 is a key
        self._key: str | None = None
        self._value = ""  # the value at depth 1 that is being read, from its first character
        self._early = ""  # arguments that came before the name

    def push(self, text: str) -> int:
        for position, character in enumerate(text):
            if self.is_done or self.is_wrong:
                return position
            self.raw += character
            self._take(character)
        return len(text)

    def _take(self, character: str) -> None:
        if self._in_string:
            self._value += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_value()
            self._show(character)
        elif character in SPACE:
            if self._depth > 1:
                self._value += character
                self._show(character)
        else:
            self._take_sign(character)

    def _take_sign(self, character: str) -> None:
        if self._depth == 0:
            self.is_wrong = character != "{"
            self._depth, self._is_key = 1, True
        elif character in "{[":
            self.is_wrong = self._is_key
            self._depth += 1
            self._value += character
            self._show(character)
        elif character in "}]" and self._depth > 1:
            self._depth -= 1
            self._value += character
            self._show(character)
            if self._depth == 1:
                self._end_value()
        elif self._depth > 1 or character not in ',:}"':
            self.is_wrong = self._is_key
            self._in_string = character == '"'
            self._value += character
            self._show(character)
        else:
            self._take_framing(character)

    def _take_framing(self, character: str) -> None:
        """A comma, colon, brace or quote of the call's own object."""
        if character == '"':
            self.is_wrong = bool(self._value)
            self._in_string = True
            self._value = character
            self._show(character)
        elif character == ":":
            self.is_wrong = self._key is None or self._is_key
        else:
            if self._value:
                self._end_value()
            self._is_key = character == ","
            if character == "}":
                self._finish()

    def _show(self, character: str) -> None:
        """Arguments that are an object go out as they come."""
        if self._key in ("arguments", "parameters") and self._value.startswith("{"):
            if self.name is None:
                self._early += character
            else:
                self._give(character)

    def _give(self, text: str) -> None:
        self.arguments.append(text)
        self.given = len(self.raw)

    def _end_value(self) -> None:
        value, self._value = self._value, ""
        if self._is_key:
            self._key, self._is_key = _text(value), False
            self.is_wrong = self._key is None
            return
        key, self._key = self._key, None
        if key in self._name_keys:
            self.name = _text(value)
            self.is_wrong = self.name not in self._names
            if self._early and not self.is_wrong:
                self._give(self._early)
        elif key in ("arguments", "parameters") and not value.startswith("{"):
            inner = _text(value)  # some models write the object as a string
            if inner is not None and self.name is not None:
                self._give(inner)
            else:
                self.is_wrong = value != "null"

    def _finish(self) -> None:
        self.is_wrong = self.name is None
        self.is_done = not self.is_wrong


class NamedReader(CallReader):
    """A call that is a name, a mark and an object of arguments."""

    def __init__(self, names: Collection[str], mark: str) -> None:
        super().__init__(names)
        self._mark, self._head = mark, ""

    def _take(self, character: str) -> None:
        if self.name is None:
            self._head += character
            if self._head.endswith(self._mark):
                name = self._head.removesuffix(self._mark).strip()
                self.name = name if name in self._names else None
                self.is_wrong = self.name is None
            else:
                head = self._head.lstrip()
                self.is_wrong = not any(f"{name}{self._mark}".startswith(head) for name in self._names)
        elif self._depth or character not in SPACE:
            self._give(character)
            self._count(character)

    def _count(self, character: str) -> None:
        """How deep we are in the object; it ends where it began."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
        self.is_done = self._depth == 0


def _text(value: str) -> str | None:
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class CallParser:
    """Parses one answer. The parts of its pieces, joined, are the parts of the whole text, however it is cut."""

    def __init__(self, format: CallFormat, names: Collection[str]) -> None:
        self.num_calls = 0
        self._format, self._names = format, names
        self._pending = ""  # seen, not yet understood
        self._space = ""  # whitespace that goes out if content follows
        self._framing = ""  # marks and joins since the last part: content, if no call follows
        self._reader: CallReader | None = None
        self._began = self._gave = False  # the reader's call was announced; it had arguments
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
        """The answer ended. A call that was cut stays one, also within its closing mark; all else that was held is
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
        """Understand some of what is pending; False when more must come first."""
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
        argues = self._format.argues
        if (first == "{" and not argues) or (argues and self._framing):
            named = self._format.name_key
            self._reader = NamedReader(self._names, argues) if argues else CallReader(self._names, named)
            self._began = self._gave = False
            return True
        closes = self._format.closes
        if closes and self._pending.startswith(closes) and self.num_calls:
            self._pending, self._framing, self._state = self._pending[len(closes) :], "", "text"
            return True
        if closes and closes.startswith(self._pending) and self.num_calls:
            return False
        if not self.num_calls or self._framing.startswith(self._format.opens):
            self._emit(parts, self._framing)
        self._framing, self._state = "", "text"
        return True

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
            if reader.is_wrong:  # the arguments were whole; what came after them is nothing we know
                self._emit(parts, reader.raw[reader.given :])
        return bool(self._pending)

    def _emit(self, parts: list[Part], text: str) -> None:
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            parts.append(Content(shown))


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0

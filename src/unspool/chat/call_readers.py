"""Readers of one call, character by character, whose arguments are a JSON object and stream as they are written."""

from __future__ import annotations

import json
from collections.abc import Collection

from unspool.chat.call_formats import NamedCall, ObjectCall

SPACE = " \t\r\n"
_ID = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-"


class CallReader:
    """One call. `push` returns the number of characters that it used.

    `name` is the function's, once it is known; `arguments` has the pieces that are ready to be sent. Text with an error
    before the name, or with a name that is not in `names`, is not a call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.raw = ""
        self.given = 0  # its length when arguments were last returned
        self.name: str | None = None
        self.is_done = self.is_wrong = False
        self.arguments: list[str] = []
        self._names = names

    def push(self, text: str) -> int:
        for position, character in enumerate(text):
            if self.is_done or self.is_wrong:
                return position
            self.raw += character
            self._take(character)
        return len(text)

    def _take(self, character: str) -> None:
        raise NotImplementedError

    def _give(self, text: str) -> None:
        self.arguments.append(text)
        self.given = len(self.raw)


class ObjectReader(CallReader):
    """A JSON object with the name and the arguments."""

    def __init__(self, names: Collection[str], call: ObjectCall) -> None:
        super().__init__(names)
        self._name_keys = ("name", call.name_key)
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_key = False  # the next value at depth 1 is a key
        self._key: str | None = None
        self._value = ""  # the value at depth 1 that is being read, from its first character
        self._early = ""  # arguments that came before the name

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
        """Pass on arguments that are an object as they arrive."""
        if self._key in ("arguments", "parameters") and self._value.startswith("{"):
            if self.name is None:
                self._early += character
            else:
                self._give(character)

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
    """The name, a mark, and a JSON object of the arguments."""

    def __init__(self, names: Collection[str], call: NamedCall) -> None:
        super().__init__(names)
        self._call = call
        self._head = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._tail: str | None = None  # of the text after the object

    def _take(self, character: str) -> None:
        if self.name is None:
            self._head += character
            self._read_head()
        elif self._tail is not None:
            self._read_tail(character)
        elif self._depth or character not in SPACE:
            self._give(character)
            self._count(character)

    def _read_head(self) -> None:
        """Everything before the object. The name may have blanks around it."""
        head, call = self._head, self._call
        rest = head.removeprefix(call.begins)
        if rest == head and call.begins:
            self.is_wrong = not call.begins.startswith(head)
            return
        rest = rest.lstrip().removeprefix(call.prefix)
        if rest.endswith(call.separator):
            name = rest.removesuffix(call.separator).strip()
            name = _without_count(name) if call.counts else name.split(call.id_mark)[0] if call.id_mark else name
            self.name = name if name in self._names else None
            self.is_wrong = self.name is None
        else:
            self.is_wrong = not any(self._may_begin(rest, name) for name in self._names)

    def _may_begin(self, rest: str, name: str) -> bool:
        """Whether the text so far can become this name and its mark."""
        if name.startswith(rest) or (self._call.prefix and self._call.prefix.startswith(rest)):
            return True
        behind = rest.removeprefix(name)
        if behind == rest:
            return False
        if self._call.counts and behind.startswith(":"):
            behind = behind[1:].lstrip("0123456789")
        elif self._call.id_mark and self._call.id_mark.startswith(behind[: len(self._call.id_mark)]):
            behind = behind[len(self._call.id_mark) :].lstrip(_ID)
        return self._call.separator.startswith(behind) or self._call.separator.strip().startswith(behind.strip())

    def _count(self, character: str) -> None:
        """Track the nesting depth in the object; it ends at depth 0."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
        if self._depth == 0:
            self.is_done = not self._call.ends
            self._tail = ""

    def _read_tail(self, character: str) -> None:
        assert self._tail is not None
        self._tail += character
        self.is_done = self._tail.strip() == self._call.ends.strip()
        self.is_wrong = not self.is_done and not self._call.ends.strip().startswith(self._tail.strip())


def _without_count(name: str) -> str:
    before, colon, count = name.rpartition(":")
    return before if colon and count.isdecimal() else name


def _text(value: str) -> str | None:
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, str) else None

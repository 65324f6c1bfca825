"""Calls as Python writes them: `look(at=3, why="rain")`. Nothing is evaluated: only literals are read."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from typing import Any

from unspool.chat.call_readers import SPACE, CallReader

_WORDS = {"true": True, "false": False, "null": None}  # for models that mix in JSON


class PythonReader(CallReader):
    """Returns the arguments when the call is complete."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._called: str | None = None  # the function's name, until its arguments are known to be valid
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._text: list[str] = []  # of the arguments

    def _take(self, character: str) -> None:
        if self._called is None:
            head = self.raw.lstrip(SPACE)
            if head[:-1] in self._names and character == "(":
                self._called, self._depth = head[:-1], 1
            else:
                self.is_wrong = not any(f"{name}(".startswith(head) for name in self._names)
            return
        # some templates write a line break within quotes, which Python does not allow
        self._text.append("\\n" if self._quote and character == "\n" else character)
        if self._quote:
            self._quote = "" if character == self._quote and not self._is_escaped else self._quote
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character in "\"'":
            self._quote = character
        else:
            self._depth += (character in "([{") - (character in ")]}")
            if self._depth == 0:
                self._end()

    def _end(self) -> None:
        arguments = _arguments("".join(self._text[:-1]))
        if arguments is None:
            self.is_wrong = True
            return
        self.name, self.is_done = self._called, True
        self._give(json.dumps(arguments, ensure_ascii=False))


def python_json(text: str) -> str | None:
    """A Python list or dictionary as JSON; None if the text is neither."""
    node = _parsed(text)
    try:
        return None if node is None else json.dumps(_value(node), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _arguments(text: str) -> dict[str, Any] | None:
    node = _parsed(f"f({text})")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        return None
    try:
        return {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, RecursionError):
        return None


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deep for the parser
        return None


def _value(node: ast.expr) -> Any:
    """The value of a literal; a ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {str(_value(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    raise ValueError(f"no literal: {type(node).__name__}")

"""Reads user input: history, completion, several lines as one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from unspool.cli.terminal import is_styled

HISTORY_LINES = 2000
PASTE_SECONDS = 0.02  # between two lines of a paste, at most
QUOTES = '"""'
PROMPT, CONTINUED = "› ", "· "


class Reader:
    """Messages from stdin. A line that ends in \\ continues in the next; \"\"\" opens a text that \"\"\" closes. What
    is pasted is one message.

    On a terminal it has line editing, a persistent history, and completion of `words`. Elsewhere each line is a
    message, and nothing is printed.
    """

    def __init__(self, history: Path, words: Callable[[], Sequence[str]] = tuple) -> None:
        """`words` is called when TAB is first pressed, because it may be slow."""
        self.is_terminal = sys.stdin.isatty()
        self._history = history
        self._knows_pastes = False
        if self.is_terminal:
            self._set_up(words)

    def _set_up(self, words: Callable[[], Sequence[str]]) -> None:
        try:
            import readline
        except ImportError:  # a Python built without it: input() still reads lines
            self._save: Callable[[], None] = lambda: None
            return
        try:
            readline.read_history_file(self._history)
        except OSError:  # no file yet, or unreadable: start with an empty history
            readline.clear_history()
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims(" ")
        readline.set_completer(_completer(words))
        readline.parse_and_bind("tab: complete")
        # A paste of several lines is one text. Without this mode, `read` also reads the lines that are waiting.
        readline.parse_and_bind("set enable-bracketed-paste on")
        self._knows_pastes = "libedit" not in (readline.__doc__ or "")

        def save() -> None:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600)  # the history is private
            os.close(descriptor)
            readline.write_history_file(self._history)

        self._save = save

    def read(self) -> str:
        """The next message. EOFError: there is none; KeyboardInterrupt: the user cancelled it."""
        line = self._line(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip().removeprefix(QUOTES))
        parts = [line]
        while parts[-1].endswith("\\") or self._more_is_waiting():
            parts[-1] = parts[-1].removesuffix("\\")
            parts.append(self._line(CONTINUED))
        return "\n".join(parts)

    def _more_is_waiting(self) -> bool:
        """Whether more lines arrive faster than typing: the rest of a paste."""
        if not self.is_terminal or self._knows_pastes:
            return False
        import select

        return bool(select.select([sys.stdin], [], [], PASTE_SECONDS)[0])

    def _quoted(self, line: str) -> str:
        parts = []
        while not line.rstrip().endswith(QUOTES):
            parts.append(line)
            line = self._line(CONTINUED)
        return "\n".join([*parts, line.rstrip().removesuffix(QUOTES)]).strip("\n")

    def _line(self, prompt: str) -> str:
        if not self.is_terminal:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.removesuffix("\n").removesuffix("\r")
        if is_styled(sys.stdout):
            prompt = f"\001\033[1;36m\002{prompt}\001\033[0m\002"  # \001 and \002 mark text without width for readline
        return input(prompt)

    def close(self) -> None:
        if self.is_terminal:
            self._save()


def _completer(words: Callable[[], Sequence[str]]) -> Callable[[str, int], str | None]:
    known = cache(words)

    def complete(start: str, state: int) -> str | None:
        matching = [word + " " for word in known() if start and word.startswith(start)]
        return matching[state] if state < len(matching) else None

    return complete

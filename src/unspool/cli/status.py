"""One status line on stderr: a model loads or a prompt is read, with the progress."""

from __future__ import annotations

import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from unspool.cli.terminal import width
from unspool.cli.wrapping import num_cells

if TYPE_CHECKING:
    from unspool.engine.engine import Engine

DELAY = 0.25  # seconds before the line is drawn: most waits are shorter
INTERVAL = 0.15  # between two drawings
LINE_INTERVAL = 2.0  # between two lines where there is no terminal
CELLS = 16  # of a bar, if there is room for one


class Status:
    """While open, a thread draws the text from `describe` with the elapsed seconds; at the end it removes the line.

    `wanted` False: nothing is drawn; None: only on a terminal; True: elsewhere too, as separate lines.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        wanted: bool | None = None,
        stream: TextIO | None = None,
        line_interval: float = LINE_INTERVAL,
    ) -> None:
        self._describe, self._stream, self._line_interval = describe, stream or sys.stderr, line_interval
        self._is_terminal = self._stream.isatty()
        self.is_wanted = wanted is True or (wanted is None and self._is_terminal)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._is_drawn = False

    def __enter__(self) -> Self:
        if self.is_wanted:
            self._begun = time.monotonic()
            threading.Thread(target=self._run, name="unspool-status", daemon=True).start()
        return self

    def end(self) -> None:
        """Remove the line before other output; nothing is drawn afterwards."""
        self._ended.set()
        with self._lock:
            if self._is_drawn:
                self._is_drawn = False
                self._stream.write("\r\033[K")
                self._stream.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _run(self) -> None:
        pause = DELAY
        while not self._ended.wait(pause):
            try:
                text = f"{self._describe()} · {time.monotonic() - self._begun:.0f} s"
            except (IndexError, RuntimeError):  # the data changed while it was read
                continue
            with self._lock:
                if not self._ended.is_set():
                    self._draw(text)
            pause = INTERVAL if self._is_terminal else self._line_interval

    def _draw(self, text: str) -> None:
        if self._is_terminal:
            self._is_drawn = True
            text = f"\r\033[K{text[: width(self._stream) - 1]}"
        else:
            text = f"unspool: {text}\n"
        self._stream.write(text)
        self._stream.flush()


def wanted(namespace: Namespace) -> bool | None:
    """Whether the options request status lines."""
    if getattr(namespace, "progress", False):
        return True
    return False if getattr(namespace, "quiet", False) else None


def bar(what: str, share: float, amounts: str) -> str:
    """`reading the prompt ━━━━╌╌╌╌ 1,024 of 2,048 tokens (50%)`, without the bar in a narrow terminal."""
    text = f"{amounts} ({share:.0%})"
    if num_cells(what) + num_cells(text) + CELLS + 12 > width(sys.stderr):
        return f"{what} {text}"
    cells = int(CELLS * share)
    return f"{what} {'━' * cells}{'╌' * (CELLS - cells)} {text}"


def work_of(engine: Engine) -> str:
    """The progress of an engine: how much of the prompts is read, then the number of tokens generated."""
    requests = [*engine.scheduler.running, *engine.scheduler.waiting]
    prompt = sum(request.num_prompt for request in requests)
    read = sum(min(request.num_computed, request.num_prompt) for request in requests)
    if not requests:
        return "preparing the prompt"
    if read < prompt:
        return bar("reading the prompt", read / prompt, f"{read:,} of {prompt:,} tokens")
    count = sum(request.num_output for request in requests)
    return f"answering, {count:,} token{'' if count == 1 else 's'}"

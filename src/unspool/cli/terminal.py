"""Terminal output: colours only on a terminal, never control characters from a model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from unspool.cli.wrapping import LineWrapper, fold, fold_columns

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
# All control characters except newline and tab: C0, and C1, which some terminals also obey.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def is_styled(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO) -> str:
    """`style` is a word of STYLES, or several with spaces between."""
    if not text or not style or not is_styled(stream):
        return text
    return f"\033[{';'.join(STYLES[word] for word in style.split())}m{text}\033[0m"


def harmless(text: str) -> str:
    """Text with control characters escaped, because a model may write an escape sequence."""
    return text.translate(_CONTROL)


def width(stream: TextIO | None = None) -> int:
    """The columns of the terminal of a stream (default: stdout), else of stderr, else 100."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    for each in (stream or sys.stdout, sys.stderr):
        try:
            columns = os.get_terminal_size(each.fileno()).columns
        except (OSError, ValueError, AttributeError):  # no terminal, or no file
            continue
        if columns > 0:
            return columns
    return 100


def show(text: str) -> None:
    """Print lines that are not an answer to stdout; on a terminal, wrapped between words within their columns."""
    print(fold_columns(text, width() - 1) if sys.stdout.isatty() else text)


def note(text: str, style: str = "dim", indent: str = "") -> None:
    """Print a line to stderr, so that stdout contains only the answer."""
    sys.stdout.flush()
    if sys.stderr.isatty():
        text = fold(text, width(sys.stderr) - 1, indent)
    print(styled(text, style, sys.stderr), file=sys.stderr, flush=True)


def note_term(term: str, meaning: str) -> None:
    """Print a list entry: a term and its meaning next to it, or below it if there is no room."""
    if sys.stderr.isatty() and width(sys.stderr) < 70:
        note(f"  {term}")
        note(f"      {meaning}", indent=" " * 6)
    else:
        note(f"  {term:<24}{meaning}", indent=" " * 26)


def warn(text: str) -> None:
    note(f"unspool: warning: {text}", "yellow")


class AnswerWriter:
    """Writes answers to stdout piece by piece. On a terminal, wraps lines between words and escapes control
    characters."""

    def __init__(self) -> None:
        self._is_seen = sys.stdout.isatty()
        self._wrapper = LineWrapper() if self._is_seen and os.environ.get("TERM") != "dumb" else None

    def write(self, text: str) -> None:
        if self._is_seen:
            text = harmless(text)
        if self._wrapper is not None:
            text = self._wrapper.feed(text, max(1, width() - 1))
        sys.stdout.write(text)
        sys.stdout.flush()


def hide_control_keys() -> Callable[[], None]:
    """Stop the terminal from printing ^C; the returned function undoes it."""
    try:
        descriptor = sys.stdin.fileno()
        # A process in the background would be stopped for changing the terminal.
        if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) != os.getpgrp():
            return lambda: None
        import termios
    except (OSError, ValueError, ImportError):
        return lambda: None
    try:
        before = termios.tcgetattr(descriptor)
        quiet = before.copy()
        quiet[3] &= ~termios.ECHOCTL
        termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
        return lambda: termios.tcsetattr(descriptor, termios.TCSANOW, before)
    except termios.error:  # an unsupported terminal
        return lambda: None


def human_bytes(count: float) -> str:
    """Decimal units, three digits: 96.5 MB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    digits = 0 if unit == "bytes" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:,.{digits}f} {unit}"


def human_number(value: float) -> str:
    """At least three digits, and all digits before the point: 0.982, 12.5, 1,030."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def human_seconds(seconds: float) -> str:
    """1.02 s, 16.6 ms, 40.0 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{human_number(seconds / size)} {unit}"
    return f"{human_number(seconds / 1e-6)} µs"


class ProgressBar:
    """A bar on a terminal, redrawn in place; elsewhere one line when each task begins."""

    INTERVAL = 0.1

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._what: str | None = None
        self._drawn = -self.INTERVAL
        self._is_open = False

    def __call__(self, what: str, done: int, total: int | None) -> None:
        is_new, self._what = what != self._what, what
        if not self._stream.isatty():
            if is_new:
                print(what, file=self._stream, flush=True)
            return
        if is_new:
            self.close()
        now = self._clock()
        if is_new or now - self._drawn >= self.INTERVAL or done == total:
            self._drawn = now
            self._draw(what, done, total)

    def _draw(self, what: str, done: int, total: int | None) -> None:
        line = what
        if total and total > 1000:  # bytes; small totals count parts and need no bar
            cells = 24 * done // total
            line += f"  {'━' * cells}{'╌' * (24 - cells)}  {human_bytes(done)} of {human_bytes(total)}"
        elif total:
            line += f"  {done} of {total}"
        self._stream.write(f"\r\033[K{line[: width(self._stream) - 1]}")
        self._stream.flush()
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_open = False

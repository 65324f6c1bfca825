"""A line on stderr that shows the progress of many answers; it is removed when they are complete."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")
INTERVAL = 0.2  # seconds between two drawings
CELLS = 24


def tracked(
    items: Iterable[T],
    total: int,
    wanted: bool | None = None,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """The items as they come. A bar counts them where there are several and stderr is a terminal; `wanted` True asks
    for it everywhere (where there is no terminal, a line for each tenth), False nowhere."""
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    if wanted is False or (wanted is None and (total < 2 or not is_terminal)):
        yield from items
        return
    start, drawn, tenth = clock(), 0.0, 0
    try:
        for done, item in enumerate(items, 1):
            now = clock()
            if is_terminal and (now - drawn >= INTERVAL or done == total):
                drawn = now
                stream.write(f"\r\033[K{_line(done, total, now - start)}")
                stream.flush()
            elif not is_terminal and 10 * done // total > tenth:
                tenth = 10 * done // total
                print(_line(done, total, now - start), file=stream, flush=True)
            yield item
    finally:
        if is_terminal:
            stream.write("\r\033[K")
            stream.flush()


def _line(done: int, total: int, seconds: float) -> str:
    cells = CELLS * done // total
    left = seconds / done * (total - done)
    return f"{'━' * cells}{'╌' * (CELLS - cells)}  {done:,} of {total:,} answers · {_clock(left)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"

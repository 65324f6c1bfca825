"""One answer. Ctrl-C ends it, and held-back text is still printed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from unspool.cli.status import Status, work_of
from unspool.cli.terminal import hide_control_keys
from unspool.events import Text
from unspool.records import record
from unspool.results import Result

if TYPE_CHECKING:
    from unspool.engine.streams import Stream
    from unspool.llm import LLM
    from unspool.options import Messages, Prompt
    from unspool.params import SamplingParams


@record(frozen=True)
class Answer:
    result: Result
    interrupted: bool


class Interrupt:
    """While open, Ctrl-C aborts the stream instead of raising KeyboardInterrupt, until the third time.

    In the meantime the terminal does not print ^C into the answer.
    """

    def __init__(self) -> None:
        self.count = 0
        self._stream: Stream | None = None
        self._previous: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if self._is_main:
            self._previous = signal.signal(signal.SIGINT, self._note)
            self._restore = hide_control_keys()
        return self

    def watch(self, stream: Stream) -> None:
        self._stream = stream
        if self.count:  # Ctrl-C arrived while the stream was being opened
            stream.abort()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._stream is not None:
            self._stream.abort()
        if self.count > 2:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_main:
            self._restore()
            signal.signal(signal.SIGINT, self._previous)


def respond(
    llm: LLM,
    prompt: Prompt | Messages,
    params: SamplingParams,
    show: Callable[[int, str], None] | None = None,
    *,
    wants_status: bool | None = None,
) -> Answer:
    """Answers a prompt; `show` gets each choice's text as it arrives. Ctrl-C ends the answer at that point. Until the
    first text, a line shows how much of the prompt is read, if `wants_status`: see Status."""
    with (
        Interrupt() as interrupt,
        Status(lambda: work_of(llm.engine), wants_status) as status,
        llm.stream(prompt, params) as stream,
    ):
        interrupt.watch(stream)
        for event in stream:
            if show is not None and isinstance(event, Text) and event.text:
                status.end()
                show(event.choice, event.text)
        return Answer(stream.result(), interrupt.count > 0)

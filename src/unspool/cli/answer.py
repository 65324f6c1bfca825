"""One answer, driven step by step, so that Ctrl-C is heard between steps and what was held back still comes out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from unspool.cli.terminal import hide_control_keys
from unspool.events import Text
from unspool.results import Fold, Result

if TYPE_CHECKING:
    from unspool.llm import LLM
    from unspool.params import SamplingParams


@dataclass(frozen=True)
class Answer:
    result: Result
    interrupted: bool


class Interrupt:
    """While open, Ctrl-C only sets `came`, which is looked at between steps; a third one interrupts as ever.

    A terminal does not write ^C into the answer meanwhile.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if self._is_main:
            self._previous = signal.signal(signal.SIGINT, self._note)
            self._restore = hide_control_keys()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            raise KeyboardInterrupt

    @property
    def came(self) -> bool:
        return self.count > 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_main:
            self._restore()
            signal.signal(signal.SIGINT, self._previous)


def respond(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, show: Callable[[int, str], None] | None = None
) -> Answer:
    """Answers a prompt; `show` gets each choice's text as it comes."""
    engine = llm.engine
    request = engine.add(prompt, params)
    resolved = engine.params_of(request)
    fold = Fold(resolved.n)
    try:
        with Interrupt() as interrupt:
            while not fold.is_done:
                if interrupt.came:
                    engine.abort(request)
                for event in engine.step():
                    fold.push(event)
                    if show is not None and isinstance(event, Text) and event.text:
                        show(event.choice, event.text)
        result = Result(tuple(prompt), resolved, tuple(fold.completions()), llm.receipt(resolved.seed))
    finally:
        engine.abort(request)
    return Answer(result, interrupt.came)

"""Holds an engine after so many steps, so that no test depends on whether an answer ends before something else happens.

As a program it is `unspool` with every engine held after FEW steps until SIGUSR1 comes.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, Self

from unspool.engine.engine import Engine
from unspool.plan import Plan

FEW = 5  # steps: enough for the first tokens of an answer
COMMAND = (sys.executable, "-P", __file__)  # to run in place of `python -m unspool`


class Brake:
    """Lets an engine compute `steps` steps, and no more until `release`. It still takes requests, calls and aborts."""

    def __init__(self, engine: Engine, steps: int = FEW) -> None:
        self._released = threading.Event()
        self._left, self._plan = steps, engine.scheduler.plan
        engine.scheduler.plan = self._braked  # type: ignore[method-assign]

    def _braked(self) -> Plan:
        if self._left <= 0 and not self._released.wait(0.001):
            return Plan(())
        plan = self._plan()
        self._left -= bool(plan)
        return plan

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def main() -> int:
    from unspool.cli import main

    brakes: list[Brake] = []
    make = Engine.__init__

    def braked(engine: Engine, *given: Any, **named: Any) -> None:
        make(engine, *given, **named)
        brakes.append(Brake(engine))

    def release(*_: object) -> None:
        for brake in brakes:
            brake.release()

    Engine.__init__ = braked  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, release)
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""How near the steps come to what the machine's memory can give."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.ceilings import Ceilings, Utilization
    from unspool.engine.engine import Engine
    from unspool.events import Finished


class Meter:
    """Compares what an engine's steps read with the bandwidth that was measured."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._steps = engine, engine.steps
        self.ceiling: float | None = None  # bytes a second; None: not measured
        self.compute: float | None = None  # operations a second, likewise
        self._limits: Ceilings | None = None  # undisturbed ones: what answers are compared with
        self._seen = (0.0, 0)

    def measure(self, *, is_alone: bool = True) -> None:
        """Learn the ceiling from the file. A processor's is measured if it is not there, which takes a second and all
        of its threads; unless other engines use it too. A card's is not, for it has better to do."""
        from unspool.ceilings import ceilings, known_ceilings

        backend, threads = self._engine.ops.name, self._engine.config.threads
        known = None
        if backend == "cpu":
            known = ceilings("cpu", threads) if is_alone else known_ceilings("cpu", threads)
        elif backend == "cuda":
            known = known_ceilings("cuda")
        if known is not None:
            self.ceiling, self.compute = known.bandwidth, known.compute
            self._limits = known if known.is_reliable else None

    def answer(self, end: Finished) -> Utilization | None:
        """How near an answer came to the ceilings, as `LLM.utilization` tells it; None: they are unknown."""
        from unspool.ceilings import utilization

        if self._limits is None:
            return None
        return utilization(self._steps.costs, end.usage, end.timings, end.work, self._limits)

    def utilization(self) -> float | None:
        """Of the steps since the last look, 0 to 1; None: the ceiling is unknown.

        A ceiling that was measured among neighbours is too low: what a step has reached can be reached.
        """
        if self.ceiling is None:
            return None
        ceiling = max(self.ceiling, self._steps.fastest)
        seconds, num_bytes = self._steps.seconds - self._seen[0], self._steps.num_bytes - self._seen[1]
        self._seen = (self._steps.seconds, self._steps.num_bytes)
        return num_bytes / seconds / ceiling if seconds > 0 else 0.0

"""The share of the machine's memory bandwidth that the steps reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.ceilings import Ceilings, Utilization
    from unspool.engine.engine import Engine
    from unspool.events import Finished


class Meter:
    """Compares the bytes that an engine's steps read with the measured bandwidth."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._steps = engine, engine.steps
        self.ceiling: float | None = None  # bytes a second; None: not measured
        self.compute: float | None = None  # operations a second, likewise
        self._limits: Ceilings | None = None  # undisturbed ones: what answers are compared with
        self._seen = (0.0, 0)

    def measure(self, *, is_alone: bool = True) -> None:
        """Read the ceiling from the file. If it is missing, a CPU's is measured, which takes a second and all threads,
        unless other engines use it too. A GPU's is not measured here, because that would delay requests."""
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
        """The shares of the ceilings that an answer reached, as `LLM.utilization` reports them; None: they are
        unknown."""
        from unspool.ceilings import utilization

        if self._limits is None:
            return None
        return utilization(self._steps.costs, end.usage, end.timings, end.work, self._limits)

    def utilization(self) -> float | None:
        """The share for the steps since the last call, 0 to 1; None: the ceiling is unknown.

        A ceiling measured while other programs ran is too low: a rate that a step reached raises it.
        """
        if self.ceiling is None:
            return None
        ceiling = max(self.ceiling, self._steps.fastest)
        seconds, num_bytes = self._steps.seconds - self._seen[0], self._steps.num_bytes - self._seen[1]
        self._seen = (self._steps.seconds, self._steps.num_bytes)
        return num_bytes / seconds / ceiling if seconds > 0 else 0.0

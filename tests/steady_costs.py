"""Costs of steps that stay as they were set, so that no test depends on how long its steps take."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.speculate.estimates import Costs

LONG = 1e6  # seconds of a step: beside it, whatever a drafter takes is nothing


class SteadyCosts(Costs):
    """Of steps that are LONG; `points` are the rows of a step and how many times as long it is."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        super().__init__([(rows, LONG * times) for rows, times in points])

    def observe(self, rows: int, seconds: float) -> None: ...

    def observe_ahead(self, rows: int, seconds: float) -> None: ...

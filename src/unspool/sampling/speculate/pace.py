"""How many tokens to draft: as many as pay, by what is known of this request and of this machine.

A step over r rows takes cost(r) seconds. A draft of k tokens, each right with chance p, yields p + p² + … + p^k tokens
more and costs cost(r + k) - cost(r) + drafting(k) seconds more. The length is the k with the best rate of tokens,
0 included. p is learnt from every guess, also those that were not sent to be checked: so it costs nothing to notice
that a text has begun to repeat itself, or has ceased to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

MOST = 16  # tokens in one draft
MARGIN = 1.02  # a draft must promise at least this much, for the estimates are rough


class Costs:
    """Seconds of a step by its number of rows: measured points, lines between them, kept up to date."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._rows = [rows for rows, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._drift = 1.0  # what steps take now against what was measured: contexts grow, neighbours come

    def __call__(self, rows: int) -> float:
        return self._at(rows) * self._drift

    def _at(self, rows: int) -> float:
        index = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        (r0, r1), (s0, s1) = self._rows[index - 1 : index + 1], self._seconds[index - 1 : index + 1]
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)

    def observe(self, rows: int, seconds: float) -> None:
        self._drift += 0.05 * (seconds / self._at(rows) - self._drift)


class Acceptance:
    """The chance that a request's next guess is right, from its last few dozen guesses."""

    def __init__(self, prior: float = 0.5) -> None:
        self.chance = prior

    def observe(self, was_right: bool) -> None:
        self.chance += 0.12 * (was_right - self.chance)


def draft_length(chance: float, rows: int, most: int, costs: Costs, drafting: Callable[[int], float]) -> int:
    """The length with the best rate of tokens for a step that has `rows` rows without this request's draft."""
    best, best_rate = 0, rows / costs(rows) * MARGIN
    expected, power = float(rows), 1.0
    for count in range(1, min(most, MOST) + 1):
        power *= chance
        expected += power
        rate = expected / (costs(rows + count) + drafting(count))
        if rate > best_rate:
            best, best_rate = count, rate
    return best

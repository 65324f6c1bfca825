"""How many tokens to draft: as many as pay, by what is known of the guesses, of the request and of this machine.

A step over r rows takes cost(r) seconds and plain decoding makes r tokens of it. A draft whose first i guesses are all
right with chance c_i yields c_1 + … + c_k tokens more and takes cost(r + k) - cost(r) seconds more, which are worth
tokens too: those seconds times the rate at which tokens come otherwise. The length is the k with the largest gain, 0
included.

A guess's chance is what guesses that looked as sure came to (its confidence's, over all requests), times how far this
request bears such estimates out. All guesses teach, also those that were not sent to be checked: so it costs nothing to
notice that a text has begun to repeat itself, or has ceased to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from unspool.drafter import MAX_DRAFT

# Seconds count for more than they seem, for the estimates are rough; in a crowd, where there is less to win, for more.
MARGIN, CROWD, CROWD_MARGIN = 1.15, 4, 1.4
MAX_CHANCE = 0.98
EXACT, STRIDE = 32, 8  # row counts with an estimate each; from there on one for each stride
CONFIDENCES = 32
UNTRIED_SPEEDUP = 1.15  # what drafting makes of an answer's speed, before it was tried
RETRY_EVERY = 32  # requests that a drafter is not tried on, after it has not paid


class Costs:
    """Seconds of a step by its number of rows: measured points, lines between them, kept up to date."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._rows = [rows for rows, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._drift = 1.0  # what steps take now against what was measured: contexts grow, neighbours come
        self._ahead = 1.0  # a step that the host runs ahead of, against one that it waits for

    def __call__(self, rows: int) -> float:
        return self._at(rows) * self._drift

    def without_draft(self, rows: int) -> float:
        """A step without drafts, as it would be run."""
        return self(rows) * self._ahead

    def _at(self, rows: int) -> float:
        index = max(bisect_left(self._rows, rows), 1)
        if index == len(self._rows):  # beyond all that is known: the mean slope, for two neighbours' may be noise
            slope = (self._seconds[-1] - self._seconds[0]) / (self._rows[-1] - self._rows[0])
            return self._seconds[-1] + max(slope, 0.0) * (rows - self._rows[-1])
        (r0, r1), (s0, s1) = self._rows[index - 1 : index + 1], self._seconds[index - 1 : index + 1]
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)

    def observe(self, rows: int, seconds: float) -> None:
        ratio = clamped(seconds / self(rows))
        self._drift *= 1 + 0.05 * (ratio - 1)
        rows = rows if rows <= EXACT else -(-rows // STRIDE) * STRIDE
        index = bisect_left(self._rows, rows)
        if index == len(self._rows) or self._rows[index] != rows:  # kernels work in blocks of rows: lines hide steps
            seconds = self._at(rows)
            self._rows.insert(index, rows)
            self._seconds.insert(index, seconds)
        self._seconds[index] *= 1 + 0.1 * (ratio - 1)

    def observe_ahead(self, rows: int, seconds: float) -> None:
        self._ahead *= 1 + 0.05 * (clamped(seconds / self.without_draft(rows)) - 1)
        self._ahead = min(self._ahead, 1.0)


def clamped(ratio: float) -> float:
    """One step that was interrupted says little."""
    return min(max(ratio, 0.5), 2.0)


class Speed:
    """How fast tokens come with a drafter against without, lately: by the estimated costs."""

    def __init__(self, first: float, share: float) -> None:
        self._tokens, self._steps, self._share = first, 1.0, share

    @property
    def ratio(self) -> float:
        return self._tokens / self._steps

    def observe(self, num_tokens: int, steps: float) -> None:
        """A round made so many tokens in the time of so many plain steps."""
        self._tokens += self._share * (num_tokens - self._tokens)
        self._steps += self._share * (steps - self._steps)


class DrafterEstimates:
    """What a drafter's guesses come to, over all requests."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._chances = [priors[min(confidence, len(priors) - 1)] for confidence in range(CONFIDENCES)]
        self._weights = [8.0] * CONFIDENCES  # what the prior counts for, in guesses
        self.typical = 0.85  # chance of the guesses made lately, whatever their confidence
        self.speed = Speed(1.0, 0.03)  # over all rounds
        self.tried = Speed(UNTRIED_SPEEDUP, 0.05)  # over those with a draft
        self._skipped = 0

    def expected_speedup(self) -> float:
        """The speed to be expected of a request that is new; now and then better than experience says."""
        if self.tried.ratio > 1.02:
            return self.tried.ratio
        self._skipped = (self._skipped + 1) % RETRY_EVERY
        return UNTRIED_SPEEDUP if self._skipped == 0 else 1.0

    @property
    def tokens_per_step(self) -> float:
        """What a plain step's time is worth in tokens: one, or what drafting makes of it otherwise."""
        return max(1.0, self.speed.ratio)

    def chance(self, confidence: int) -> float:
        return self._chances[min(max(confidence, 0), CONFIDENCES - 1)]

    def observe(self, confidence: int, was_right: bool) -> None:
        confidence = min(max(confidence, 0), CONFIDENCES - 1)
        self._weights[confidence] = min(self._weights[confidence] + 1, 200.0)
        self._chances[confidence] += (was_right - self._chances[confidence]) / self._weights[confidence]
        self.typical += 0.05 * (was_right - self.typical)


class RequestEstimates:
    """What came of one request's guesses: whether estimates hold for it, and whether drafting has paid."""

    def __init__(self, speed: float = 1.0) -> None:
        self._right = self._expected = 0.0
        self._speed = Speed(max(speed, 1.02), 0.1)
        self._pause = 8
        self._left = 0  # tokens before a costly drafter is tried again
        self.has_begun: bool | None = None  # whether a costly drafter shall see the prompt; None: not asked yet

    @property
    def trust(self) -> float:
        return min(1.0, (self._right + 3.0) / (self._expected + 3.0))

    def observe(self, chance: float, was_right: bool) -> None:
        self._right = 0.97 * self._right + was_right
        self._expected = 0.97 * self._expected + chance

    def observe_round(self, num_tokens: int, steps: float) -> None:
        self._speed.observe(num_tokens, steps)
        if self._speed.ratio < 1:
            self._pause = min(2 * self._pause, 256)
            self._left = self._pause
        else:
            self._pause = 8

    def may_ask(self) -> bool:
        """Whether a drafter that costs time is to be asked now: not for a while after it has not paid."""
        self._left -= 1
        return self._left < 0


def draft_length(chances: Sequence[float], rows: int, most: int, costs: Costs, tokens_per_step: float = 1.0) -> int:
    """The length with the largest gain for a step that has `rows` rows without it; `chances` are the guesses' own, each
    given that those before it are right; `tokens_per_step` is what a plain step's time is worth, in its tokens."""
    base = costs.without_draft(rows)
    rate = tokens_per_step * (MARGIN if rows < CROWD else CROWD_MARGIN) * rows / base
    best, best_gain, gain, reach = 0, 0.0, 0.0, 1.0
    for count, chance in enumerate(chances[: min(most, MAX_DRAFT)], 1):
        reach *= chance
        gain += reach
        net = gain - rate * (costs(rows + count) - base)
        if net > best_gain:
            best, best_gain = count, net
        if reach < 0.02:
            break
    return best

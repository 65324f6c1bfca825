"""What each step of an engine computed, as plain values: rows, bytes and seconds, on every device. Never a token.

Bytes are those that a step must have read at the least: weights, with experts counted as if rows chose them by chance,
and the keys, values and states of its sequences.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING

from unspool.plan import Plan

if TYPE_CHECKING:
    from unspool.models.costs import StepCosts

MAX_STEPS, MAX_WORKS = 8192, 1 << 16  # of the history


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step."""

    number: int
    start: float  # when it was launched, on the engine's clock
    seconds: float  # to when it was read; of a step that was run ahead of, since the one before it was read
    is_ahead: bool  # the next one was launched before it was read
    prompt_rows: int  # rows of requests that compute more tokens than they choose
    decode_rows: int
    weight_bytes: int
    cache_bytes: int
    requests: tuple[int, ...]  # the number of each that had a part in it
    first: tuple[int, ...]  # of each, the first position that was computed,
    tokens: tuple[int, ...]  # how many tokens were,
    samples: tuple[int, ...]  # and from how many of them a token was chosen
    waiting: int  # requests, when it was read
    blocks_free: int

    @property
    def rows(self) -> int:
        return self.prompt_rows + self.decode_rows

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


class StepMeter:
    """Counts an engine's steps and remembers the latest. Others may read it from any thread."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.num_steps = 0
        self.seconds = 0.0
        self.num_bytes = 0
        self.flops = 0.0
        self.fastest = 0.0  # bytes a second, of any step
        self.history: deque[StepStats] = deque(maxlen=MAX_STEPS)
        self._num_works = 0  # parts of requests in all of the history

    def record(
        self, plan: Plan, start: float, seconds: float, *, is_ahead: bool, waiting: int, blocks_free: int
    ) -> StepStats:
        numbers, starts, tokens, _, logits, samples, *_ = plan.columns
        counts = tuple(map(len, tokens))
        rows = sum(counts)
        prompt_rows = 0 if counts == samples else sum(c for c, s in zip(counts, samples, strict=True) if c > s)
        step = StepStats(
            number=self.num_steps,
            start=start,
            seconds=seconds,
            is_ahead=is_ahead,
            prompt_rows=prompt_rows,
            decode_rows=rows - prompt_rows,
            weight_bytes=int(self.costs.weight_bytes(rows)),
            cache_bytes=self._cache_bytes(list(map(add, starts, counts))),
            requests=numbers,
            first=starts,
            tokens=counts,
            samples=samples,
            waiting=waiting,
            blocks_free=blocks_free,
        )
        self.num_steps += 1
        self.seconds += seconds
        self.num_bytes += step.num_bytes
        self.flops += self.costs.step_flops(starts, counts, sum(logits))
        if seconds > 0:
            self.fastest = max(self.fastest, step.num_bytes / seconds)
        self._remember(step)
        return step

    def _cache_bytes(self, contexts: list[int]) -> int:
        """What sequences of these lengths keep, as far as their last token looks at it."""
        total = 2.0 * self.costs.state_bytes * len(contexts)
        for span in self.costs.spans:
            seen = sum(contexts) if span.window is None else sum(map(min, contexts, repeat(span.window)))
            total += span.kv_bytes * seen
        return int(total)

    def _remember(self, step: StepStats) -> None:
        self._num_works += len(step.requests)
        while self.history and (self._num_works > MAX_WORKS or len(self.history) == MAX_STEPS):
            self._num_works -= len(self.history.popleft().requests)
        self.history.append(step)

"""What each step of an engine computed, as plain values: rows, bytes and seconds, on every device. Never a token.

Bytes are those that a step must have read at the least: weights, with experts counted as if rows chose them by chance,
and the keys, values and states of its sequences.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, chain, pairwise, repeat
from operator import add, mul
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from unspool.plan import Plan

if TYPE_CHECKING:
    from unspool.models.costs import StepCosts

MAX_STEPS, MAX_WORKS = 8192, 1 << 16  # of the history
COUNTED_TOGETHER = 64  # steps

T = TypeVar("T", int, float)


class StepStats(NamedTuple):
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


class Measured(NamedTuple):
    """A step that was read, and not counted yet."""

    plan: Plan
    start: float
    seconds: float
    is_ahead: bool
    waiting: int
    blocks_free: int


class StepMeter:
    """Counts an engine's steps and remembers the latest. Others may read it from any thread.

    A step of few rows is short, and its host works while the device waits. So the engine's thread only notes a step,
    and many are counted at once: when somebody reads what they add up to, or when there are enough of them.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.num_steps = 0
        self.seconds = 0.0
        self._new: deque[Measured] = deque()
        self._lock = threading.Lock()  # held to count; the engine's thread may add steps meanwhile
        self._num_bytes = 0
        self._flops = 0.0
        self._fastest = 0.0
        self._history: deque[StepStats] = deque(maxlen=MAX_STEPS)
        self._num_counted = 0
        self._weights_read: dict[int, int] = {}  # bytes, by the number of rows
        self._num_works = 0  # parts of requests in all of the history

    def record(
        self, plan: Plan, start: float, seconds: float, *, is_ahead: bool, waiting: int, blocks_free: int
    ) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self._new.append(Measured(plan, start, seconds, is_ahead, waiting, blocks_free))
        if len(self._new) >= COUNTED_TOGETHER:
            self._count()

    @property
    def num_bytes(self) -> int:
        self._count()
        return self._num_bytes

    @property
    def flops(self) -> float:
        self._count()
        return self._flops

    @property
    def fastest(self) -> float:
        """Bytes a second, of any step."""
        self._count()
        return self._fastest

    @property
    def history(self) -> list[StepStats]:
        """The latest steps, oldest first."""
        with self._lock:
            self._count_new()
            return list(self._history)

    def _count(self) -> None:
        if self._new:
            with self._lock:
                self._count_new()

    def _count_new(self) -> None:
        new = [self._new.popleft() for _ in range(len(self._new))]
        if not new:
            return
        bounds = list(pairwise(accumulate((len(each.plan.works) for each in new), initial=0)))
        works = chain.from_iterable(each.plan.works for each in new)
        requests, first, tokens, _, logits, samples, *_ = zip(*works, strict=True)
        counts = tuple(map(len, tokens))
        self._flops += self.costs.step_flops(first, counts, sum(logits))
        all_rows = _sums(counts, bounds)
        prompt_rows = _sums([c if c > s else 0 for c, s in zip(counts, samples, strict=True)], bounds)
        cache_bytes = _sums(self._cache_bytes(list(map(add, first, counts))), bounds)
        for each, (begin, end), rows, of_prompts, num_bytes in zip(
            new, bounds, all_rows, prompt_rows, cache_bytes, strict=True
        ):
            step = StepStats(
                self._num_counted, each.start, each.seconds, each.is_ahead, of_prompts, rows - of_prompts,
                self._weight_bytes(rows), int(num_bytes), requests[begin:end], first[begin:end], counts[begin:end],
                samples[begin:end], each.waiting, each.blocks_free,
            )  # fmt: skip
            self._num_counted += 1
            num_bytes = step.weight_bytes + step.cache_bytes
            self._num_bytes += num_bytes
            if num_bytes > self._fastest * step.seconds and step.seconds > 0:
                self._fastest = num_bytes / step.seconds
            self._remember(step)

    def _weight_bytes(self, rows: int) -> int:
        known = self._weights_read.get(rows)
        if known is None:
            known = self._weights_read[rows] = int(self.costs.weight_bytes(rows))
        return known

    def _cache_bytes(self, contexts: list[int]) -> Iterable[float]:
        """What each sequence of these lengths keeps, as far as its last token looks at it."""
        total: Iterable[float] = [2.0 * self.costs.state_bytes] * len(contexts)
        for span in self.costs.spans:
            seen = contexts if span.window is None else map(min, contexts, repeat(span.window))
            total = map(add, total, map(mul, seen, repeat(span.kv_bytes)))
        return total

    def _remember(self, step: StepStats) -> None:
        self._num_works += len(step.requests)
        while self._history and (self._num_works > MAX_WORKS or len(self._history) == MAX_STEPS):
            self._num_works -= len(self._history.popleft().requests)
        self._history.append(step)


def _sums(values: Iterable[T], bounds: list[tuple[int, int]]) -> list[T]:
    """The sum of the values from each begin to its end."""
    sums = list(accumulate(values, initial=0))
    return [sums[end] - sums[begin] for begin, end in bounds]

"""Limits of a key: requests and tokens per minute, and concurrent requests. The most that a request may use is reserved
when it is admitted; the unused part is returned when it ends.

A limit of N per minute is a token bucket that has room for N and refills evenly, N per minute. All arithmetic uses
integers, so nothing is lost to rounding, and the remaining amount depends only on the times and amounts.

Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unspool.params import SamplingParams
from unspool.records import record
from unspool.server.faults import HTTPFault

if TYPE_CHECKING:
    from unspool.server.job import Run

MINUTE = 60 * 10**9  # in nanoseconds
UNSTATED_TOKENS = 1024  # reserved for an answer whose request does not say how long it may be
KINDS = ("requests", "tokens", "concurrency")
CODE = "rate_limit_exceeded"


@record(frozen=True)
class Limits:
    """None: there is no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


NO_LIMITS = Limits()


class Bucket:
    """A token bucket with room for `limit`, which refills evenly within a minute. Its level may be below zero."""

    def __init__(self, limit: int, now: int) -> None:
        self.limit = limit
        self._level, self._at = limit * MINUTE, now  # a unit is 1 / MINUTE

    def _fill(self, now: int) -> None:
        self._level = min(self.limit * MINUTE, self._level + max(0, now - self._at) * self.limit)
        self._at = max(self._at, now)

    def remaining(self, now: int) -> int:
        self._fill(now)
        return max(0, self._level // MINUTE)

    def wait(self, amount: int, now: int) -> int:
        """Nanoseconds until the amount is available."""
        self._fill(now)
        return max(0, -(-(amount * MINUTE - self._level) // self.limit))

    def take(self, amount: int, now: int) -> None:
        """A negative amount is returned to the bucket."""
        self._fill(now)
        self._level = min(self.limit * MINUTE, self._level - amount * MINUTE)

    def resize(self, limit: int, now: int) -> None:
        """Change the limit; usage of the old limit counts against the new one."""
        self._fill(now)
        self._level += (limit - self.limit) * MINUTE
        self.limit = limit


class KeyCounts:
    """Counts of the requests of all keys with one name."""

    def __init__(self) -> None:
        self.num_requests = self.num_running = self.num_prompt_tokens = self.num_tokens = 0
        self.num_refused = dict.fromkeys(KINDS, 0)


class Account:
    """What one key, or all keys of one name, may use and have used."""

    def __init__(
        self, name: str, limits: Limits, counts: KeyCounts, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name, self.counts, self._clock = name, counts, clock
        self.limits = NO_LIMITS
        self.num_running = 0
        self._buckets: dict[str, Bucket] = {}
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        now = self._clock()
        self.limits = limits
        for kind, limit in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
            if limit is None:
                self._buckets.pop(kind, None)
            elif kind in self._buckets:
                self._buckets[kind].resize(limit, now)
            else:
                self._buckets[kind] = Bucket(limit, now)

    def admit(self, retry_after: int) -> Admission:
        """Admit a request, or raise the fault for its answer. `retry_after`: seconds after which a running request has
        probably ended."""
        self.counts.num_requests += 1
        most = self.limits.concurrent_requests
        if most is not None and self.num_running >= most:
            message = f"this API key may have {most:,} requests at once, and has; try again when one has ended"
            raise self._refusal("concurrency", message, retry_after * 10**9)
        bucket = self.take("requests", 1)
        self.num_running += 1
        self.counts.num_running += 1
        return Admission(self, bucket)

    def take(self, kind: str, amount: int) -> Bucket | None:
        """Reserve an amount of a limit, if there is one; a fault if it is not available. Returns the bucket."""
        bucket, now = self._buckets.get(kind), self._clock()
        if bucket is None:
            return None
        wait = bucket.wait(amount, now)
        if wait:
            left = f"limit {bucket.limit:,}, left {bucket.remaining(now):,}, asked for {amount:,}"
            message = f"the rate limit of this API key for {kind} per minute is reached: {left}"
            if amount > bucket.limit:
                message += "; no request can have as many: a smaller max_tokens or a shorter prompt asks for fewer"
            raise self._refusal(kind, message, wait if amount <= bucket.limit else None)
        bucket.take(amount, now)
        return bucket

    def give_back(self, bucket: Bucket | None, amount: int) -> None:
        """Return the unused part of a reservation; a negative amount takes what was used beyond it."""
        if bucket is not None:
            bucket.take(-amount, self._clock())

    def _refusal(self, kind: str, message: str, wait: int | None) -> HTTPFault:
        """`wait`: nanoseconds until a retry can succeed; None: never, which a header says to OpenAI's and Anthropic's
        clients."""
        self.counts.num_refused[kind] += 1
        again = {"x-should-retry": "false"} if wait is None else {"retry-after": str(max(1, -(-wait // 10**9)))}
        type = "tokens" if kind == "tokens" else "requests"
        return HTTPFault(429, message, code=CODE, headers=again, type=type)

    def headers(self, path: str) -> Iterator[tuple[bytes, bytes]]:
        """The rate limit headers of every answer, in the format of the API that the path belongs to."""
        now = self._clock()
        for kind, bucket in self._buckets.items():
            left, until = bucket.remaining(now), bucket.wait(bucket.limit, now)
            if path.startswith("/v1/messages"):
                prefix, at = f"anthropic-ratelimit-{kind}", _moment(time.time() + until / 1e9)
                headers = ((f"{prefix}-limit", bucket.limit), (f"{prefix}-remaining", left), (f"{prefix}-reset", at))
            else:
                headers = (
                    (f"x-ratelimit-limit-{kind}", bucket.limit),
                    (f"x-ratelimit-remaining-{kind}", left),
                    (f"x-ratelimit-reset-{kind}", duration(until)),
                )
            yield from ((name.encode(), str(value).encode()) for name, value in headers)


HEADERS = tuple(
    name
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
    for name in (f"x-ratelimit-{what}-{kind}", f"anthropic-ratelimit-{kind}-{what}")
)


class Admission:
    """One request's use of its account, until `end`."""

    def __init__(self, account: Account, requests: Bucket | None) -> None:
        """`requests`: the bucket that this request was taken from."""
        self.account = account
        self._requests = requests
        self._tokens: Bucket | None = None  # the bucket that the tokens were taken from
        self._reserved = 0  # tokens
        self._is_held = True
        self.run: Run | None = None  # the run, once started; without it, nothing was used

    def reserve(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]], context: int) -> None:
        """Reserve the most tokens that prompts and their answers may have; a fault if the limit has fewer left. A
        request that is refused for its tokens does not count as a request either."""
        limit = self.account.limits.tokens_per_minute
        most = sum(len(ids) + _width(params) * _longest(params, len(ids), context, limit) for ids, params in prompts)
        try:
            self._tokens = self.account.take("tokens", most)
        except HTTPFault:
            self.account.give_back(self._requests, 1)
            raise
        self._reserved = most

    def settle(self) -> None:
        """Return the unused part of the reservation; only the first call counts."""
        reserved, self._reserved = self._reserved, 0
        if not reserved:
            return
        prompt, generated = (0, 0) if self.run is None else used(self.run)
        self.account.give_back(self._tokens, reserved - prompt - generated)
        self.account.counts.num_prompt_tokens += prompt
        self.account.counts.num_tokens += generated

    def end(self) -> None:
        """The answer is written; only the first call counts."""
        if self._is_held:
            self._is_held = False
            self.settle()
            self.account.num_running -= 1
            self.account.counts.num_running -= 1


def _width(params: SamplingParams) -> int:
    """The number of answers computed for a prompt, including those that are not returned."""
    return max(params.n, params.best_of or 1, params.beam.width if params.beam is not None else 1)


def _longest(params: SamplingParams, num_prompt: int, context: int, limit: int | None) -> int:
    """How many tokens are reserved for each answer to a prompt."""
    room = max(0, context - num_prompt)
    if params.max_tokens is not None:
        return min(params.max_tokens, room)
    share = math.inf if limit is None else max(0, limit - num_prompt) // _width(params)
    return int(min(UNSTATED_TOKENS, room, share))


def used(run: Run) -> tuple[int, int]:
    """Tokens of a run's prompts and of its answers so far. Answers that were computed but not returned (best_of, beams)
    count with the length of those returned."""
    first, generated = 0, 0
    for _, params in run.job.prompts:
        choices = run.choices[first : first + params.n]
        first += params.n
        generated += -(-sum(choice.num_tokens for choice in choices) * _width(params) // params.n)
    return sum(len(ids) for ids, _ in run.job.prompts), generated


def duration(nanoseconds: int) -> str:
    """As OpenAI writes it: 1h2m3s, 6m0s, 8.64s, 20ms; rounded up."""
    milliseconds = -(-nanoseconds // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    seconds, minutes = milliseconds % 60_000, milliseconds // 60_000
    text = f"{seconds / 1000:g}s"
    if not minutes:
        return text
    return f"{minutes}m{text}" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{text}"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.ceil(seconds)))


class AccountCollector:
    """Metrics of keys, by name."""

    def __init__(self, prefix: str, counts: Mapping[str, KeyCounts]) -> None:
        self._prefix, self._counts = prefix, counts

    def collect(self) -> Iterable[Metric]:
        label = ("key_name",)
        refused = CounterMetricFamily(
            self._prefix + "api_key_refused_requests",
            "Of those, the ones that were over a limit.",
            labels=("key_name", "limit"),
        )
        running = GaugeMetricFamily(
            self._prefix + "api_key_requests_running", "Of those, the ones under way.", labels=label
        )
        counters = {
            name: CounterMetricFamily(self._prefix + name, text, labels=label)
            for name, text in (
                ("api_key_requests", "Requests of the keys of this name that have a body, refused ones too."),
                ("api_key_prompt_tokens", "Tokens of their prompts."),
                ("api_key_generation_tokens", "Tokens of their answers."),
            )
        }
        for name, counts in self._counts.items():
            values = (counts.num_requests, counts.num_prompt_tokens, counts.num_tokens)
            for family, value in zip(counters.values(), values, strict=True):
                family.add_metric([name], value)
            running.add_metric([name], counts.num_running)
            for kind, count in counts.num_refused.items():
                refused.add_metric([name, kind], count)
        return [*counters.values(), running, refused]

"""Prometheus metrics. The names, after the prefix, and the label `model_name` are vLLM's."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from unspool.drafter import MAX_DRAFT
from unspool.engine.driver import Driver
from unspool.events import Finished, FinishReason
from unspool.server.meter import Meter

LABELS = ("model_name",)
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
REASONS = (*get_args(FinishReason), "error")


class Tally:
    """A histogram's counts. Adding is one search and one sum, because it happens for every token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        buckets, total = [], 0
        for bound, count in zip((*map(float, self._bounds), float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric([model], buckets, self._sum)
        return family


class Metrics:
    """Counts and times of the answers of one model."""

    def __init__(self) -> None:
        self.first_token, self.gap, self.total = Tally(LATENCIES), Tally(GAPS), Tally(LATENCIES)
        self.queue, self.prefill, self.decode = Tally(LATENCIES), Tally(LATENCIES), Tally(LATENCIES)
        self.prompt_size, self.answer_size = Tally(COUNTS), Tally(COUNTS)
        self.num_prompt_tokens = self.num_tokens = 0
        self._wait = 1.0  # a moving mean of whole requests, for Retry-After

    def on_text(self, num_tokens: int, last: float | None) -> float:
        """Count text of `num_tokens` tokens; `last`: the time of the choice's previous text. Returns the time now."""
        now = time.perf_counter()
        self.num_tokens += num_tokens
        if last is not None and num_tokens:
            self.gap.add((now - last) / num_tokens, num_tokens)
        return now

    def on_finished(self, end: Finished, *, is_first: bool) -> None:
        timings = end.timings
        if is_first:
            self.num_prompt_tokens += end.usage.prompt_tokens
            self.prompt_size.add(end.usage.prompt_tokens)
            self.queue.add(timings.queue)
        if timings.first_token is not None:
            self.first_token.add(timings.first_token)
            self.prefill.add(timings.prefill)
            self.decode.add(timings.decode)
        self.answer_size.add(end.usage.completion_tokens)
        self.total.add(timings.total)
        self._wait += 0.1 * (timings.total - self._wait)

    def typical_wait(self) -> int:
        return max(1, min(60, round(self._wait)))


class ServerMetrics:
    """Everything in /metrics. `collectors` returns the collectors of the current models."""

    def __init__(self, prefix: str, collectors: Callable[[], Iterable[Collector]]) -> None:
        self.registry = CollectorRegistry()
        self._http = Counter(
            prefix + "http_requests", "Responses by route and status.", ("route", "status"), registry=self.registry
        )
        self.registry.register(Joined(collectors))

    def on_response(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)


class Joined(Collector):
    """Joins collectors that have the same metrics with other labels, because Prometheus requires each name once."""

    def __init__(self, collectors: Callable[[], Iterable[Collector]]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for collector in self._collectors():
            for metric in collector.collect():
                if joined.setdefault(metric.name, metric) is not metric:
                    joined[metric.name].samples += metric.samples
        return iter(joined.values())


class Continued(Collector):
    """A collector whose source may disappear and return: counters continue from their last values."""

    def __init__(self) -> None:
        self._source: Collector | None = None
        self._past: dict[str, Metric] = {}  # counters when the last source went

    def attach(self, source: Collector | None) -> None:
        """Set the source; None: there is none for now."""
        self._past = {metric.name: metric for metric in self.collect() if metric.type == "counter"}
        self._source = source

    def collect(self) -> Iterator[Metric]:
        if self._source is None:
            yield from self._past.values()
            return
        for metric in self._source.collect():
            past = self._past.get(metric.name)
            if past is not None:
                before = {(one.name, *sorted(one.labels.items())): one.value for one in past.samples}
                metric.samples = [
                    one._replace(value=one.value + before.get((one.name, *sorted(one.labels.items())), 0.0))
                    for one in metric.samples
                ]
            yield metric


class Families(Collector):
    """Metrics that are converted to Prometheus's format when they are read, so that counting stays cheap."""

    def __init__(self, prefix: str, model: str) -> None:
        self._prefix, self._model = prefix, model

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._prefix + name, text, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=LABELS)
        family.add_metric([self._model], value)
        return family


class AnswerCollector(Families):
    """Metrics of answers."""

    def __init__(self, prefix: str, model: str, metrics: Metrics) -> None:
        super().__init__(prefix, model)
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, tally in (
            ("time_to_first_token_seconds", "Arrival to first token.", metrics.first_token),
            ("inter_token_latency_seconds", "Between a stream's tokens, as they are handed on.", metrics.gap),
            ("e2e_request_latency_seconds", "Arrival to end.", metrics.total),
            ("request_queue_time_seconds", "Arrival to first step.", metrics.queue),
            ("request_prefill_time_seconds", "First step to first token.", metrics.prefill),
            ("request_decode_time_seconds", "First to last token.", metrics.decode),
            ("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_size),
            ("request_generation_tokens", "Tokens of an answer.", metrics.answer_size),
        ):
            yield tally.family(self._prefix + name, text, self._model)
        yield self._counter("prompt_tokens", "Tokens of prompts whose answers ended.", metrics.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated and handed on.", metrics.num_tokens)


def cache_config(prefix: str, model: str, block_size: int, num_blocks: int) -> Metric:
    """The cache's size for routers, with the name of the Gateway API Inference Extension's protocol."""
    labels = ("model_name", "block_size", "num_gpu_blocks")
    text = "The KV cache's block size in tokens and its number of blocks; the value is always 1."
    family = GaugeMetricFamily(prefix + "cache_config_info", text, labels=labels)
    family.add_metric([model, str(block_size), str(num_blocks)], 1)
    return family


def adapters(prefix: str, model: str) -> Metric:
    """The adapters metric of the same protocol: no adapters."""
    labels = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
    text = "LoRA adapters, of which there are none here; the value is always 1."
    family = GaugeMetricFamily(prefix + "lora_requests_info", text, labels=labels)
    family.add_metric([model, "0", "", ""], 1)
    return family


class EngineCollector(Families):
    """Metrics that the engine counts itself."""

    def __init__(self, prefix: str, model: str, engine: Driver, meter: Meter) -> None:
        super().__init__(prefix, model)
        self._engine, self._meter = engine, meter

    def collect(self) -> Iterator[Metric]:
        engine = self._engine.engine
        stats = engine.stats
        yield self._gauge("num_requests_running", "Answers being computed.", stats["running"])
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats["waiting"])
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats["cache_usage"])
        yield self._counter("num_preemptions", "Answers that lost their blocks for a while.", stats["preemptions"])
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats["prefix_queries"])
        yield self._counter("prefix_cache_hits", "Prompt tokens found computed.", stats["prefix_hits"])
        yield cache_config(self._prefix, self._model, int(engine.config.block_size), int(stats["blocks"]))
        yield adapters(self._prefix, self._model)
        success = CounterMetricFamily(
            self._prefix + "request_success", "Answers by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason in REASONS:
            success.add_metric([self._model, reason], engine.finished.get(reason, 0))
        yield success
        yield from self._steps()
        drafts = engine.speculation.total
        yield self._counter("spec_decode_num_drafts", "Drafts verified.", drafts.steps)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", drafts.drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "Of those, chosen by the model itself.", drafts.accepted)
        by_place = CounterMetricFamily(
            self._prefix + "spec_decode_num_accepted_tokens_per_pos",
            "The same by their place in the draft.",
            labels=["model_name", "position"],
        )
        for place, count in zip_longest(range(MAX_DRAFT), drafts.accepted_at, fillvalue=0):
            by_place.add_metric([self._model, str(place)], count)
        yield by_place
        mean = drafts.mean_accepted
        yield self._gauge("spec_decode_mean_accepted_length", "Guesses of a draft that were chosen.", mean)
        text = "By the measured costs: plain steps that were not needed, less what drafts took."
        yield self._gauge("spec_decode_saved_seconds", text, drafts.seconds_saved)

    def _steps(self) -> Iterator[Metric]:
        steps = self._engine.engine.steps
        yield self._counter("engine_steps", "Steps computed.", steps.num_steps)
        yield self._counter("engine_step_seconds", "Time spent in them.", steps.seconds)
        yield self._counter("engine_bytes_read", "Weights and KV cache that they read.", steps.num_bytes)
        utilization = self._meter.utilization()
        if utilization is not None:
            text = "Of what memory can give, what the steps since the last scrape read, 0 to 1."
            yield self._gauge("memory_bandwidth_utilization", text, utilization)

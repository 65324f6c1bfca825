"""What dashboards read. The names, after the prefix, and the label `model_name` are those that vLLM made common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from unspool.engine.async_engine import AsyncEngine
from unspool.events import Finished
from unspool.server.meter import Meter

LABELS = ("model_name",)
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
REASONS = ("stop", "length", "eos", "abort", "deadline", "repetition", "error")


class Metrics:
    def __init__(self, prefix: str, model: str, engine: AsyncEngine, meter: Meter) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(prefix + name, text, LABELS, buckets=buckets, registry=registry).labels(model)

        def counter(name: str, text: str) -> Any:
            return Counter(prefix + name, text, LABELS, registry=registry).labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", LATENCIES)
        self._gap = histogram("inter_token_latency_seconds", "Between a stream's tokens, as they are sent.", GAPS)
        self._total = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCIES)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first step.", LATENCIES)
        self._prefill = histogram("request_prefill_time_seconds", "First step to first token.", LATENCIES)
        self._decode = histogram("request_decode_time_seconds", "First to last token.", LATENCIES)
        self._prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt.", COUNTS)
        self._answer_size = histogram("request_generation_tokens", "Tokens of an answer.", COUNTS)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts whose answers ended.")
        self._answer_tokens = counter("generation_tokens", "Tokens generated and handed on.")
        self._http = Counter(
            prefix + "http_requests", "Responses by route and status.", ("route", "status"), registry=registry
        )
        self._wait = 1.0  # a moving mean of whole requests, for Retry-After
        registry.register(EngineCollector(prefix, model, engine, meter))

    def on_tokens(self, count: int, gap: float | None) -> None:
        if count:
            self._answer_tokens.inc(count)
            if gap is not None:
                for _ in range(count):
                    self._gap.observe(gap / count)

    def on_finished(self, end: Finished, *, is_first: bool) -> None:
        timings = end.timings
        if is_first:
            self._prompt_tokens.inc(end.usage.prompt_tokens)
            self._prompt_size.observe(end.usage.prompt_tokens)
            self._queue.observe(timings.queue)
        if timings.first_token is not None:
            self._first_token.observe(timings.first_token)
            self._prefill.observe(timings.prefill)
            self._decode.observe(timings.decode)
        self._answer_size.observe(end.usage.completion_tokens)
        self._total.observe(timings.total)
        self._wait += 0.1 * (timings.total - self._wait)

    def on_response(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def typical_wait(self) -> int:
        return max(1, min(60, round(self._wait)))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Read from the engine when somebody looks, so that looking costs and counting does not."""

    def __init__(self, prefix: str, model: str, engine: AsyncEngine, meter: Meter) -> None:
        self._prefix, self._model, self._engine, self._meter = prefix, model, engine, meter

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        engine = self._engine.engine
        stats = engine.stats
        held = stats["blocks"] - stats["blocks_free"]
        yield self._gauge("num_requests_running", "Answers being computed.", stats["running"])
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats["waiting"])
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", held / stats["blocks"])
        yield self._counter("num_preemptions", "Answers that lost their blocks for a while.", stats["preemptions"])
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats["prefix_queries"])
        yield self._counter("prefix_cache_hits", "Prompt tokens found computed.", stats["prefix_hits"])
        success = CounterMetricFamily(
            self._prefix + "request_success", "Answers by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason in REASONS:
            success.add_metric([self._model, reason], engine.finished.get(reason, 0))
        yield success
        yield self._counter("engine_steps", "Steps computed.", self._meter.num_steps)
        yield self._counter("engine_step_seconds", "Time spent in them.", self._meter.seconds)
        yield self._counter("engine_bytes_read", "Weights and KV cache that they read.", self._meter.num_bytes)
        utilization = self._meter.utilization()
        if utilization is not None:
            text = "Of what memory can give, what the steps since the last scrape read, 0 to 1."
            yield self._gauge("memory_bandwidth_utilization", text, utilization)
        tally = engine.speculation.total
        yield self._counter("spec_decode_num_drafts", "Drafts verified.", tally.steps)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", tally.drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "Of those, chosen by the model itself.", tally.accepted)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._prefix + name, text, labels=LABELS)
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=LABELS)
        family.add_metric([self._model], value)
        return family

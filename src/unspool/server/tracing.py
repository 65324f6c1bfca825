"""OpenTelemetry spans, with the `otel` extra: one for each generating request, with the conventions' gen_ai names.

If the engine is in another process, the request carries its span context, and each replica that computes the answer
adds a child span.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from unspool.errors import BackendError

if TYPE_CHECKING:
    from starlette.requests import Request

    from unspool.events import Timings
    from unspool.server.job import Job, Run


class Span(Protocol):
    """Of one request."""

    @property
    def traceparent(self) -> str | None:
        """The span context for other processes."""

    def start(self, run: Run) -> None:
        """The engine has accepted the request."""

    def fail(self, error: BaseException) -> None:
        """The request was refused, and the span ends."""

    def end(self, run: Run) -> None:
        """The answer is complete, or the client has disconnected."""


class ReplicaSpan(Protocol):
    """Of one attempt at a request, on the replica that computes it."""

    def end(self, *, tokens: int, reasons: list[str], timings: Timings | None) -> None: ...


class NoSpan:
    traceparent: str | None = None

    def start(self, run: Run) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def end(self, run: Run) -> None: ...


class NoReplicaSpan:
    def end(self, *, tokens: int, reasons: list[str], timings: Timings | None) -> None: ...


class Tracer:
    """Without an endpoint: does nothing."""

    def begin(self, operation: str, request: Request, job: Job, model: str) -> Span:
        return NoSpan()

    def begin_attempt(self, replica: str, request: str, traceparent: str | None) -> ReplicaSpan:
        return NoReplicaSpan()


class OtelSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get("traceparent")

    def start(self, run: Run) -> None:
        params = run.params[0]
        self._span.set_attribute("gen_ai.request.temperature", params.temperature)
        self._span.set_attribute("gen_ai.request.top_p", params.top_p)
        self._span.set_attribute("gen_ai.request.max_tokens", params.max_tokens or 0)

    def fail(self, error: BaseException) -> None:
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.end()

    def end(self, run: Run) -> None:
        ends = run.ends
        self._span.set_attribute("gen_ai.usage.output_tokens", sum(len(c.tokens) for c in run.choices))
        self._span.set_attribute("gen_ai.response.finish_reasons", [end.reason for end in ends])
        if ends:
            _set_timings(self._span, ends[0].timings)
        self._span.end()


class OtelReplicaSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, *, tokens: int, reasons: list[str], timings: Timings | None) -> None:
        self._span.set_attribute("gen_ai.usage.output_tokens", tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if timings is not None:
            _set_timings(self._span, timings)
        self._span.end()


def _set_timings(span: Any, timings: Timings) -> None:
    span.set_attribute("gen_ai.latency.time_in_queue", timings.queue)
    span.set_attribute("gen_ai.latency.time_in_model_prefill", timings.prefill)
    span.set_attribute("gen_ai.latency.time_in_model_decode", timings.decode)
    if timings.first_token is not None:
        span.set_attribute("gen_ai.latency.time_to_first_token", timings.first_token)


class OtelTracer(Tracer):
    def __init__(self, endpoint: str, model: str, processor: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise BackendError(f"tracing needs the otel extra: pip install 'unspool[otel]' ({error})") from error
        if processor is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint)))
        provider = TracerProvider(resource=Resource.create({"service.name": "unspool"}))
        provider.add_span_processor(processor)  # the provider flushes it when the process ends
        self._tracer = provider.get_tracer("unspool")
        self._kinds, self._model = trace.SpanKind, model

    def begin(self, operation: str, request: Request, job: Job, model: str) -> OtelSpan:
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": sum(len(ids) for ids, _ in job.prompts),
            "http.request.id": request.scope.get("unspool.id", ""),
        }
        name, context = f"{operation} {model}", _context(dict(request.headers))
        return OtelSpan(self._tracer.start_span(name, context, self._kinds.SERVER, attributes=attributes))

    def begin_attempt(self, replica: str, request: str, traceparent: str | None) -> OtelReplicaSpan:
        attributes = {"unspool.replica": replica, "unspool.request": request, "gen_ai.request.model": self._model}
        context = _context({} if traceparent is None else {"traceparent": traceparent})
        span = self._tracer.start_span(f"replica {replica}", context, self._kinds.INTERNAL, attributes=attributes)
        return OtelReplicaSpan(span)


def make_tracer(endpoint: str | None, model: str) -> Tracer:
    return Tracer() if endpoint is None else OtelTracer(endpoint, model)


def _context(headers: Mapping[str, str]) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)


def traces_url(endpoint: str) -> str:
    """The collector's URL for spans: OTLP's path is appended to the address unless it already ends with it."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"

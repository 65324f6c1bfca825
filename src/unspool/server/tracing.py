"""OpenTelemetry spans, with the `otel` extra: one for each generating request, with the conventions' gen_ai names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unspool.errors import BackendError

if TYPE_CHECKING:
    from starlette.requests import Request

    from unspool.server.job import Run


class NoSpan:
    def end(self, run: Run) -> None:
        pass


class Tracer:
    """Without an endpoint: does nothing."""

    def begin(self, operation: str, request: Request, run: Run) -> Any:
        return NoSpan()


class OtelSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, run: Run) -> None:
        ends = run.ends
        self._span.set_attribute("gen_ai.usage.output_tokens", sum(len(c.tokens) for c in run.choices))
        self._span.set_attribute("gen_ai.response.finish_reasons", [end.reason for end in ends])
        if ends:
            timings = ends[0].timings
            self._span.set_attribute("gen_ai.latency.time_in_queue", timings.queue)
            self._span.set_attribute("gen_ai.latency.time_in_model_prefill", timings.prefill)
            self._span.set_attribute("gen_ai.latency.time_in_model_decode", timings.decode)
            if timings.first_token is not None:
                self._span.set_attribute("gen_ai.latency.time_to_first_token", timings.first_token)
        self._span.end()


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
        provider.add_span_processor(processor)  # which the provider flushes when the process ends
        self._tracer = provider.get_tracer("unspool")
        self._kind, self._model = trace.SpanKind.SERVER, model

    def begin(self, operation: str, request: Request, run: Run) -> Any:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        params = run.params[0]
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.usage.input_tokens": sum(len(ids) for ids, _ in run.job.prompts),
            "http.request.id": request.scope.get("unspool.id", ""),
        }
        context = TraceContextTextMapPropagator().extract(dict(request.headers))
        name = f"{operation} {self._model}"
        return OtelSpan(self._tracer.start_span(name, context, self._kind, attributes=attributes))


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans: OTLP's path behind the given address, unless it is there already."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"

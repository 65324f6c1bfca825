"""OpenTelemetry spans, with the `otel` extra: one for each generating request, with the conventions' gen_ai names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unspool.errors import BackendError

if TYPE_CHECKING:
    from starlette.requests import Request

    from unspool.server.service import Run


class NoSpan:
    def end(self, run: Run) -> None:
        pass


class Tracer:
    """Without an endpoint it does nothing, and costs nothing."""

    def begin(self, path: str, request: Request, run: Run, body: dict[str, Any]) -> Any:
        return NoSpan()

    def close(self) -> None:
        pass


class OtelSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, run: Run) -> None:
        ends = [choice.end for choice in run.answer.choices if choice.end is not None]
        self._span.set_attribute("gen_ai.usage.output_tokens", sum(len(c.tokens) for c in run.answer.choices))
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
    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise BackendError(f"tracing needs the otel extra: pip install 'unspool[otel]' ({error})") from error
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "unspool"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("unspool")
        self._kind, self._model = trace.SpanKind.SERVER, model

    def begin(self, path: str, request: Request, run: Run, body: dict[str, Any]) -> Any:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        params = run.params[0]
        attributes = {
            "gen_ai.operation.name": path.rsplit("/", 1)[-1],
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.usage.input_tokens": sum(len(ids) for ids, _ in run.job.prompts),
            "http.request.id": request.scope.get("unspool.id", ""),
        }
        context = TraceContextTextMapPropagator().extract(dict(request.headers))
        return OtelSpan(self._tracer.start_span(path, context, self._kind, attributes=attributes))

    def close(self) -> None:
        self._provider.shutdown()

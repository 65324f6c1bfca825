"""What happens before a request is one: keys, hosts, sizes, shapes; and what is told about it after."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from typing import Any

import pytest

from tests.brake import Brake
from tests.server.harness import CONTEXT, PATIENCE, Client, in_process, make_llm
from unspool.errors import EngineDiedError
from unspool.server.config import ServerConfig
from unspool.server.run import Server, serve
from unspool.server.service import Service
from unspool.server.tracing import OtelTracer, traces_url

BODY = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
QUIET: dict[str, Any] = {"log_format": "off"}


def test_keys_guard_every_route_but_health() -> None:
    config = ServerConfig(api_keys=("sk-one", "sk-two"), **QUIET)

    async def test(client: Client) -> None:
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/nowhere"):
            refused = await client.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await client.post("/v1/completions", BODY)).status_code == 401
        for headers in ({"authorization": "Bearer sk-one"}, {"x-api-key": "sk-two"}):
            assert (await client.post("/v1/completions", BODY, headers=headers)).status_code == 200
        for wrong in ("Bearer sk-three", "Bearer", "sk-one", "Bearer sk-on\xe9", "Basic !", "Bearer sk-one,sk-two"):
            answer = await client.post("/v1/completions", BODY, headers={"authorization": wrong.encode("latin-1")})
            assert answer.status_code == 401
        password = "Basic " + base64.b64encode(b"me:sk-one").decode()
        assert (await client.get("/docs", headers={"authorization": password})).status_code == 200
        for site, status in ((None, 401), ("cross-site", 401), ("same-site", 401), ("none", 401), ("same-origin", 200)):
            sent = {"authorization": password} | ({"sec-fetch-site": site} if site else {})
            assert (await client.post("/v1/completions", BODY, headers=sent)).status_code == status, site
        assert "Basic" in (await client.get("/docs")).headers["www-authenticate"]

    in_process(test, config)




def test_a_page_elsewhere_cannot_reach_an_open_server() -> None:
    async def test(client: Client) -> None:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]", "box.lan"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200
        plain = await client.http.post(
            "/v1/completions", content=json.dumps(BODY), headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415

    in_process(test, ServerConfig(allowed_hosts=("box.lan",), **QUIET))


def test_cors_is_off_unless_asked() -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}

    async def closed(client: Client) -> None:
        answer = await client.http.options("/v1/completions", headers=asks)
        assert "access-control-allow-origin" not in answer.headers

    async def opened(client: Client) -> None:
        answer = await client.http.options("/v1/completions", headers=asks)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.http.options("/v1/completions", headers=asks | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers

    in_process(closed)
    in_process(opened, ServerConfig(cors_origins=("https://app.example",), api_keys=("k",), **QUIET))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "constraint": {"kind": "json_schema", "value": ' + b'{"a":' * 900 + b"1" + b"}" * 902, None),
        (b'{"prompt": "a"} trailing', "invalid_json"),
    ],
)
def test_malformed_bodies(data: bytes, code: str | None) -> None:
    async def test(client: Client) -> None:
        answer = await client.http.post("/v1/completions", content=data, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        if code is not None:
            assert answer.json()["error"]["code"] == code

    in_process(test)


def test_sizes_are_bounded() -> None:
    async def test(client: Client) -> None:
        error = await client.refused("/v1/completions", {"prompt": "x" * 20_000}, 413)
        assert error["code"] == "request_too_large"
        assert "10,000" in error["message"]

        async def chunks() -> Any:
            for _ in range(100):
                yield b" " * 1000

        answer = await client.http.post(
            "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        schema = {"kind": "json_schema", "value": {"enum": ["y" * 9000]}}
        assert (await client.post("/v1/completions", BODY | {"constraint": schema})).status_code in (200, 400)

    async def schemas(client: Client) -> None:
        schema = {"kind": "json_schema", "value": {"description": "y" * 70_000}}
        error = await client.refused("/v1/completions", BODY | {"constraint": schema})
        assert error["param"] == "constraint.value"

    in_process(test, ServerConfig(max_body=10_000, **QUIET))
    in_process(schemas)


def test_paths_and_methods() -> None:
    async def test(client: Client) -> None:
        missing = await client.get("/v2/x")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        wrong = await client.get("/v1/completions")
        assert wrong.status_code == 405
        assert "POST" in wrong.headers["allow"]
        assert (await client.get("/v1/messages")).json()["type"] == "error"
        assert (await client.get("/docs")).text.startswith("<!doctype html>")
        assert "http://" not in (await client.get("/docs")).text

    in_process(test)


def test_request_ids_are_echoed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: Client) -> None:
        given = await client.post("/v1/completions", BODY, headers={"x-request-id": "mine-7"})
        assert given.headers["x-request-id"] == "mine-7"
        made = await client.post("/v1/completions", BODY, headers={"x-request-id": "not ok"})
        assert made.headers["x-request-id"].startswith("req_")
        failed = await client.get("/nowhere")
        assert failed.headers["x-request-id"].startswith("req_")

    with caplog.at_level(logging.INFO, logger="unspool.access"):
        in_process(test, ServerConfig(log_format="json"))
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "unspool.access"]
    assert [line["status"] for line in lines] == [200, 200, 404]
    assert lines[0]["id"] == "mine-7"
    assert lines[0]["completion_tokens"] == 2
    assert lines[0]["finish"] == "length"


def test_metrics_count() -> None:
    async def test(client: Client) -> None:
        for _ in range(3):
            await client.ok("/v1/completions", {"prompt": "hello", "max_tokens": 4, "logit_bias": {"65": 100}})
        page = (await client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        name = client.service.name

        def value(metric: str, labels: str = "") -> float:
            return float(values[f'unspool:{metric}{{{labels}model_name="{name}"}}'])

        assert value("generation_tokens_total") == 12
        assert value("prompt_tokens_total") == 15
        assert value("time_to_first_token_seconds_count") == 3
        assert value("inter_token_latency_seconds_count") == 9
        assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
        assert value("request_success_total", 'finished_reason="length",') == 3
        assert value("engine_steps_total") == 12
        for known in (
            "e2e_request_latency_seconds_sum", "request_queue_time_seconds_sum", "num_preemptions_total",
            "prefix_cache_hits_total", "prefix_cache_queries_total", "spec_decode_num_accepted_tokens_total",
        ):  # fmt: skip
            value(known)
        client.service.meter.ceiling = 1e9
        assert "memory_bandwidth_utilization" in (await client.get("/metrics")).text

    in_process(test)


def test_a_failing_step_is_told_and_the_server_lives() -> None:
    async def test(client: Client) -> None:
        runner = client.service.llm.engine.runner
        whole, runner.run = runner.run, _broken  # type: ignore[method-assign]
        answer = await client.post("/v1/completions", BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "broken on purpose" in answer.json()["error"]["message"]
        events = await client.events("/v1/completions", BODY)
        assert events[-2][1]["error"]["code"] == "engine_error"
        assert events[-1][1] == "[DONE]"
        failed = await client.events("/v1/responses", {"input": "x", "max_output_tokens": 2})
        assert failed[-1][0] == "response.failed"
        assert (await client.events("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}))[
            -1
        ][0] == "error"
        runner.run = whole  # type: ignore[method-assign]
        await client.ok("/v1/completions", BODY)

    in_process(test)


class Panic(BaseException):
    """As a Rust library's panic arrives: no Exception."""


def _panic(*given: Any, **named: Any) -> Any:
    raise Panic("out of fuel")


def test_a_dead_engine_is_told_to_everyone() -> None:
    """Those under way, those who come after, and the probes."""

    async def test() -> None:
        service = Service(make_llm(), ServerConfig(**QUIET))
        client = Client(service)
        assert (await client.get("/ready")).json() == {"status": "ready"}
        runner = service.llm.engine.runner
        whole_run = runner.run
        runner.run = lambda plan: whole_run(plan) if len(plan.works) < 2 else _panic()  # type: ignore[method-assign]
        long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
        with Brake(service.llm.engine, 0):  # until both are under way
            asked = asyncio.gather(client.post("/v1/completions", long), client.events("/v1/completions", long))
            while service.engine.num_open < 2:
                await asyncio.sleep(0.005)
        whole, streamed = await asyncio.wait_for(asked, PATIENCE)
        assert whole.status_code == 503
        for error in (whole.json()["error"], streamed[-2][1]["error"]):
            assert (error["code"], error["message"]) == ("engine_died", "the engine stopped: Panic: out of fuel")
        assert (await client.refused("/v1/completions", BODY, 503))["code"] == "engine_died"
        health, ready = await client.get("/health"), await client.get("/ready")
        assert (health.status_code, ready.status_code) == (503, 503)
        assert health.json() == {"status": "failed", "message": "the engine stopped: Panic: out of fuel"}
        assert ready.json() == {"status": "failed"}
        await client.http.aclose()
        await service.engine.shutdown()

    asyncio.run(test())


def test_a_server_whose_engine_died_does_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()

    def run(server: Server, sockets: Any) -> None:
        llm.driver.failure = EngineDiedError("the engine stopped")

    monkeypatch.setattr(Server, "run", run)
    with pytest.raises(EngineDiedError, match="the engine stopped"):
        serve(llm, ServerConfig(**QUIET), [])
    llm.driver.failure = None
    llm.close()


def test_a_panic_in_a_request_is_its_own() -> None:
    async def test(client: Client) -> None:
        encode = client.service.llm.tokenizer.encode
        client.service.llm.tokenizer.encode = _panic  # type: ignore[method-assign]
        error = await client.refused("/v1/completions", BODY, 500)
        assert (error["code"], error["message"]) == ("internal_error", "an internal error (Panic)")
        client.service.llm.tokenizer.encode = encode  # type: ignore[method-assign]
        assert (await client.get("/health")).status_code == 200
        await client.ok("/v1/completions", BODY)

    in_process(test)


def _broken(plan: Any) -> Any:
    raise ValueError("broken on purpose")


def test_spans_tell_a_request() -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from unspool.server.app import build

    async def run() -> None:
        service = Service(make_llm(), ServerConfig(**QUIET))
        tracer = OtelTracer("", service.name, SimpleSpanProcessor(exporter))
        client = Client(service, build(service, tracer))
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await client.post("/v1/completions", BODY, headers={"traceparent": parent})
        await client.events("/v1/completions", BODY)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for path in ("/v1/chat/completions", "/v1/messages"):
            await client.ok(path, chat)
        await client.ok("/v1/responses", {"input": "a", "max_output_tokens": 1})
        await client.refused("/v1/completions", {"prompt": "a", "max_tokens": CONTEXT})
        await service.engine.shutdown()

    asyncio.run(run())
    spans = exporter.get_finished_spans()
    assert [span.attributes["gen_ai.operation.name"] for span in spans] == [
        *["text_completion"] * 2,
        *["chat"] * 3,
        "text_completion",
    ]
    assert spans[0].attributes["gen_ai.request.temperature"] == 1.0
    assert spans[-1].attributes["error.type"] == "ContextLengthError"
    assert spans[0].name == f"text_completion {spans[0].attributes['gen_ai.request.model']}"
    assert format(spans[0].context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 2
    assert spans[0].attributes["gen_ai.response.finish_reasons"] == ("length",)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp", "https://host/otlp/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
    ],
)
def test_spans_go_where_collectors_take_them(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_no_step_is_faster_than_the_memory() -> None:
    """A ceiling that was measured beside a busy neighbour does not flatter."""

    async def test(client: Client) -> None:
        meter = client.service.meter
        meter.ceiling = 1.0
        await client.ok("/v1/completions", {"prompt": "a", "max_tokens": 8, "ignore_eos": True})
        share = meter.utilization()
        assert share is not None
        assert 0 < share <= 1

    in_process(test)

"""A server in front of replicas answers as a server with an engine does: the same bodies, streams and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import ANSWERS, REFUSED, WHOLE, Fake, FakeTransport, folded, same, write_model
from tests.server.harness import PATIENCE, Client
from unspool import LLM
from unspool.ceilings import Ceilings
from unspool.cluster.back import engine_pages
from unspool.cluster.front import PooledService, start_service
from unspool.cluster.models import ModelSource, open_source
from unspool.cluster.replica import Replica
from unspool.server.app import build
from unspool.server.config import ServerConfig
from unspool.server.meter import Meter
from unspool.server.service import Service
from unspool.server.tracing import OtelTracer

OPTIONS = {"threads": 1, "kv_tokens": 8192}
QUIET = ServerConfig(log_format="off")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource(str(write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")), None, OPTIONS)


@pytest.fixture(scope="module")
def llm(source: ModelSource) -> Iterator[LLM]:
    with LLM(open_source(source), **OPTIONS) as model:  # type: ignore[arg-type]
        yield model


@asynccontextmanager
async def pooled(source: ModelSource, llm: LLM, config: ServerConfig = QUIET, **fake: Any) -> AsyncIterator[Client]:
    """A server in front of two replicas, which share an engine of this process."""
    pages = engine_pages(llm, Service(llm, config))
    fakes = [Fake(name, Replica(llm, pages, name=name), **fake) for name in ("one", "two")]
    service = await start_service(source, config, FakeTransport(fakes))
    client = Client(service)
    try:
        yield client
    finally:
        await client.http.aclose()
        await service.engine.shutdown()


@pytest.mark.parametrize("name", [*ANSWERS, *WHOLE])
def test_an_answer_is_the_single_servers(source: ModelSource, llm: LLM, name: str) -> None:
    path, body = (ANSWERS | WHOLE)[name]

    async def check() -> None:
        single = Client(Service(llm, QUIET))
        async with pooled(source, llm) as client:
            assert same(await client.ok(path, body)) == same(await single.ok(path, body))
            if name in ANSWERS:
                streams = [await each.post(path, body | {"stream": True}) for each in (client, single)]
                assert [each.status_code for each in streams] == [200, 200]
                assert folded(streams[0].content) == folded(streams[1].content)

    asyncio.run(check())


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_the_single_servers(source: ModelSource, llm: LLM, name: str) -> None:
    path, body = REFUSED[name]

    async def check() -> None:
        single = Client(Service(llm, QUIET))
        async with pooled(source, llm) as client:
            answers = [await each.post(path, body) for each in (client, single)]
            assert answers[0].status_code == answers[1].status_code >= 400
            assert same(answers[0].json()) == same(answers[1].json())

    asyncio.run(check())


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_survives_its_replica_on_every_path(source: ModelSource, llm: LLM, name: str) -> None:
    path, body = ANSWERS[name]

    async def check() -> None:
        async with pooled(source, llm) as calm, pooled(source, llm, dies_after=[4]) as shaken:
            assert same(await shaken.ok(path, body)) == same(await calm.ok(path, body))
        async with pooled(source, llm) as calm, pooled(source, llm, dies_after=[6]) as shaken:
            streams = [await each.post(path, body | {"stream": True}) for each in (shaken, calm)]
            assert folded(streams[0].content) == folded(streams[1].content)
            service = shaken.service
            assert isinstance(service, PooledService)
            assert service.engine.num_replays >= 1  # type: ignore[attr-defined]

    asyncio.run(check())


def test_a_seed_that_was_drawn_is_told_and_gives_the_answer_again(source: ModelSource, llm: LLM) -> None:
    async def check() -> None:
        body = {"prompt": "Once", "max_tokens": 30, "temperature": 1.2, "ignore_eos": True}
        async with pooled(source, llm, dies_after=[5]) as client:
            first = await client.ok("/v1/completions", body)
            reported = first["unspool"]
            assert reported["params"]["seed"]["origin"] == "drawn"
            assert reported["receipt"]["seed"] == reported["choices"][0]["seed"] == reported["params"]["seed"]["value"]
            again = await client.ok("/v1/completions", body | {"seed": reported["receipt"]["seed"]})
            assert again["choices"] == first["choices"]

    asyncio.run(check())


def test_an_answer_tells_its_share_of_its_replicas_hardware(
    source: ModelSource, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Ceilings("a processor", 1, "cpu-test", 1e9, 2e9, 4e9, "2026-01-02T03:04:05Z")
    monkeypatch.setattr("unspool.ceilings.known_ceilings", lambda *_: limits)
    meter = Meter(llm.engine)
    path, body = "/v1/completions", {"prompt": "Once", "max_tokens": 9, "ignore_eos": True, "n": 2}

    async def check() -> None:
        async with pooled(source, llm) as client:
            assert (await client.ok(path, body))["unspool"]["utilization"] is None, "nobody has measured this machine"
            meter.measure(is_alone=False)
            for fake in client.service._transport.fakes:  # type: ignore[attr-defined]
                fake.replica._meter = meter
            reported = [(await client.ok(path, body))["unspool"], (await client.events(path, body))[-2][1]["unspool"]]
            for used in (each["utilization"] for each in reported):
                assert used["weight_bytes"] == llm.engine.steps.costs.weight_bytes()
                assert used["mbu"] > 0

    asyncio.run(check())


def test_full_replicas_answer_429(source: ModelSource, llm: LLM) -> None:
    async def check() -> None:
        async with pooled(source, llm, is_full=True) as client:
            answer = await client.post("/v1/completions", {"prompt": "x"})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(check())


def test_lost_replicas_are_a_named_error(source: ModelSource, llm: LLM) -> None:
    async def check() -> None:
        async with pooled(source, llm, dies_after=[3] * 20) as client:
            answer = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 30, "ignore_eos": True})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "replica_lost"
            assert "5 replicas were lost" in answer.json()["error"]["message"]
        async with pooled(source, llm, dies_after=[6] * 20) as client:
            path, body = ANSWERS["completion"]
            events = await client.events(path, body)
            assert events[-2][1]["error"]["code"] == "replica_lost"

    asyncio.run(check())


def test_pages_of_an_engine_are_asked_of_a_replica(source: ModelSource, llm: LLM) -> None:
    async def check() -> None:
        async with pooled(source, llm) as client:
            single = Client(Service(llm, QUIET))
            for path in ("/v1/capabilities", "/v1/machine"):
                answer = await client.get(path, params={"replica": "two"})
                assert answer.headers["x-unspool-replica"] == "two"
                assert answer.headers["x-unspool-replicas"] == "one,two"
                assert (
                    answer.json() == (await single.get(path)).json() | {"free_memory": answer.json()["free_memory"]}
                    if path == "/v1/machine"
                    else answer.json() == (await single.get(path)).json()
                )
            assert (await client.get("/v1/engine/cache")).json()["num_blocks"] == llm.engine.stats["blocks"]
            wrong = await client.get("/v1/engine/steps", params={"since": "x"})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")
            missing = await client.get("/v1/engine/steps", params={"replica": "three"})
            assert missing.status_code == 404
            assert "there are one, two" in missing.json()["error"]["message"]

    asyncio.run(check())


def test_a_replicas_steps_can_be_followed(source: ModelSource, llm: LLM) -> None:
    async def check() -> None:
        async with pooled(source, llm) as client:
            last = llm.engine.steps.num_steps
            seen: list[int] = []

            async def follow() -> None:
                params = {"follow": "1", "since": str(last - 1)}
                async with client.http.stream("GET", "/v1/engine/steps", params=params) as stream:
                    async for line in stream.aiter_lines():
                        if line.startswith("data: "):
                            seen.extend(step["number"] for step in json.loads(line[6:])["steps"])

            following = asyncio.create_task(follow())
            await client.ok("/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True})
            await client.has_sent("/v1/engine/steps", b'"works"', 5)
            await client.service.engine.shutdown()  # which ends the stream
            async with asyncio.timeout(PATIENCE):
                await following
            assert seen[0] >= last
            assert seen == list(range(seen[0], seen[0] + len(seen)))
            assert len(seen) >= 5

    asyncio.run(check())


def test_spans_go_through_to_the_replica(source: ModelSource, llm: LLM) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = OtelTracer("", "tiny", SimpleSpanProcessor(exporter))

    async def check() -> None:
        fakes = [
            Fake(name, Replica(llm, name=name, tracer=tracer), [3] if name == "one" else []) for name in ("one", "two")
        ]
        service = await start_service(source, QUIET, FakeTransport(fakes))
        client = Client(service, build(service, tracer))
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True}
        answer = await client.post("/v1/completions", body, headers={"traceparent": parent})
        assert answer.status_code == 200
        await service.engine.shutdown()

    asyncio.run(check())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request, lost, whole = (
        next(spans[name] for name in spans if name.startswith(each))
        for each in ("text_completion", "replica one", "replica two")
    )
    assert request.parent is not None
    assert format(request.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    for span in (lost, whole):
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert span.context.trace_id == request.context.trace_id
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.output_tokens"] == 9
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_metrics_are_those_of_every_replica(source: ModelSource, llm: LLM) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async def check() -> None:
        async with pooled(source, llm, dies_after=[4]) as client:
            await client.ok(*ANSWERS["completion"])
            page = (await client.get("/metrics")).text
            single = Client(Service(llm, QUIET))
            await single.ok(*ANSWERS["completion"])
            names = {family.name for family in text_string_to_metric_families((await single.get("/metrics")).text)}
            families = {family.name: family for family in text_string_to_metric_families(page)}
            assert names <= set(families)
            assert set(families) - names == {"unspool:replicas", "unspool:replays"}
            assert [sample.value for sample in families["unspool:replicas"].samples] == [2]
            assert [sample.value for sample in families["unspool:replays"].samples] == [1]
            assert [sample.value for sample in families["unspool:generation_tokens"].samples] == [60]
            usage = families["unspool:kv_cache_usage_perc"].samples
            assert [sample.labels["replica"] for sample in usage] == ["one", "two"]

    asyncio.run(check())


def test_what_several_servers_counted_is_added_up(source: ModelSource, llm: LLM) -> None:
    async def check() -> None:
        async with pooled(source, llm) as one, pooled(source, llm) as two:

            async def peers() -> list[str]:
                return [each.service.counters() for each in (one, two)]  # type: ignore[attr-defined]

            for client, count in ((one, 3), (two, 2)):
                client.service._peers = peers  # type: ignore[attr-defined]
                for _ in range(count):
                    await client.ok("/v1/completions", {"prompt": "x", "max_tokens": 4, "ignore_eos": True})
            for client in (one, two):
                page = (await client.get("/metrics")).text
                name = client.service.name
                assert f'unspool:generation_tokens_total{{model_name="{name}"}} 20.0' in page
                assert f'unspool:time_to_first_token_seconds_count{{model_name="{name}"}} 5.0' in page
                assert 'unspool:http_requests_total{route="/v1/completions",status="200"} 5.0' in page

    asyncio.run(check())


def test_the_ingress_and_its_replicas_must_have_one_model(llm: LLM, tmp_path: Path) -> None:
    other = ModelSource(str(write_model(tmp_path / "other.gguf", seed=1)), None, OPTIONS)

    async def check() -> None:
        with pytest.raises(Exception, match="is not the model of the replicas"):
            await start_service(other, QUIET, FakeTransport([Fake("one", Replica(llm))]))

    asyncio.run(check())

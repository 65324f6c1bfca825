"""Several models in one server: loaded when they are asked for, unloaded for others, and never in each other's way."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.brake import Brake
from tests.server.harness import PATIENCE, Client, parse_events
from unspool.errors import ModelError, RequestError
from unspool.models.random import SHAPES, write_random_gguf
from unspool.server import host as host_module
from unspool.server.app import build
from unspool.server.config import ServerConfig
from unspool.server.host import ModelHost
from unspool.server.hosted import HostedModel, ModelSpec
from unspool.server.service import Service, Workers

OPTIONS = {"device": "cpu", "threads": 1, "kv_tokens": 1024}
ASK = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    paths = {name: directory / f"{name}.gguf" for name in ("ash", "birch", "cedar")}
    for seed, path in enumerate(paths.values()):
        write_random_gguf(path, replace(SHAPES["tiny"], context_length=512), seed=seed)
    return paths


def make_host(files: dict[str, Path], fitting: float | None = None, **config: Any) -> ModelHost:
    """A host of models, of which so many fit into its memory."""
    settings = ServerConfig(**({"log_format": "off", "memory_wait": PATIENCE} | config))
    specs = [ModelSpec((name, f"{name}-alias"), path, options=OPTIONS) for name, path in files.items()]
    models = [HostedModel(spec, settings) for spec in specs]
    budget = None
    if fitting is not None:
        budget = int(fitting * max(model.examine(None).memory for model in models))
    return ModelHost(models, settings, budget if budget is not None else 1 << 40)


def run(host: ModelHost, test: Callable[[Client], Awaitable[None]]) -> None:
    """Run a test against a host; afterwards nobody uses a model, and memory is accounted for."""

    async def main() -> None:
        service: Any = host  # the client hands it to nobody
        client = Client(service, build(host))
        try:
            async with asyncio.timeout(PATIENCE):
                await test(client)
                while any(model.num_users for model in host.models):
                    await asyncio.sleep(0.01)
                held = sum(model.needs.memory for model in host.models if model.needs and model.state == "loaded")
                while host._tasks:
                    await asyncio.sleep(0.01)
                assert host._held == held
        finally:
            await client.http.aclose()
            await host.shutdown()

    asyncio.run(main())


class Hold:
    """Holds up the loading of some models until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.go, self.started = threading.Event(), threading.Event()
        build = HostedModel.build

        def slow(model: HostedModel, workers: Workers) -> Service:
            if model.name in names:
                self.started.set()
                assert self.go.wait(PATIENCE)
            return build(model, workers)

        monkeypatch.setattr(HostedModel, "build", slow)

    async def has_started(self) -> None:
        while not self.started.is_set():
            await asyncio.sleep(0.005)


async def states(client: Client) -> dict[str, str]:
    reported = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model["state"] for model in reported}


async def ask(client: Client, model: str | None, **more: Any) -> str:
    answer = await client.ok("/v1/completions", {**ASK, **({} if model is None else {"model": model}), **more})
    text: str = answer["choices"][0]["text"]
    return text


def test_a_model_is_loaded_when_it_is_asked_for(files: dict[str, Path]) -> None:
    async def test(client: Client) -> None:
        assert await states(client) == {"ash": "unloaded", "birch": "unloaded", "cedar": "unloaded"}
        assert (await client.get("/ready")).status_code == 200
        reported = await client.ok("/v1/completions", {**ASK, "model": "birch-alias"})
        assert reported["model"] == "birch"
        assert await states(client) == {"ash": "unloaded", "birch": "loaded", "cedar": "unloaded"}
        entry = (await client.get("/v1/models/birch-alias")).json()
        assert entry["id"] == "birch-alias"
        assert entry["aliases"] == ["birch"]
        assert entry["max_model_len"] == 512
        assert entry["size_bytes"] > 1000
        assert entry["memory_bytes"] > entry["size_bytes"]
        assert await ask(client, None) == await ask(client, "ash"), "the first one is the default"
        assert await ask(client, "ash") != await ask(client, "birch")

    run(make_host(files), test)


def test_an_unknown_model_is_answered_with_the_nearest_name(files: dict[str, Path]) -> None:
    async def test(client: Client) -> None:
        for path, body in (("/v1/completions", ASK), ("/tokenize", {"prompt": "a"})):
            error = await client.refused(path, {**body, "model": "Brich"}, 404)
            assert error["code"] == "model_not_found"
            assert "'Brich' is not served here; did you mean 'birch'? known: ash, ash-alias, birch" in error["message"]
        assert (await client.get("/v1/models/ahs")).status_code == 404
        assert set((await states(client)).values()) == {"unloaded"}

    run(make_host(files), test)


def test_a_loaded_model_waits_for_no_other(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold(monkeypatch, "birch")

    async def test(client: Client) -> None:
        expected = await ask(client, "ash")
        waiting = [asyncio.create_task(ask(client, "birch")) for _ in range(3)]
        await hold.has_started()
        assert (await states(client))["birch"] == "loading"
        assert [await ask(client, "ash") for _ in range(3)] == [expected] * 3
        assert not any(task.done() for task in waiting)
        hold.go.set()
        assert len(set(await asyncio.gather(*waiting))) == 1

    run(make_host(files), test)


def test_the_least_recently_used_is_unloaded_and_what_is_in_use_stays(files: dict[str, Path]) -> None:
    host = make_host(files, fitting=2.5)

    async def test(client: Client) -> None:
        first = {name: await ask(client, name) for name in ("ash", "birch")}
        await ask(client, "ash")
        await ask(client, "cedar")
        assert await states(client) == {"ash": "loaded", "birch": "unloaded", "cedar": "loaded"}
        long = asyncio.create_task(ask(client, "ash", max_tokens=400, ignore_eos=True))
        while not host.models[0].num_users:
            await asyncio.sleep(0)
        busy = host_module.Lease(host, host.models[0])  # so that ash stays in use, however soon that answer ends
        await ask(client, "cedar")  # used later than ash
        assert await ask(client, "birch") == first["birch"], "the same bits when it is loaded again"
        assert (await states(client))["cedar"] == "unloaded"
        busy.release()
        assert len(await long) > 20
        assert host._held <= (host.budget or 0)

    run(host, test)


def test_a_model_waits_for_memory_in_use_and_gives_up_in_time(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host(files, fitting=1.2, memory_wait=0.3)

    async def test(client: Client) -> None:
        await ask(client, "ash")
        lease = host_module.Lease(host, host.models[0])  # as a request in use of it has
        response = await client.post("/v1/completions", {**ASK, "model": "birch"})
        assert response.status_code == 503
        assert response.headers["retry-after"]
        error = response.json()["error"]
        assert error["code"] == "model_not_loaded"
        assert "do not fit beside 'ash', in use for 0.3 s" in error["message"]
        assert (await states(client))["ash"] == "loaded"
        monkeypatch.setattr(host_module, "RETRY_SECONDS", 0.0)
        host.config = replace(host.config, memory_wait=PATIENCE)
        waiting = asyncio.create_task(ask(client, "birch"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        lease.release()
        assert await waiting
        assert (await states(client)) == {"ash": "unloaded", "birch": "loaded", "cedar": "unloaded"}

    run(host, test)


def test_a_model_that_nobody_waits_for_displaces_nobody(files: dict[str, Path]) -> None:
    host = make_host(files, fitting=1.2)

    async def test(client: Client) -> None:
        await ask(client, "ash")
        busy = host_module.Lease(host, host.models[0])
        waiting = asyncio.create_task(ask(client, "birch"))
        while host.models[1].state != "loading":
            await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.wait([waiting])
        while host.models[1].state != "unloaded":
            await asyncio.sleep(0.005)
        busy.release()
        await asyncio.sleep(0.05)
        assert (await states(client))["ash"] == "loaded"

    run(host, test)


def test_a_model_that_cannot_be_loaded_fails_its_own_requests(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")

    async def test(client: Client) -> None:
        results = await asyncio.gather(*(client.post("/v1/completions", {**ASK, "model": "broken"}) for _ in range(3)))
        for response in results:
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "model_load_failed"
            assert f"the model 'broken' could not be loaded: {broken}" in response.json()["error"]["message"]
        assert await ask(client, "ash")
        entry = (await client.get("/v1/models/broken")).json()
        assert entry["state"] == "failed"
        assert str(broken) in entry["error"]
        assert (await client.get("/health")).status_code == 200
        error = await client.refused("/v1/completions", {**ASK, "model": "broken"}, 500)
        assert error["code"] == "model_load_failed"
        broken.write_bytes(files["birch"].read_bytes())
        monkeypatch.setattr(host_module, "RETRY_SECONDS", 0.0)
        assert await ask(client, "broken") == await ask(client, "birch")

    run(make_host({**files, "broken": broken}), test)


def test_a_model_larger_than_the_memory_is_told_with_numbers(files: dict[str, Path]) -> None:
    async def test(client: Client) -> None:
        error = await client.refused("/v1/completions", {**ASK, "model": "ash"}, 500)
        assert error["code"] == "model_too_large"
        assert "needs" in error["message"]
        assert "KV cache of 1,024 tokens" in error["message"]

    run(make_host(files, fitting=0.5), test)


def test_those_who_wait_are_bounded(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold(monkeypatch, "ash")
    host = make_host(files, max_loading=2)

    async def test(client: Client) -> None:
        waiting = [asyncio.create_task(ask(client, "ash")) for _ in range(2)]
        await hold.has_started()
        while host.models[0].num_waiting < 2:
            await asyncio.sleep(0.005)
        response = await client.post("/v1/completions", {**ASK, "model": "ash"})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"]
        hold.go.set()
        await asyncio.gather(*waiting)

    run(host, test)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_lives_while_its_model_is_loaded(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    hold = Hold(monkeypatch, "ash")

    def failing(model: HostedModel, workers: Workers) -> Service:
        hold.started.set()
        assert hold.go.wait(PATIENCE)
        raise ModelError("ash.gguf: its last tensor is cut")

    if fails:
        monkeypatch.setattr(HostedModel, "build", failing)

    async def test(client: Client) -> None:
        asking = asyncio.create_task(client.post("/v1/completions", {**ASK, "stream": True, "model": "ash"}))
        await hold.has_started()
        await client.has_sent("/v1/completions", b": loading 0%\n\n", 2)
        hold.go.set()
        response = await asking
        assert response.status_code == 200
        assert response.content.count(b": loading 0%\n\n") >= 2
        events = [data for _, data in parse_events(response.content) if data is not None]
        assert events[-1] == "[DONE]"
        if fails:
            [reported] = events[:-1]
            assert reported["error"]["code"] == "model_load_failed"
            assert "its last tensor is cut" in reported["error"]["message"]
        else:
            text = "".join(each["choices"][0]["text"] for each in events[:-1])
            assert text == await ask(client, "ash")

    run(make_host(files, ping_interval=0.05), test)


def test_errors_of_late_streams_have_their_apis_shape(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold(monkeypatch, "ash")
    host = make_host({"ash": files["ash"]}, ping_interval=0.02)
    talk = [{"role": "user", "content": "a"}]

    async def test(client: Client) -> None:
        bodies = {
            "/v1/messages": {"messages": talk, "max_tokens": 4},
            "/v1/responses": {"input": talk},
            "/v1/chat/completions": {"messages": talk},
        }
        asked = [asyncio.create_task(client.post(path, {**body, "stream": True})) for path, body in bodies.items()]
        for path in bodies:
            await client.has_sent(path, b": loading 0%\n\n")
        hold.go.set()  # random models have no template: all are refused now
        found = [[one for one in parse_events((await task).content) if one[1] is not None] for task in asked]
        message = "ash has no chat template"
        [(name, anthropic)], [(other, response)], [(_, chat), (_, done)] = found
        assert (name, anthropic["type"], anthropic["error"]["type"]) == ("error", "error", "invalid_request_error")
        assert (other, response["type"], response["param"]) == ("error", "error", "messages")
        assert chat["error"]["param"] == "messages"
        assert done == "[DONE]"
        for reported in (anthropic["error"], response, chat["error"]):
            assert message in reported["message"]

    run(host, test)


def test_draining_ends_loads_and_lets_answers_finish(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold(monkeypatch, "birch")
    host = make_host(files)

    async def test(client: Client) -> None:
        await ask(client, "ash")
        assert host.models[0].service is not None
        brake = Brake(host.models[0].service.llm.engine)
        running = asyncio.create_task(ask(client, "ash", max_tokens=300, ignore_eos=True))
        while not host.num_open:
            await asyncio.sleep(0.005)
        waiting = asyncio.create_task(client.post("/v1/completions", {**ASK, "model": "birch"}))
        await hold.has_started()
        ending = asyncio.create_task(host.shutdown(PATIENCE))
        await asyncio.sleep(0.05)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        error = await client.refused("/v1/completions", {**ASK, "model": "cedar"}, 503)
        assert error["code"] == "shutting_down"
        hold.go.set()
        brake.release()
        assert len(await running) > 20
        response = await waiting
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        await ending
        assert host.models[1].state == "unloaded"

    run(host, test)


def test_an_unloaded_model_leaves_nothing_behind(files: dict[str, Path]) -> None:
    host = make_host(files, fitting=1.2)

    async def test(client: Client) -> None:
        await ask(client, "ash")
        service = host.models[0].service
        assert service is not None
        known = [weakref.ref(service), weakref.ref(service.llm), weakref.ref(service.llm.engine)]
        del service
        await ask(client, "birch")
        while any(each() is not None for each in known):  # a thread may not have returned yet
            gc.collect()
            await asyncio.sleep(0.005)

    run(host, test)


def test_metrics_have_each_model_and_go_on_after_a_reload(files: dict[str, Path]) -> None:
    host = make_host(files, fitting=1.2)

    def value(page: str, name: str, model: str) -> float:
        [line] = [each for each in page.splitlines() if each.startswith(f'unspool:{name}{{model_name="{model}"')]
        return float(line.split()[-1])

    async def test(client: Client) -> None:
        await ask(client, "ash")
        before = (await client.get("/metrics")).text
        await ask(client, "birch")
        between = (await client.get("/metrics")).text
        await ask(client, "ash")
        after = (await client.get("/metrics")).text
        for page in (before, between, after):
            names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
            assert len(names) == len(set(names)), "each metric once"
        assert value(between, "generation_tokens_total", "ash") == 4
        assert value(after, "generation_tokens_total", "ash") == 8
        assert value(between, "engine_steps_total", "ash") == value(before, "engine_steps_total", "ash") > 0
        assert value(after, "engine_steps_total", "ash") == 2 * value(before, "engine_steps_total", "ash")
        assert [value(page, "model_loaded", "ash") for page in (before, between, after)] == [1, 0, 1]
        assert value(after, "model_loads_total", "ash") == 2
        assert value(after, "model_unloads_total", "ash") == 1

    run(host, test)


def test_one_engine_that_died_is_told_and_others_answer(files: dict[str, Path]) -> None:
    host = make_host(files)

    async def test(client: Client) -> None:
        await ask(client, "ash")
        await ask(client, "birch")
        service = host.models[0].service
        assert service is not None

        def die(engine: Any) -> None:
            raise SystemExit("a panic")

        with pytest.raises(Exception, match="a panic"):
            await service.engine.call_async(die)  # type: ignore[attr-defined]
        error = await client.refused("/v1/completions", {**ASK, "model": "ash"}, 503)
        assert error["code"] == "engine_died"
        assert await ask(client, "birch")
        assert (await client.get("/health")).status_code == 503
        assert (await states(client))["ash"] == "failed"

    run(host, test)


# What is on the command line ----------------------------------------------------------------------------------------
@contextmanager
def spec_of(*arguments: str) -> Iterator[list[ModelSpec]]:
    from unspool.cli.serve import make_parser
    from unspool.cli.served import model_specs

    yield model_specs(make_parser().parse_args(list(arguments)), {})


def test_a_directory_is_its_models(files: dict[str, Path], tmp_path: Path) -> None:
    from unspool.cli.parser import UsageError

    split = tmp_path / "split"
    split.mkdir()
    for part in (1, 2):
        (split / f"oak-0000{part}-of-00002.gguf").write_bytes(b"")
    (tmp_path / "elm").mkdir()
    (tmp_path / "elm" / "config.json").write_text("{}")
    (tmp_path / "mmproj-elm.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "ash.gguf").write_bytes(files["ash"].read_bytes())
    with spec_of("-m", str(tmp_path)) as specs:
        assert [spec.names for spec in specs] == [("ash",), ("elm",), ("oak",)]
    with spec_of("-m", str(files["ash"]), "-m", str(files["birch"])) as specs:
        assert [spec.names for spec in specs] == [("ash",), ("birch",)]
    twice = ("-m", str(tmp_path), "-m", str(files["ash"]))
    with pytest.raises(UsageError, match="two models are called 'ash': "), spec_of(*twice):
        pass
    with pytest.raises(UsageError, match="--name is for one model"), spec_of("-m", str(tmp_path), "--name", "tree"):
        pass
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="holds no model"), spec_of("-m", str(empty)):
        pass


def test_what_cannot_be_loaded_is_told_at_the_start(
    files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from unspool.cli.served import make_host as from_specs

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    config = ServerConfig(log_format="off")
    specs = [ModelSpec((name,), path, options=OPTIONS) for name, path in files.items()]
    with pytest.raises(RequestError, match=r"'ash' needs .* more than the 0.1 MB that --memory allows.*'cedar' needs"):
        from_specs(specs, config, 100_000)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        from_specs([ModelSpec(("broken",), broken, options=OPTIONS)], config, None)
    host = from_specs([*specs, ModelSpec(("broken",), broken, options=OPTIONS)], config, None)
    assert len(host.models) == 4
    with pytest.raises(ModelError, match="does not exist"):
        from_specs([*specs, ModelSpec(("gone",), tmp_path / "gone.gguf", options=OPTIONS)], config, None)


def test_the_budget_holds_what_is_really_taken(files: dict[str, Path]) -> None:
    """The plan's cache is the engine's: nothing is taken that was not counted."""
    settings = ServerConfig(log_format="off")
    options = {"device": "cpu", "threads": 1}
    model = HostedModel(ModelSpec(("ash",), files["ash"], options=options), settings)
    needs = model.examine(50_000_000)
    assert needs.memory <= 50_000_000
    service = model.build(Workers())
    try:
        assert service.llm.engine.config.kv_tokens == needs.kv_tokens
    finally:
        assert service.local is not None
        service.local.close()


def test_options_of_one_model_are_not_for_several(files: dict[str, Path]) -> None:
    from unspool.cli.parser import UsageError
    from unspool.cli.serve import make_parser
    from unspool.cli.served import model_specs

    both = ["-m", str(files["ash"]), "-m", str(files["birch"])]
    with pytest.raises(UsageError, match="--rope-theta is for one model; the configuration file has options for each"):
        model_specs(make_parser().parse_args(both), {"rope_theta": 500.0})
    assert [spec.options for spec in model_specs(make_parser().parse_args(both), {"max_model_len": 100})] == [
        {"max_model_len": 100}
    ] * 2


def test_overrides_are_told(files: dict[str, Path]) -> None:
    settings = ServerConfig(log_format="off")
    options = {**OPTIONS, "rope_theta": 500.0, "max_model_len": 100}
    spec = ModelSpec(("ash",), files["ash"], options=options)
    host = ModelHost([HostedModel(spec, settings)], settings, 1 << 40)

    async def test(client: Client) -> None:
        answer = await client.ok("/v1/completions", ASK)
        assert answer["unspool"]["receipt"]["overrides"] == ["rope_theta=500", "max_model_len=100"]
        reported = (await client.get("/v1/capabilities")).json()
        assert reported["context_length"] == 100
        assert reported["overrides"] == [
            {"option": "rope_theta", "value": "500", "before": "10000"},
            {"option": "max_model_len", "value": "100", "before": "512"},
        ]
        assert (await client.get("/v1/models/ash")).json()["max_model_len"] == 100
        error = await client.refused("/v1/completions", {**ASK, "max_tokens": 200})
        assert error["code"] == "context_length_exceeded"
        assert "100 tokens" in error["message"]

    run(host, test)

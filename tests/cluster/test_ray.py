"""Replicas on a real Ray cluster, killed, stopped, updated and scaled while they answer: `make test-cluster`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="make test-cluster runs these, in an environment that has Ray")

from tests.cluster.harness import ANSWERS, LONG, REFUSED, WHOLE, Asked, folded, same, write_model
from tests.cluster.ray_harness import (
    HANG,
    Cluster,
    Load,
    is_stopped,
    kill,
    processor_time,
    ray_cluster,
    replicas_of,
    stream,
    text_of,
    wait_for,
)
from tests.server.harness import Client
from unspool import LLM
from unspool.models.checkpoint import open_checkpoint
from unspool.server.config import ServerConfig
from unspool.server.service import Service

pytestmark = pytest.mark.cluster
ENGINE = {"threads": 1, "kv_tokens": 16384}
STORY: Asked = ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1900} | LONG)
Expected = dict[str, tuple[Asked, int, Any, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "one.gguf"), write_model(folder / "two.gguf", seed=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> Expected:
    return expected_of(models[0])


def expected_of(model: Path) -> Expected:
    """What a server with one engine answers to each request."""

    async def ask() -> Expected:
        found: Expected = {}
        with LLM(open_checkpoint(model), **ENGINE) as llm:  # type: ignore[arg-type]
            client = Client(Service(llm, ServerConfig(log_format="off", names=("tiny",))))
            for name, (path, body) in (ANSWERS | WHOLE | REFUSED | {"story": STORY}).items():
                answer = await client.post(path, body)
                streamed = None
                if name in ANSWERS or name == "story":
                    streamed = folded((await client.post(path, body | {"stream": True})).content)
                found[name] = (path, body), answer.status_code, same(answer.json()), streamed
        return found

    return asyncio.run(ask())


def story_of(expected: Expected) -> str:
    text: str = expected["story"][2]["choices"][0]["text"]
    return text


@pytest.fixture
def two(cluster: Cluster, models: tuple[Path, Path]) -> Cluster:
    """Two replicas of the first model, whatever a test before did."""
    cluster.run(model=str(models[0]), num_replicas=2, engine=ENGINE)
    cluster.wait_for_replicas(2)
    return cluster


# The same answers ----------------------------------------------------------------------------------------------------
def test_answers_and_errors_are_the_single_servers(two: Cluster, expected: Expected) -> None:
    with two.client() as client:
        for name, (asked, status, body, streamed) in expected.items():
            answer = client.post(asked[0], json=asked[1])
            assert (answer.status_code, same(answer.json())) == (status, body), name
            if streamed is not None:
                assert folded(stream(client, asked)) == streamed, name
        assert client.get("/nothing").json()["error"]["message"] == "there is nothing at /nothing"
        assert client.get("/v1/completions").status_code == 405
        assert client.post("/v1/completions", content=b"{").json()["error"]["code"] == "unsupported_type"
        for path in (
            "/health",
            "/ready",
            "/v1/models",
            "/openapi.json",
            "/docs",
            "/v1/engine/cache",
            "/v1/capabilities",
        ):
            assert client.get(path).status_code == 200, path


def test_keys_are_asked_for(cluster: Cluster, models: tuple[Path, Path]) -> None:
    cluster.run(model=str(models[0]), engine=ENGINE, server={"api_keys": ["sk-one"]})
    with cluster.client() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer sk-one"}).status_code == 200


def test_a_client_that_leaves_ends_its_request(two: Cluster) -> None:
    with two.client() as client, client.stream("POST", STORY[0], json=STORY[1] | {"stream": True}) as response:
        next(response.iter_bytes())
    wait_for("the request's end", lambda: two.metric("num_requests_running") == 0)
    assert two.metric("request_success_total", finished_reason="abort") >= 1


def test_full_replicas_answer_429(cluster: Cluster, models: tuple[Path, Path]) -> None:
    cluster.run(model=str(models[0]), engine=ENGINE | {"max_running": 1, "max_waiting": 1})
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(cluster.ask(STORY))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1


# Losing replicas -----------------------------------------------------------------------------------------------------
def busiest(before: dict[int, int]) -> int:
    """The replica that has computed most since."""
    return max(before, key=lambda process: processor_time(process) - before[process])


def test_a_stream_survives_its_replica(two: Cluster, expected: Expected) -> None:
    def lose() -> None:
        kill(busiest(before))

    replays = two.metric("replays_total")
    with two.client() as client:
        for chunk in (1, 30, 200):
            two.wait_for_replicas(2)
            before = {process: processor_time(process) for process in replicas_of("Engine")}
            assert text_of(stream(client, STORY, {chunk: lose})) == story_of(expected)
    assert two.metric("replays_total") > replays


def test_a_stream_survives_all_replicas_even_while_they_load(two: Cluster, expected: Expected) -> None:
    killed: list[int] = []

    def lose_all() -> None:
        killed.extend(replicas_of("Engine"))
        for process in killed:
            kill(process)
        threading.Thread(target=lose_the_next).start()

    def lose_the_next() -> None:
        fresh = wait_for("a new replica", lambda: set(replicas_of("Engine")) - set(killed))
        time.sleep(0.3)  # while it loads
        for process in fresh:
            kill(process)
            killed.append(process)

    with two.client() as client:
        assert text_of(stream(client, STORY, {50: lose_all})) == story_of(expected)
    assert len(killed) >= 3


def test_a_hung_replica_is_noticed_and_replaced(two: Cluster, expected: Expected) -> None:
    hung: list[int] = []

    def stop() -> None:
        hung.append(busiest(before))
        kill(hung[0], signal.SIGSTOP)

    before = {process: processor_time(process) for process in replicas_of("Engine")}
    with two.client() as client:
        assert text_of(stream(client, STORY, {30: stop})) == story_of(expected)
        assert is_stopped(hung[0]) or hung[0] not in replicas_of("Engine")
        for _ in range(20):  # which do not wait for the hung one again
            assert text_of(stream(client, STORY)) == story_of(expected)
    wait_for("the end of the hung process", lambda: hung[0] not in replicas_of("Engine"))
    two.wait_for_replicas(2)


def test_a_thousand_requests_survive_random_kills(two: Cluster, expected: Expected) -> None:
    load, done, rng = Load(two, expected, seed=3), threading.Event(), random.Random(4)
    replays = two.metric("replays_total")
    killed: list[int] = []

    def disturb() -> None:
        """Kill a replica, sometimes one that loads, once there is another to go on with."""
        while not done.wait(rng.uniform(0.2, 2.0)):
            running = replicas_of("Engine")
            if two.metric("replicas") >= 2 or (len(running) > 1 and rng.random() < 0.2):
                killed.append(rng.choice(running))
                kill(killed[-1])

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    total = 0
    try:
        while total < 1000 or len(killed) < 8:  # on a slow machine replicas come back slowly
            load.run(200, threads=12)
            total += 200
    finally:
        done.set()
        disturbing.join()
    assert not load.wrong, "\n".join(load.wrong[:20])
    assert load.num_right == total
    assert two.metric("replays_total") > replays
    print(f"{total} requests, {len(killed)} kills, {two.metric('replays_total') - replays:g} answers computed again")


def test_a_killed_ingress_serves_again(two: Cluster, expected: Expected) -> None:
    (ingress,) = replicas_of("Ingress")
    with two.client() as client, pytest.raises(httpx.RemoteProtocolError):  # as documented
        stream(client, STORY, {20: lambda: kill(ingress)})

    def serves() -> bool:
        try:
            return two.ask(STORY).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for("an answer", serves)
    assert two.ask(STORY).json()["choices"][0]["text"] == story_of(expected)
    assert replicas_of("Ingress") != [ingress]
    wait_for("the end of the lost stream", lambda: two.metric("num_requests_running") == 0)


# Changing ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("replicas", "surge"),
    [(2, 100), (1, 0)],
    ids=["new replicas start first", "the old replica ends first, and requests wait"],
)
def test_an_update_of_the_model_loses_no_request(
    cluster: Cluster, models: tuple[Path, Path], expected: Expected, replicas: int, surge: int
) -> None:
    cluster.run(model=str(models[0]), num_replicas=replicas, engine=ENGINE)
    cluster.wait_for_replicas(replicas)
    second = expected_of(models[1])
    texts = {one["story"][2]["unspool"]["receipt"]["model"]: story_of(one) for one in (expected, second)}
    done = threading.Event()
    seen: list[str] = []
    problems: list[str] = []

    def ask() -> None:
        while not done.is_set():
            answer = cluster.ask(STORY)
            if answer.status_code != 200:
                problems.append(answer.text)
                continue
            reported = answer.json()
            model = reported["unspool"]["receipt"]["model"]
            seen.append(model)
            if reported["choices"][0]["text"] != texts[model]:
                problems.append(f"a text that is not of {model}")

    def ask_streaming() -> None:
        with cluster.client() as client:
            while not done.is_set():
                try:
                    if text_of(stream(client, STORY)) not in texts.values():
                        problems.append("a streamed text that is of neither model")
                except (httpx.HTTPError, AssertionError) as error:
                    problems.append(f"a stream: {type(error).__name__}: {error}")

    asking = [threading.Thread(target=target) for target in (ask, ask, ask_streaming)]
    for thread in asking:
        thread.start()
    try:
        cluster.run(model=str(models[1]), num_replicas=replicas, engine=ENGINE, surge=surge)
        wait_for("answers of the new model", lambda: len(set(seen[-20:])) == 1 and seen[-1] != seen[0])
    finally:
        done.set()
        for thread in asking:
            thread.join()
    assert problems == []
    assert set(seen) == set(texts)


def test_answers_that_outlast_the_drain_of_an_update_end_with_a_named_error(
    cluster: Cluster, models: tuple[Path, Path], expected: Expected
) -> None:
    engine, drain = ENGINE | {"max_running": 1, "max_waiting": 200}, 6.0
    cluster.run(model=str(models[0]), engine=engine, drain=drain)
    answers: list[httpx.Response] = []
    asking = [threading.Thread(target=lambda: answers.append(cluster.ask(STORY))) for _ in range(120)]
    for thread in asking:
        thread.start()
    wait_for("a full queue", lambda: cluster.metric("num_requests_waiting") > 80)
    cluster.run(model=str(models[0]), engine=engine, drain=drain, server={"ping_interval": 9.0})  # a new ingress only
    for thread in asking:
        thread.join()
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == story_of(expected)
        else:
            assert answer.json()["error"]["code"] == "replica_lost"
            assert "not done in the time to drain" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
    wait_for("the end of their requests", lambda: cluster.metric("num_requests_running") == 0)
    assert cluster.ask(STORY).status_code == 200


def test_receipts_name_the_version_of_the_code(two: Cluster, models: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import unspool.version\nunspool.version.VERSION = '9.9.9'\n")
    environment = {
        "env_vars": {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.getenv("PYTHONPATH")])])}
    }
    before = two.ask(STORY).json()
    two.run(model=str(models[0]), num_replicas=2, engine=ENGINE, surge=100, runtime_env=environment)
    wait_for("the new version", lambda: two.ask(STORY).json()["unspool"]["receipt"]["version"] == "9.9.9")
    after = two.ask(STORY).json()
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert after["system_fingerprint"] != before["system_fingerprint"]


def test_load_brings_replicas_and_idleness_ends_them(
    cluster: Cluster, models: tuple[Path, Path], expected: Expected
) -> None:
    cluster.run(
        model=str(models[0]), engine=ENGINE, min_replicas=1, max_replicas=2,
        target_requests=2, upscale_delay=0.5, downscale_delay=2.0,
    )  # fmt: skip
    wait_for("one replica", lambda: cluster.metric("replicas") == 1)
    load, done = Load(cluster, {"story": expected["story"]}, seed=1), threading.Event()

    def ask() -> None:
        while not done.is_set():
            load.run(24, threads=12)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        cluster.wait_for_replicas(2)
    finally:
        done.set()
        asking.join()
    wait_for("one replica", lambda: cluster.metric("replicas") == 1 and len(replicas_of("Engine")) == 1)
    assert load.wrong == []
    assert cluster.metric("replays_total") == 0, "a replica that is to go first answers what it has begun"


def test_the_command_runs_and_tells_and_ends_an_application(
    cluster: Cluster, models: tuple[Path, Path], expected: Expected
) -> None:
    import ray

    cluster.stop()
    (app := models[0].parent / "app.yaml").write_text(
        "model: one.gguf\ncpus: 0.01\nengine: {threads: 1, kv_tokens: 16384}\n"
        "server: {names: [tiny], log_format: 'off'}\n"
    )
    address = ray.get_runtime_context().gcs_address

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unspool", "cluster", *arguments, "--address", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)

    nothing = run("--stop")
    assert (nothing.returncode, nothing.stderr) == (2, "unspool: no application 'unspool' runs there\n")
    assert json.loads(run("--status").stdout) == {"status": "NOT_STARTED"}
    deployed = run(str(app), "--prefix", "/llm")
    assert deployed.returncode == 0, deployed.stderr
    assert "/llm/v1" in deployed.stdout
    reported = json.loads(run("--status").stdout)
    assert reported["status"] == "RUNNING"
    assert reported["deployments"]["Engine"]["replicas"] == {"RUNNING": 1}
    path, body = STORY
    answer = httpx.post(f"{cluster.url}/llm{path}", json=body, timeout=HANG)
    assert answer.json()["choices"][0]["text"] == story_of(expected)
    assert run("--stop").returncode == 0
    wait_for("the end of the replicas", lambda: not replicas_of("Engine"))


def test_several_ingresses_have_one_page_of_metrics(cluster: Cluster, models: tuple[Path, Path]) -> None:
    cluster.stop()
    cluster.run(model=str(models[0]), engine=ENGINE, num_ingresses=2)
    assert len(replicas_of("Ingress")) == 2
    for _ in range(20):
        assert cluster.ask(("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})).status_code == 200
    for _ in range(5):  # whichever is asked
        assert cluster.metric("generation_tokens_total") == 60
        assert cluster.metric("http_requests_total", route="/v1/completions") == 20


def test_a_model_that_cannot_be_loaded_is_told(cluster: Cluster, tmp_path: Path) -> None:
    from unspool.errors import EngineError

    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    cluster.stop()
    with pytest.raises(EngineError, match=r"could not be deployed: .*bad\.gguf"):
        cluster.run(model=str(bad), engine=ENGINE)
    cluster.stop()

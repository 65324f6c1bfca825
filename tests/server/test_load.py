"""Under load and among bad neighbours: nobody harms another, nothing is lost, memory is bounded."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from tests.brake import Brake
from tests.server.harness import PATIENCE, Client, Live, in_process, make_llm, parse_events, wait_until
from unspool.llm import LLM
from unspool.server.config import ServerConfig

LONG = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def raw_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data


def read_until(connection: socket.socket, mark: bytes, most: int = 1 << 20) -> bytes:
    data = b""
    while mark not in data and len(data) < most:
        piece = connection.recv(4096)
        if not piece:
            break
        data += piece
    return data


def finished(server: Live) -> dict[str, int]:
    return dict(server.service.llm.engine.finished)


def braked(**options: Any) -> LLM:
    """A model whose engine computes a few steps and then none, so that no answer ends of itself."""
    llm = make_llm(**options)
    Brake(llm.engine)
    return llm


def test_a_disconnect_cancels_a_stream(make_server: Callable[..., Live]) -> None:
    server = make_server(braked())
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(raw_request(LONG))
        read_until(connection, b"data: ")
    server.wait_idle()
    assert finished(server) == {"abort": 1}
    assert server.service.llm.engine.stats["blocks_free"] == server.service.llm.engine.stats["blocks"]


def test_a_disconnect_cancels_a_whole_answer(make_server: Callable[..., Live]) -> None:
    server = make_server(braked())
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(raw_request(LONG | {"stream": False, "n": 3}))
        wait_until(lambda: server.service.llm.engine.stats["running"])
    server.wait_idle()
    assert finished(server) == {"abort": 3}


def test_half_a_body_costs_nothing(make_server: Callable[..., Live]) -> None:
    server = make_server(read_timeout=0.3)
    whole = raw_request(LONG)
    connections = []
    for cut in (10, 60, len(whole) - 20, len(whole) - 1):
        connection = socket.create_connection(server.address, timeout=PATIENCE)
        connection.sendall(whole[:cut])
        connections.append(connection)
    connections.pop().close()  # one leaves in the middle
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE).status_code == 200
    assert read_until(connections[-1], b"request_timeout").startswith(b"HTTP/1.1 408")
    for connection in connections:
        connection.close()
    server.wait_idle()


def test_a_reader_that_stands_still_is_cut(make_server: Callable[..., Live]) -> None:
    server = make_server(stall_timeout=0.3)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(server.address)
        wide = LONG | {"n": 16, "logprobs": 20, "max_tokens": 400}
        connection.sendall(raw_request(wide))
        other = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 64}, timeout=PATIENCE)
        assert other.status_code == 200
        server.wait_idle()
        # The answer may be ready before its reader has stood still for long enough.
        wait_until(lambda: not server.server.server_state.connections)
        data = read_until(connection, b"[DONE]", 1 << 30)
    assert b"[DONE]" not in data


def test_a_slow_reader_gets_everything(server: Live) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(server.address)
        connection.sendall(
            raw_request({"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5})
        )
        data = read_until(connection, b"data: ")
        server.wait_idle()  # the engine never waits for it
        data += read_until(connection, b"[DONE]\n\n", 1 << 30)
    body = data.split(b"\r\n\r\n", 1)[1]
    assert body.count(b"data: ") > 100
    assert b'"finish_reason":"length"' in body


def test_framing_on_the_wire(server: Live) -> None:
    body = {**LONG, "max_tokens": 50}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        data = b"".join(answer.iter_bytes())
    events = parse_events(data)
    assert events[-1][1] == "[DONE]"
    server.wait_idle()


def test_silence_is_filled(make_server: Callable[..., Live]) -> None:
    """While others are served first, a queued stream still says that it lives."""
    server = make_server(braked(max_running=1), ping_interval=0.05)
    with (
        socket.create_connection(server.address, timeout=PATIENCE) as first,
        socket.create_connection(server.address, timeout=PATIENCE) as second,
    ):
        first.sendall(raw_request(LONG))
        read_until(first, b"data: ")
        second.sendall(raw_request(LONG))
        assert b": still here" in read_until(second, b": still here")


def test_a_full_queue_is_told(make_server: Callable[..., Live]) -> None:
    llm = make_llm(max_running=1, max_waiting=2)
    brake = Brake(llm.engine)
    server = make_server(llm)
    connections = []
    for _ in range(3):
        connection = socket.create_connection(server.address, timeout=PATIENCE)
        connection.sendall(raw_request(LONG))
        read_until(connection, b"HTTP/1.1 200 OK")
        connections.append(connection)
        wait_until(lambda: server.service.llm.engine.stats["running"] == 1)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    for connection in connections:
        connection.close()
    server.wait_idle()
    brake.release()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE).status_code == 200


def test_a_burst_is_taken_as_far_as_it_can_run_or_wait() -> None:
    async def test(client: Client) -> None:
        """All six arrive before the engine's thread takes its next step."""
        driver, gate = client.service.llm.driver, threading.Event()
        waits = asyncio.create_task(driver.call_async(lambda _: gate.wait(PATIENCE)))
        ask = {"prompt": "a", "max_tokens": 4}
        burst = [asyncio.create_task(client.post("/v1/completions", ask)) for _ in range(6)]
        while driver._calls.qsize() < 6:
            await asyncio.sleep(0.005)
        gate.set()
        statuses = [answer.status_code for answer in await asyncio.gather(*burst)]
        assert sorted(statuses) == [200] * 3 + [429] * 3
        await waits

    in_process(test, llm=make_llm(max_running=1, max_waiting=2))


def test_a_deadline_ends_honestly() -> None:
    async def test(client: Client) -> None:
        answer = await client.ok("/v1/completions", {**LONG, "stream": False, "deadline_ms": 30})
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        assert answer["unspool"]["choices"][0]["finish_reason"] == "deadline"
        assert answer["usage"]["completion_tokens"] < 1500
        assert len(answer["unspool"]["choices"]) == 1

    in_process(test, llm=braked())


def test_stopping_ends_streams_honestly(make_server: Callable[..., Live]) -> None:
    server = make_server(braked(), drain=0.0)
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(raw_request(LONG))
        read_until(connection, b"data: ")
        server.server.should_exit = True
        data = read_until(connection, b"[DONE]\n\n", 1 << 30)
    assert b'"finish_reason":"abort"' in data
    assert b"[DONE]" in data


def test_draining_lets_answers_finish_and_takes_no_more(make_server: Callable[..., Live]) -> None:
    llm = make_llm()
    brake = Brake(llm.engine)
    server = make_server(llm, drain=PATIENCE)
    with (
        socket.create_connection(server.address, timeout=PATIENCE) as running,
        socket.create_connection(server.address, timeout=PATIENCE) as late,
    ):
        [listening] = server.server.servers[0].sockets
        running.sendall(raw_request({**LONG, "max_tokens": 300}))
        read_until(running, b"data: ")
        late.sendall(raw_request({"prompt": "a"})[:20])  # connected before, asks after
        server.server.should_exit = True
        wait_until(lambda: server.service.state != "ready")
        brake.release()
        data = read_until(running, b"[DONE]\n\n", 1 << 30)
    assert b'"finish_reason":"length"' in data
    server.stop()
    assert not server.service.llm.engine.has_work
    assert listening.fileno() == -1, "it listens no more"


def test_while_draining_probes_and_new_work_are_answered(make_server: Callable[..., Live]) -> None:
    server = make_server(braked(), drain=PATIENCE)
    with socket.create_connection(server.address, timeout=PATIENCE) as running:
        running.sendall(raw_request(LONG))
        read_until(running, b"data: ")
        server.server.should_exit = True
        wait_until(lambda: server.service.state != "ready")
        ready, health = (httpx.get(f"{server.url}/{path}", timeout=PATIENCE) for path in ("ready", "health"))
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers


def test_a_second_signal_ends_the_drain(make_server: Callable[..., Live]) -> None:
    server = make_server(braked(), drain=600.0)
    with socket.create_connection(server.address, timeout=PATIENCE) as running:
        running.sendall(raw_request(LONG))
        read_until(running, b"data: ")
        server.server.should_exit = True
        wait_until(lambda: server.service.state != "ready")
        server.server.force_exit = True
        data = read_until(running, b"[DONE]\n\n", 1 << 30)
    assert b'"finish_reason":"abort"' in data


def test_a_thousand_requests_with_random_aborts(make_server: Callable[..., Live]) -> None:
    server = make_server(make_llm(kv_tokens=2048, max_running=48, step_tokens=256))
    rng = random.Random(11)
    job = _job(random.Random(0)) | {"stream": False, "n": 1}
    alone = httpx.post(f"{server.url}/v1/completions", json=job, timeout=PATIENCE).json()

    async def one(http: httpx.AsyncClient, seed: int) -> str:
        own = random.Random(seed)
        body = _job(own)
        leaves_after = own.randrange(8) if own.random() < 0.5 else None
        path = own.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
        try:
            async with asyncio.timeout(own.uniform(0.001, 0.3) if own.random() < 0.2 else PATIENCE):
                async with http.stream("POST", server.url + path, json=_as(path, body)) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    count = 0
                    async for _ in answer.aiter_lines():
                        count += 1
                        if count == leaves_after:
                            return "left"
        except TimeoutError:
            return "cancelled"
        return "done"

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE) as http:
            gate = asyncio.Semaphore(64)

            async def gated(seed: int) -> str:
                async with gate:
                    return await one(http, seed)

            return await asyncio.gather(*(gated(rng.randrange(1 << 30)) for _ in range(1000)))

    outcomes = asyncio.run(run())
    assert outcomes.count("done") > 200
    assert outcomes.count("left") > 100
    server.wait_idle()
    server.service.llm.engine.check()
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'unspool:{gauge}{{model_name="{server.service.name}"}} 0.0' in page
    again = httpx.post(f"{server.url}/v1/completions", json=job, timeout=PATIENCE).json()
    assert again["choices"] == alone["choices"]


def _job(rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": "ab" * rng.randrange(1, 60),
        "max_tokens": rng.randrange(1, 40),
        "temperature": rng.choice([0, 1, 1.5]),
        "seed": rng.randrange(100),
        "n": rng.choice([1, 1, 1, 3]),
        "stream": rng.random() < 0.7,
    }


def _as(path: str, job: dict[str, Any]) -> dict[str, Any]:
    """The same job in a path's own dialect."""
    job = dict(job)
    messages = [{"role": "user", "content": job["prompt"]}]
    if path == "/v1/completions":
        return job
    del job["prompt"]
    if path == "/v1/chat/completions":
        return job | {"messages": messages}
    del job["n"]
    if path == "/v1/messages":
        return job | {"messages": messages}
    return job | {"input": messages, "max_output_tokens": job.pop("max_tokens")}


def test_bodies_are_bounded_together() -> None:
    async def test(client: Client) -> None:
        async def slow(body: bytes) -> Any:
            yield body[:4000]
            await asyncio.sleep(0.2)
            yield body[4000:]

        def body() -> bytes:
            return json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 7000}).encode()

        kind = {"content-type": "application/json"}
        answers = await asyncio.gather(
            *(client.http.post("/v1/completions", content=slow(body()), headers=kind) for _ in range(5))
        )
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses[0] == 200
        assert statuses[-1] == 429

    in_process(test, ServerConfig(max_bodies=10_000, log_format="off"))


def test_a_bad_neighbour_harms_nobody() -> None:
    """NaN logits, a grammar that explodes, a schema without an end: each is its own request's failure."""

    async def test(client: Client) -> None:
        runner = client.service.llm.engine.runner
        whole = runner.run

        def poisoned(plan: Any) -> Any:
            logits = np.array(whole(plan))
            row = 0
            for work in plan.works:
                if 90 in work.tokens:  # a Z in the prompt
                    logits[row : row + work.num_logits] = float("nan")
                row += work.num_logits
            return logits

        runner.run = poisoned  # type: ignore[method-assign]
        good = {"prompt": "hello", "max_tokens": 20, "seed": 1}
        alone = await client.ok("/v1/completions", good)
        bad: list[tuple[dict[str, Any], int]] = [
            ({"prompt": "Z", "max_tokens": 3}, 500),
            ({"prompt": "a", "constraint": {"kind": "regex", "value": "((a{1,900}){1,900}){1,900}"}}, 400),
            ({"prompt": "a", "constraint": {"kind": "grammar", "value": "start: start start"}}, 400),
            ({"prompt": "a", "constraint": {"kind": "json_schema", "value": {"$ref": "#"}}}, 400),
        ]
        answers = await asyncio.gather(
            *(client.post("/v1/completions", good) for _ in range(4)),
            *(client.post("/v1/completions", body) for body, _ in bad),
        )
        for answer in answers[:4]:
            assert answer.json()["choices"] == alone["choices"]
        assert [answer.status_code for answer in answers[4:]] == [status for _, status in bad]

    in_process(test)

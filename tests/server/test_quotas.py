"""Limits of keys: buckets, what requests reserve and give back, headers, refusals, metrics."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.brake import Brake
from tests.server.harness import CONTEXT, PATIENCE, Client, Live, in_process, make_llm, wait_until
from unspool.server.config import ServerConfig
from unspool.server.faults import HTTPFault
from unspool.server.host import host_of
from unspool.server.quotas import MINUTE, UNSTATED_TOKENS, Account, Bucket, KeyCounts, Limits, duration

SECOND = 10**9
PROMPT = [5, 6, 7]  # three tokens
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "seed": 7}
COMPLETIONS = "/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


# Buckets ------------------------------------------------------------------------------------------------------------
def test_a_bucket_fills_evenly_within_a_minute() -> None:
    bucket = Bucket(6, 0)
    assert bucket.wait(6, 0) == 0
    bucket.take(6, 0)
    assert bucket.remaining(0) == 0
    assert bucket.wait(1, 0) == 10 * SECOND
    assert bucket.remaining(10 * SECOND - 1) == 0
    assert bucket.remaining(10 * SECOND) == 1
    assert bucket.wait(6, 10 * SECOND) == 50 * SECOND
    assert bucket.remaining(MINUTE) == 6
    assert bucket.remaining(100 * MINUTE) == 6


def test_a_bucket_may_owe_and_holds_no_more_than_its_limit() -> None:
    bucket = Bucket(60, 0)
    bucket.take(90, 0)
    assert bucket.remaining(0) == 0
    assert bucket.wait(1, 0) == 31 * SECOND
    bucket.take(-1000, 0)
    assert bucket.remaining(0) == 60


def test_another_limit_keeps_what_was_used() -> None:
    bucket = Bucket(10, 0)
    bucket.take(4, 0)
    bucket.resize(20, 0)
    assert bucket.remaining(0) == 16
    bucket.resize(3, 0)
    assert bucket.remaining(0) == 0
    assert bucket.wait(1, 0) == 2 * MINUTE // 3


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_to_rounding(seed: int) -> None:
    """However often somebody looks, a bucket has what was filled in less what was taken."""
    rng, now, taken = random.Random(seed), 0, 0
    limit = rng.choice([1, 7, 1000, 10**12 - 1])
    bucket = Bucket(limit, 0)
    bucket.take(limit, 0)
    while now < MINUTE // 2:
        now += rng.randrange(SECOND)
        if (left := bucket.remaining(now)) and rng.random() < 0.3:
            bucket.take(left, now)
            taken += left
        assert taken + bucket.remaining(now) == limit * min(now, MINUTE) // MINUTE


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0s"), (1, "1ms"), (20_000_000, "20ms"), (8_640_000_000, "8.64s"), (60 * SECOND, "1m0s"),
     (366_500_000_000, "6m6.5s"), (3_723 * SECOND, "1h2m3s")],
)  # fmt: skip
def test_durations_are_written_as_openai_does(nanoseconds: int, text: str) -> None:
    assert duration(nanoseconds) == text


# Accounts -----------------------------------------------------------------------------------------------------------
def account(clock: Clock, **limits: int) -> Account:
    return Account("x", Limits(**limits), KeyCounts(), clock)


def test_requests_are_refused_beyond_the_limit_and_taken_when_it_has_filled() -> None:
    clock = Clock()
    held = account(clock, requests_per_minute=2)
    for _ in range(2):
        held.admit(1).end()
    with pytest.raises(HTTPFault, match=r"requests per minute is reached: limit 2, left 0, asked for 1$") as raised:
        held.admit(1)
    fault = raised.value
    assert (fault.status, fault.code, fault.type) == (429, "rate_limit_exceeded", "requests")
    assert fault.headers == {"retry-after": "30"}
    clock.now += 30 * SECOND - 1
    with pytest.raises(HTTPFault):
        held.admit(1)
    clock.now += 1
    held.admit(1).end()
    assert held.counts.num_requests == 5
    assert held.counts.num_refused == {"requests": 2, "tokens": 0, "concurrency": 0}


def test_requests_at_once() -> None:
    held = account(Clock(), concurrent_requests=1, requests_per_minute=2)
    first = held.admit(1)
    with pytest.raises(HTTPFault, match="may have 1 requests at once") as raised:
        held.admit(3)
    assert (raised.value.type, raised.value.headers) == ("requests", {"retry-after": "3"})
    first.end()
    first.end()
    assert held.num_running == 0
    held.admit(1).end()  # the refused one did not count


# The server ---------------------------------------------------------------------------------------------------------
class Keyed:
    """A key's file, its account's clock, and requests with the key."""

    def __init__(self, tmp_path: Path, limits: str) -> None:
        self.file = tmp_path / "keys"
        self.file.write_text(f"sk-a name=ann {limits}\nsk-free\n")
        self.config = ServerConfig(api_key_file=str(self.file), log_format="off")
        self.headers = {"authorization": "Bearer sk-a"}
        self.clock = Clock()

    def account(self, client: Client) -> Account:
        ring = host_of(client.service).keys
        found = ring.match("sk-a")
        assert found is not None
        found._clock = self.clock
        for bucket in found._buckets.values():
            bucket._at = 0
        return found

    async def post(self, client: Client, body: Any = BODY, path: str = COMPLETIONS, status: int = 200) -> Any:
        answer = await client.post(path, body, headers=self.headers)
        assert answer.status_code == status, answer.text
        return answer


def limited(tmp_path: Path, limits: str, test: Callable[[Client, Keyed, Account], Any]) -> None:
    keyed = Keyed(tmp_path, limits)

    async def run(client: Client) -> None:
        await test(client, keyed, keyed.account(client))

    in_process(run, keyed.config)


def left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_every_answer_of_a_limited_key_tells_its_limits(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        done = await keyed.post(client)
        assert done.json()["usage"]["total_tokens"] == 7
        limits = {name: value for name, value in done.headers.items() if "ratelimit" in name}
        assert limits == {
            "x-ratelimit-limit-requests": "3",
            "x-ratelimit-remaining-requests": "2",
            "x-ratelimit-reset-requests": "20s",
            "x-ratelimit-limit-tokens": "600",
            "x-ratelimit-remaining-tokens": "593",
            "x-ratelimit-reset-tokens": "700ms",
        }
        wrong = await keyed.post(client, {**BODY, "top_p": 7}, status=400)
        assert wrong.headers["x-ratelimit-remaining-requests"] == "1"
        read = await client.get("/v1/models", headers=keyed.headers)
        assert read.headers["x-ratelimit-remaining-requests"] == "1", "what is read counts as no request"
        for answer in (await client.get("/v1/models"), await client.get("/health")):
            assert not [name for name in answer.headers if "ratelimit" in name]
        free = await client.post(COMPLETIONS, BODY, headers={"authorization": "Bearer sk-free"})
        assert not [name for name in free.headers if "ratelimit" in name]

    limited(tmp_path, "requests_per_minute=3 tokens_per_minute=600", test)


def test_a_refusal_has_openais_body_and_retry_after(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        await keyed.post(client)
        refused = await keyed.post(client, status=429)
        assert refused.headers["retry-after"] == "60"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
        keyed.clock.now += 60 * SECOND
        await keyed.post(client)

    limited(tmp_path, "requests_per_minute=1", test)


def test_anthropics_paths_have_anthropics_words(tmp_path: Path) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}

    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        keyed.headers = {"x-api-key": "sk-a"}
        done = await keyed.post(client, body, "/v1/messages")
        usage = done.json()["usage"]
        used = usage["input_tokens"] + usage["output_tokens"]
        limits = {name: value for name, value in done.headers.items() if "ratelimit" in name}
        resets = {name: limits.pop(name) for name in list(limits) if name.endswith("-reset")}
        assert limits == {
            "anthropic-ratelimit-requests-limit": "1",
            "anthropic-ratelimit-requests-remaining": "0",
            "anthropic-ratelimit-tokens-limit": "500",
            "anthropic-ratelimit-tokens-remaining": str(500 - used),
        }
        assert set(resets) == {"anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-reset"}
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", moment) for moment in resets.values())
        refused = await keyed.post(client, body, "/v1/messages", status=429)
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "60"

    limited(tmp_path, "requests_per_minute=1 tokens_per_minute=500", test)


def test_tokens_are_reserved_before_and_settled_after(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        """Of 100 tokens: 3 of the prompt and up to 90 of the answer, which a stop ends after some."""
        first = await keyed.post(client, {**BODY, "max_tokens": 90, "return_token_ids": True})
        ids = first.json()["choices"][0]["token_ids"]
        assert left(first) == 7
        refused = await keyed.post(client, status=429, body={**BODY, "max_tokens": 5})
        assert refused.json()["error"]["type"] == "tokens"
        assert "limit 100, left 7, asked for 8" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"  # of 0.6 s
        keyed.clock.now = MINUTE
        stopped = await keyed.post(client, {**BODY, "max_tokens": 90, "stop_token_ids": ids[3:4]})
        assert left(stopped) == 100 - stopped.json()["usage"]["total_tokens"] > 7
        keyed.clock.now = 2 * MINUTE
        for _ in range(2):
            await keyed.post(client, {**BODY, "max_tokens": 98}, status=429)
        many = await keyed.post(client, {"prompt": [PROMPT, [8]], "max_tokens": 5, "n": 2, "ignore_eos": True})
        assert left(many) == 100 - 3 - 1 - 4 * 5

    limited(tmp_path, "tokens_per_minute=100", test)


def test_what_can_never_be_admitted_is_told_so(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        refused = await keyed.post(client, {**BODY, "max_tokens": 18}, status=429)
        assert "asked for 21; no request can have as many: a smaller max_tokens" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert left(refused) == 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "5", "it does not count as a request"

    limited(tmp_path, "tokens_per_minute=20 requests_per_minute=5", test)


def test_an_answer_without_a_length_reserves_some_and_may_owe(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}

    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        bucket = account._buckets["tokens"]
        taken: list[int] = []
        take = bucket.take
        bucket.take = lambda amount, now: (taken.append(amount), take(amount, now))[1]  # type: ignore[method-assign]
        done = await keyed.post(client, body, "/v1/chat/completions")
        usage = done.json()["usage"]
        assert taken[0] == usage["prompt_tokens"] + UNSTATED_TOKENS
        assert usage["total_tokens"] == CONTEXT
        assert sum(taken) == CONTEXT, "in the end, what was used"
        assert left(done) == 0
        refused = await keyed.post(client, status=429)
        assert refused.headers["retry-after"] == str(-(-(CONTEXT - 1200 + 7) * 60 // 1200))

    limited(tmp_path, "tokens_per_minute=1200", test)


@pytest.mark.parametrize("more", [{"best_of": 3}, {"beam": {"width": 3}}], ids=["best_of", "beam"])
def test_answers_that_are_not_returned_count_too(tmp_path: Path, more: dict[str, Any]) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        done = await keyed.post(client, {**BODY, **more})
        assert done.json()["usage"]["completion_tokens"] == 4
        assert left(done) == 100 - 3 - 3 * 4

    limited(tmp_path, "tokens_per_minute=100", test)


def test_a_request_that_the_engine_refuses_costs_no_tokens(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        refused = await keyed.post(client, {**BODY, "logit_bias": {"99999999": 1}}, status=400)
        assert left(refused) == 100
        assert account.num_running == 0

    limited(tmp_path, "tokens_per_minute=100", test)


def test_streams_are_settled_when_they_end(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        answer = await keyed.post(client, {**BODY, "stream": True, "stream_options": {"include_usage": True}})
        assert left(answer) == 100 - 7, "while it runs, what is reserved is taken"
        assert b'"completion_tokens":4' in answer.content
        assert account._buckets["tokens"].remaining(0) == 93
        assert account.num_running == 0

    limited(tmp_path, "tokens_per_minute=100 concurrent_requests=1", test)


def test_an_abort_gives_back_what_was_not_computed(tmp_path: Path, make_server: Callable[..., Live]) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a name=ann tokens_per_minute=100000 concurrent_requests=1\n")
    llm = make_llm()
    Brake(llm.engine, 20)
    server = make_server(llm, api_key_file=str(file))
    account = host_of(server.service).keys.match("sk-a")
    assert account is not None
    clock = Clock()  # stands still: nothing fills up meanwhile
    account._clock = clock
    account._buckets["tokens"]._at = 0
    data = json.dumps({**BODY, "max_tokens": 2000, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-a\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + data)
        seen = b""
        while seen.count(b"data: ") < 5:
            seen += connection.recv(65536)
        assert b"x-ratelimit-remaining-tokens: 97997" in seen
        headers = {"authorization": "Bearer sk-a"}
        refused = httpx.post(server.url + COMPLETIONS, json=BODY, headers=headers, timeout=PATIENCE)
        assert refused.status_code == 429
    server.wait_idle()
    wait_until(lambda: not account.num_running)  # the event loop has seen the end too
    used = 100_000 - account._buckets["tokens"].remaining(0)
    assert used == 3 + account.counts.num_tokens
    assert 3 <= account.counts.num_tokens < 2000


def test_many_at_once_never_use_more_than_the_limit(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        answers = await asyncio.gather(
            *(client.post(COMPLETIONS, BODY, headers=keyed.headers) for _ in range(40))
        )
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) == 100 // 7, "each may use 7 of 100, and does"
        assert statuses.count(429) == 40 - 100 // 7
        assert account._buckets["tokens"].remaining(0) == 100 - 7 * (100 // 7)

    limited(tmp_path, "tokens_per_minute=100", test)


def test_metrics_tell_what_each_name_used(tmp_path: Path) -> None:
    async def test(client: Client, keyed: Keyed, account: Account) -> None:
        await keyed.post(client)
        await keyed.post(client, {**BODY, "max_tokens": 98}, status=429)
        free = {"authorization": "Bearer sk-free"}
        await client.post("/tokenize", {"prompt": "a"}, headers=free)
        page = (await client.get("/metrics", headers=free)).text
        for line in (
            'api_key_requests_total{key_name="ann"} 2.0',
            'api_key_prompt_tokens_total{key_name="ann"} 3.0',
            'api_key_generation_tokens_total{key_name="ann"} 4.0',
            'api_key_refused_requests_total{key_name="ann",limit="tokens"} 1.0',
            'api_key_refused_requests_total{key_name="ann",limit="concurrency"} 0.0',
            'api_key_requests_running{key_name="ann"} 0.0',
            'api_key_requests_total{key_name="unnamed"} 1.0',
            "api_key_file_valid 1.0",
        ):
            assert f"unspool:{line}\n" in page
        assert "sk-" not in page

    limited(tmp_path, "tokens_per_minute=100", test)

"""Large requests: what is refused before it costs time, and that the event loop does no work of theirs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.server.harness import CONTEXT, PATIENCE, Client, in_process
from unspool import strict_json
from unspool.server import http, kinds
from unspool.server.config import ServerConfig
from unspool.server.fields import MAX_MESSAGES, MAX_STRING_CHARS, MAX_STRING_LENGTH
from unspool.server.scores import ScoreWriter
from unspool.server.service import LARGE, LARGE_WORKERS

USER = {"role": "user", "content": "a"}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LONG = " " * 1_000_000  # more than any number of tokens within the context could hold
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": LONG}}]}


def anthropic_error(response: Any) -> str:
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [LONG, "a"]}, "prompt"),
        (CHAT, {"messages": [USER, {"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": " " * 1000}] * 1000}, "messages"),
        (CHAT, {"messages": [CALL, USER]}, "messages"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"documents": [LONG[4:]]}}, "chat_template_kwargs"),
        (RESPONSES, {"input": LONG}, "input"),
        ("/v1/score", {"input": LONG}, "input"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(path: str, body: Any, param: str) -> None:
    async def test(client: Client) -> None:
        def refuse(*given: Any, **named: Any) -> Any:
            raise AssertionError("it was tokenized")

        longest = client.service.longest_token
        client.service.llm.tokenizer.encode = refuse  # type: ignore[method-assign]
        error = await client.refused(path, body)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert f"maximum context length is {CONTEXT} tokens of at most {longest} bytes" in error["message"]
        assert f"{param} has 10000" in error["message"]

    in_process(test)


def test_a_text_that_might_fit_is_tokenized() -> None:
    """The bound is no more than a bound: what it lets through is counted."""

    async def test(client: Client) -> None:
        text = "é" * CONTEXT
        ids = client.service.llm.encode(text)
        assert len(ids) >= CONTEXT
        error = await client.refused(COMPLETIONS, {"prompt": text})
        assert error["code"] == "context_length_exceeded"
        assert str(len(ids)) in error["message"]

    in_process(test)


def test_messages_are_bounded_in_number() -> None:
    async def test(client: Client) -> None:
        for path, name in ((CHAT, "messages"), (RESPONSES, "input"), ("/tokenize", "messages")):
            error = await client.refused(path, {name: [USER] * (MAX_MESSAGES + 1)})
            assert error["param"] == name
            assert f"{name} has {MAX_MESSAGES + 1:,} entries; at most {MAX_MESSAGES:,} are allowed" in error["message"]
        many = {"messages": [USER] * (MAX_MESSAGES + 1), "max_tokens": 1}
        for path in (MESSAGES, "/v1/messages/count_tokens"):
            body = many if path == MESSAGES else {"messages": many["messages"]}
            assert f"at most {MAX_MESSAGES:,} are allowed" in anthropic_error(await client.post(path, body))

    in_process(test)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_to_look_for_are_bounded(name: str) -> None:
    async def test(client: Client) -> None:
        async def refused(value: Any) -> tuple[str, str]:
            error = await client.refused(COMPLETIONS, {"prompt": "a", "max_tokens": 1, name: value})
            return error["param"], error["message"]

        most = MAX_STRING_LENGTH
        assert await refused("x" * (most + 1)) == (
            name, f"{name} has {most + 1:,} characters; at most {most:,} are allowed",
        )  # fmt: skip
        assert (await refused(["a", "x" * (most + 1)]))[0] == f"{name}[1]"
        many = [f"{number:02d}" + "x" * 1000 for number in range(20)]
        assert await refused(many) == (
            name, f"{name} has 20,040 characters together; at most {MAX_STRING_CHARS:,} are taken",
        )  # fmt: skip
        await client.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1, name: many[:16]})

    in_process(test)


def test_anthropics_stops_are_bounded() -> None:
    async def test(client: Client) -> None:
        for stops in (["x" * 2000], ["x" * 1000 + str(number) for number in range(20)]):
            body = {"messages": [USER], "max_tokens": 1, "stop_sequences": stops}
            answer = await client.post(MESSAGES, body)
            assert answer.status_code == 400
            assert "characters" in anthropic_error(answer)

    in_process(test)


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_VALUES", 10_000)
    monkeypatch.setattr(kinds, "MAX_CHECKS", 5000)

    async def test(client: Client) -> None:
        error = await client.refused(COMPLETIONS, {"prompt": [1] * 10_002}, 413)
        assert error["code"] == "request_too_large"
        assert error["message"] == "the body has 10,001 commas; at most 10,000 are taken"
        error = await client.refused(COMPLETIONS, {"prompt": [[1]] * 5000})
        assert "more values than are checked (5,000)" in error["message"]
        assert error["param"].startswith("prompt[")
        error = await client.refused(COMPLETIONS, {"prompt": [1] * 9000})
        assert error["code"] == "context_length_exceeded"  # token ids are checked in one go, however many

    in_process(test)


# The event loop -----------------------------------------------------------------------------------------------------
class Held:
    """Stands for a function and lets its callers wait until they are released."""

    def __init__(self, function: Callable[..., Any], when: Callable[..., bool] = lambda *given, **named: True) -> None:
        self._function, self._when = function, when
        self._lock, self.num_waiting = threading.Lock(), 0
        self._released = threading.Event()

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._when(*given, **named):
            with self._lock:
                self.num_waiting += 1
            assert self._released.wait(PATIENCE), "the event loop waits for this"
        return self._function(*given, **named)

    async def reached(self, count: int = 1) -> None:
        while self.num_waiting < count:
            await asyncio.sleep(0.005)

    def release(self) -> None:
        self._released.set()


async def lives_while(client: Client, held: Held, asked: Awaitable[Any]) -> Any:
    """The answer to a request during whose work others are answered."""
    task = asyncio.ensure_future(asked)
    try:
        await held.reached()
        assert (await client.get("/health")).status_code == 200
        assert not task.done()
    finally:
        held.release()
    return await task


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, lambda text: {"prompt": text, "max_tokens": 1}),
        (CHAT, lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        (RESPONSES, lambda text: {"input": text, "max_output_tokens": 1}),
        (MESSAGES, lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/score", lambda text: {"input": text}),
        ("/tokenize", lambda text: {"prompt": text}),
    ],
)
def test_tokenizing_leaves_the_loop_alone(path: str, body: Callable[[str], Any], size: int) -> None:
    async def test(client: Client) -> None:
        tokenizer = client.service.llm.tokenizer
        tokenizer.encode = held = Held(tokenizer.encode)  # type: ignore[method-assign]
        client.service.longest_token = LARGE  # however long, it might fit
        answer = await lives_while(client, held, client.post(path, body("a" * size)))
        assert answer.status_code == (200 if size == 10 or path in ("/tokenize",) or "count" in path else 400)

    in_process(test)


def test_parsing_leaves_the_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client) -> None:
        held = Held(strict_json.loads)
        monkeypatch.setattr(strict_json, "loads", held)
        answer = await lives_while(client, held, client.post("/tokenize", {"prompt": "a"}))
        assert answer.status_code == 200

    in_process(test)


def test_writing_a_long_answer_leaves_the_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client) -> None:
        body = ScoreWriter.body
        held = Held(lambda writer: body(writer))
        monkeypatch.setattr(ScoreWriter, "body", lambda writer: held(writer))
        asked = client.post("/v1/score", {"input": [5] * 1000, "top_logprobs": 5})
        answer = await lives_while(client, held, asked)
        assert len(answer.json()["data"][0]["tokens"]) == 1000

    in_process(test)


def test_large_requests_leave_room_for_small_ones() -> None:
    async def test(client: Client) -> None:
        tokenizer = client.service.llm.tokenizer
        tokenizer.encode = held = Held(  # type: ignore[method-assign]
            tokenizer.encode, lambda text, **named: len(text) >= LARGE
        )
        client.service.longest_token = LARGE
        crowd = [asyncio.ensure_future(client.post("/tokenize", {"prompt": "a" * LARGE})) for _ in range(20)]
        await held.reached(LARGE_WORKERS)
        assert len((await client.ok("/tokenize", {"prompt": "abc"}))["tokens"]) > 0
        assert held.num_waiting == LARGE_WORKERS
        held.release()
        assert {answer.status_code for answer in await asyncio.gather(*crowd)} == {200}

    in_process(test)


def test_bodies_count_until_they_are_used() -> None:
    async def test(client: Client) -> None:
        tokenizer = client.service.llm.tokenizer
        tokenizer.encode = held = Held(tokenizer.encode)  # type: ignore[method-assign]
        client.service.longest_token = LARGE
        body = {"prompt": "a" * 60_000}
        first = asyncio.ensure_future(client.post("/tokenize", body))
        await held.reached()
        assert (await client.refused("/tokenize", body, 429))["code"] == "too_many_bodies"
        held.release()
        assert (await first).status_code == 200
        await client.ok("/tokenize", body)

    in_process(test, ServerConfig(max_bodies=100_000, log_format="off"))


def test_tokenizing_lets_other_threads_run() -> None:
    """A text of one long word is one call into native code."""
    from tests.server.harness import make_llm

    encode = make_llm().tokenizer.encode
    done: list[str] = []

    def work(size: int) -> None:
        done.append("begun")
        encode(" " * size)
        done.append("ended")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread that computes keeps its turn unless it gives it up
    try:
        for doubled in range(8):  # long enough that this thread, which waits for its turn, is woken within the call
            done.clear()
            worker = threading.Thread(target=work, args=(100_000 << doubled,))
            worker.start()
            while worker.is_alive():
                worker.join(0.001)
                if done == ["begun"]:
                    worker.join()
                    return
    finally:
        sys.setswitchinterval(interval)
    raise AssertionError("it held up this thread")

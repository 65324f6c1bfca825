"""Any thread: what a caller gets is what it gets alone, whatever others do with the same LLM at the same time."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from unspool.engine.engine import Engine
from unspool.events import Finished, Token
from unspool.llm import LLM
from unspool.models.checkpoint import Checkpoint
from unspool.params import SamplingParams
from unspool.plan import Plan
from unspool.results import Result

NUM_THREADS = 8
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"
Task = Callable[[LLM], Any]


@pytest.fixture(params=["cpu", "reference"])
def llm(tiny: Callable[..., Checkpoint], request: pytest.FixtureRequest) -> Any:
    """Small limits: requests share steps, wait, and lose their blocks to each other."""
    checkpoint = replace(tiny("tiny"), chat_template=TEMPLATE)
    with LLM(
        checkpoint, device=request.param, threads=2, kv_tokens=192, block_size=4, step_tokens=24, max_running=6
    ) as llm:
        yield llm
        llm.driver.call(lambda engine: engine.check())
        llm.engine.scheduler.blocks.check()


def bits(tokens: Sequence[Token | None]) -> list[tuple[int, bytes]]:
    found = []
    for token in tokens:
        if token is not None:
            kept = token.logprob is None  # by a fork, which does not choose it again
            numbers = () if kept else (token.logprob, *(value for _, value in token.top))
            found.append((token.id, struct.pack(f"<{len(numbers)}d", *numbers)))
    return found


def answers(result: Result) -> list[Any]:
    return [(choice.text, choice.finish_reason, bits(choice.tokens)) for choice in result.choices]


def generate(prompts: list[list[int]], params: list[SamplingParams]) -> Task:
    return lambda llm: [answers(result) for result in llm.generate(prompts, params)]


def stream(prompt: list[int], params: SamplingParams) -> Task:
    def task(llm: LLM) -> Any:
        tokens: list[Token] = []
        for event in llm.stream(prompt, params):
            if isinstance(event, Finished):
                return bits(tokens), event.reason
            assert not isinstance(event, Exception)
            tokens += getattr(event, "tokens", ())
        raise AssertionError("a stream without an ending")

    return task


def abandon(prompt: list[int], params: SamplingParams, count: int, close: bool) -> Task:
    """What came before the reader left: how many events that is depends on text alone, not on others."""

    def task(llm: LLM) -> Any:
        events = llm.stream(prompt, replace(params, max_tokens=60, ignore_eos=True))
        texts = [getattr(next(events), "text", "") for _ in range(count)]
        if close:
            events.close()
        return texts

    return task


def chat(text: str, params: SamplingParams) -> Task:
    return lambda llm: answers(llm.chat([{"role": "user", "content": text}], params))


def score(prompt: list[int]) -> Task:
    return lambda llm: bits(llm.score(prompt, top=2))


def fork(prompt: list[int], params: SamplingParams, token: int) -> Task:
    def task(llm: LLM) -> Any:
        result = llm.generate(prompt, params)
        return answers(llm.fork(result, min(2, len(result.token_ids)), token))

    return task


def random_task(rng: random.Random) -> Task:
    def prompt() -> list[int]:
        return [*range(5, 5 + rng.randrange(12)), *(rng.randrange(200) for _ in range(rng.randrange(1, 16)))]

    def params() -> SamplingParams:
        return SamplingParams(
            max_tokens=rng.randrange(4, 12),
            temperature=rng.choice([0, 0.8, 1.2]),
            top_p=rng.choice([None, 0.9]),
            repetition_penalty=rng.choice([None, 1.2]),
            seed=rng.randrange(1000),
            n=rng.choice([1, 1, 2]),
            logprobs=2,
        )

    count = rng.randrange(1, 4)
    return rng.choice(
        [
            generate([prompt() for _ in range(count)], [params() for _ in range(count)]),
            stream(prompt(), replace(params(), n=1)),
            abandon(prompt(), replace(params(), n=1), count, close=rng.random() < 0.5),
            chat(f"hello {rng.randrange(100)}", params()),
            score(prompt()),
            fork(prompt(), replace(params(), n=1), rng.randrange(200)),
        ]
    )


def test_threads_get_what_they_get_alone(llm: LLM) -> None:
    rng = random.Random(11)
    tasks = [[random_task(rng) for _ in range(6)] for _ in range(NUM_THREADS)]
    alone = [[task(llm) for task in each] for each in tasks]
    together = threading.Barrier(NUM_THREADS)

    def work(each: list[Task]) -> list[Any]:
        together.wait(600)
        return [task(llm) for task in each]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(work, tasks))
    assert found == alone


def test_to_thread_gives_what_a_call_gives(llm: LLM) -> None:
    rng = random.Random(12)
    tasks = [random_task(rng) for _ in range(24)]
    alone = [task(llm) for task in tasks]

    async def main() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(task, llm) for task in tasks))

    assert asyncio.run(main()) == alone


def test_threads_share_steps(llm: LLM) -> None:
    """Requests of several threads are one batch, not one after the other."""
    largest, plan = 0, llm.engine.scheduler.plan

    def planned() -> Plan:
        nonlocal largest
        made = plan()
        largest = max(largest, len(made.works))
        return made

    def hold(engine: Engine) -> None:
        """Until the others have sent their requests."""
        until = time.monotonic() + 600
        while llm.driver._calls.qsize() < 4 and time.monotonic() < until:
            time.sleep(0.001)

    llm.engine.scheduler.plan = planned  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with ThreadPoolExecutor(5) as pool:
        held = pool.submit(llm.driver.call, hold)
        answered = [pool.submit(llm.generate, [5, 6, number], params) for number in range(4)]
        for future in (held, *answered):
            future.result()
    assert largest == 4

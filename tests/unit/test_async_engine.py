"""The engine in its thread: many readers, slow readers, readers that leave, and a clean end."""

from __future__ import annotations

import asyncio
import random

import pytest

from unspool.config import EngineConfig
from unspool.engine.async_engine import AsyncEngine
from unspool.engine.engine import Engine
from unspool.errors import ContextLengthError, EngineClosedError, EngineDiedError, EngineError
from unspool.events import Finished, Text
from unspool.params import SamplingParams

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def make_engine(tiny):
    def make(**options) -> AsyncEngine:
        checkpoint = tiny()
        config = EngineConfig(device="reference", kv_tokens=128, block_size=4, **options)
        return AsyncEngine(Engine(checkpoint, config, tokenizer=checkpoint.tokenizer()))

    return make


async def read(engine: AsyncEngine, params: SamplingParams, prompt=PROMPT) -> tuple[list[int], list[str]]:
    ids, reasons = [], []
    async for event in await engine.submit(prompt, params):
        if isinstance(event, Text):
            ids += [token.id for token in event.tokens]
        elif isinstance(event, Finished):
            reasons.append(event.reason)
    return ids, reasons


def test_many_at_once_get_what_they_get_alone(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        jobs = [SamplingParams(max_tokens=6, temperature=1, seed=seed, ignore_eos=True) for seed in range(12)]
        alone = [await read(engine, params) for params in jobs]
        assert await asyncio.gather(*(read(engine, params) for params in jobs)) == alone
        await engine.shutdown()
        engine.engine.scheduler.blocks.check()

    asyncio.run(main())


def test_leaving_early_aborts(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        async with await engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True, n=2)) as stream:
            await anext(stream)
        while await engine.ask(lambda e: e.has_work):
            await asyncio.sleep(0.001)
        await engine.ask(lambda e: e.check())
        assert (await engine.ask(lambda e: dict(e.finished))) == {"abort": 2}
        assert engine._readers == {}
        await engine.shutdown()

    asyncio.run(main())


def test_random_leavers_cost_no_block(make_engine) -> None:
    async def visit(engine: AsyncEngine, rng: random.Random) -> None:
        params = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True, n=rng.choice([1, 1, 3]))
        async with await engine.submit([rng.randrange(200) for _ in range(rng.randrange(1, 40))], params) as stream:
            for _ in range(rng.randrange(12)):
                try:
                    await anext(stream)
                except StopAsyncIteration:
                    break

    async def main() -> None:
        engine, rng = make_engine(max_running=8, step_tokens=16), random.Random(3)
        await asyncio.gather(*(visit(engine, rng) for _ in range(60)))
        while await engine.ask(lambda e: e.has_work):
            await asyncio.sleep(0.001)
        await engine.ask(lambda e: e.check())
        assert (await engine.ask(lambda e: e.stats["running"])) == 0
        await engine.shutdown()
        engine.engine.scheduler.blocks.check()

    asyncio.run(main())


def test_a_cancelled_submit_leaves_nothing_behind(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        for delay in (0, 0.0005, 0.002):
            task = asyncio.create_task(engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)))
            await asyncio.sleep(delay)
            task.cancel()
            stream = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(stream, BaseException):
                stream.abort()
        while await engine.ask(lambda e: e.has_work):
            await asyncio.sleep(0.001)
        assert engine._readers == {}
        await engine.shutdown()

    asyncio.run(main())


def test_bad_requests_are_refused_to_the_one_who_asked(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        with pytest.raises(ContextLengthError):
            await engine.submit([1] * 500)
        assert (await read(engine, SamplingParams(max_tokens=2, ignore_eos=True)))[1] == ["length"]
        await engine.shutdown()

    asyncio.run(main())


def test_shutdown_drains_then_aborts(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        task = asyncio.create_task(read(engine, SamplingParams(max_tokens=5, ignore_eos=True)))
        await asyncio.sleep(0.01)
        await engine.shutdown(drain=30)
        assert (await task)[1] == ["length"], "what runs may finish"
        with pytest.raises(EngineClosedError):
            await engine.submit(PROMPT)

        engine = make_engine()
        task = asyncio.create_task(read(engine, SamplingParams(max_tokens=120, ignore_eos=True)))
        await asyncio.sleep(0.01)
        await engine.shutdown(drain=0)
        assert (await task)[1] == ["abort"], "what does not finish is told so"

    asyncio.run(main())


class Panic(BaseException):
    """As a Rust library's panic arrives: no Exception."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, Panic])
def test_a_broken_engine_tells_everyone(make_engine, kind: type[BaseException]) -> None:
    async def main() -> None:
        engine = make_engine()

        def broken():
            raise kind("a bug")

        engine.engine.scheduler.plan = broken
        with pytest.raises(EngineError, match=f"the engine stopped: {kind.__name__}"):
            await asyncio.wait_for(read(engine, SamplingParams(max_tokens=3)), 10)
        assert not engine.is_ready
        with pytest.raises(EngineDiedError):
            await engine.submit(PROMPT)
        await engine.shutdown()

    asyncio.run(main())


def test_a_panic_while_a_request_is_added_reaches_who_asked_and_who_runs(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        running = asyncio.create_task(read(engine, SamplingParams(max_tokens=120, ignore_eos=True)))
        while not await engine.ask(lambda e: e.has_work):
            await asyncio.sleep(0.001)

        def panic(_):
            raise Panic("out of fuel")

        with pytest.raises(EngineDiedError, match="Panic: out of fuel"):
            await asyncio.wait_for(engine.ask(panic), 10)
        with pytest.raises(EngineDiedError, match="Panic: out of fuel"):
            await asyncio.wait_for(running, 10)
        await engine.shutdown()

    asyncio.run(main())

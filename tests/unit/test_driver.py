"""The driver: many callers, slow and leaving readers, a clean end, and an engine that dies."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from tests.brake import Brake
from unspool.config import EngineConfig
from unspool.engine.driver import Driver, Submission
from unspool.engine.engine import Engine
from unspool.engine.streams import AsyncStream, Generation, Stream
from unspool.errors import ContextLengthError, EngineClosedError, EngineDiedError, RequestError
from unspool.events import Event, Failed, Finished, Text
from unspool.params import SamplingParams

PROMPT = [5, 6, 7, 8]
PATIENCE = 600.0  # seconds until a test that hangs is given up
Make = Callable[..., Driver]


@pytest.fixture
def make_driver(tiny) -> Iterator[Make]:
    made: list[Driver] = []

    def make(**options: object) -> Driver:
        checkpoint = tiny()
        config = EngineConfig(device="reference", kv_tokens=128, block_size=4, **options)  # type: ignore[arg-type]
        made.append(Driver(Engine(checkpoint, config, tokenizer=checkpoint.tokenizer())))
        return made[-1]

    yield make
    for driver in made:
        driver.close()
        if driver.failure is None:
            driver.engine.scheduler.blocks.check()


def answer(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def asked(params: SamplingParams, prompt: list[int] = PROMPT) -> Generation:
    return Generation(tuple(prompt), params)


def opened(driver: Driver, params: SamplingParams, prompt: list[int] = PROMPT, *, whole: bool = False) -> Stream:
    stream = Stream(driver, asked(params, prompt), whole=whole)
    Stream.start(driver, [stream])
    return stream


def settled(driver: Driver) -> None:
    """Wait until the engine has nothing to do; then nothing may be left behind."""
    until = time.monotonic() + PATIENCE
    while driver.call(lambda engine: engine.has_work):
        assert time.monotonic() < until
        time.sleep(0.001)
    driver.call(lambda engine: engine.check())
    assert driver._submissions == {}


def break_engine(driver: Driver, error: BaseException) -> None:
    def broken() -> None:
        raise error

    driver.engine.scheduler.plan = broken  # type: ignore[assignment, method-assign]


# Event loops --------------------------------------------------------------------------------------------------------
def test_many_at_once_get_what_they_get_alone(make_driver: Make) -> None:
    async def main() -> None:
        driver = make_driver()
        jobs = [answer(6, temperature=1, seed=seed) for seed in range(12)]
        alone = [(await AsyncStream(driver, asked(params)).result()).token_ids for params in jobs]
        found = await asyncio.gather(*(AsyncStream(driver, asked(params)).result() for params in jobs))
        assert [result.token_ids for result in found] == alone

    asyncio.run(main())


@pytest.mark.parametrize("whole", [False, True])
def test_leaving_early_aborts(make_driver: Make, whole: bool) -> None:
    async def main() -> None:
        driver = make_driver()
        with Brake(driver.engine):
            async with AsyncStream(driver, asked(answer(100, n=2)), whole=whole) as stream:
                if not whole:
                    await anext(stream)
            settled(driver)
        assert driver.call(lambda engine: dict(engine.finished)) == {"abort": 2}
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(RequestError, match="closed before"):
            await stream.result()

    asyncio.run(main())


def test_random_leavers_cost_no_block(make_driver: Make) -> None:
    async def visit(driver: Driver, rng: random.Random) -> None:
        params = answer(rng.randrange(1, 20), n=rng.choice([1, 1, 3]))
        prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        async with AsyncStream(driver, asked(params, prompt)) as stream:
            for _ in range(rng.randrange(12)):
                try:
                    await anext(stream)
                except StopAsyncIteration:
                    break

    async def main() -> None:
        driver, rng = make_driver(max_running=8, step_tokens=16), random.Random(3)
        await asyncio.gather(*(visit(driver, rng) for _ in range(60)))
        settled(driver)
        assert driver.engine.stats["running"] == 0

    asyncio.run(main())


def test_a_cancelled_start_leaves_nothing_behind(make_driver: Make) -> None:
    async def main() -> None:
        driver = make_driver()
        for delay in (0, 0.0005, 0.002):
            task = asyncio.create_task(AsyncStream(driver, asked(answer(100))).start())
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
        gc.collect()
        settled(driver)

    asyncio.run(main())


def test_a_loop_that_was_closed_ends_its_requests(make_driver: Make) -> None:
    driver = make_driver()
    streams: list[AsyncStream] = []

    async def main() -> None:
        streams.append(await AsyncStream(driver, asked(answer(120))).start())

    asyncio.run(main())
    settled(driver)
    assert streams[0].params.max_tokens == 120


# Threads ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("whole", [False, True])
def test_a_stream_folds_into_its_result(make_driver: Make, whole: bool) -> None:
    driver = make_driver()
    stream = opened(driver, answer(5, n=2, temperature=1, seed=1), whole=whole)
    events = list(stream)
    result = stream.result()
    for choice in (0, 1):
        texts = [event for event in events if isinstance(event, Text) and event.choice == choice]
        assert "".join(text.text for text in texts) == result.choices[choice].text
        assert [token.id for text in texts for token in text.tokens] == result.choices[choice].token_ids
    assert sum(isinstance(event, Finished) for event in events) == 2
    again = opened(driver, answer(5, n=2, temperature=1, seed=1)).result()
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in result.choices]


def test_a_stream_that_is_dropped_is_aborted(make_driver: Make) -> None:
    driver = make_driver()
    with Brake(driver.engine):
        stream = opened(driver, answer(120))
        next(stream)
        del stream
        settled(driver)
    assert driver.call(lambda engine: dict(engine.finished)) == {"abort": 1}


def test_an_aborted_stream_gives_its_last_events(make_driver: Make) -> None:
    driver = make_driver()
    with Brake(driver.engine):
        stream = opened(driver, answer(120))
        next(stream)
        stream.abort()
        result = stream.result()
    assert result.finish_reason == "abort"
    assert 1 <= len(result.token_ids) < 120


def test_nobody_waits_for_a_stream_that_is_not_read(make_driver: Make) -> None:
    driver = make_driver()
    unread = opened(driver, answer(60))
    for _ in range(3):
        assert opened(driver, answer(4), whole=True).result().finish_reason == "length"
    assert len(unread.result().token_ids) == 60


def test_requests_are_taken_all_or_none(make_driver: Make) -> None:
    driver = make_driver()
    streams = [Stream(driver, asked(answer(3))), Stream(driver, asked(answer(3), [1] * 500))]
    with pytest.raises(ContextLengthError):
        Stream.start(driver, streams)
    settled(driver)
    assert opened(driver, answer(2)).result().finish_reason == "length"


def test_an_interrupted_start_leaves_nothing_behind(make_driver: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a caller waits for its request to be taken."""
    driver = make_driver()
    call = driver.call

    def interrupted(function: Callable[[Engine], object]) -> object:
        call(function)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Stream.start(driver, [Stream(driver, asked(answer(120)))])
    monkeypatch.undo()
    settled(driver)


def test_ctrl_c_leaves_the_engine_usable(make_driver: Make) -> None:
    driver = make_driver()
    expected = opened(driver, answer(20, seed=1), whole=True).result().token_ids

    kept: list[Stream] = []  # a Ctrl-C that comes while an object is freed is dropped by Python

    def ask_for_ever(delay: float) -> None:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            kept.append(opened(driver, answer(100), whole=True))
            kept[-1].result()

    for delay in (0.0, 0.001, 0.005, 0.02):
        with pytest.raises(KeyboardInterrupt):
            ask_for_ever(delay)
    settled(driver)
    assert opened(driver, answer(20, seed=1), whole=True).result().token_ids == expected


def test_a_model_that_nobody_refers_to_is_freed(tiny) -> None:
    driver = Driver(Engine(tiny(), EngineConfig(device="reference", kv_tokens=64)))
    thread, reference = driver._thread, weakref.ref(driver)
    assert opened(driver, answer(3), whole=True).result().token_ids
    del driver
    thread.join(PATIENCE)
    gc.collect()
    assert reference() is None
    assert not thread.is_alive()


# Ends ---------------------------------------------------------------------------------------------------------------
def test_shutdown_drains_then_aborts(make_driver: Make) -> None:
    async def main() -> None:
        driver = make_driver()
        stream = await AsyncStream(driver, asked(answer(5))).start()
        await driver.shutdown(drain=PATIENCE)
        assert (await stream.result()).finish_reason == "length", "what runs may finish"
        with pytest.raises(EngineClosedError):
            await AsyncStream(driver, asked(answer(5))).start()

        driver = make_driver()
        with Brake(driver.engine):
            stream = await AsyncStream(driver, asked(answer(120))).start()
            await driver.shutdown(drain=0)
        assert (await stream.result()).finish_reason == "abort", "what does not finish is told so"

    asyncio.run(main())


def test_closing_ends_what_runs_and_refuses_the_rest(make_driver: Make) -> None:
    driver = make_driver()
    with Brake(driver.engine):
        stream = opened(driver, answer(120))
        driver.close()
    driver.close()
    assert stream.result().finish_reason == "abort"
    assert not driver.is_ready
    with pytest.raises(EngineClosedError):
        opened(driver, answer(3))
    with pytest.raises(EngineClosedError):
        driver.call(lambda engine: engine.stats)
    stream.abort()  # harmless


class Panic(BaseException):
    """As Rust libraries report one."""


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), Panic("index out of bounds"), SystemExit(3)])
def test_an_engine_that_dies_tells_everyone(make_driver: Make, error: BaseException) -> None:
    name = type(error).__name__

    async def main() -> None:
        driver = make_driver()
        Brake(driver.engine)  # until it is broken
        waiting = opened(driver, answer(120))
        break_engine(driver, error)
        with pytest.raises(EngineDiedError, match=f"the engine stopped: {name}"):
            await asyncio.wait_for(AsyncStream(driver, asked(answer(3))).result(), PATIENCE)
        with pytest.raises(EngineDiedError, match=name):
            waiting.result()
        assert not driver.is_ready
        with pytest.raises(EngineDiedError, match=name):
            opened(driver, answer(3))
        with pytest.raises(EngineDiedError, match=name):
            await AsyncStream(driver, asked(answer(3))).start()
        with pytest.raises(EngineDiedError, match=name):
            driver.call(lambda engine: engine.stats)
        await driver.shutdown()

    asyncio.run(main())


def test_a_call_that_panics_ends_the_engine(make_driver: Make) -> None:
    driver = make_driver()
    Brake(driver.engine)  # to its end
    running = opened(driver, answer(120))

    def panic(engine: Engine) -> None:
        raise Panic("poisoned")

    with pytest.raises(EngineDiedError, match="Panic: poisoned"):
        driver.call(panic)
    with pytest.raises(EngineDiedError, match="Panic: poisoned"):
        running.result()
    with pytest.raises(EngineDiedError, match="Panic: poisoned"):
        driver.call(lambda engine: engine.stats)


def test_a_call_that_fails_is_its_callers_own(make_driver: Make) -> None:
    driver = make_driver()
    with pytest.raises(ZeroDivisionError):
        driver.call(lambda engine: 1 // 0)
    assert driver.call(lambda engine: engine.context_length) == 128


def test_sinks_get_one_ending_for_each_choice(make_driver: Make) -> None:
    driver, events = make_driver(), []
    done = threading.Event()

    def sink(event: Event) -> None:
        events.append(event)
        if sum(not isinstance(each, Text) for each in events) == 3:
            done.set()

    submission = Submission(PROMPT, answer(4, n=3), sink)
    driver.start([submission])
    assert done.wait(PATIENCE)
    settled(driver)
    assert sorted(event.choice for event in events if isinstance(event, Finished)) == [0, 1, 2]
    assert not any(isinstance(event, Failed) for event in events)


# Forks and exits ----------------------------------------------------------------------------------------------------
def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)


SETUP = """
import os, sys, threading, warnings
from dataclasses import replace
warnings.simplefilter("ignore")
from unspool import LLM, EngineError, SamplingParams
from unspool.models.random import SHAPES, random_checkpoint
def load():
    return LLM(random_checkpoint(replace(SHAPES["tiny"], context_length=8192)), kv_tokens=8192, threads=2)
def ask(llm, count=8):
    return llm.generate([1, 2, 3], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)).token_ids
llm = load()
expected = ask(llm)
"""


def test_a_forked_child_is_refused_by_name_and_may_load_its_own() -> None:
    """Also while another thread computes: the fork then copies locks that nobody will release."""
    done = run_python(
        SETUP
        + """
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True))
next(stream)
for _ in range(5):
    child = os.fork()
    if child == 0:
        try:
            ask(llm)
        except EngineError as error:
            assert "fork" in str(error) and str(os.getppid()) in str(error), error
            stream.close()
            assert ask(load()) == expected
            del llm, stream
            sys.exit(7)
        sys.exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stream.close()
assert ask(llm) == expected
print("done")
"""
    )
    assert done.stdout == "done\n", done.stderr


def test_leaving_python_while_the_engine_computes() -> None:
    done = run_python(
        SETUP
        + """
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True))
next(stream)
print("done")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

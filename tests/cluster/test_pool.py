"""The pool over replicas that are in this process: what it does when they are full, die, fall silent or differ."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.brake import Brake
from tests.cluster.harness import Fake, FakeTransport
from tests.server.harness import PATIENCE
from unspool import LLM
from unspool.cluster import wire
from unspool.cluster.models import resolver
from unspool.cluster.pool import Patience, ReplicaPool
from unspool.cluster.replica import Replica
from unspool.engine.driver import Submission
from unspool.errors import EngineDiedError, EngineError, QueueFullError, ReplayError, ReplicaLostError, RequestError
from unspool.events import Event, Failed, Finished, Text, Timings, Usage
from unspool.models.random import stand_in
from unspool.params import SamplingParams

PROMPT = tuple(range(40, 70))


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(stand_in("tiny"), threads=1, kv_tokens=4096) as model:
        yield model


def run(llm: LLM, fakes: Sequence[Fake], params: SamplingParams, act: Callable[..., None] | None = None) -> list[Event]:
    """The events of one request."""

    async def answer() -> list[Event]:
        pool = ReplicaPool(FakeTransport(fakes), await Replica(llm).status(), resolver(llm.checkpoint, ()))
        events: list[Event] = []
        done = asyncio.Event()

        def receive(event: Event) -> None:
            events.append(event)
            if act is not None:
                act(pool, submission, event)
            if sum(not isinstance(each, Text) for each in events) == params.n:
                done.set()

        submission = Submission(PROMPT, params, receive)
        await pool.start_async([submission])
        async with asyncio.timeout(PATIENCE):
            await done.wait()
        await pool.shutdown()
        return events

    return asyncio.run(answer())


def folded(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Each choice's text, tokens and ending."""
    choices = sorted({event.choice for event in events})
    return [
        (
            "".join(e.text for e in events if isinstance(e, Text) and e.choice == choice),
            [token for e in events if isinstance(e, Text) and e.choice == choice for token in e.tokens],
            next(e.reason for e in events if isinstance(e, Finished) and e.choice == choice),
        )
        for choice in choices
    ]  # fmt: skip


ASKED = SamplingParams(max_tokens=40, temperature=1.2, seed=11, logprobs=2, n=2)


@pytest.mark.parametrize("deaths", [[0], [1], [2], [5], [5, 3, 9], [1, 1, 1, 1]])
def test_an_answer_survives_its_replicas(llm: LLM, deaths: list[int]) -> None:
    replica = Replica(llm)
    undisturbed = run(llm, [Fake("a", replica)], ASKED)
    fakes = [Fake("a", replica, list(deaths)), Fake("b", replica)]
    assert folded(run(llm, fakes, ASKED)) == folded(undisturbed)
    assert fakes[1].num_requests >= 1


def test_a_drawn_seed_is_drawn_once(llm: LLM) -> None:
    replica = Replica(llm)
    events = run(llm, [Fake("a", replica, [4]), Fake("b", replica)], replace(ASKED, seed=None))
    ending = next(event for event in events if isinstance(event, Finished) and event.choice == 0)
    assert folded(events) == folded(run(llm, [Fake("a", replica)], replace(ASKED, seed=ending.seed)))


def test_what_another_replica_computes_must_be_equal(llm: LLM) -> None:
    def lie(message: wire.Message) -> wire.Message:
        if not isinstance(message, wire.Events):
            return message
        (event,) = message.events
        if isinstance(event, Text):
            event = event._replace(tokens=tuple(token._replace(id=1) for token in event.tokens))
        return wire.Events((event,))

    replica = Replica(llm)
    events = run(llm, [Fake("a", replica, [6]), Fake("b", replica, change=lie)], ASKED)
    failures = [event.error for event in events if isinstance(event, Failed)]
    assert len(failures) == 2
    assert all(isinstance(error, ReplayError) for error in failures)
    assert "computed a different answer" in str(failures[0])


def test_another_version_does_not_go_on_with_an_answer(llm: LLM) -> None:
    def older(message: wire.Message) -> wire.Message:
        if isinstance(message, wire.Accepted):
            return wire.Accepted(replace(message.receipt, version="0.0"))
        return message

    replica = Replica(llm)
    events = run(llm, [Fake("a", replica, [6]), Fake("b", replica, change=older)], ASKED)
    assert {type(event.error) for event in events if isinstance(event, Failed)} == {ReplayError}
    assert not any(isinstance(event, Failed) for event in run(llm, [Fake("b", replica, change=older)], ASKED))


def test_full_replicas_are_passed_over_and_the_last_one_says_so(llm: LLM) -> None:
    replica = Replica(llm)
    fakes = [Fake("a", replica, is_full=True), Fake("b", replica)]
    assert any(isinstance(event, Finished) for event in run(llm, fakes, ASKED))
    with pytest.raises(QueueFullError, match="full"):
        run(llm, [Fake("a", replica, is_full=True), Fake("b", replica, is_full=True)], ASKED)


def test_what_is_wrong_with_a_request_is_its_own_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_tokens is") as raised:
        run(llm, [Fake("a", Replica(llm))], SamplingParams(max_tokens=100_000))
    assert raised.value.param == "max_tokens"


def test_an_abort_ends_an_answer_with_its_reason(llm: LLM) -> None:
    def act(pool: ReplicaPool, submission: Submission, event: Event) -> None:
        pool.abort(submission, "stop")

    with Brake(llm.engine):
        events = run(llm, [Fake("a", Replica(llm))], SamplingParams(max_tokens=400, seed=3, ignore_eos=True), act)
    assert [event.reason for event in events if isinstance(event, Finished)] == ["stop"]


def test_an_aborted_answer_ends_though_its_replica_is_lost(llm: LLM) -> None:
    def act(pool: ReplicaPool, submission: Submission, event: Event) -> None:
        if isinstance(event, Text):
            pool.abort(submission, "abort")

    fake = Fake("a", Replica(llm), [3])
    events = run(llm, [fake, Fake("b", Replica(llm))], SamplingParams(max_tokens=400, seed=3), act)
    assert [event.reason for event in events if isinstance(event, Finished)] == ["abort"]


def test_replicas_that_die_again_and_again_fail_the_request_by_name(llm: LLM) -> None:
    replica = Replica(llm)
    fakes = [Fake("a", replica, [3] * 50), Fake("b", replica, [3] * 50)]
    events = run(llm, fakes, SamplingParams(max_tokens=400, seed=3))
    (failure,) = [event.error for event in events if isinstance(event, Failed)]
    assert isinstance(failure, ReplicaLostError | EngineError)
    assert "replicas were lost while they computed this answer" in str(failure)


TIMES = Timings(0, 0, 0, 0, None, None)


@pytest.mark.parametrize(
    "ending",
    [
        Failed("r", 0, EngineDiedError("the engine stopped: a defect")),
        Finished("r", 0, "abort", Usage(30, 3), TIMES, seed=11),
    ],
)
def test_the_end_of_an_engine_is_not_the_end_of_an_answer(llm: LLM, ending: Event) -> None:
    def end(message: wire.Message) -> wire.Message:
        nonlocal count
        count += 1
        return wire.Events((ending,)) if count == 6 else message

    count = 0
    replica = Replica(llm)
    undisturbed = run(llm, [Fake("a", replica)], ASKED)
    fakes = [Fake("a", replica, change=end), Fake("b", replica)]
    assert folded(run(llm, fakes, ASKED)) == folded(undisturbed)
    assert fakes[1].num_requests == 1


def test_a_hung_replica_is_taken_last_until_it_reports(llm: LLM) -> None:
    async def check() -> None:
        replica = Replica(llm)
        fakes = [Fake("a", replica, is_hung=True), Fake("b", replica)]
        transport = FakeTransport(fakes)
        pool = ReplicaPool(transport, await replica.status(), resolver(llm.checkpoint, ()))
        params = SamplingParams(max_tokens=1, seed=1)
        for expected in ((1, 1), (1, 2)):
            await pool.start_async([Submission(PROMPT, params, lambda event: None)])
            assert (fakes[0].num_requests, fakes[1].num_requests) == expected
        fakes[0].is_hung, fakes[0].num_reports = False, 2
        await pool.start_async([Submission(PROMPT, params, lambda event: None)])
        assert (fakes[0].num_requests, fakes[1].num_requests) == (2, 2)
        await pool.shutdown(drain=PATIENCE)

    asyncio.run(check())


def test_a_replica_with_another_model_is_passed_over(llm: LLM) -> None:
    """As while an application changes its model: a prompt's ids mean something to its own model alone."""
    other = Replica(llm, name="other", source="another fingerprint")
    fakes = [Fake("a", other), Fake("b", Replica(llm))]

    async def check() -> list[Event]:
        pool = ReplicaPool(FakeTransport(fakes), await fakes[1].replica.status(), resolver(llm.checkpoint, ()))
        events: list[Event] = []
        await pool.start_async([Submission(PROMPT, replace(ASKED, n=1), events.append)])
        await pool.shutdown(drain=PATIENCE)
        return events

    assert isinstance(asyncio.run(check())[-1], Finished)
    assert [fake.num_requests for fake in fakes] == [1, 1]


def test_without_replicas_a_request_waits_and_then_says_so(llm: LLM) -> None:
    async def check() -> None:
        status = await Replica(llm).status()
        patience = Patience(seconds=0.6)
        pool = ReplicaPool(FakeTransport([]), status, resolver(llm.checkpoint, ()), patience)
        with pytest.raises(ReplicaLostError, match="no replica can take the request now"):
            await pool.start_async([Submission(PROMPT, ASKED, lambda event: None)])

    asyncio.run(check())


def test_a_request_does_not_wait_for_a_model_that_was_replaced(llm: LLM) -> None:
    async def check() -> None:
        (transport := FakeTransport([])).has_another_model = True
        pool = ReplicaPool(transport, await Replica(llm).status(), resolver(llm.checkpoint, ()), Patience(seconds=1e5))
        with pytest.raises(ReplicaLostError, match="another model took the place"):
            await pool.start_async([Submission(PROMPT, ASKED, lambda event: None)])

    asyncio.run(check())


def test_an_answer_whose_model_was_replaced_fails_by_name(llm: LLM) -> None:
    """It cannot be gone on with: what was sent is the old model's."""
    fake = Fake("a", Replica(llm), [3])

    def replace_model(pool: ReplicaPool, submission: Submission, event: Event) -> None:
        transport = pool.transport
        assert isinstance(transport, FakeTransport)
        transport.fakes, transport.has_another_model = [], True

    *texts, end = run(llm, [fake], ASKED, replace_model)
    assert texts
    assert isinstance(end, Failed)
    assert isinstance(end.error, ReplicaLostError)
    assert "another model took the place" in str(end.error)


def test_a_server_that_is_to_go_ends_its_answers_by_name(llm: LLM) -> None:
    async def check() -> list[Event]:
        fakes = [Fake("a", Replica(llm))]
        pool = ReplicaPool(FakeTransport(fakes), await fakes[0].replica.status(), resolver(llm.checkpoint, ()))
        events: list[Event] = []
        with Brake(llm.engine):
            params = SamplingParams(max_tokens=450, n=2, ignore_eos=True)
            await pool.start_async([Submission(PROMPT, params, events.append)])
            while not events:
                await asyncio.sleep(0.01)
            pool.end_all()
            with pytest.raises(EngineError, match="closed, or closing"):
                await pool.start_async([Submission(PROMPT, ASKED, events.append)])
            async with asyncio.timeout(PATIENCE):
                while pool.num_open:
                    await asyncio.sleep(0.01)
            assert llm.driver.call(lambda engine: engine.stats["running"] + engine.stats["waiting"]) == 0
        return events

    ends = [event for event in asyncio.run(check()) if isinstance(event, Failed)]
    assert sorted(end.choice for end in ends) == [0, 1]
    assert all("not done in the time to drain" in str(end.error) for end in ends)


def test_what_is_held_back_is_told_by_a_replica_too(llm: LLM) -> None:
    """The same events, whichever replica they come from."""
    params = SamplingParams(
        max_tokens=60,
        seed=4,
        temperature=1.1,
        trace=True,
        stop=tuple(f"{first}☃" for first in "abcdefghijklmnopqrstuvwxyz"),
        ignore_eos=True,
    )

    def held(events: Sequence[Event]) -> list[str]:
        return [event.held for event in events if isinstance(event, Text) and event.held]

    straight: list[Event] = []
    done = threading.Event()

    def receive(event: Event) -> None:
        straight.append(event)
        if not isinstance(event, Text):
            done.set()

    llm.driver.start([Submission(PROMPT, params, receive)])
    assert done.wait(PATIENCE)
    assert held(straight)
    assert held(run(llm, [Fake("a", Replica(llm))], params)) == held(straight)


def test_nothing_is_left_in_a_replica(llm: LLM) -> None:
    replica = Replica(llm)
    run(llm, [Fake("a", replica, [5]), Fake("b", replica)], ASKED)
    assert not llm.driver.call(lambda engine: engine.has_work)
    llm.driver.call(lambda engine: engine.check())


def test_a_long_step_is_no_sign_of_death(llm: LLM) -> None:
    """While the engine computes, its replica tells what it told last, and that a request waits."""

    async def check() -> None:
        gate, replica = threading.Event(), Replica(llm)
        before = await replica.status()
        step = asyncio.create_task(llm.driver.call_async(lambda engine: gate.wait(PATIENCE)))
        await asyncio.sleep(0)
        assert await replica.status() == before
        pool = ReplicaPool(FakeTransport([Fake("a", replica)]), before, resolver(llm.checkpoint, ()))
        ended: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def receive(event: Event) -> None:
            if not isinstance(event, Text):
                ended.set_result(event)

        starting = asyncio.create_task(pool.start_async([Submission(PROMPT, SamplingParams(max_tokens=2), receive)]))
        messages = replica.stream(wire.dump(wire.WireRequest("left", PROMPT, SamplingParams(seed=1))))
        assert wire.load(await anext(messages)) == wire.Events()
        await messages.aclose()  # type: ignore[attr-defined]
        assert not starting.done()
        gate.set()
        await step
        await starting
        assert isinstance(await ended, Finished)
        assert (await replica.status()).stats["running"] == 0
        await pool.shutdown()

    asyncio.run(check())

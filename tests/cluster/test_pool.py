"""The pool over replicas that are in this process: what it does when they are full, die, fall silent or differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from unspool import LLM
from unspool.cluster import wire
from unspool.cluster.models import resolver
from unspool.cluster.pool import ReplicaPool
from unspool.cluster.replica import Replica
from unspool.engine.driver import Submission
from unspool.errors import EngineError, QueueFullError, ReplayError, ReplicaLostError, RequestError
from unspool.events import Event, Failed, Finished, FinishReason, Text
from unspool.models.random import stand_in
from unspool.params import SamplingParams

PROMPT = tuple(range(40, 70))


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(stand_in("tiny"), threads=1, kv_tokens=4096) as model:
        yield model


@dataclass
class Fake:
    """A replica of this process: after `dies_after` events of a stream it is lost; `changes` what it says."""

    name: str
    replica: Replica
    dies_after: list[int] = field(default_factory=list)  # of one stream after the other; then it lives on
    change: Callable[[wire.Message], wire.Message] = lambda message: message
    is_full: bool = False
    num_requests: int = 0


class FakeStream:
    def __init__(self, fake: Fake, data: bytes) -> None:
        self.replica, self._fake = fake.name, fake
        self._request = wire.load(data)
        self._messages = fake.replica.stream(data)
        self._ready: list[wire.Message] = []
        self._left = fake.dies_after.pop(0) if fake.dies_after else None

    def __aiter__(self) -> AsyncIterator[wire.Message]:
        return self

    async def __anext__(self) -> wire.Message:
        if self._left == 0:
            raise ReplicaLostError(f"{self.replica} died")
        if self._left is not None:
            self._left -= 1
        if self._fake.is_full:
            return wire.Refused(QueueFullError("full"))
        while not self._ready:
            message = wire.load(await anext(self._messages))
            if isinstance(message, wire.Events):  # one by one, however many came together
                self._ready += [wire.Events((event,)) for event in message.events]
            else:
                self._ready.append(message)
        return self._fake.change(self._ready.pop(0))

    async def abort(self, reason: FinishReason) -> None:
        self._fake.replica.abort(self._request.id, reason)

    async def close(self) -> None:
        await self._messages.aclose()  # type: ignore[attr-defined]


class FakeTransport:
    def __init__(self, fakes: Sequence[Fake]) -> None:
        self.fakes = fakes

    async def open(self, request: bytes, chain: Sequence[str], avoid: Collection[str]) -> FakeStream:
        for fake in self.fakes:
            if fake.name not in avoid:
                fake.num_requests += 1
                return FakeStream(fake, request)
        raise ReplicaLostError("no replica can take the request now")

    def reports(self) -> dict[str, int]:
        return {}

    def statuses(self) -> dict[str, wire.Status]:
        return {}

    async def close(self) -> None: ...


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
        async with asyncio.timeout(60):
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

    events = run(llm, [Fake("a", Replica(llm))], SamplingParams(max_tokens=400, seed=3), act)
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


def test_nothing_is_left_in_a_replica(llm: LLM) -> None:
    replica = Replica(llm)
    run(llm, [Fake("a", replica, [5]), Fake("b", replica)], ASKED)
    assert not llm.driver.call(lambda engine: engine.has_work)
    llm.driver.call(lambda engine: engine.check())

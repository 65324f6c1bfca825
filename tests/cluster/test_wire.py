"""Values that go from process to process arrive as they were sent."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest

from unspool import events, params
from unspool.ceilings import Utilization
from unspool.cluster import wire
from unspool.errors import (
    ContextLengthError,
    EngineError,
    QueueFullError,
    RequestError,
    SamplingError,
    UnspoolError,
)
from unspool.events import Failed, Finished, Text, Timings, Token, Usage
from unspool.params import BeamParams, Constraint, RepetitionDetector, SamplingParams, ThinkingMarks
from unspool.results import Receipt
from unspool.sampling import trace
from unspool.sampling.trace import Candidate, StageTrace, StepTrace, TokenEffect

TRACE = StepTrace(
    position=3,
    token=5,
    raw_probability=0.1,
    raw_rank=2,
    entropy_bits=1.5,
    alternatives=((5, 0.1), (6, 0.3)),
    stages=(StageTrace("top_k", 3, 3, 0.7, 1.25, (TokenEffect(5, 0.25, None),)),),
    greedy=False,
    seed=7,
    candidates=(Candidate(5, 0.25, 1.5, 1.75),),
)
RECEIPT = Receipt("model", "1.0", "cpu-avx2", 7)


@pytest.mark.parametrize(
    "value",
    [
        SamplingParams(),
        SamplingParams(temperature=0.1 + 0.2, top_p=0.3, stop=["a", "b"], logit_bias={3: -math.inf, 5: 1.5}, n=2),
        SamplingParams(constraint=Constraint("json_schema", {"type": "object", "~": {"~": "map"}, "enum": [1, None]})),
        SamplingParams(constraint=Constraint("choice", ("ja", "nein")), repetition_detector=RepetitionDetector(4, 3)),
        SamplingParams(beam=BeamParams(width=3)),
        SamplingParams(thinking_budget=4, thinking_marks=ThinkingMarks("<think>", "</think>", is_open=True)),
        wire.Events((Text("r", 0, "", (), held="END"),)),
        wire.WireRequest("r1", (1, 2, 3), SamplingParams(seed=2**53 - 1), (4,), True, "00-ab-cd-01", "model"),
        wire.Events((Text("r", 1, "\ud800 \u2028é", (Token(4), Token(5, -0.1, ((5, -0.1),), TRACE, 2))),)),
        wire.Events(
            (Finished("r", 0, "stop", Usage(3, 4, 2), Timings(0.1, 0.2, 0.3, 0.6, 0.3, None), stop="\n", seed=7),)
        ),
        wire.Events((), Utilization(1e9, 2e6, 0.25, None)),
        wire.Accepted(RECEIPT),
        wire.Status(RECEIPT, "model", 512, 16, "30x3x64", {"running": 3}, "aa" * 8),
    ],
)
def test_a_value_arrives_as_it_was_sent(value: object) -> None:
    assert wire.load(wire.dump(value)) == value


def test_every_value_that_a_request_can_hold_may_be_sent() -> None:
    records = {name for name in params.__all__ if dataclasses.is_dataclass(getattr(params, name))}
    assert records - {"ResolvedParams"} <= set(wire.kinds())


def test_floats_keep_their_bits() -> None:
    values = (-0.0, 5e-324, 1 / 3, math.pi * 1e-300, -math.inf)
    tokens = tuple(Token(1, value) for value in values)
    sent = wire.Events((Text("r", 0, "", tokens),))
    (event,) = wire.load(wire.dump(sent)).events
    assert [token.logprob.hex() for token in event.tokens] == [value.hex() for value in values]


@pytest.mark.parametrize(
    "error",
    [
        RequestError("temperature is -1", "temperature", "invalid"),
        ContextLengthError("too long", "messages"),
        QueueFullError("full"),
        SamplingError("NaN logits"),
        EngineError("it failed"),
    ],
)
def test_an_error_keeps_its_kind_its_words_and_its_field(error: UnspoolError) -> None:
    loaded = wire.load(wire.dump(wire.Refused(error))).error
    assert type(loaded) is type(error)
    assert str(loaded) == str(error)
    assert getattr(loaded, "param", None) == getattr(error, "param", None)
    assert getattr(loaded, "code", None) == getattr(error, "code", None)


def test_a_foreign_error_keeps_its_name() -> None:
    loaded = wire.load(wire.dump(wire.Events((Failed("r", 0, ZeroDivisionError("by zero")),))))
    error = loaded.events[0].error
    assert isinstance(error, wire.Defect)
    assert (type(error).__name__, str(error)) == ("ZeroDivisionError", "by zero")
    assert not isinstance(error, UnspoolError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1,2",
        b'{"a":1}',
        b'{"~":"os"}',
        b'{"~":"Token"}',
        b'{"~":"Token","id":1,"other":2}',
        b'{"~":"error","name":"__builtins__","message":""}',
        b'{"~":"error","name":"annotations","message":""}',
        b'{"~":"defect","name":"a b","message":""}',
        b'{"~":"defect","name":3,"message":""}',
        b"[" * 100_000,
    ],
)
def test_data_of_another_shape_is_refused(data: bytes) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        wire.load(data)


def test_a_function_cannot_be_sent() -> None:
    with pytest.raises(EngineError, match="function cannot be sent"):
        wire.dump(SamplingParams(order=[lambda row: row]))


def test_every_record_that_an_event_can_hold_can_be_sent() -> None:
    """A field of a new type in an event is sent as soon as it is declared, or this test fails."""
    # A Token's trace is declared as Any.
    open_types: list[object] = [events.Text, events.Finished, events.Failed, trace.StepTrace]
    seen: set[object] = set()
    while open_types:
        kind = open_types.pop()
        if kind in seen:
            continue
        seen.add(kind)
        if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
            assert wire.kinds().get(kind.__name__) is kind
            open_types += typing.get_type_hints(kind, vars(trace) | vars(events)).values()
        open_types += typing.get_args(kind)
    assert events.StepWork in seen
    assert trace.Candidate in seen

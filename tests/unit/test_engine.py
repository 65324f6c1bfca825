"""The engine's requests: how they begin, branch, go back, end and fail, and that no block is ever lost."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    QueueFullError,
    RequestError,
)
from unspool.events import Failed, Finished, Text
from unspool.params import RepetitionDetector, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11]


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine(tiny) -> Engine:
    checkpoint = tiny("tiny", "f32")
    config = EngineConfig(device="reference", kv_tokens=256, block_size=4)
    return Engine(checkpoint, config, tokenizer=checkpoint.tokenizer(), clock=FakeClock())


def drain(engine: Engine) -> list:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    engine.scheduler.blocks.check()
    return events


def answer(engine: Engine, params: SamplingParams, prompt=PROMPT, **options) -> tuple[list[int], str, Finished]:
    id = engine.add(prompt, params, **options)
    events = [event for event in drain(engine) if event.request == id]
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    texts = [event for event in events if isinstance(event, Text)]
    assert isinstance(events[-1], Finished)
    return [token.id for text in texts for token in text.tokens], "".join(text.text for text in texts), events[-1]


def test_length_counts_tokens(engine) -> None:
    ids, _, end = answer(engine, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert (len(ids), end.reason, end.usage.completion_tokens, end.usage.prompt_tokens) == (5, "length", 5, 7)


def test_a_generation_ends_with_the_context(engine) -> None:
    ids, _, end = answer(engine, SamplingParams(temperature=0, ignore_eos=True), prompt=[3] * 240)
    assert (len(ids), end.reason) == (16, "length")


def test_max_tokens_zero_computes_the_prompt_alone(engine) -> None:
    ids, text, end = answer(engine, SamplingParams(max_tokens=0))
    assert (ids, text, end.reason) == ([], "", "length")


def test_end_token(engine) -> None:
    end_id = min(engine.end_ids)
    ids, text, end = answer(engine, SamplingParams(max_tokens=5, logit_bias={end_id: 100.0}))
    assert (ids, text, end.reason, end.stop) == ([end_id], "", "eos", end_id)


def test_stop_token(engine) -> None:
    ids, text, end = answer(engine, SamplingParams(max_tokens=9, logit_bias={65: 100.0}, stop_token_ids=[65]))
    assert (ids, text, end.reason, end.stop) == ([65], "", "stop", 65)
    shown = SamplingParams(max_tokens=9, logit_bias={65: 100.0}, stop_token_ids=[65], include_stop_str=True)
    assert answer(engine, shown)[1] == "A"


def test_stop_string_cuts_text_and_tokens(engine) -> None:
    params = SamplingParams(max_tokens=6, allowed_token_ids=[65], temperature=0)
    assert answer(engine, params)[1] == "AAAAAA"
    ids, text, end = answer(engine, dataclasses.replace(params, stop="AAA"))
    assert (ids, text, end.reason, end.stop) == ([], "", "stop", "AAA")
    biased = SamplingParams(max_tokens=30, allowed_token_ids=[65, 66], temperature=9, seed=1)
    whole = answer(engine, biased)[1]
    at = whole.index("AB")
    ids, text, end = answer(engine, dataclasses.replace(biased, stop=["AB", "never"]))
    assert (text, ids, end.stop) == (whole[:at], [ord(c) for c in whole[:at]], "AB")


def test_banned_strings_are_never_shown_and_change_nothing_before_them(engine) -> None:
    params = SamplingParams(max_tokens=24, allowed_token_ids=[65, 66, 67], temperature=9, seed=2)
    free = answer(engine, params)[1]
    at = free.index("AB")
    id = engine.add(PROMPT, dataclasses.replace(params, bad_words=["AB"]))
    shown = [event.text for event in drain(engine) if isinstance(event, Text) and event.request == id]
    assert "AB" not in "".join(shown)
    assert len("".join(shown)) == 24
    assert "".join(shown)[:at] == free[:at]
    for seed in range(30):  # strings that overlap themselves and each other
        banned = ["AB", "AAC", "CBC", "BBB"]
        params = SamplingParams(
            max_tokens=40, allowed_token_ids=[65, 66, 67, 68], temperature=9, seed=seed, bad_words=banned
        )
        ids, text, _ = answer(engine, params)
        assert not any(word in text for word in banned)
        assert [chr(id) for id in ids] == list(text)
        assert len(text) == 40


def test_when_every_way_is_banned_the_request_fails_alone(engine) -> None:
    with pytest.raises(RequestError, match="no token may be chosen"):
        answer(engine, SamplingParams(max_tokens=4, allowed_token_ids=[65], bad_words=["A"]))


def test_forced_tokens_take_no_step_of_their_own(tiny) -> None:
    from unspool.params import Constraint

    checkpoint = tiny()
    engine = Engine(
        checkpoint, EngineConfig(device="reference", kv_tokens=256, block_size=4), tokenizer=checkpoint.tokenizer()
    )
    params = SamplingParams(
        max_tokens=40, temperature=1, seed=3, logprobs=2, constraint=Constraint("regex", "(ab|cd)efghijklmno(p|q)rstuv")
    )

    def run() -> tuple[list, int]:
        engine.add(PROMPT, params)
        events, steps = [], 0
        while engine.has_work:
            events += engine.step()
            steps += 1
            engine.check()
        tokens = [token for event in events if isinstance(event, Text) for token in event.tokens]
        return tokens, steps

    tokens, steps = run()
    engine.draft = lambda: None
    assert run()[0] == tokens, "ids, logprobs and alternatives are those of step by step"
    assert len(tokens) == 19
    assert steps < 8


def test_a_finished_constraint_finishes_the_answer(tiny) -> None:
    from unspool.params import Constraint

    checkpoint = tiny()
    engine = Engine(checkpoint, EngineConfig(device="reference", kv_tokens=256), tokenizer=checkpoint.tokenizer())
    choice = Constraint("choice", ["yes", "no"])
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 20}):
        ids, text, end = answer(engine, SamplingParams(max_tokens=40, constraint=choice, **options))
        assert text in ("yes", "no")
        assert (len(ids), end.reason) == (len(text), "constraint")


@pytest.mark.parametrize(("length", "tokens"), [(0, 4), (4, 4), (9, 9)])
def test_loop_detector(engine, length: int, tokens: int) -> None:
    detector = RepetitionDetector(period=3, repeats=4, length=length)
    ids, _, end = answer(engine, SamplingParams(max_tokens=50, allowed_token_ids=[65], repetition_detector=detector))
    assert (len(ids), end.reason) == (tokens, "repetition")


def test_n_answers_have_the_seeds_they_would_have_alone(engine) -> None:
    params = SamplingParams(max_tokens=8, temperature=1, seed=9, n=4, ignore_eos=True)
    id = engine.add(PROMPT, params)
    events = drain(engine)
    seeds = {event.choice: event.seed for event in events if isinstance(event, Finished)}
    assert sorted(seeds) == [0, 1, 2, 3]
    assert seeds[0] == 9
    assert len(set(seeds.values())) == 4
    for choice, seed in seeds.items():
        ids = [t.id for e in events if isinstance(e, Text) and (e.request, e.choice) == (id, choice) for t in e.tokens]
        assert ids == answer(engine, dataclasses.replace(params, n=1, seed=seed))[0]


def test_best_of_keeps_the_likeliest(engine) -> None:
    params = SamplingParams(max_tokens=6, temperature=1, seed=3, n=6, logprobs=0, ignore_eos=True)
    engine.add(PROMPT, params, id="all")
    engine.add(PROMPT, dataclasses.replace(params, n=2, best_of=6), id="best")
    events = drain(engine)

    def means(id: str, count: int) -> list[float]:
        tokens = [
            [t for e in events if isinstance(e, Text) and (e.request, e.choice) == (id, c) for t in e.tokens]
            for c in range(count)
        ]
        return [sum(t.logprob for t in choice) / len(choice) for choice in tokens]

    assert means("best", 2) == sorted(means("all", 6), reverse=True)[:2]


def test_given_output_is_continued_as_if_chosen(engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1, seed=5, repetition_penalty=1.2, ignore_eos=True)
    straight = answer(engine, params)
    for index in (1, 4, 9):
        assert answer(engine, params, output=straight[0][:index])[:2] == straight[:2]
    with pytest.raises(RequestError, match="ends the answer already"):
        engine.add(PROMPT, params, output=straight[0])
    with pytest.raises(RequestError, match="output has token 99999"):
        engine.add(PROMPT, params, output=[99999])
    engine.check()


def test_prompt_logprobs_are_those_of_the_model(engine) -> None:
    _, _, end = answer(engine, SamplingParams(max_tokens=0, prompt_logprobs=2), prompt=list(range(40, 110)))
    scored = end.prompt_logprobs
    assert scored[0] is None
    assert [token.id for token in scored[1:]] == list(range(41, 110))
    # The same numbers, one position at a time, from what a draw would have been made of.
    for length in (1, 30, 69):
        prompt = list(range(40, 40 + length))
        engine.add(prompt, SamplingParams(max_tokens=1, temperature=0, logprobs=320))
        (token,) = [t for e in drain(engine) if isinstance(e, Text) for t in e.tokens]
        assert dict(token.top)[40 + length] == scored[length].logprob


def test_abort_tells_what_there_is_and_frees(engine) -> None:
    id = engine.add(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True, n=2))
    for _ in range(4):
        engine.step()
    assert engine.abort(id)
    events = drain(engine)
    assert [e.reason for e in events if isinstance(e, Finished)] == ["abort", "abort"]
    assert not engine.abort(id)


def test_abort_before_anything_ran(engine) -> None:
    id = engine.add(PROMPT, SamplingParams(n=3))
    engine.abort(id)
    assert [e.reason for e in drain(engine)] == ["abort"] * 3


def test_a_deadline_ends_a_request(engine) -> None:
    id = engine.add(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True, deadline_ms=1000))
    engine.step()
    engine._now.now += 2
    events = drain(engine)
    assert [(e.request, e.reason) for e in events if isinstance(e, Finished)] == [(id, "deadline")]


def test_one_requests_failure_is_its_own(engine) -> None:
    def explode(row, state):
        raise ZeroDivisionError("a user's mistake")

    quiet = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone = answer(engine, quiet)[0]
    bad = engine.add(PROMPT, SamplingParams(max_tokens=6, order=["temperature", explode]))
    good = engine.add(PROMPT, quiet)
    events = drain(engine)
    (failed,) = [e for e in events if isinstance(e, Failed)]
    assert failed.request == bad
    assert isinstance(failed.error, RequestError)
    assert str(failed.error) == "stage explode raised ZeroDivisionError: a user's mistake"
    assert [t.id for e in events if isinstance(e, Text) and e.request == good for t in e.tokens] == alone


def test_nan_logits_fail_the_one_who_has_them(engine) -> None:
    run = engine.runner.run

    def poisoned(plan):
        logits = run(plan).copy()
        logits[0] = np.nan
        return logits

    engine.runner.run = poisoned
    first = engine.add(PROMPT, SamplingParams(max_tokens=2))
    second = engine.add(PROMPT, SamplingParams(max_tokens=1))
    events = drain(engine)
    assert {e.request for e in events if isinstance(e, Failed)} == {first}
    assert {e.request for e in events if isinstance(e, Finished)} == {second}
    assert "NaN logits at position 7" in str(next(e.error for e in events if isinstance(e, Failed)))


def test_a_failing_step_fails_those_in_it(engine) -> None:
    run = engine.runner.run

    def broken(plan):
        raise MemoryError("no room")

    engine.runner.run = broken
    engine.add(PROMPT, SamplingParams(max_tokens=2, n=2))
    events = drain(engine)
    assert [type(e.error) for e in events] == [EngineError, EngineError]
    engine.runner.run = run
    assert answer(engine, SamplingParams(max_tokens=2, ignore_eos=True))[2].reason == "length"


def test_what_cannot_run_is_refused_with_its_numbers(engine) -> None:
    with pytest.raises(ContextLengthError, match=r"300 tokens\. .* 256 tokens here \(kv_tokens; 512"):
        engine.add([1] * 300)
    with pytest.raises(RequestError, match="no tokens"):
        engine.add([])
    with pytest.raises(RequestError, match="token 320; the vocabulary has 320"):
        engine.add([320])
    engine.add([1], id="x")
    with pytest.raises(RequestError, match="running already"):
        engine.add([1], id="x")


def test_the_queue_is_bounded(tiny) -> None:
    engine = Engine(tiny(), EngineConfig(device="reference", kv_tokens=64, max_running=1, max_waiting=2))
    engine.add([1], SamplingParams(max_tokens=1))  # starts with the next step
    engine.add([1], SamplingParams(max_tokens=1))
    engine.add([1], SamplingParams(max_tokens=1))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.add([1])
    drain(engine)
    engine.add([1], SamplingParams(max_tokens=1))


def test_a_closed_engine_takes_nothing(engine) -> None:
    engine.add(PROMPT, SamplingParams(max_tokens=9))
    assert [e.reason for e in engine.close()] == ["abort"]
    with pytest.raises(EngineClosedError):
        engine.add(PROMPT)


def test_timings_add_up(engine) -> None:
    clock = engine._now
    id = engine.add(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    clock.now += 1  # waits
    run = engine.runner.run

    def slow(plan):
        clock.now += 2
        return run(plan)

    engine.runner.run = slow
    (end,) = [e for e in drain(engine) if isinstance(e, Finished) and e.request == id]
    t = end.timings
    assert (t.queue, t.prefill, t.first_token, t.decode, t.total) == (1, 2, 3, 4, 7)
    assert t.tokens_per_second == 0.5
    assert math.isclose(t.queue + t.prefill + t.decode, t.total)

"""Stages and stop rules of one's own: answers are the same in every company, and a failure is its request's alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.laws.test_speculation import eager
from unspool import PRESETS
from unspool.engine.engine import Engine
from unspool.errors import RequestError
from unspool.events import Failed, Finished, Text
from unspool.params import BeamParams, SamplingParams

ORDER = PRESETS["unspool"].stages


def against_last(row, state):
    """Looks at the output, so that it differs at each place of a draft."""
    if state.output_ids.size:
        row[state.output_ids[-3:]] -= 4
    return row


def after_a_sum(state):
    return sum(state.output_ids) % 7 == 3 and len(state.output_ids) > 2


def after_five_characters(state):
    return len(state.text) >= 5


def with_rules(jobs, rng):
    orders = [None, (*ORDER, against_last), (against_last, *ORDER), ("temperature", against_last, "top_k", "top_p")]
    rules = [None, after_a_sum, (after_five_characters, after_a_sum)]
    for job in jobs:
        order = rng.choice(orders)
        changes = {"order": order, "stop_rules": rng.choice(rules)}
        if order is not None and "repetition" not in order:
            changes["repetition_penalty"] = None
        yield replace(job, params=replace(job.params, **changes))


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_the_same_in_every_company(seed, tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(seed)
    common = [rng.randrange(4) + 65 for _ in range(30)]
    jobs = list(with_rules([make_job(rng, 100, common, 30) for _ in range(10)], rng))
    plain = make_crowd(checkpoint, kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    small = {"kv_tokens": 128, "block_size": 4, "step_tokens": 24, "chunk_tokens": 7}
    assert make_crowd(checkpoint, **small).together(jobs, rng) == expected
    drafted = make_crowd(checkpoint, kv_tokens=256, speculate="early-exit")
    eager(drafted.engine)
    assert drafted.together(jobs, rng) == expected
    assert drafted.engine.speculation.total.drafted > 0


def answers(engine: Engine, ids: list[str]) -> dict[str, object]:
    """The token ids of each answer, or its error."""
    tokens: dict[str, list[int]] = {id: [] for id in ids}
    found: dict[str, object] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Text):
                tokens[event.request] += [token.id for token in event.tokens]
            elif isinstance(event, Failed):
                found[event.request] = event.error
            else:
                assert isinstance(event, Finished)
                found[event.request] = tokens[event.request]
        engine.check()
    return found


def broken_stage(row, state):
    if len(state.output_ids) == 4:
        raise KeyError("no such thing")
    return row


def broken_rule(state):
    return 1 / (6 - len(state.output_ids)) > 5


def vague_rule(state):
    return "yes"


WRONG = {
    "stage broken_stage raised KeyError: 'no such thing'": {"order": (*ORDER, broken_stage)},
    "stop rule broken_rule raised ZeroDivisionError: division by zero": {"stop_rules": broken_rule},
    "stop rule vague_rule returned 'yes'; expected True or False": {"stop_rules": [vague_rule]},
}


@pytest.mark.parametrize("speculate", [None, "early-exit"])
def test_a_failure_costs_its_own_request_alone(speculate, tiny, make_crowd) -> None:
    engine = make_crowd(tiny("tiny", "q4_1"), kv_tokens=512, speculate=speculate).engine
    if speculate:
        eager(engine)
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    good = engine.add([1, 2, 3], params)
    bad = {engine.add([1, 2, 3], replace(params, **one)): reported for reported, one in WRONG.items()}
    found = answers(engine, [good, *bad])
    for id, reported in bad.items():
        error = found[id]
        assert isinstance(error, RequestError)
        assert str(error) == reported
    alone = engine.add([1, 2, 3], params)
    assert found[good] == answers(engine, [alone])[alone]


def test_a_rule_ends_an_answer_with_its_name(tiny, make_crowd) -> None:
    engine = make_crowd(tiny("tiny", "q4_1"), kv_tokens=512).engine
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    whole = answers(engine, [id := engine.add([5, 6], params)])[id]
    seen = []

    def third(state):
        seen.append(state)
        return np.bool_(len(state.output_ids) == 3)

    id = engine.add([5, 6], replace(params, stop_rules=third))
    ends = []
    while engine.has_work:
        ends += [event for event in engine.step() if isinstance(event, Finished)]
    assert [(end.reason, end.stop, end.usage.completion_tokens) for end in ends] == [("stop", "third", 3)]
    assert [list(state.output_ids) for state in seen] == [whole[:1], whole[:2], whole[:3]]
    assert seen[0].prompt_ids == (5, 6)


def test_a_rule_sees_the_text_after_a_banned_string_was_taken_back(tiny, make_crowd) -> None:
    checkpoint = tiny("tiny", "q4_1")
    crowd = make_crowd(checkpoint, kv_tokens=512)
    tokenizer, texts = checkpoint.tokenizer(), []

    def watching(state):
        texts.append((state.text, tokenizer.decode(state.output_ids, prompt_ids=state.prompt_ids)))
        return False

    ban = [chr(code) for code in range(65, 91)]
    params = SamplingParams(max_tokens=25, seed=3, ignore_eos=True, logit_bias=dict.fromkeys(range(60, 100), 8.0))
    id = crowd.engine.add([70, 71], replace(params, bad_words=ban, stop_rules=watching))
    crowd.drain()
    assert not set(crowd.collector.answer(id).text) & set(ban)
    assert len(texts) > 20
    for seen, decoded in texts:
        assert decoded.startswith(seen)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"stop_rules": "a"}, "stop_rules"),
        ({"stop_rules": [1]}, "stop_rules"),
        ({"stop_rules": dict}, "stop_rules"),
        ({"order": [1]}, "order holds 1"),
        ({"order": ["temprature"]}, "'temprature'"),
    ],
)
def test_what_is_no_rule_is_refused_at_once(wrong, expected) -> None:
    with pytest.raises(RequestError, match=expected):
        SamplingParams(**wrong)


def test_a_beam_search_takes_stages_and_refuses_rules(tiny, make_crowd) -> None:
    engine = make_crowd(tiny("tiny", "q4_1"), kv_tokens=512).engine
    beam = SamplingParams(beam=BeamParams(2), max_tokens=4)
    with pytest.raises(RequestError, match="stop_rules"):
        engine.add([1, 2], replace(beam, stop_rules=after_a_sum))
    bad = engine.add([1, 2], replace(beam, order=(broken_stage_now, *ORDER)))
    assert "stage broken_stage_now raised" in str(answers(engine, [bad])[bad])


def broken_stage_now(row, state):
    raise ValueError("now")

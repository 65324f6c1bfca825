"""Answers that end in the middle of a draft, drafts under a grammar, and drafts on a device that is run ahead of."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.laws.crowd import Crowd
from tests.laws.emulated_device import device_crowd
from tests.laws.test_speculation import Oracle, eager
from tests.steady_costs import SteadyCosts
from unspool.bench.synthetic import fix_length
from unspool.drafter import BaseDrafter
from unspool.events import Finished
from unspool.models.random import SHAPES, write_random_gguf
from unspool.params import BeamParams, Constraint, SamplingParams

PROMPT = (70, 71, 72)


class Knowing(BaseDrafter):
    """Says what it was told, right or wrong, and goes on past the end of the answer."""

    name = "knowing"

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def propose(self, contexts, counts):
        return [self.tokens[len(s.tokens) - s.num_prompt :][:count] for s, count in zip(contexts, counts, strict=True)]


def ended(crowd: Crowd, params: SamplingParams) -> tuple[list[int], str, Finished]:
    id = crowd.engine.add(PROMPT, params)
    crowd.drain()
    answer, end = crowd.collector.answer(id), crowd.collector.ends[id]
    return list(answer.ids), answer.text, end


def both(tiny, params: SamplingParams, past: list[int]) -> tuple[list[int], str, Finished, Finished]:
    """The plain answer, and the same from a draft of ten that goes on beyond its end: (ids, text, end, end)."""
    plain, fast = (Crowd(tiny("tiny", "q4_1"), kv_tokens=256, speculate=how) for how in (None, "lookup"))
    ids, text, end = ended(plain, params)
    fast.engine.speculation.drafters = {"knowing": Knowing([*ids, *past])}
    fix_length(fast.engine, 10)
    fast_ids, fast_text, fast_end = ended(fast, params)
    assert (fast_ids, fast_text) == (ids, text)
    assert (fast_end.reason, fast_end.stop, fast_end.usage) == (end.reason, end.stop, end.usage)
    return ids, text, end, fast_end


def test_a_stop_inside_an_accepted_run(tiny) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, logit_bias={65: 100})
    _, text, end, fast_end = both(tiny, replace(params, stop=["AAAA"]), [65] * 20)
    assert end.reason == "stop"
    assert end.stop == "AAAA"
    assert text == ""
    assert fast_end.speculation.steps == 1, "one draft had the whole answer and more"
    assert both(tiny, params, [65] * 20)[2].reason == "length"


def test_the_end_token_inside_a_draft(tiny) -> None:
    end_id = min(tiny().eos_ids)
    params = SamplingParams(max_tokens=30, temperature=0, logit_bias={end_id: 100}, min_tokens=5)
    _, _, end, fast_end = both(tiny, params, [end_id, 65, 66, 67])
    assert end.reason == "eos"
    assert fast_end.speculation.accepted >= 4
    assert fast_end.usage.completion_tokens == end.usage.completion_tokens


@pytest.mark.parametrize("most", range(1, 8))
def test_max_tokens_inside_a_draft(tiny, most) -> None:
    ids, _, end, _ = both(tiny, SamplingParams(max_tokens=most, temperature=1, seed=3, ignore_eos=True), [65] * 20)
    assert end.reason == "length"
    assert len(ids) == most


def test_a_banned_string_inside_an_accepted_run(tiny) -> None:
    """The draft has the string that may not be; the answer goes back and another way, as without."""
    free = Crowd(tiny("tiny", "q4_1"), kv_tokens=256)
    params = SamplingParams(
        max_tokens=16, temperature=1, seed=5, ignore_eos=True, allowed_token_ids=list(range(65, 91))
    )
    ids, text, _ = ended(free, params)
    banned = replace(params, bad_words=[text[4:6]])
    plain, fast = (Crowd(tiny("tiny", "q4_1"), kv_tokens=256, speculate=how) for how in (None, "lookup"))
    fast.engine.speculation.drafters = {"knowing": Knowing(ids)}
    fix_length(fast.engine, 10)
    expected = ended(plain, banned)[:2]
    assert text[4:6] not in expected[1]
    assert ended(fast, banned)[:2] == expected


def test_a_draft_model_under_a_grammar(tiny, tmp_path) -> None:
    checkpoint = tiny("tiny", "q4_1")
    write_random_gguf(tmp_path / "draft.gguf", SHAPES["tiny"], format="q8_0")
    plain = Crowd(checkpoint, kv_tokens=256)
    fast = Crowd(checkpoint, kv_tokens=256, speculate=f"model:{tmp_path / 'draft.gguf'}")
    fix_length(fast.engine, 4)
    for kind, value in (
        ("regex", "[a-f]{4,20}(xy|z)+[0-9]{3}"),
        ("choice", ["Apple", "Apply", "Banana"]),
        ("json_schema", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    ):
        for seed in range(4):
            params = SamplingParams(
                max_tokens=40, temperature=1, seed=seed, constraint=Constraint(kind, value), logprobs=2
            )
            assert ended(fast, params)[:2] == ended(plain, params)[:2]
    assert fast.engine.speculation.total.accepted > 0
    blocks = fast.engine.speculation.drafters["model"]._blocks
    blocks.check()


def test_a_draft_model_finds_earlier_turns_again(tiny, tmp_path) -> None:
    """Its blocks of an ended request serve the next one that begins alike, also with a salt; and none is lost."""
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(1)
    write_random_gguf(tmp_path / "draft.gguf", SHAPES["tiny"], format="q8_0")
    plain = Crowd(checkpoint, kv_tokens=256, block_size=8)
    fast = Crowd(checkpoint, kv_tokens=128, block_size=8, speculate=f"model:{tmp_path / 'draft.gguf'}")
    fix_length(fast.engine, 3)
    drafter = fast.engine.speculation.drafters["model"]
    computed: list[int] = []
    run = drafter._runner.run
    drafter._runner.run = lambda plan: (computed.append(plan.num_tokens), run(plan))[1]
    turn = [rng.randrange(256) for _ in range(40)]
    for salt in ("a", "a", "b"):
        params = SamplingParams(max_tokens=6, temperature=1, seed=2, ignore_eos=True, cache_salt=salt)
        answers = []
        for crowd in (plain, fast):
            id = crowd.engine.add(tuple(turn), params)
            crowd.drain()
            answers.append(crowd.collector.answer(id))
        assert answers[0] == answers[1]
        drafter._blocks.check()
        most, computed[:] = max(computed), []
        assert most <= 16 if (salt, len(turn)) == ("a", 46) else most >= 40
        turn += answers[0].ids


@pytest.mark.parametrize("seed", range(8))
def test_a_device_is_run_ahead_of_while_no_draft_pays(seed, tiny, make_job) -> None:
    """Drafting and running ahead take turns as the drafter has something to say or not; the answers stay."""
    checkpoint, rng = tiny("tiny-qwen3", "q4_1"), random.Random(seed)
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 30) for _ in range(8)]
    jobs = [
        replace(
            job, params=replace(job.params, logprobs=None, repetition_penalty=None, max_tokens=rng.randrange(8, 40))
        )
        for job in jobs
    ]
    plain = Crowd(checkpoint, kv_tokens=512)
    expected = [plain.alone(job) for job in jobs]
    kv_tokens = rng.choice([160, 512])
    crowd, (device,) = device_crowd(checkpoint, kv_tokens=kv_tokens, block_size=8, max_running=2, speculate="lookup")
    known = {job.prompt: list(answer.ids) for job, answer in zip(jobs, expected, strict=True)}
    oracle = Oracle(known, rng, rng.choice([0.5, 1.0]))
    propose = oracle.propose
    oracle.propose = lambda contexts, counts: [
        draft if len(context.tokens) // 10 % 2 else []
        for context, draft in zip(contexts, propose(contexts, counts), strict=True)
    ]
    crowd.engine.speculation.drafters = {"oracle": oracle}
    crowd.engine.speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 12.0)])
    fix_length(crowd.engine, 4)
    assert crowd.together(jobs, rng) == expected
    assert device.used > 5, "it was run ahead of"
    assert crowd.engine.speculation.total.accepted > 5, "and drafts were accepted"


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_model_on_a_device(seed, tiny, tmp_path, make_job) -> None:
    """Whole drafts are made there before they are read; with neighbours that need the host, one guess at a time."""
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(seed)
    write_random_gguf(tmp_path / "draft.gguf", SHAPES["tiny"], format="q8_0")
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 40) for _ in range(6)]
    if seed % 2:
        jobs = [replace(job, params=replace(job.params, logprobs=None, repetition_penalty=None)) for job in jobs]
    plain = Crowd(checkpoint, kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    how = f"model:{tmp_path / 'draft.gguf'}"
    crowd, (_, device) = device_crowd(checkpoint, kv_tokens=256, block_size=8, speculate=how)
    drafter = crowd.engine.speculation.drafters["model"]
    length = rng.randrange(1, 7)
    fix_length(crowd.engine, length)
    assert crowd.together(jobs, rng) == expected
    assert crowd.engine.speculation.total.accepted > 0
    assert seed % 2 == 0 or device.used > 0 or length == 1
    drafter._blocks.check()


def test_a_whole_draft_on_a_device_is_right_if_the_model_is_its_own(tiny, make_job) -> None:
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(9)
    how = f"early-exit:{checkpoint.config.num_layers}"
    crowd, (_, device) = device_crowd(checkpoint, kv_tokens=256, speculate=how)
    fix_length(crowd.engine, 5)
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 30) for _ in range(6)]
    crowd.together([replace(j, params=replace(j.params, logprobs=None, repetition_penalty=None)) for j in jobs], rng)
    total = crowd.engine.speculation.total
    assert total.accepted == total.drafted >= 15
    assert device.used >= 8


def test_a_beam_search_has_no_drafts(tiny) -> None:
    crowd = Crowd(tiny("tiny", "q4_1"), kv_tokens=256, speculate="lookup")
    eager(crowd.engine)
    crowd.engine.add((65,) * 12, SamplingParams(beam=BeamParams(2), max_tokens=8))
    crowd.drain()
    assert crowd.engine.speculation.total.drafted == 0

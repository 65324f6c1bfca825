"""Speculative = plain: ids, text and the bits of every logprob, whatever the drafter says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.crowd import Crowd
from tests.steady_costs import SteadyCosts
from unspool.bench.synthetic import fix_length
from unspool.config import EngineConfig
from unspool.drafter import BaseDrafter
from unspool.engine.engine import Engine
from unspool.errors import RequestError
from unspool.models.random import SHAPES, random_checkpoint
from unspool.params import BeamParams, Constraint, RepetitionDetector, SamplingParams
from unspool.speculate.estimates import Costs, DrafterEstimates, RequestEstimates, draft_length
from unspool.speculate.lookup import SuffixAutomaton


class Oracle(BaseDrafter):
    """Knows the answers, and lies now and then: garbage ids, strings, repeats, too many tokens."""

    name = "oracle"

    def __init__(self, answers: dict[tuple[int, ...], list[int]], rng: random.Random, honesty: float) -> None:
        self.answers, self.rng, self.honesty = answers, rng, honesty

    def propose(self, contexts, counts):
        drafts = []
        for context, _ in zip(contexts, counts, strict=True):
            prompt = tuple(context.tokens[: context.num_prompt])
            right = self.answers[prompt][len(context.tokens) - context.num_prompt :][:8]
            draft = [t if self.rng.random() < self.honesty else self.rng.randrange(-5, 400) for t in right]
            drafts.append(draft + self.rng.choice([[], [], [0] * 30, [10**9], [256]]))
        return drafts

    def seconds(self, count):
        return 0.0

    def forget(self, number):
        pass


def eager(engine: Engine) -> None:
    """Let every proposal be sent: on models this small nothing ever pays, least of all on a busy machine."""
    engine.speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 1.0001)])
    for drafter in engine.speculation.drafters.values():
        if drafter.seconds(1) > 0:
            drafter.seconds = lambda count: 1e-9 * count


@pytest.mark.parametrize("seed", range(10))
def test_any_drafter_gives_the_plain_answer(seed, tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny-qwen3", "q4_1"), random.Random(seed)
    common = [rng.randrange(256) for _ in range(40)]
    jobs = [make_job(rng, checkpoint.config.vocab_size, common, 40) for _ in range(8)]
    plain = make_crowd(checkpoint, kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    answers = {job.prompt: list(answer.ids) for job, answer in zip(jobs, expected, strict=True)}
    crowd = make_crowd(checkpoint, kv_tokens=160, block_size=4, step_tokens=24, chunk_tokens=7, speculate="lookup")
    crowd.engine.speculation.drafters = {"oracle": Oracle(answers, rng, rng.choice([0.0, 0.6, 1.0]))}
    eager(crowd.engine)
    assert crowd.together(jobs, rng) == expected
    assert crowd.engine.speculation.total.drafted > 0


@pytest.mark.parametrize("drafter", ["lookup", "early-exit", "early-exit:1"])
def test_our_drafters_give_the_plain_answer(drafter, tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny-gemma3", "q4_1"), random.Random(4)
    common = [rng.randrange(4) + 65 for _ in range(60)]
    jobs = [make_job(rng, 60, common, 60) for _ in range(8)]
    plain = make_crowd(checkpoint, kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    crowd = make_crowd(checkpoint, kv_tokens=128, block_size=8, step_tokens=32, speculate=drafter)
    eager(crowd.engine)
    assert crowd.together(jobs, rng, abort_share=0.0) == expected
    assert crowd.engine.speculation.total.drafted > 0


def test_early_exit_through_every_layer_is_always_right(tiny, make_crowd, make_job) -> None:
    """A drafter that is the model itself, with the same noise, is never wrong, at temperature 1 either."""
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(4)
    crowd = make_crowd(checkpoint, kv_tokens=256, speculate=f"early-exit:{checkpoint.config.num_layers}")
    fix_length(crowd.engine, 5)
    for _ in range(6):
        crowd.alone(make_job(rng, checkpoint.config.vocab_size, [], 30))
    total = crowd.engine.speculation.total
    assert total.accepted == total.drafted >= 20


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([None, 3, 40]),
        "top_p": st.sampled_from([None, 0.5, 0.95]),
        "min_p": st.sampled_from([None, 0.1]),
        "typical_p": st.sampled_from([None, 0.8]),
        "top_n_sigma": st.sampled_from([None, 1.5]),
        "xtc_probability": st.sampled_from([None, 0.5]),
        "repetition_penalty": st.sampled_from([None, 1.3]),
        "frequency_penalty": st.sampled_from([None, 0.7]),
        "presence_penalty": st.sampled_from([None, 0.7]),
        "dry_multiplier": st.sampled_from([None, 0.8]),
        "no_repeat_ngram": st.sampled_from([None, 2]),
        "min_tokens": st.sampled_from([None, 5]),
        "max_tokens": st.integers(5, 24),
        "stop": st.sampled_from([None, ["A"], ["AB", "e", "\x00"], ["th"]]),
        "bad_words": st.sampled_from([None, ["B"], ["AA", "ca"]]),
        "stop_token_ids": st.sampled_from([None, [66, 7]]),
        "logit_bias": st.sampled_from([None, {65: 6.0, 66: 5.0}, {256: 4.0}]),
        "ignore_eos": st.booleans(),
        "repetition_detector": st.sampled_from([None, RepetitionDetector(period=3, repeats=3)]),
        "logprobs": st.sampled_from([0, 2]),
        "logprobs_stage": st.sampled_from([None, "final"]),
        "stop_rules": st.sampled_from([None, None, lambda state: sum(state.output_ids) % 9 == 4]),
        "order": st.sampled_from([None, "llama.cpp", "vllm", "transformers", "mlx"]),
        "constraint": st.sampled_from(
            [None, None, Constraint("regex", "[A-F]{3}(ab|cd)*z"), Constraint("choice", ["Apple", "Apply", "Banana"])]
        ),
        "seed": st.integers(0, 50),
    }
)


class Pair:
    """One engine that decodes plainly and one that speculates, made once for all examples."""

    def __init__(self) -> None:
        checkpoint = random_checkpoint(SHAPES["tiny"], format="q4_1")
        self.plain = Crowd(checkpoint, kv_tokens=256)
        self.fast = Crowd(checkpoint, kv_tokens=256, speculate="lookup")
        eager(self.fast.engine)

    def answer(self, crowd, prompt, params):
        id = crowd.engine.add(prompt, params)
        try:
            crowd.drain()
        except Exception as error:  # the failure too must be the same
            while crowd.engine.has_work:
                crowd.engine.step()
            return repr(error)
        return crowd.collector.answer(id)


PAIRS: list[Pair] = []


@settings(max_examples=150, deadline=None)
@given(values=PARAMS, honesty=st.sampled_from([0.0, 0.5, 1.0]), noise=st.integers(0, 1000))
def test_over_all_parameters(values, honesty, noise) -> None:
    if not PAIRS:
        PAIRS.append(Pair())
    pair, rng = PAIRS[0], random.Random(noise)
    prompt = tuple(rng.randrange(60, 90) for _ in range(rng.randrange(1, 20)))
    params = SamplingParams(**{name: value for name, value in values.items() if value is not None})
    expected = pair.answer(pair.plain, prompt, params)
    known = list(expected.ids) if not isinstance(expected, str) else [65, 66] * 10
    pair.fast.engine.speculation.drafters = {"oracle": Oracle({prompt: known}, rng, honesty)}
    assert pair.answer(pair.fast, prompt, params) == expected


def test_what_speculation_cannot_do_is_refused(tiny) -> None:
    with pytest.raises(RequestError, match="allowed: lookup, model:PATH"):
        Engine(tiny(), EngineConfig(device="reference", kv_tokens=64, speculate="magic"))
    with pytest.raises(RequestError, match="the model has 2"):
        Engine(tiny(), EngineConfig(device="reference", kv_tokens=64, speculate="early-exit:99"))
    engine = Engine(tiny(), EngineConfig(device="reference", kv_tokens=64, speculate="lookup"))
    with pytest.raises(RequestError, match="this engine's drafters: lookup"):
        engine.add([1], SamplingParams(speculate="model"))
    with pytest.raises(RequestError, match="a beam search makes none"):
        engine.add([1], SamplingParams(beam=BeamParams(2), speculate="lookup"))


def test_a_foreign_draft_model_is_refused(tiny, tmp_path) -> None:
    from dataclasses import replace

    from unspool.models.random import write_random_gguf

    path = tmp_path / "draft.gguf"
    write_random_gguf(path, replace(SHAPES["tiny"], vocab_size=300))
    with pytest.raises(RequestError, match=r"has 300 tokens, this model 320"):
        Engine(
            tiny(),
            EngineConfig(device="reference", kv_tokens=64, speculate=f"model:{path}"),
            tokenizer=tiny().tokenizer(),
        )


def test_a_draft_model_gives_the_plain_answer(tiny, tmp_path, make_crowd, make_job) -> None:
    from unspool.models.random import write_random_gguf

    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(6)
    write_random_gguf(tmp_path / "draft.gguf", SHAPES["tiny"], format="q8_0")
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 40) for _ in range(6)]
    plain = make_crowd(checkpoint, kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    crowd = make_crowd(checkpoint, kv_tokens=128, block_size=8, speculate=f"model:{tmp_path / 'draft.gguf'}")
    eager(crowd.engine)
    assert crowd.together(jobs, rng) == expected
    assert crowd.engine.speculation.total.accepted > 0, "the same weights in 8 bits agree with 4 bits at times"


@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_automaton_knows_the_longest_repeated_suffix(tokens: list[int]) -> None:
    automaton = SuffixAutomaton(tokens)
    length, end = automaton.repeated_suffix()
    text = tokens

    def occurs_before(n: int) -> bool:
        return any(text[i : i + n] == text[len(text) - n :] for i in range(len(text) - n))

    longest = max((n for n in range(1, len(text)) if occurs_before(n)), default=0)
    assert length == longest
    if length:
        assert text[end + 1 - length : end + 1] == text[len(text) - length :]


def test_what_follows_a_period_is_the_period() -> None:
    assert SuffixAutomaton([7, 7, 7]).following(5) == [7] * 5
    assert SuffixAutomaton([1, 2, 3, 1, 2, 3, 1, 2]).following(7) == [3, 1, 2, 3, 1, 2, 3]
    assert SuffixAutomaton([1, 2, 9, 8, 1, 2]).following(3) == [9, 8, 1]
    assert SuffixAutomaton([1, 2, 3]).following(3) == []


def test_length_follows_chance_and_cost() -> None:
    flat, steep = Costs([(1, 1.0), (17, 1.1)]), Costs([(1, 1.0), (17, 17.0)])
    assert draft_length([0.9] * 16, 1, 16, flat) >= 8
    assert draft_length([0.9] * 16, 1, 3, flat) == 3
    assert draft_length([0.9, 0.9, 0.0, 0.9], 1, 16, flat) == 2
    assert draft_length([0.05] * 16, 1, 16, Costs([(1, 1.0), (17, 3.0)])) == 0
    assert draft_length([0.9] * 16, 1, 16, steep) == 0
    assert draft_length([], 1, 16, flat) == 0
    # Where time is worth more, fewer guesses are worth it; in a crowd that fills the machine, none.
    sloped = Costs([(1, 1.0), (17, 3.0)])
    assert 0 < draft_length([0.8] * 16, 1, 16, sloped, tokens_per_step=2.0) < draft_length([0.8] * 16, 1, 16, sloped)
    assert draft_length([0.8] * 16, 16, 16, Costs([(1, 1.0), (8, 1.2), (64, 8.0)])) == 0


def test_costs_follow_what_steps_take() -> None:
    costs = Costs([(1, 1.0), (2, 1.1), (4, 1.3)])
    assert costs(3) == pytest.approx(1.2)
    for _ in range(300):
        costs.observe(1, 2.0)
        costs.observe(4, 4.0)
        costs.observe_ahead(1, 1.8)
    assert costs(1) == pytest.approx(2.0, rel=0.05)
    assert costs(4) == pytest.approx(4.0, rel=0.05)
    assert costs.without_draft(1) == pytest.approx(1.8, rel=0.05)
    assert Costs([(1, 1.0), (16, 4.0), (17, 3.9)])(34) > 6, "two neighbours' difference may be noise"


def test_paces_and_records_learn() -> None:
    estimates, record = DrafterEstimates((0.5, 0.9)), RequestEstimates()
    assert estimates.chance(7) == 0.9
    for _ in range(100):
        estimates.observe(0, was_right=False)
        record.observe(0.9, was_right=False)
        estimates.speed.observe(3, 1.5)
    assert estimates.chance(0) < 0.05
    assert estimates.chance(1) == 0.9
    assert estimates.tokens_per_step == pytest.approx(2.0, rel=0.1)
    assert record.trust < 0.12


def test_a_costly_drafter_that_does_not_pay_is_tried_ever_less() -> None:
    record = RequestEstimates()
    tried = 0
    for _ in range(1000):
        if record.may_ask():
            record.observe_round(1, 1.5)
            tried += 1
    assert 1 < tried < 12
    for _ in range(30):
        record.observe_round(4, 2.0)
    assert sum(record.may_ask() for _ in range(300)) > 40, "one that pays again is tried at every token"

"""Models with recurrent layers: however a state was reached, what follows is the same to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.laws.crowd import Crowd, Job
from tests.laws.guesses import Guesses
from tests.steady_costs import SteadyCosts
from unspool.engine import state
from unspool.errors import ModelError, RequestError
from unspool.events import Text
from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import architecture_of
from unspool.models.shapes import EVERY_FAMILY, SHAPES
from unspool.ops.storage import state_bytes
from unspool.params import BeamParams, SamplingParams

RECURRENT = [name for name in EVERY_FAMILY if state_bytes(architecture_of(SHAPES[name]).storage)]
pytestmark = pytest.mark.parametrize("shape", RECURRENT)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
PROMPT = tuple(random.Random(7).choices(range(256), k=45))
Tiny = Callable[..., Checkpoint]


def cached(crowd: Crowd, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> tuple[int, tuple[int, ...]]:
    """How much of a prompt was reused, and its answer."""
    id = crowd.engine.add(prompt, params)
    crowd.drain()
    return crowd.collector.ends[id].usage.cached_tokens, crowd.collector.answer(id).ids


def test_a_prompt_again_computes_one_token_and_a_longer_one_what_follows(shape: str, tiny: Tiny) -> None:
    crowd, fresh = (Crowd(tiny(shape), kv_tokens=256, block_size=8) for _ in "ab")
    none, answer = cached(crowd, PROMPT)
    assert none == 0
    assert cached(crowd, PROMPT) == (len(PROMPT) - 1, answer)
    longer = (*PROMPT, *answer, 5, 6, 7)
    reused, after = cached(crowd, longer)
    assert reused == len(PROMPT) + len(answer) - 1, "all that was computed: the last token never was"
    assert after == cached(fresh, longer)[1]


def test_a_beginning_that_two_prompts_share_is_kept_for_the_third(shape: str, tiny: Tiny) -> None:
    crowd = Crowd(tiny(shape), kv_tokens=512, block_size=8)
    prompts = [(*PROMPT[:32], *(tail for _ in range(9))) for tail in (1, 2, 3)]
    found = [cached(crowd, prompt) for prompt in prompts]
    assert [reused for reused, _ in found] == [0, 0, 32]
    assert [answer for _, answer in found] == [cached(Crowd(tiny(shape), kv_tokens=256), each)[1] for each in prompts]


def test_branches_share_the_prompt(shape: str, tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, n=3, ignore_eos=True)
    one = state_bytes(_storage(shape))
    many, few = (Crowd(tiny(shape), kv_tokens=512, block_size=8, **each) for each in ({}, {"state_bytes": one}))
    assert branches(many, params) == branches(few, params), "with one slot, one after the other"


def branches(crowd: Crowd, params: SamplingParams) -> dict[int, list[int]]:
    crowd.engine.add(PROMPT, params)
    found: dict[int, list[int]] = {}
    while crowd.engine.has_work:
        for event in crowd.engine.step():
            if isinstance(event, Text):
                found.setdefault(event.choice, []).extend(token.id for token in event.tokens)
        crowd.engine.check()
    assert sorted(map(len, found.values())) == [params.max_tokens] * params.n
    return found


def test_banned_strings_go_back_to_a_state(shape: str, tiny: Tiny) -> None:
    checkpoint = tiny(shape)
    crowd = Crowd(checkpoint, kv_tokens=512, block_size=8)
    text = crowd.alone(Job(PROMPT, SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True))).text
    banned = next(text[at : at + 2] for at in range(3, len(text) - 1) if text[at : at + 2].isascii())
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True, bad_words=[banned], logprobs=0)
    expected = Crowd(checkpoint, kv_tokens=512, block_size=8, prefix_cache=False).alone(Job(PROMPT, params))
    assert banned not in expected.text
    assert crowd.alone(Job(PROMPT, params)) == expected


def test_beams_take_their_states_with_them(shape: str, tiny: Tiny) -> None:
    params = SamplingParams(beam=BeamParams(width=3), max_tokens=8)
    many = Crowd(tiny(shape), kv_tokens=512, block_size=8)
    few = Crowd(tiny(shape), kv_tokens=512, block_size=8, state_bytes=2 * state_bytes(_storage(shape)))
    assert many.alone(Job(PROMPT, params)) == few.alone(Job(PROMPT, params))


def test_drafts_change_nothing(shape: str, tiny: Tiny) -> None:
    plain = Crowd(tiny(shape), kv_tokens=512, block_size=8)
    each = state_bytes(_storage(shape))
    for options in ({}, {"state_bytes": each}, {"state_bytes": 3 * each}):
        guesses = Guesses(len(PROMPT))
        fast = Crowd(tiny(shape), kv_tokens=512, block_size=8, speculate=guesses, **options)
        fast.engine.speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 1.0001)])  # drafts pay
        for seed in range(4):
            job = Job(PROMPT, SamplingParams(max_tokens=30, temperature=0.7, seed=seed, ignore_eos=True, logprobs=0))
            answer = plain.alone(job)
            guesses.answer = answer.ids
            assert fast.alone(job) == answer
        accepted = fast.engine.speculation.total.accepted
        assert accepted == 0 if options.get("state_bytes") == each else accepted > 20, "without a slot, no draft"


def test_a_saved_prompt_goes_on_in_the_next_engine(shape: str, tiny: Tiny, tmp_path: Path) -> None:
    first, second = (Crowd(tiny(shape), kv_tokens=256, block_size=8) for _ in "ab")
    cached(first, PROMPT, SamplingParams(max_tokens=0))
    assert state.save(first.engine, PROMPT, tmp_path / "saved") == len(PROMPT)
    assert state.load(second.engine, tmp_path / "saved") == list(PROMPT)
    longer = (*PROMPT, 9, 9)
    assert cached(second, longer) == (len(PROMPT), cached(Crowd(tiny(shape), kv_tokens=256), longer)[1])
    damaged = (tmp_path / "saved").read_bytes()
    (tmp_path / "saved").write_bytes(damaged[:-3] + b"abc")
    with pytest.raises(ModelError, match="checksum"):
        state.load(second.engine, tmp_path / "saved")


def test_a_budget_below_one_state_is_refused_with_numbers(shape: str, tiny: Tiny) -> None:
    with pytest.raises(RequestError, match=r"state_bytes is 7; the states of one sequence take [0-9,]+"):
        Crowd(tiny(shape), kv_tokens=256, state_bytes=7)


@pytest.mark.parametrize("how", ["early-exit"])
def test_a_model_with_states_does_not_draft(shape: str, how: str, tiny: Tiny) -> None:
    with pytest.raises(RequestError, match="recurrent layers cannot draft"):
        Crowd(tiny(shape), kv_tokens=256, speculate=how)


def _storage(shape: str):  # type: ignore[no-untyped-def]
    return architecture_of(SHAPES[shape]).storage

"""Layers with a window release the blocks behind it, and no answer changes a bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.laws.crowd import Crowd, Job, random_job
from tests.laws.emulated_device import device_crowd
from tests.laws.guesses import Guesses
from tests.steady_costs import SteadyCosts
from unspool.cache import blocks
from unspool.cache.blocks import blocks_in_window
from unspool.engine import sizing, state, tables
from unspool.errors import ModelError, RequestError
from unspool.events import Text
from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import architecture_of
from unspool.models.shapes import EVERY_FAMILY, SHAPES
from unspool.ops import storage
from unspool.ops.storage import layer_groups, one_group
from unspool.params import BeamParams, SamplingParams
from unspool.plan import NO_BLOCK

GROUPS = {name: layer_groups(architecture_of(SHAPES[name]).storage) for name in EVERY_FAMILY}
WINDOWED = [name for name, groups in GROUPS.items() if groups[-1].window is not None]
ALL_WINDOWED = [name for name in WINDOWED if len(GROUPS[name]) == 1]
MIXED = [name for name in WINDOWED if len(GROUPS[name]) > 1]
SMALL = {"block_size": 8, "step_tokens": 16, "max_running": 4, "threads": 1}
PROMPT = tuple(random.Random(5).choices(range(256), k=300))
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)
Tiny = Callable[..., Checkpoint]
every_shape = pytest.mark.parametrize("shape", WINDOWED)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> Callable[..., Crowd]:
    """A crowd whose engine releases nothing: all layers are one group."""

    def make(shape: str, **options: object) -> Crowd:
        with monkeypatch.context() as patch:
            for module in (storage, sizing):
                patch.setattr(module, "layer_groups", lambda layers: (one_group(layers),))
            crowd = Crowd(tiny(shape), kv_tokens=512, threads=1, **options)
        assert [group.window for group in crowd.engine.scheduler.tables.groups] == [None]
        return crowd

    return make


def small(shape: str, tiny: Tiny, **options: object) -> Crowd:
    """A crowd with a pool for the windows of few sequences."""
    tokens = 512 if shape in MIXED else 8 * blocks_in_window(24, 8, 16)
    crowd = Crowd(tiny(shape), **{"kv_tokens": tokens} | SMALL | options)
    assert crowd.engine.context_length == 512
    return crowd


def windows_of(crowd: Crowd) -> list[int]:
    """The blocks of groups with a window that requests hold now, of each request and group."""
    requests = [*crowd.engine.scheduler.running, *crowd.engine.scheduler.waiting]
    return [
        sum(block != NO_BLOCK for block in table)
        for request in requests
        for group, table in crowd.engine.scheduler.tables.of(request)
        if group.window is not None
    ]


@every_shape
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_an_answer_past_the_window_is_the_same_without_the_blocks_behind_it(
    shape: str, device: str, tiny: Tiny, keeping: Callable[..., Crowd]
) -> None:
    prompt = PROMPT if device == "cpu" else PROMPT[:150]
    job = Job(prompt, GREEDY if device == "cpu" else SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    crowd, whole = small(shape, tiny, device=device), keeping(shape, device=device)
    expected = whole.alone(job)
    id = crowd.engine.add(job.prompt, job.params)
    most = 0
    while crowd.engine.has_work:
        crowd.step()
        most = max([most, *windows_of(crowd)])
    assert crowd.collector.answer(id) == expected
    assert 3 < most <= blocks_in_window(24, 8, 16) < len(prompt) / 8, "what a sequence holds is bounded"
    crowd.drain()


@pytest.mark.parametrize("shape", ALL_WINDOWED)
def test_a_pool_far_smaller_than_the_context_serves_it(shape: str, tiny: Tiny, keeping: Callable[..., Crowd]) -> None:
    """And one that is too small for a window and a token limits the context, as it always did."""
    least = blocks_in_window(24, 8, 1)
    crowd = Crowd(tiny(shape), kv_tokens=8 * least, **SMALL)
    assert (crowd.engine.context_length, crowd.engine.scheduler.blocks.num_blocks) == (512, least)
    job = Job(PROMPT[:20], SamplingParams(max_tokens=480, temperature=0.9, seed=3, ignore_eos=True, logprobs=0))
    assert crowd.alone(job) == keeping(shape).alone(job)
    assert Crowd(tiny(shape), kv_tokens=8 * least - 8, **SMALL).engine.context_length == 8 * least - 8


@every_shape
@pytest.mark.parametrize("seed", range(2))
def test_a_crowd_answers_as_each_request_alone(
    shape: str, seed: int, tiny: Tiny, keeping: Callable[..., Crowd]
) -> None:
    rng = random.Random(seed)
    vocab_size = SHAPES[shape].vocab_size
    common = [rng.randrange(vocab_size) for _ in range(200)]
    jobs = [random_job(rng, vocab_size, common, 200) for _ in range(12)]
    jobs = [Job(job.prompt, replace(job.params, max_tokens=rng.randrange(20, 100))) for job in jobs]
    options = SMALL | {"kv_tokens": 8 * (40 if shape in MIXED else 26), "step_tokens": rng.choice([7, 24])}
    calm, crowd = keeping(shape), Crowd(tiny(shape), **options)
    expected = [calm.alone(job) for job in jobs]
    for answer, alone in zip(crowd.together(jobs, rng, abort_share=0.2), expected, strict=True):
        assert answer in (None, alone)
    assert crowd.engine.stats["preemptions"] > 0
    assert crowd.engine.stats["prefix_hits"] > 0


@every_shape
def test_a_device_that_runs_ahead_answers_the_same(
    shape: str, tiny: Tiny, keeping: Callable[..., Crowd]
) -> None:
    jobs = [Job(PROMPT[:length], GREEDY) for length in (30, 120, 200)]
    calm = keeping(shape)
    crowd, (device,) = device_crowd(tiny(shape), **{"kv_tokens": 512} | SMALL)
    assert crowd.together(jobs, random.Random(1)) == [calm.alone(job) for job in jobs]
    assert device.used > 50, "of tokens that the host had not read"


@every_shape
def test_branches_share_the_prompt_and_part(shape: str, tiny: Tiny, keeping: Callable[..., Crowd]) -> None:
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=4, n=3, ignore_eos=True)
    assert branches(small(shape, tiny), params) == branches(keeping(shape), params)


def branches(crowd: Crowd, params: SamplingParams) -> dict[int, list[int]]:
    crowd.engine.add(PROMPT[:101], params)
    found: dict[int, list[int]] = {}
    while crowd.engine.has_work:
        for event in crowd.engine.step():
            if isinstance(event, Text):
                found.setdefault(event.choice, []).extend(token.id for token in event.tokens)
        crowd.engine.check()
    assert sorted(map(len, found.values())) == [params.max_tokens] * params.n
    return found


@every_shape
def test_beams_keep_their_windows(shape: str, tiny: Tiny, keeping: Callable[..., Crowd]) -> None:
    job = Job(PROMPT[:150], SamplingParams(beam=BeamParams(width=3), max_tokens=60, ignore_eos=True))
    assert small(shape, tiny).alone(job) == keeping(shape).alone(job)


@every_shape
@pytest.mark.parametrize("rewind", [0, 16])
def test_banned_strings_go_back_behind_what_was_released(
    shape: str, rewind: int, tiny: Tiny, keeping: Callable[..., Crowd], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a request goes back further than it may, it begins again."""
    monkeypatch.setattr(blocks, "KEY_TILE", 16)  # what the CPU's kernels read at once
    monkeypatch.setattr(tables, "REWIND", rewind)
    crowd, whole, restarts = small(shape, tiny), keeping(shape), 0.0
    for seed in range(4):
        params = SamplingParams(max_tokens=150, temperature=9.0, seed=seed, allowed_token_ids=range(65, 69), logprobs=0)
        text = whole.alone(Job(PROMPT[:40], params)).text
        job = Job(PROMPT[:40], replace(params, bad_words=[text[at : at + 6] for at in range(8, 140, 12)]))
        assert crowd.alone(job) == whole.alone(job)
        restarts += crowd.engine.stats["preemptions"]
    assert (restarts > 0) == (rewind == 0)


@every_shape
def test_drafts_change_nothing(shape: str, tiny: Tiny, keeping: Callable[..., Crowd]) -> None:
    guesses = Guesses(100)
    fast, plain = small(shape, tiny, speculate=guesses), keeping(shape)
    fast.engine.speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 1.0001)])  # drafts pay
    params = SamplingParams(max_tokens=120, temperature=0.7, seed=2, ignore_eos=True, logprobs=0)
    job = Job(PROMPT[:100], params)
    answer = plain.alone(job)
    guesses.answer = answer.ids
    assert fast.alone(job) == answer
    assert fast.engine.speculation.total.accepted > 40


@pytest.mark.parametrize("shape", ["tiny-mistral", "tiny-gemma3"])
def test_a_draft_model_keeps_all_of_its_own_blocks(shape: str, tiny: Tiny, keeping: Callable[..., Crowd]) -> None:
    crowd = small(shape, tiny, speculate="early-exit")
    params = SamplingParams(max_tokens=200, temperature=0.7, seed=2, ignore_eos=True, logprobs=0)
    job = Job(PROMPT[:100], params)
    assert crowd.alone(job) == keeping(shape).alone(job)


# Prefixes -----------------------------------------------------------------------------------------------------------
def cached(crowd: Crowd, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> tuple[int, object]:
    """How much of a prompt was reused, and its answer."""
    id = crowd.engine.add(prompt, params)
    crowd.drain()
    return crowd.collector.ends[id].usage.cached_tokens, crowd.collector.answer(id)


def plenty(shape: str, tiny: Tiny, **options: object) -> Crowd:
    """A crowd whose pools are larger than all that these tests compute."""
    return Crowd(tiny(shape), **{"kv_tokens": 2048, "block_size": 8, "step_tokens": 64, "threads": 1} | options)


@every_shape
def test_a_longer_prompt_begins_where_an_earlier_one_ended(
    shape: str, tiny: Tiny, keeping: Callable[..., Crowd]
) -> None:
    crowd, fresh = small(shape, tiny), keeping(shape)
    none, answer = cached(crowd, PROMPT)
    assert none == 0
    longer = (*PROMPT, *answer.ids, 5, 6, 7)  # type: ignore[attr-defined]
    reused, after = cached(crowd, longer)
    assert reused == (len(PROMPT) + GREEDY.max_tokens - 1) // 8 * 8, "its full blocks: the window before them is kept"
    assert after == cached(fresh, longer)[1]


@every_shape
def test_windows_at_prompt_ends_and_turns_outlive_those_between(
    shape: str, tiny: Tiny, keeping: Callable[..., Crowd]
) -> None:
    """Long prompts run through a pool that holds a few windows. What stands between the parts of a conversation is
    forgotten first."""
    crowd, fresh = small(shape, tiny, kv_tokens=3072 if shape in MIXED else 8 * 45), keeping(shape)
    assert crowd.engine.scheduler.tables.groups[-1].num_blocks < 50
    build = crowd.engine._builder._request

    def with_turns(group, limit):  # type: ignore[no-untyped-def]
        request = build(group, limit)
        request.turns = (100, 210)
        return request

    crowd.engine._builder._request = with_turns  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    cached(crowd, PROMPT[:250], params)
    for turn in (210, 100):
        other = (*PROMPT[:turn], 1, 2, 3, *PROMPT[:20])
        reused, answer = cached(crowd, other)
        assert turn - 8 < reused <= turn
        assert answer == cached(fresh, other)[1]


@every_shape
def test_a_beginning_without_its_window_is_computed_and_kept_for_the_next(shape: str, tiny: Tiny) -> None:
    crowd = plenty(shape, tiny)
    for group in crowd.engine.scheduler.tables.groups:
        if group.window is not None:
            group.release_first = forget_at_once(group)  # type: ignore[method-assign]
    cached(crowd, PROMPT)
    prompts = [(*PROMPT[:160], tail, *PROMPT[170:270]) for tail in (1, 2)]
    found = [cached(crowd, prompt) for prompt in prompts]
    assert [reused for reused, _ in found] == ([0, 160] if shape in MIXED else [0, 0])
    fresh = plenty(shape, tiny, prefix_cache=False)
    assert [answer for _, answer in found] == [cached(fresh, prompt)[1] for prompt in prompts]


def forget_at_once(group):  # type: ignore[no-untyped-def]
    """As if others had taken the block: unless it is likely to be found again."""
    release = type(group).release_first

    def release_first(block: int, *, is_likely: bool) -> None:
        if not is_likely and group.num_owners(block) == 1:
            group.unregister(block)
        release(group, block, is_likely=is_likely)

    return release_first


# Saved files --------------------------------------------------------------------------------------------------------
@every_shape
def test_a_saved_prompt_has_the_last_window_of_blocks(shape: str, tiny: Tiny, tmp_path: Path) -> None:
    first, second = (small(shape, tiny) for _ in "ab")
    cached(first, PROMPT, SamplingParams(max_tokens=0))
    assert state.save(first.engine, PROMPT, tmp_path / "saved") == 296
    sizes = dict(zip([group.window for group in GROUPS[shape]], first.engine.runner.kv.block_bytes, strict=True))
    held = {window: 296 // 8 - (0 if window is None else 256 // 8) for window in sizes}
    size = sum(held[window] * nbytes for window, nbytes in sizes.items())
    assert size < (tmp_path / "saved").stat().st_size < size + 4000, "296 tokens of some layers, 40 of the others"
    assert state.load(second.engine, tmp_path / "saved") == list(PROMPT[:296])
    second.engine.check()
    longer = (*PROMPT, 9, 9)
    fresh = plenty(shape, tiny, prefix_cache=False)
    assert cached(second, longer) == (296, cached(fresh, longer)[1])
    assert state.load(second.engine, tmp_path / "saved") == list(PROMPT[:296]), "loading twice is harmless"
    second.engine.check()
    cut = (tmp_path / "saved").read_bytes()[:-8]
    (tmp_path / "saved").write_bytes(cut)
    with pytest.raises(ModelError, match="its blocks are not as long"):
        state.load(second.engine, tmp_path / "saved")


def test_a_file_that_does_not_fit_names_its_blocks(tiny: Tiny, tmp_path: Path) -> None:
    first = small("tiny-gemma3", tiny)
    cached(first, PROMPT, SamplingParams(max_tokens=0))
    state.save(first.engine, PROMPT, tmp_path / "saved")
    few = Crowd(tiny("tiny-gemma3"), kv_tokens=128, **SMALL)
    with pytest.raises(RequestError, match="holds 37 blocks; 16 are free"):
        state.load(few.engine, tmp_path / "saved")

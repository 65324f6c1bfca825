"""Speculative = plain with the head that a model's file brings: recurrent layers go back with every rejected guess."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.laws.crowd import Crowd, Job, random_job
from tests.laws.test_speculation import eager
from unspool.config import ModelConfig
from unspool.models.random import SHAPES, random_checkpoint
from unspool.params import SamplingParams
from unspool.speculate.mtp import MAX_ENDED, MtpDrafter

WITH_HEADS: dict[str, ModelConfig] = {
    name: replace(SHAPES[name], extra_layers=1)
    for name in ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next", "tiny-glm4-moe", "tiny-deepseek-v3")
}
# With much noise, which the head's draws share with the model's, guesses of random weights are often right.
NOISY = SamplingParams(max_tokens=24, temperature=3.0, ignore_eos=True, logprobs=0)


def drafting(config: ModelConfig, **options: object) -> tuple[Crowd, MtpDrafter]:
    """An engine that sends every guess."""
    crowd = Crowd(random_checkpoint(config), speculate="mtp", **options)
    eager(crowd.engine)
    drafter = crowd.engine.speculation.drafters["mtp"]
    assert isinstance(drafter, MtpDrafter)
    return crowd, drafter


@pytest.mark.parametrize("shape", WITH_HEADS)
def test_a_crowd_gets_the_plain_answers(shape: str) -> None:
    config, rng = WITH_HEADS[shape], random.Random(6)
    common = [rng.randrange(256) for _ in range(40)]
    jobs = [random_job(rng, 256, common, 40) for _ in range(5)]
    jobs += [Job(job.prompt, replace(NOISY, seed=seed)) for seed, job in enumerate(jobs[:3])]
    plain = Crowd(random_checkpoint(config), kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    crowd, _ = drafting(config, kv_tokens=160, block_size=4, step_tokens=24, chunk_tokens=7)
    found = crowd.together(jobs, rng, abort_share=0.1)
    assert all(answer in (None, right) for answer, right in zip(found, expected, strict=True))
    assert sum(answer is not None for answer in found) >= 5
    total = crowd.engine.speculation.total
    assert 0 < total.accepted < total.drafted, "some guesses were right and some were not"


@pytest.mark.parametrize("options", [{"bad_words": ["a", "e", "0"]}, {"repetition_penalty": 1.4}, {"top_k": 4}])
def test_parameters_change_what_is_guessed_and_nothing_else(options: dict[str, object]) -> None:
    config = WITH_HEADS["tiny-qwen3.5"]
    crowd, _ = drafting(config, kv_tokens=256)
    plain = Crowd(random_checkpoint(config), kv_tokens=256)
    for seed in range(3):
        job = Job(tuple(range(40, 70)), replace(NOISY, seed=seed, **options))  # type: ignore[arg-type]
        assert crowd.alone(job) == plain.alone(job)
    assert crowd.engine.speculation.total.drafted > 0


def test_branches_take_the_prompts_rows_along() -> None:
    params = replace(NOISY, n=3, seed=1, max_tokens=10)
    answers = []
    for crowd in (drafting(WITH_HEADS["tiny-qwen3.5"], kv_tokens=256)[0],
                  Crowd(random_checkpoint(WITH_HEADS["tiny-qwen3.5"]), kv_tokens=256)):  # fmt: skip
        crowd.engine.add(range(30), params)
        found: dict[int, list[int]] = {}
        while crowd.engine.has_work:
            for event in crowd.engine.step():
                for token in getattr(event, "tokens", ()):
                    found.setdefault(event.choice, []).append(token.id)
        answers.append(found)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


def test_a_cached_prefix_has_its_rows_still() -> None:
    """The second turn of a chat: the model computes the new tokens alone, and the head knows the others."""
    crowd, drafter = drafting(WITH_HEADS["tiny-qwen3.5"], kv_tokens=512, block_size=8)
    prompt = tuple(random.Random(3).choices(range(256), k=50))
    first = crowd.collector, crowd.engine.add(prompt, replace(NOISY, seed=4))
    crowd.drain()
    answer = first[0].answer(first[1]).ids
    offsets = []
    watch = drafter.watch

    def noted(number, tokens, work, rows):  # type: ignore[no-untyped-def]
        watch(number, tokens, work, rows)
        seen = drafter._seen[number]
        offsets.append((work.start, seen.offset, seen.offset + len(seen.tokens)))

    drafter.watch = noted  # type: ignore[method-assign]
    longer = (*prompt, *answer, 7, 8, 9)
    id = crowd.engine.add(longer, replace(NOISY, seed=5))
    crowd.drain()
    begun = offsets[0]
    assert begun[0] == crowd.collector.ends[id].usage.cached_tokens > len(prompt)
    assert begun[1] < 20, "rows of the last few tokens alone may be missing"
    assert begun[2] == len(longer)
    plain = Crowd(random_checkpoint(WITH_HEADS["tiny-qwen3.5"]), kv_tokens=512)
    assert crowd.collector.answer(id) == plain.alone(Job(longer, replace(NOISY, seed=5)))


def test_rows_of_ended_requests_make_room() -> None:
    crowd, drafter = drafting(WITH_HEADS["tiny-glm4-moe"], kv_tokens=96, block_size=8)
    rng = random.Random(8)
    for seed in range(8):
        crowd.alone(Job(tuple(rng.choices(range(256), k=40)), replace(NOISY, seed=seed, max_tokens=6)))
    assert 0 < len(drafter._ended) <= min(MAX_ENDED, 96 // 40)
    drafter._blocks.check(seen.blocks for seen in drafter._ended.values())

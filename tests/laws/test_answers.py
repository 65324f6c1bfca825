"""The first promise, on real models: an answer is a function of weights, prompt, parameters and seed.

Token ids, text and the bits of every logprob are compared between a request alone in a fresh engine and the same
request in a crowd: neighbours of every kind, any order of arrival, prompts whole or in pieces, prefix hits, preemption.
"""

from __future__ import annotations

import random

import pytest

from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import architecture_of
from unspool.models.shapes import EVERY_FAMILY
from unspool.ops.storage import state_bytes
from unspool.params import SamplingParams


def tight(rng: random.Random) -> dict[str, object]:
    """Limits small enough that chunks, sharing and preemption happen all the time."""
    block_size = rng.choice([4, 8, 32])
    return {
        "block_size": block_size,
        "kv_tokens": rng.choice([64, 96, 160]),
        "step_tokens": rng.choice([3, 8, 32]),
        "chunk_tokens": rng.choice([1, 5, 64]),
        "max_running": rng.choice([2, 5, 16]),
        "prefix_cache": rng.random() < 0.8,
    }


def few_states(checkpoint: Checkpoint, rng: random.Random) -> dict[str, object]:
    """For recurrent layers, so few slots that snapshots come and go, and sometimes none has room."""
    each = state_bytes(architecture_of(checkpoint.config).storage)
    return {"state_bytes": each * rng.choice([1, 2, 4, 10])} if each else {}


THOROUGHLY = ["tiny", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3", "tiny-lfm2"]
CASES = [(shape, format, 20) for format in ("f32", "q4_1") for shape in THOROUGHLY]
CASES += [(shape, "f32", 2) for shape in EVERY_FAMILY if shape not in THOROUGHLY]


@pytest.mark.parametrize(("shape", "format", "schedules"), CASES)
def test_in_a_crowd_as_alone(shape, format, schedules, tiny, make_crowd, make_job) -> None:
    checkpoint = tiny(shape, format)
    for seed in range(schedules):
        rng = random.Random(f"{shape} {format} {seed}")
        common = [rng.randrange(checkpoint.config.vocab_size) for _ in range(64)]
        jobs = [make_job(rng, checkpoint.config.vocab_size, common, 48) for _ in range(10)]
        calm = make_crowd(checkpoint, kv_tokens=256)
        expected = [calm.alone(job) for job in jobs]
        crowd = make_crowd(checkpoint, **tight(rng), **few_states(checkpoint, rng))
        for job, alone, among in zip(jobs, expected, crowd.together(jobs, rng, abort_share=0.15), strict=True):
            assert among is None or among == alone, job


def test_the_reference_keeps_the_law_too(tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny"), random.Random(5)
    common = [rng.randrange(checkpoint.config.vocab_size) for _ in range(64)]
    jobs = [make_job(rng, checkpoint.config.vocab_size, common, 32) for _ in range(6)]
    calm = make_crowd(checkpoint, device="reference", kv_tokens=256)
    expected = [calm.alone(job) for job in jobs]
    crowd = make_crowd(checkpoint, device="reference", **tight(rng))
    assert crowd.together(jobs, rng) == expected


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 33, 512])
def test_whole_as_in_pieces(step_tokens, tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(11)
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 100) for _ in range(5)]
    whole = make_crowd(checkpoint, kv_tokens=256)
    pieces = make_crowd(checkpoint, kv_tokens=256, step_tokens=step_tokens, prefix_cache=False)
    for job in jobs:
        assert pieces.alone(job) == whole.alone(job)


def test_a_hit_is_a_miss(tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny-qwen3", "q4_1"), random.Random(12)
    crowd = make_crowd(checkpoint, kv_tokens=512, block_size=8)
    job = make_job(rng, checkpoint.config.vocab_size, [], 90)
    miss = crowd.alone(job)
    id = crowd.engine.add(job.prompt, job.params)
    crowd.drain()
    assert crowd.collector.answer(id) == miss
    assert crowd.collector.ends[id].usage.cached_tokens == len(job.prompt) - 1, "even the partial block is shared"


def test_threads_do_not_change_an_answer(tiny, make_crowd, make_job) -> None:
    checkpoint, rng = tiny("tiny-untied", "q4_1"), random.Random(13)
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 60) for _ in range(4)]
    one, three = (make_crowd(checkpoint, kv_tokens=256, threads=threads) for threads in (1, 3))
    assert [one.alone(job) for job in jobs] == [three.alone(job) for job in jobs]


def test_many_completions_of_one_prompt_are_one(tiny, make_crowd, make_job) -> None:
    """The experiment of the nondeterminism debate, in small: one prompt again and again among random neighbours."""
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(14)
    prompt = [rng.randrange(checkpoint.config.vocab_size) for _ in range(21)]
    for temperature in (0, 1):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, logprobs=2)
        crowd = make_crowd(checkpoint, kv_tokens=400, step_tokens=48)
        answers = set()
        for _ in range(12):
            ids = []
            for _ in range(8):
                ids.append(crowd.engine.add(prompt, params))
                neighbour = make_job(rng, checkpoint.config.vocab_size, prompt, 60)
                crowd.engine.add(neighbour.prompt, neighbour.params)
                crowd.step()
            crowd.drain()
            answers |= {crowd.collector.answer(id) for id in ids}
        assert len(answers) == 1


def test_the_default_model_in_a_crowd(smollm2, make_crowd) -> None:
    tokenizer = smollm2.tokenizer()
    texts = ["The capital of France is", "def fib(n):\n", "Once upon a time, in a small village,", "2 + 2 =", "¿Dónde"]
    jobs = []
    for index, text in enumerate(texts * 2):
        params = SamplingParams(max_tokens=10, temperature=[0, 0.9][index % 2], seed=index, logprobs=2)
        jobs.append(type("Job", (), {"prompt": tuple(tokenizer.encode(text)), "params": params}))
    calm = make_crowd(smollm2, kv_tokens=512)
    expected = [calm.alone(job) for job in jobs]
    crowd = make_crowd(smollm2, kv_tokens=128, block_size=16, step_tokens=24, chunk_tokens=5)
    assert crowd.together(jobs, random.Random(1)) == expected

"""Running ahead = stepping plainly, on a device that is emulated: tokens are withheld until they are asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.laws.crowd import Crowd
from tests.laws.emulated_device import device_crowd
from tests.laws.test_speculation import Oracle, eager
from unspool.events import Finished, Text
from unspool.params import SamplingParams


@pytest.mark.parametrize("seed", range(12))
def test_ahead_is_plain(seed, tiny, make_job) -> None:
    checkpoint, rng = tiny("tiny-qwen3", "q4_1"), random.Random(seed)
    common = [rng.randrange(256) for _ in range(60)]
    jobs = [make_job(rng, checkpoint.config.vocab_size, common, 50) for _ in range(10)]
    # Most draw on the device; in some runs a few need the host now and then.
    host = 0.2 if seed % 3 == 0 else 0.0
    jobs = [
        replace(job, params=replace(job.params, dry_multiplier=0.5)) if rng.random() < host else job for job in jobs
    ]
    calm = Crowd(checkpoint, kv_tokens=256)
    expected = [calm.alone(job) for job in jobs]
    crowd, (device,) = device_crowd(
        checkpoint,
        kv_tokens=rng.choice([64, 96, 256]),
        block_size=rng.choice([4, 8, 32]),
        step_tokens=rng.choice([8, 32]),
        chunk_tokens=rng.choice([3, 64]),
        max_running=rng.choice([3, 16]),
    )
    answers = crowd.together(jobs, rng, abort_share=0.15)
    assert [a for a in answers if a] == [e for e, a in zip(expected, answers, strict=True) if a]
    assert host or device.used > 10, "tokens must have fed the next step without the host"


def test_n_answers_and_stops_ahead(tiny) -> None:
    checkpoint = tiny("tiny", "q4_1")
    params = SamplingParams(
        max_tokens=20, seed=3, n=3, temperature=2, stop=["A", "e"], allowed_token_ids=list(range(60, 110))
    )

    def answers(crowd: Crowd) -> list:
        crowd.engine.add([5, 6, 7, 8, 9], params)
        events = []
        while crowd.engine.has_work:
            events += crowd.engine.step()
            crowd.engine.check()
        crowd.engine.scheduler.blocks.check()
        texts = ["".join(e.text for e in events if e.choice == c and isinstance(e, Text)) for c in range(3)]
        ends = sorted((e.choice, e.reason, e.stop) for e in events if isinstance(e, Finished))
        return [texts, ends]

    plain, (ahead, _) = Crowd(checkpoint, kv_tokens=256), device_crowd(checkpoint, kv_tokens=256)
    assert answers(ahead) == answers(plain)


def test_drafts_are_checked_on_the_device(tiny, make_job) -> None:
    checkpoint, rng = tiny("tiny", "q4_1"), random.Random(2)
    jobs = [make_job(rng, checkpoint.config.vocab_size, [], 30) for _ in range(6)]
    jobs = [replace(job, params=replace(job.params, repetition_penalty=None)) for job in jobs]
    plain = Crowd(checkpoint, kv_tokens=256)
    expected = [plain.alone(job) for job in jobs]
    crowd, _ = device_crowd(checkpoint, kv_tokens=256, speculate="lookup")
    eager(crowd.engine)
    known = {job.prompt: list(answer.ids) for job, answer in zip(jobs, expected, strict=True)}
    crowd.engine.speculation.drafters = {"oracle": Oracle(known, rng, 0.7)}
    assert crowd.together(jobs, rng) == expected
    assert crowd.engine.speculation.total.accepted > 0


def test_who_needs_the_host(tiny) -> None:
    crowd, _ = device_crowd(tiny(), kv_tokens=64)
    for params, expected in (
        (SamplingParams(temperature=1), True),
        (SamplingParams(logprobs=1), True),
        (SamplingParams(trace=True), False),
        (SamplingParams(n=2, best_of=3), True),
        (SamplingParams(bad_words=["x"]), False),
        (SamplingParams(repetition_penalty=1.2), True),
        (SamplingParams(dry_multiplier=1.0), False),
    ):
        id = crowd.engine.add([1, 2], params)
        branch = crowd.engine.active.groups[id].branches[0]
        assert branch.on_device is expected, params
        crowd.engine.abort(id)

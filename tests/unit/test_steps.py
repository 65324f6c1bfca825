"""What an engine tells of its steps: what was computed, read, and for whom, also when it runs ahead of its device."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.laws.emulated_device import device_crowd
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.engine.steps import COUNTED_TOGETHER, MAX_STEPS, MAX_WORKS, StepMeter, StepStats
from unspool.models.costs import ExpertLayer, Span, StepCosts
from unspool.params import SamplingParams
from unspool.plan import Plan, Work

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def drain(engine: Engine) -> list[StepStats]:
    while engine.has_work:
        engine.step()
    return engine.steps.history


def test_each_step_tells_its_rows_bytes_and_requests(tiny) -> None:
    checkpoint = tiny("tiny", "f32")
    ticks = iter(range(1000))
    config = EngineConfig(device="reference", kv_tokens=256, block_size=4)
    engine = Engine(checkpoint, config, clock=lambda: float(next(ticks)))
    engine.add(PROMPT, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    steps = drain(engine)
    assert [(step.number, step.prompt_rows, step.decode_rows) for step in steps] == [(0, 7, 0), (1, 0, 1), (2, 0, 1)]
    parts = [(step.requests, step.first, step.tokens, step.samples) for step in steps]
    assert parts == [((0,), (start,), (count,), (1,)) for start, count in ((0, 7), (7, 1), (8, 1))]
    weights = sum(weight.nbytes for weight in checkpoint.weights.values())
    looked_up = 0 if checkpoint.config.tied_embeddings else checkpoint.weights["token_embd.weight"].nbytes
    assert {step.weight_bytes for step in steps} == {weights - looked_up}
    per_token = steps[0].cache_bytes // 7
    assert [step.cache_bytes for step in steps] == [7 * per_token, 8 * per_token, 9 * per_token]
    assert all(step.seconds > 0 and not step.is_ahead for step in steps)
    assert all(earlier.start < later.start for earlier, later in itertools.pairwise(steps))
    assert engine.steps.num_bytes == sum(step.num_bytes for step in steps)


def test_a_device_that_is_run_ahead_of_is_measured_too(tiny) -> None:
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    crowd, _ = device_crowd(tiny("tiny", "q4_1"), kv_tokens=256)
    for prompt in (PROMPT, PROMPT[:4]):
        crowd.engine.add(prompt, params)
    steps = drain(crowd.engine)
    assert any(step.is_ahead for step in steps)
    computed = Counter[int]()
    for step in steps:
        computed.update(dict(zip(step.requests, step.tokens, strict=True)))
    assert computed == {0: len(PROMPT) + 8, 1: 4 + 8}, "prompts, and all tokens but the last"
    assert all(step.seconds > 0 for step in steps)
    assert crowd.engine.steps.seconds == pytest.approx(sum(step.seconds for step in steps))


def test_windows_and_experts_count_as_far_as_they_are_read() -> None:
    costs = StepCosts(1000, (), 0.0, 0.0, (Span(None, 0.0, 10.0), Span(4, 0.0, 1.0)), 3)
    meter = StepMeter(costs)
    plan = Plan((Work(0, 0, (1,) * 6, (0,), 1, 1), Work(1, 2, (1,), (1,), 1, 1)))
    meter.record(plan, 0.0, 0.5, is_ahead=False, waiting=2, blocks_free=1)
    (step,) = meter.history
    assert step.cache_bytes == 10 * (6 + 3) + (4 + 3) + 2 * 2 * 3
    assert (step.weight_bytes, step.rows, step.prompt_rows) == (1000, 7, 6)
    assert meter.fastest == step.num_bytes / 0.5


def test_operations_of_a_step_are_those_of_its_sequences() -> None:
    costs = StepCosts(0, (), 3.0, 100.0, (Span(None, 2.0, 0.0), Span(4, 1.0, 0.0)), 0)
    meter = StepMeter(costs)
    works = (Work(0, 0, (1,) * 6, (0,), 1, 1), Work(1, 2, (1,), (1,), 1, 1), Work(2, 5, (1,) * 3, (2,), 0, 0))
    meter.record(Plan(works), 0.0, 0.5, is_ahead=False, waiting=0, blocks_free=0)
    whole = costs.prefill_flops(6) + costs.prefill_flops(1, 2) + costs.prefill_flops(3, 5) - costs.head_flops
    assert meter.flops == whole, "a piece of a prompt that is not its last has no row of logits"


def test_steps_are_counted_alike_whenever_somebody_reads_them() -> None:
    costs = StepCosts(1000, (ExpertLayer(64.0, 8, 2),), 3.0, 100.0, (Span(None, 2.0, 10.0), Span(4, 1.0, 1.0)), 3)
    often, seldom = StepMeter(costs), StepMeter(costs)
    for number in range(3 * COUNTED_TOGETHER + 5):
        works = [Work(7, number, (1,), (0,), 1, 1)]
        if number % 3 == 0:
            works.append(Work(8, 2 * number, (1,) * (1 + number % 4), (1,), 1, 1))
        for meter in (often, seldom):
            seconds = 0.5 + number % 7
            meter.record(Plan(tuple(works)), float(number), seconds, is_ahead=False, waiting=0, blocks_free=1)
        assert often.history[-1].number == number
        assert often.num_bytes == sum(step.num_bytes for step in often.history)
    assert seldom.history == often.history
    assert (seldom.num_bytes, seldom.flops, seldom.fastest) == (often.num_bytes, often.flops, often.fastest)
    assert often.fastest == max(step.num_bytes / step.seconds for step in often.history)


def test_a_step_is_counted_once_while_other_threads_read() -> None:
    meter, is_over = StepMeter(StepCosts(8, (), 1.0, 1.0, (), 0)), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            known = meter.history
            assert [step.number for step in known] == list(range(len(known)))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for _ in range(2000):
            meter.record(Plan((Work(0, 0, (1,), (0,), 1, 1),)), 0.0, 1.0, is_ahead=False, waiting=0, blocks_free=0)
        is_over.set()
        for reader in readers:
            reader.result()
    assert len(meter.history) == 2000
    assert meter.num_bytes == 2000 * 8


@pytest.mark.parametrize("num_works", [1, 256])
def test_the_history_is_bounded(num_works: int) -> None:
    meter = StepMeter(StepCosts(0, (), 0.0, 0.0, (), 0))
    plan = Plan(tuple(Work(number, 0, (1,), (0,), 1, 1) for number in range(num_works)))
    count = 2 * min(MAX_STEPS, MAX_WORKS // num_works)
    for _ in range(count):
        meter.record(plan, 0.0, 0.0, is_ahead=False, waiting=0, blocks_free=0)
    assert meter.num_steps == count
    assert len(meter.history) == count // 2
    assert meter.history[-1].number == count - 1
    assert meter.history[-1]._replace(number=0) == meter.history[0]._replace(number=0)

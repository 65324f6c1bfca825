"""What a machine can do at best is measured once, kept, and compared with what an answer reached."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import unspool.ceilings as module
from unspool.ceilings import Ceilings, ceilings, ceilings_path, known_ceilings, utilization
from unspool.cli import main
from unspool.events import StepWork, Timings, Usage
from unspool.llm import LLM
from unspool.machine import num_cores, processor_name
from unspool.models.checkpoint import Checkpoint
from unspool.models.costs import step_costs

QUIET = Ceilings(processor_name(), num_cores(), "cpu-test", 1e9, 2e9, 4e9, "2026-01-02T03:04:05Z")


@pytest.fixture
def measured(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Ceilings], list[int]]:
    """measured(found): every measurement finds that, and is counted."""

    def prepare(found: Ceilings) -> list[int]:
        calls: list[int] = []

        def measure(threads: int) -> Ceilings:
            calls.append(threads)
            return replace(found, threads=threads)

        monkeypatch.setattr(module, "_measure_processor", measure)
        return calls

    return prepare


def test_measured_once(measured: Callable[[Ceilings], list[int]]) -> None:
    calls = measured(QUIET)
    assert known_ceilings() is None
    assert ceilings() == ceilings() == known_ceilings() == QUIET
    assert calls == [num_cores()]
    ceilings(again=True)
    assert len(calls) == 2


def test_other_numbers_of_threads_are_measured_apart(measured: Callable[[Ceilings], list[int]]) -> None:
    calls = measured(QUIET)
    assert ceilings(threads=1).threads == 1
    assert ceilings(threads=3).threads == 3
    assert calls == [1, 3]
    kept = json.loads(ceilings_path().read_text())
    assert len(kept["machines"]) == 2


def test_a_disturbed_measurement_is_made_again_and_never_told(measured: Callable[[Ceilings], list[int]]) -> None:
    measured(replace(QUIET, bandwidth=5e8, disturbed=1.4))
    assert ceilings().bandwidth == 5e8
    assert known_ceilings() is None
    measured(replace(QUIET, bandwidth=3e8, integers=9e9, disturbed=1.0))
    assert (ceilings().bandwidth, ceilings().integers) == (5e8, 9e9), "the best of each"
    measured(QUIET)
    assert ceilings() == QUIET == known_ceilings()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1, "machines": {"x": 3}}'])
def test_a_file_that_is_not_ours_counts_as_none(content: str, measured: Callable[[Ceilings], list[int]]) -> None:
    measured(QUIET)
    ceilings_path().parent.mkdir(parents=True, exist_ok=True)
    ceilings_path().write_text(content)
    assert known_ceilings() is None
    assert ceilings() == known_ceilings() == QUIET


def test_a_machine_on_which_nothing_can_be_written(measured: Callable[[Ceilings], list[int]], own_cache: Path) -> None:
    calls = measured(QUIET)
    own_cache.parent.write_text("a file where the cache would be")
    assert ceilings() == ceilings() == QUIET
    assert len(calls) == 2


def test_the_real_measurement(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("unspool._native")
    monkeypatch.setattr(module, "SPIN_SECONDS", 0.01)
    found = ceilings(threads=1)
    assert min(found.bandwidth, found.floats, found.integers) > 1e6
    assert found.compute == max(found.floats, found.integers)


def test_shares_by_hand(tiny: Callable[..., Checkpoint]) -> None:
    checkpoint = tiny()
    costs = step_costs(checkpoint.config, checkpoint.weights.values(), kv_bytes=256)
    timings, work = Timings(0.0, 0.5, 2.0, 2.5, 0.5, 2.0), StepWork(prefill_flops=1e9, decode_bytes=5e8)
    used = utilization(costs, Usage(10, 5, 4), timings, work, QUIET)
    assert used.weight_bytes == costs.weight_bytes()
    assert used.cache_bytes == 256 * 12.5
    assert used.mbu == 5e8 / 2.0 / 1e9
    assert used.prefill_compute == 1e9 / 0.5 / 4e9
    one = utilization(costs, Usage(1, 1), timings, work, QUIET)
    assert one.mbu is one.prefill_compute is None
    none = utilization(costs, Usage(10, 5, 4), timings, None, QUIET)
    assert none.mbu is none.prefill_compute is None


def test_an_answer_tells_its_share(
    chat_model: str, measured: Callable[[Ceilings], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(QUIET)
    run = ["run", "-m", chat_model, "hello", "-n", "8", "--temperature", "0", "--ignore-eos"]
    assert main([*run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["utilization"] is None, "nothing is measured for an answer"
    ceilings()
    assert main([*run, "--json"]) == 0
    used = json.loads(capsys.readouterr().out)["utilization"]
    assert used["mbu"] > 0
    assert used["prefill_compute"] > 0
    assert main(run) == 0
    output = capsys.readouterr().err
    assert "of memory bandwidth; " in output
    assert "MB a token)" in output
    assert "of compute)" in output


def test_the_work_of_an_answer_is_that_of_its_steps(chat_model: str) -> None:
    with LLM(chat_model) as llm:
        alone = llm.generate("hello", max_tokens=8, temperature=0, ignore_eos=True)
        work, costs = alone.choices[0].work, llm.engine.steps.costs
        assert work is not None
        prompt = alone.usage.prompt_tokens
        assert work.prefill_flops == pytest.approx(costs.prefill_flops(prompt))
        read = [costs.weight_bytes() + costs.cache_bytes(prompt + n) for n in range(1, 8)]
        assert work.decode_bytes == pytest.approx(sum(read), rel=0.01), "seven steps follow the first token"
        crowd = llm.generate(["hello", "world"], max_tokens=8, temperature=0, ignore_eos=True)
        for each in crowd:
            both = each.choices[0].work
            assert both is not None
            assert both.decode_bytes > work.decode_bytes, "a neighbour's cache is read in the same steps"
            assert both.decode_bytes < 1.5 * work.decode_bytes, "and the weights once for both"


def test_a_speculated_answer_tells_what_its_steps_read(
    chat_model: str, measured: Callable[[Ceilings], list[int]]
) -> None:
    measured(QUIET)
    ceilings()
    with LLM(chat_model, speculate="lookup") as llm:
        result = llm.generate("aaaaaa", max_tokens=8, temperature=0, ignore_eos=True)
        used = llm.utilization(result)
        assert used is not None
        assert used.mbu is not None
        work = result.choices[0].work
        assert work is not None
        assert work.decode_bytes <= 7.01 * (used.weight_bytes + used.cache_bytes), "no more steps than tokens"

"""Drafts on the CUDA backend: checked by its kernels, drawn on the device, one reading a round; the answer is the plain
one's, and where no draft pays the engine runs ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ops.cuda_setting import MARKS
from tests.steady_costs import SteadyCosts
from unspool.bench.synthetic import Synthetic, fix_length
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.engine.runner import make_runner
from unspool.events import Failed
from unspool.models.random import SHAPES, random_checkpoint
from unspool.params import SamplingParams
from unspool.speculate.model import ModelDrafter

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

PROMPT = (5, 6, 7, 8)


def answer(engine: Engine, **params: object) -> list[int]:
    engine.add(PROMPT, SamplingParams(max_tokens=7, ignore_eos=True, seed=1, **params))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            tokens += [token.id for token in getattr(event, "tokens", ())]
    return tokens


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1, "top_k": 50}], ids=["greedy", "drawn"])
def test_drafts_are_checked_by_the_device(params, monkeypatch) -> None:
    config = replace(SHAPES["tiny"], num_layers=1)
    engine = Engine(random_checkpoint(config, format="bf16"), EngineConfig(device="cuda", block_size=16, kv_tokens=64))
    plain = answer(engine, **params)
    speculation = engine.speculation
    speculation.drafters = {"synthetic": Synthetic({PROMPT: plain}, 0.7, config.vocab_size)}
    speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 1.1)])
    fix_length(engine, 3)
    launched: list[tuple[int, int]] = []
    launch = engine.runner.launch

    def counted(plan):
        launched.append((plan.num_tokens, sum(work.num_samples for work in plan.works)))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", counted)
    monkeypatch.setattr(engine.runner, "run", lambda plan: pytest.fail("logits left the device"))
    assert answer(engine, **params) == plain
    assert 0 < speculation.total.accepted < speculation.total.drafted
    assert (4, 4) in launched, "one row and three guesses, a draw from each"
    assert len(launched) < 7


def test_a_draft_is_made_on_the_device_and_read_once() -> None:
    """The drafter is the model itself: with the same noise it is never wrong."""
    config = replace(SHAPES["tiny"], num_layers=1)
    engine = Engine(random_checkpoint(config, format="bf16"), EngineConfig(device="cuda", block_size=16, kv_tokens=64))
    plain = answer(engine, temperature=1)
    speculation = engine.speculation
    drafter = ModelDrafter("own", make_runner(engine.runner.model, engine.config, engine.runner.kv.num_blocks))
    speculation.drafters = {"own": drafter}
    speculation.policy.costs = SteadyCosts([(1, 1.0), (64, 1.1)])
    fix_length(engine, 5)
    assert answer(engine, temperature=1) == plain
    assert speculation.total.accepted == speculation.total.drafted == 5

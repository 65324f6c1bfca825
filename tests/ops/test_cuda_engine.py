"""The engine on the CUDA backend, tokens chosen there, one step ahead: what stepping plainly gives, bit for bit."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.cuda_setting import MARKS, ON_CARD
from unspool.cache.blocks import Blocks
from unspool.config import EngineConfig
from unspool.engine import sizing
from unspool.engine.engine import Engine
from unspool.events import Failed, Finished
from unspool.models.random import SHAPES, random_checkpoint
from unspool.ops import storage
from unspool.params import SamplingParams

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ASKED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 1},
    "filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 2, "logprobs": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 0},
    "bias": {"temperature": 0.7, "seed": 3, "logit_bias": {5: 3.0, 9: -100.0}, "presence_penalty": 1.0},
    "allowed": {"temperature": 1.0, "seed": 4, "allowed_token_ids": list(range(250, 270)), "min_tokens": 2},
    "ranked": {"temperature": 1.0, "seed": 5, "n": 1, "best_of": 2},
}
Answer = list[tuple[int, bytes]]


def make_engine() -> Engine:
    checkpoint = random_checkpoint(replace(SHAPES["tiny"], num_layers=1), format="bf16")
    return Engine(checkpoint, EngineConfig(device="cuda", block_size=16, kv_tokens=512, step_tokens=64))


def answers(engine: Engine, names: list[str]) -> dict[str, Answer]:
    for index, name in enumerate(names):
        params = SamplingParams(max_tokens=4, ignore_eos=name != "allowed", **ASKED[name])
        engine.add([17 + len(name), 5, 5, 250, 7 + len(ASKED[name])], params, id=f"{name}-{index}")
    answers: dict[str, Answer] = {name: [] for name in names}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            for token in getattr(event, "tokens", ()):
                bits = struct.pack("<d", float("nan") if token.logprob is None else token.logprob)
                bits += b"".join(struct.pack("<id", id, logprob) for id, logprob in token.top)
                name = event.request.rpartition("-")[0]
                if name in answers:
                    answers[name].append((token.id, bits))
    engine.check()
    return answers


def test_ahead_is_plain_whatever_shapes_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ahead = make_engine(), make_engine()
    monkeypatch.setattr(plain.runner, "can_draw", lambda params: False)  # so that the host chooses
    expected = answers(plain, list(ASKED))
    monkeypatch.setattr(ahead.runner, "run", lambda plan: pytest.fail("logits left the device"))
    assert answers(ahead, list(ASKED)) == expected
    # In another order, with some gone: rows, slots and neighbours are others.
    some = ["bias", "penalties", "filters"]
    assert answers(ahead, some) == {name: expected[name] for name in some}


def test_the_host_chooses_in_between() -> None:
    """A request that needs the host makes everyone step plainly; the device's counts are set anew afterwards."""
    engine = make_engine()
    expected = answers(make_engine(), ["penalties"])["penalties"]
    engine.add([1, 2], SamplingParams(max_tokens=2, temperature=1, typical_p=0.5, ignore_eos=True))
    assert answers(engine, ["penalties"])["penalties"] == expected


# Layers of each kind that keeps something else than keys and values of each head; the interpreter takes long for one.
KEPT: dict[str, dict[str, Any]] = {"tiny-qwen3.5": {"num_layers": 2, "attention_layers": (False, True)}}
# One layer with a window and one without, in blocks of their own.
WINDOWS: dict[str, dict[str, Any]] = {
    "tiny-gemma3": {"num_layers": 2, "sliding_layers": (True, False)},
    "tiny-gpt-oss": {"num_layers": 2, "sliding_layers": (True, False)},
    "tiny-mistral": {"num_layers": 1},
}
if ON_CARD:
    KEPT["tiny-deepseek-v2"] = {"num_layers": 1}
    KEPT["tiny-lfm2"] = {"num_layers": 2, "attention_layers": (True, False)}
    KEPT["tiny-granite-hybrid-dense"] = {"num_layers": 2, "attention_layers": (False, True)}


def make_engine_of(shape: str, **changes: Any) -> Engine:
    checkpoint = random_checkpoint(replace(SHAPES[shape], **KEPT[shape]), format="bf16")
    return Engine(checkpoint, EngineConfig(device="cuda", block_size=16, kv_tokens=512, step_tokens=12, **changes))


def greedy(engine: Engine, *prompts: tuple[int, ...], count: int = 2) -> list[tuple[int, Answer]]:
    """Of each prompt, how much of it was reused, and its answer."""
    answers: dict[str, Answer] = {str(index): [] for index in range(len(prompts))}
    reused = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0)
        engine.add(prompt, params, id=str(index))
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Finished):
                reused[event.request] = event.usage.cached_tokens
            tokens = getattr(event, "tokens", ())
            answers[event.request] += [(each.id, struct.pack("<d", each.logprob)) for each in tokens]
    engine.check()
    return [(reused[name], answers[name]) for name in answers]


@pytest.mark.parametrize("shape", KEPT)
def test_however_a_prompt_was_reached_its_answer_is_the_same(shape: str) -> None:
    """In one step or in pieces, computed or from a snapshot, alone or in company."""
    prompt = tuple(range(30, 49))
    fresh, engine = (make_engine_of(shape) for _ in "ab")
    [(none, answer)] = greedy(engine, prompt)
    assert none == 0
    longer = (*prompt, *(token for token, _ in answer), 7)
    expected = greedy(fresh, longer)[0][1]
    (again, same), (_, other), (reused, after) = greedy(engine, prompt, (5, 6), longer)
    assert same == answer
    assert after == expected
    assert other == greedy(fresh, (5, 6))[0][1]
    has_states = engine.runner.kv.state_bytes > 0
    assert again == (len(prompt) - 1 if has_states else 16)
    assert reused >= again


@pytest.mark.skipif(not ON_CARD, reason="contexts beyond a window and a tile of keys take the interpreter minutes")
@pytest.mark.parametrize("shape", WINDOWS)
def test_blocks_behind_a_window_are_released_and_change_nothing(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and beside another, from the start and from what the cache has; a released block is read by no kernel, for
    another request has it meanwhile."""
    checkpoint = random_checkpoint(replace(SHAPES[shape], **WINDOWS[shape]), format="bf16")
    config = EngineConfig(device="cuda", block_size=16, kv_tokens=512, step_tokens=160, max_running=2)
    with monkeypatch.context() as patch:
        for module in (storage, sizing):
            patch.setattr(module, "layer_groups", lambda layers: (storage.one_group(layers),))
        whole = Engine(checkpoint, config)
    engine, prompt = Engine(checkpoint, config), tuple(range(40, 183))
    assert [group.window for group in whole.scheduler.tables.groups] == [None]
    assert engine.scheduler.tables.groups[-1].window == 24
    released = []
    release = Blocks.release_first
    monkeypatch.setattr(
        Blocks, "release_first", lambda *block, **how: (released.append(block[1]), release(*block, **how))
    )
    (_, answer), (_, expected) = (greedy(each, prompt, count=3)[0] for each in (engine, whole))
    assert answer == expected
    assert len(released) == 64 // 16
    groups = engine.scheduler.tables.groups
    assert [group.num_cached for group in groups] == [9] * len(groups), "all full blocks can be found, released or not"
    longer = (*prompt, 7, 8)
    (_, other), (reused, after) = greedy(engine, prompt[5:90], longer)
    assert reused == len(prompt) // 16 * 16
    assert [other, after] == [each for _, each in greedy(whole, prompt[5:90], longer)]

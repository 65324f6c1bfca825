"""Heads that predict a token further ahead: read from both kinds of files, computed as the formulas say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.laws.crowd import Crowd
from tests.laws.test_speculation import eager
from tests.models.head_directory import QWEN_HEAD, glm_head, with_glm_head, with_qwen_head
from tests.models.head_reference import head_rows
from unspool import ops as backends
from unspool.config import EngineConfig, ModelConfig
from unspool.engine.head_runner import HeadRunner, make_head_runner
from unspool.engine.runner import make_runner
from unspool.errors import RequestError
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.draft_head import build_head
from unspool.models.random import SHAPES, random_checkpoint, write_random_gguf
from unspool.models.registry import build, draft_head_of
from unspool.params import SamplingParams
from unspool.plan import Plan, Work
from unspool.weights.safetensors import open_safetensors_directory

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PLAIN_ROPE = {"rope_scaling": None, "score_log": 0.0}
WITH_HEADS: dict[str, ModelConfig] = {
    "qwen3_5": replace(SHAPES["tiny-qwen3.5"], extra_layers=1),
    "qwen3_5_moe": replace(SHAPES["tiny-qwen3.5-moe"], extra_layers=1),
    "qwen3_next": replace(SHAPES["tiny-qwen3-next"], extra_layers=1),
    "glm4_moe": replace(SHAPES["tiny-glm4-moe"], extra_layers=1),
    "deepseek_v3": replace(SHAPES["tiny-deepseek-v3"], extra_layers=1, **PLAIN_ROPE),
}


def values_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The head's tensors without the layer's number, and the matrices that it shares."""
    number = f"blk.{checkpoint.config.num_layers}."
    found = {name.removeprefix(number): each for name, each in checkpoint.draft_weights().items()}
    found |= {name: checkpoint.weights[name] for name in ("token_embd.weight", "output.weight")
              if name in checkpoint.weights}  # fmt: skip
    return {name: each.dequantize().astype(np.float64) for name, each in found.items()}


def expected_of(checkpoint: Checkpoint, ids: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and rows of the head, of hidden rows and the tokens that follow each."""
    w = values_of(checkpoint)
    rows = head_rows(w, w["token_embd.weight"][ids], hidden.astype(np.float64), checkpoint.config)
    return rows @ w.get("output.weight", w["token_embd.weight"]).T, rows


def runner_of(checkpoint: Checkpoint, device: str) -> HeadRunner:
    config = EngineConfig(device=device, kv_dtype="f32", kv_tokens=64, block_size=16)
    ops = backends.load(config)
    model = build(checkpoint.config, checkpoint.weights, ops)
    make_runner(model, config, 4, 2, keeps_hidden=True)  # as the engine does: the model's matrices are prepared first
    head = draft_head_of(checkpoint.config)
    assert head is not None
    return make_head_runner(build_head(head, model, checkpoint.draft_weights()), config, 4)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("family", WITH_HEADS)
def test_a_head_computes_what_the_formulas_say(family: str, device: str) -> None:
    checkpoint = random_checkpoint(WITH_HEADS[family])
    rng = np.random.default_rng(0)
    ids = rng.integers(256, size=NUM_TOKENS)
    hidden = rng.standard_normal((NUM_TOKENS, checkpoint.config.hidden_size), np.float32)
    runner = runner_of(checkpoint, device)

    def run(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        work = Work(0, start, tuple(map(int, ids[start:end])), (0, 1), end - start, end - start)
        logits, rows = runner.run([work], hidden[start:end])
        return np.array(logits), rows

    logits, rows = run(0, NUM_TOKENS)
    expected = expected_of(checkpoint, ids, hidden)
    np.testing.assert_allclose(rows, expected[1], atol=2e-4)
    np.testing.assert_allclose(logits, expected[0], atol=5e-4)
    pieces = [run(0, 7), run(7, 8), run(8, NUM_TOKENS)]
    for index, whole in enumerate((logits, rows)):
        assert np.concatenate([piece[index] for piece in pieces]).tobytes() == whole.tobytes(), "bits depend on pieces"


@pytest.mark.parametrize("family", WITH_HEADS)
def test_a_gguf_file_brings_its_head(family: str, tmp_path: Path) -> None:
    config = WITH_HEADS[family]
    write_random_gguf(tmp_path / "model.gguf", config)
    opened, made = open_checkpoint(tmp_path / "model.gguf"), random_checkpoint(config)
    assert opened.config.num_layers == config.num_layers
    assert not any(".nextn." in name for name in opened.weights), "the model itself runs without"
    found, expected = opened.draft_weights(), made.draft_weights()
    assert set(found) == set(expected)
    assert all(found[name].raw == expected[name].raw for name in expected)


def test_a_directory_of_qwen_brings_its_head(tmp_path: Path) -> None:
    check_directory(with_qwen_head(tmp_path / "qwen", "qwen3.5"), QWEN_HEAD, one_more="norm")


def test_a_directory_of_glm_brings_its_head(tmp_path: Path) -> None:
    check_directory(with_glm_head(tmp_path / "glm", "glm4-moe"), glm_head("glm4-moe"))


def check_directory(folder: Path, names: dict[str, str], one_more: str = "none") -> None:
    """Names and values by GGUF's conventions, and the same answer as without it."""
    checkpoint, stored = open_checkpoint(folder), open_safetensors_directory(folder)
    weights = checkpoint.draft_weights()
    for which, name in names.items():
        found = weights[f"blk.{checkpoint.config.num_layers}.nextn.{which}.weight"].dequantize()
        np.testing.assert_allclose(found, stored[name].dequantize() + (1 if one_more in which else 0), atol=1e-6)
    answers = []
    for speculate in (None, "mtp"):
        crowd = Crowd(checkpoint, with_text=False, kv_tokens=128, speculate=speculate)
        if speculate:
            eager(crowd.engine)
        id = crowd.engine.add(range(20), GREEDY)
        crowd.drain()
        answers.append(crowd.collector.answer(id))
    assert answers[0] == answers[1]
    assert crowd.engine.speculation.total.drafted > 0


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_drafts_are_the_heads_guesses_after_the_models_own_rows(family: str) -> None:
    """End to end: hidden rows as the model computes them, the first guess from them and the second from the head's."""
    checkpoint = random_checkpoint(WITH_HEADS[family])
    crowd = Crowd(checkpoint, device="reference", kv_tokens=128, kv_dtype="f32", block_size=16, speculate="mtp")
    engine = crowd.engine
    eager(engine)
    drafter, drafts = engine.speculation.drafters["mtp"], []
    propose = drafter.propose

    def noted(contexts, counts):  # type: ignore[no-untyped-def]
        found = propose(contexts, [min(count, 2) for count in counts])
        drafts.extend((tuple(context.tokens), list(draft)) for context, draft in zip(contexts, found, strict=True))
        return found

    drafter.propose = noted  # type: ignore[method-assign]
    prompt = random.Random(2).choices(range(256), k=21)
    engine.add(prompt, GREEDY)
    crowd.drain()
    assert len(drafts) >= 8
    assert sum(len(draft) == 2 for _, draft in drafts) >= 3
    for tokens, draft in drafts:
        hidden = hidden_rows(checkpoint, tokens[:-1])
        for guess in draft:
            logits, rows = expected_of(checkpoint, np.array(tokens[1:]), hidden)
            assert logits[-1][guess] >= logits[-1].max() - 1e-3
            tokens, hidden = (*tokens, guess), np.concatenate([hidden, rows[-1:]])


def hidden_rows(checkpoint: Checkpoint, tokens: tuple[int, ...]) -> np.ndarray:
    config = EngineConfig(device="reference", kv_dtype="f32", block_size=16)
    runner = make_runner(build(checkpoint.config, checkpoint.weights, backends.load(config)), config, 8, 1)
    work = Work(0, 0, tokens, tuple(range(8)), 0, 0, state=0, num_hidden=len(tokens))
    return np.asarray(runner.compute(Plan((work,))).hidden)


def test_a_model_without_a_head_refuses_by_name() -> None:
    for shape, why in (
        ("tiny-qwen3", "models of qwen3 have no head that predicts further ahead"),
        ("tiny-nemotron-h", "models of nemotron_h have no head"),
        ("tiny-qwen3.5", "random-qwen3_5-f32-0 has no head that predicts further ahead"),
        ("tiny-glm4-moe", "models of glm4_moe have no head"),
    ):
        with pytest.raises(RequestError, match=why) as caught:
            Crowd(random_checkpoint(SHAPES[shape]), kv_tokens=64, speculate="mtp")
        assert caught.value.param == "speculate"

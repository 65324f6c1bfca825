"""Why this token: the trace is enough to make the choice again by hand, and this test does."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from unspool.params import SamplingParams
from unspool.sampling.pipeline import Choice, Sampler
from unspool.sampling.trace import StepTrace

VOCAB = 60
PROMPT = [1, 2, 3, 1, 2]
FIELDS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "logit_bias": {4: 2.0, 5: -math.inf},
    "seed": 77,
}


def chosen(row: np.ndarray, position: int, *, trace: bool = True, **fields: Any) -> Choice:
    params = SamplingParams(trace=trace, **fields).resolve({}, vocab_size=VOCAB)
    return Sampler(params, prompt_ids=PROMPT, vocab_size=VOCAB, end_ids=frozenset()).choose(row, position)


def rows(count: int) -> np.ndarray:
    return (np.random.default_rng(1).normal(size=(count, VOCAB)) * 2).astype(np.float32)


def philox_by_hand(token: int, position: int, seed: int) -> int:
    """The textbook algorithm on plain integers: the first of the four words."""
    counter = [token, position & 0xFFFFFFFF, position >> 32, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0]


def recompute(trace: StepTrace) -> int:
    """The choice from the candidates alone: noise from the seed, added, and the best taken."""
    scores = {}
    for candidate in trace.candidates:
        u = ((philox_by_hand(candidate.token, trace.position, trace.seed) >> 9) + 0.5) / 2**23
        noise = -math.log(-math.log(u))
        assert candidate.gumbel == pytest.approx(noise, abs=2e-6)
        scores[candidate.token] = candidate.logit + noise
    return max(scores, key=lambda token: scores[token])


def test_the_choice_can_be_made_again_by_hand() -> None:
    for position, row in enumerate(rows(50)):
        trace = chosen(row, position, **FIELDS).trace
        assert trace is not None
        assert recompute(trace) == trace.token


def test_each_stage_can_be_followed_by_hand() -> None:
    for position, row in enumerate(rows(20)):
        trace = chosen(row, position, **FIELDS).trace
        assert trace is not None
        names = [stage.name for stage in trace.stages]
        assert names == ["bias", "repetition", "temperature", "top_k", "top_p", "min_p"]
        logit = {effect.token: float(row[effect.token]) for effect in trace.stages[0].tokens}
        for stage in trace.stages:
            for effect in stage.tokens:
                if effect.before is None:
                    assert logit[effect.token] == -math.inf
                    continue
                assert effect.before == logit[effect.token]
                after = by_hand(stage.name, effect.token, effect.before)
                if effect.after is not None:
                    assert effect.after == pytest.approx(after, rel=1e-6)
                logit[effect.token] = -math.inf if effect.after is None else effect.after
        assert trace.stages[3].survivors == 20
        assert all(0 < stage.mass <= 1 for stage in trace.stages)
        assert trace.stages[4].mass >= 0.95 - 1e-6
        assert trace.stages[-1].survivors == len(trace.candidates)


def by_hand(stage: str, token: int, logit: float) -> float:
    match stage:
        case "bias":
            return logit + FIELDS["logit_bias"].get(token, 0.0)
        case "repetition" if token in PROMPT:
            return logit / 1.3 if logit > 0 else logit * 1.3
        case "temperature":
            return logit / 0.8
    return logit


def test_the_models_view_of_the_chosen_token() -> None:
    row = rows(1)[0]
    trace = chosen(row, 5, **FIELDS).trace
    assert trace is not None
    p = np.exp(row.astype(np.float64) - row.max())
    p /= p.sum()
    assert trace.raw_probability == pytest.approx(p[trace.token], rel=1e-5)
    assert trace.raw_rank == 1 + int((p > p[trace.token]).sum())
    assert trace.entropy_bits == pytest.approx(-(p * np.log2(p)).sum(), rel=1e-5)
    assert [token for token, _ in trace.alternatives] == np.argsort(-p)[:8].tolist()


def test_tracing_changes_no_token() -> None:
    for fields in (FIELDS, {"temperature": 0}, {"seed": 3}, {"seed": 3, "typical_p": 0.8, "xtc_probability": 0.5}):
        for position, row in enumerate(rows(20)):
            traced = chosen(row, position, **fields)
            assert traced.token == chosen(row, position, trace=False, **fields).token
            assert traced.trace is not None
            assert traced.trace.candidates[0].token == traced.token


def test_greedy_needs_no_noise() -> None:
    trace = chosen(rows(1)[0], 5, temperature=0, top_p=0.9).trace
    assert trace is not None
    assert trace.greedy
    assert trace.stages == ()
    assert {candidate.gumbel for candidate in trace.candidates} == {0.0}


def test_a_trace_is_json() -> None:
    trace = chosen(rows(1)[0], 5, **FIELDS).trace
    assert trace is not None
    reported = json.loads(json.dumps(trace.as_dict(), allow_nan=False))
    assert reported["token"] == trace.token
    assert reported["stages"][0]["tokens"][0].keys() == {"token", "before", "after"}

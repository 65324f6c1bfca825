"""The device's draws against the specification's, token by token; and what it tells of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.ops.cuda_setting import DEVICE, MARKS, ON_CARD, torch
from unspool.ops.cuda.launch import has_dependent_launch
from unspool.ops.cuda.sampler import (
    FREQUENCY_SEES_PROMPT,
    REPETITION_SEES_PROMPT,
    TELLS,
    WORDS,
    Rows,
    Sampled,
    SampleRows,
    SamplingRoom,
    can_draw,
)
from unspool.ops.cuda.steps import HEADER, ROW_PARAMS
from unspool.params import SamplingParams
from unspool.sampling import draw, filters, penalties
from unspool.sampling.logprobs import rank_of, row_stats
from unspool.sampling.native import HAS_INFINITY, HAS_NAN, NONE_LEFT

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
VOCABULARY = 128_256 if ON_CARD else 5000


def sample(logits: np.ndarray, rows: SampleRows, counts: np.ndarray | None = None) -> tuple[Sampled, np.ndarray]:
    """The results, and the tokens that the next step would read."""
    count, vocabulary = logits.shape
    room = SamplingRoom(count, vocabulary, DEVICE)
    step = np.zeros(HEADER + count * WORDS, np.int32)
    step[ROW_PARAMS] = HEADER
    step[HEADER:] = rows.words().reshape(-1)
    seen = np.zeros((1, vocabulary), np.int32) if counts is None else counts
    sampled = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    results = torch.zeros(count * 8, dtype=torch.int32, device=DEVICE)
    on_device = [torch.from_numpy(array.copy()).to(DEVICE) for array in (logits, step, seen)]
    args = (on_device[0], count, *on_device[1:], sampled, results)
    for launch in room.launches(*args, filtered=rows.is_filtered, tells=rows.tells):
        launch.run()
    return Sampled.of(results.cpu().numpy().reshape(count, 8)), sampled.cpu().numpy()


def expected_token(row: np.ndarray, rows: SampleRows, r: int) -> int:
    """By the reference, stage by stage."""
    if rows.temperature[r] == 0:
        return draw.greedy(row)
    row = filters.temperature(row, rows.temperature[r])
    if rows.top_k[r]:
        row = filters.top_k(row, int(rows.top_k[r]))
    if rows.top_p[r] < 1:
        row = filters.top_p(row, float(rows.top_p[r]))
    if rows.min_p[r] > -np.inf:
        row = np.where(row - row.max() >= rows.min_p[r], row, filters.REMOVED)
    return draw.draw(row, int(rows.seed[r]), int(rows.position[r]))


@pytest.mark.parametrize("seed", range(2))
def test_draws_are_the_specifications(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((8, VOCABULARY))).astype(np.float32)
    logits[1], logits[2] = np.round(logits[1]), np.round(2 * logits[2]) / 2  # many equals
    logits[4, ::2] = -np.inf
    rows = SampleRows.greedy(8)
    rows.temperature[:] = [0, 1, 0.7, 1.3, 1, 1, 0.8, 2.5]
    rows.seed[:] = rng.integers(0, 2**63, 8).astype(np.uint64)
    rows.position[:] = rng.integers(0, 2**40, 8)
    rows.top_k[:] = [0, 5, 0, 50, 0, 1, 700, 0]
    rows.top_p[:] = [1, 0.9, 0.3, 0.8, 0.95, 1, 0.999, 1]
    rows.min_p[3::4] = filters.min_p_floor(0.05)
    rows.flags[:] = TELLS
    found, next_tokens = sample(logits, rows)
    for r, row in enumerate(logits):
        token = expected_token(row, rows, r)
        assert (found.tokens[r], next_tokens[r]) == (token, token), r
        stats = row_stats(row)
        assert (found.best[r], found.total[r]) == (stats.max, stats.total)
        assert (found.logit[r], found.rank[r]) == (row[token], rank_of(row, token))


def test_plain_draws_need_no_filter() -> None:
    rng = np.random.default_rng(5)
    logits = (4 * rng.standard_normal((3, VOCABULARY))).astype(np.float32)
    rows = SampleRows.greedy(3)
    rows.temperature[:], rows.seed[:], rows.position[:] = [0, 0.5, 1], [1, 2, 2**64 - 1], [3, 4, 2**33]
    assert not rows.is_filtered
    assert sample(logits, rows)[0].tokens.tolist() == [expected_token(row, rows, r) for r, row in enumerate(logits)]


def test_penalties_count_what_was_seen() -> None:
    rng = np.random.default_rng(6)
    logits = (2 * rng.standard_normal((2, VOCABULARY))).astype(np.float32)
    prompt, output = np.zeros(VOCABULARY, np.int32), np.zeros(VOCABULARY, np.int32)
    np.add.at(prompt, np.argsort(-logits[0])[:40], 1)
    np.add.at(output, np.argsort(-logits[1])[:40].repeat(2), 1)
    counts = np.stack([prompt << 16 | output] * 2)
    rows = SampleRows.greedy(2)
    rows.slot[:], rows.repetition[:], rows.frequency[:], rows.presence[:] = [0, 1], 1.4, [0, 0.5], [0.3, 0]
    rows.flags[:] = [REPETITION_SEES_PROMPT | FREQUENCY_SEES_PROMPT, REPETITION_SEES_PROMPT]
    found, _ = sample(logits, rows, counts)
    for r, row in enumerate(logits):
        penalised = penalties.repetition(row, prompt + output, 1.4)
        frequent = prompt + output if r == 0 else output
        penalised = penalties.frequency(penalised, frequent, float(rows.frequency[r]))
        penalised = penalties.presence(penalised, frequent, float(rows.presence[r]))
        assert found.tokens[r] == draw.greedy(penalised)


def test_rows_that_nothing_can_be_drawn_from_say_why() -> None:
    logits = np.zeros((4, VOCABULARY), np.float32)
    logits[0, 4123] = np.nan
    logits[1, 77] = np.inf
    logits[2] = -np.inf
    logits[3, 4500] = 1
    rows = SampleRows.greedy(4)
    rows.temperature[1:3] = 1
    found, next_tokens = sample(logits, rows)
    assert found.tokens.tolist() == [HAS_NAN, HAS_INFINITY, NONE_LEFT, 4500]
    assert next_tokens.tolist() == [0, 0, 0, 4500], "a step under way must get a token that exists"


def resolved(**params: object) -> object:
    return SamplingParams(**params).resolve({}, vocab_size=1000)


@pytest.mark.parametrize(
    ("params", "can"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0, "top_p": 0.5}, True),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, True),
        ({"temperature": 1, "order": ["top_p", "temperature"], "top_p": 0.9}, True),  # temperature 1 does nothing
        ({"temperature": 2, "order": ["top_p", "temperature"], "top_p": 0.9}, False),
        ({"temperature": 1, "typical_p": 0.9}, False),
        ({"temperature": 0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0, "min_tokens": 3}, False),
    ],
)
def test_the_device_knows_what_it_can_draw(params: dict[str, object], can: bool) -> None:
    assert can_draw(resolved(**params)) is can


def test_draws_are_packed_like_rows() -> None:
    class Sampler(SimpleNamespace):
        __hash__ = object.__hash__

    params = resolved(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1)
    samplers = [Sampler(params=params, seed=2**64 - 1), Sampler(params=resolved(temperature=0), seed=3)]
    draws = [SimpleNamespace(sampler=sampler, position=2**33 + i) for i, sampler in enumerate(samplers)]
    packed = Rows()
    words, filtered = packed.words(draws)
    rows = SampleRows.greedy(2)
    rows.temperature[0], rows.top_k[0], rows.top_p[0], rows.min_p[0] = 0.7, 5, 0.9, filters.min_p_floor(0.1)
    rows.seed[:], rows.position[:] = [2**64 - 1, 3], [2**33, 2**33 + 1]
    assert filtered
    assert (words == rows.words()).all()
    draws[0].position += 1
    assert packed.words(draws)[0][0, 7] == 1, "a position is a draw's own"


def test_dependent_launch_is_for_cards_alone() -> None:
    assert has_dependent_launch() == (ON_CARD and torch.cuda.get_device_capability()[0] >= 9)

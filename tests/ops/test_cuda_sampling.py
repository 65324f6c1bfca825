"""The device's draws against the specification's, token by token; and what it wants_logprobs of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.ops.cuda_setting import DEVICE, MARKS, ON_CARD, torch
from unspool.ops.cuda.launch import has_dependent_launch
from unspool.ops.cuda.sampler import WANTS_LOGPROBS, WORDS, Rows, Sampled, SampleRows, SamplingRoom, can_draw
from unspool.ops.cuda.sampling import PLANES, RESULT
from unspool.ops.cuda.slots import Slots
from unspool.ops.cuda.steps import HEADER, ROW_PARAMS
from unspool.params import SamplingParams
from unspool.sampling import draw, filters
from unspool.sampling.logprobs import rank_of, row_stats
from unspool.sampling.native import HAS_INFINITY, HAS_NAN, NONE_LEFT
from unspool.sampling.pipeline import Sampler

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
VOCABULARY = 128_256 if ON_CARD else 5000


def run(logits: np.ndarray, words: np.ndarray, mode: tuple[bool, bool], planes: Any) -> tuple[Sampled, np.ndarray]:
    """The results, and the tokens that the next step would read."""
    count, vocabulary = logits.shape
    room = SamplingRoom(count, vocabulary, DEVICE)
    step = np.zeros(HEADER + count * WORDS, np.int32)
    step[ROW_PARAMS] = HEADER
    step[HEADER:] = words.reshape(-1)
    sampled = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    results = torch.zeros(count * RESULT, dtype=torch.int32, device=DEVICE)
    on_device = [torch.from_numpy(array.copy()).to(DEVICE) for array in (logits, step)]
    args = (on_device[0], count, on_device[1], planes, sampled, results)
    for launch in room.launches(*args, filtered=mode[0], wants_logprobs=mode[1]):
        launch.run()
    assert not room.state.any(), "the next step finds zeros"
    return Sampled(results.cpu().numpy().reshape(count, RESULT)), sampled.cpu().numpy()


def sample(logits: np.ndarray, rows: SampleRows) -> tuple[Sampled, np.ndarray]:
    planes = torch.zeros((1, PLANES, 1), dtype=torch.int32, device=DEVICE)
    return run(logits, rows.words(), (rows.is_filtered, rows.wants_logprobs), planes)


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
    rows.flags[:] = WANTS_LOGPROBS
    found, next_tokens = sample(logits, rows)
    for r, row in enumerate(logits):
        token = expected_token(row, rows, r)
        assert (found.tokens[r], next_tokens[r]) == (token, token), r
        assert found.stats(r) == row_stats(row)
        assert (found.logit(r), found.rank(r)) == (row[token], rank_of(row, token))


def test_plain_draws_need_no_filter() -> None:
    rng = np.random.default_rng(5)
    logits = (4 * rng.standard_normal((3, VOCABULARY))).astype(np.float32)
    rows = SampleRows.greedy(3)
    rows.temperature[:], rows.seed[:], rows.position[:] = [0, 0.5, 1], [1, 2, 2**64 - 1], [3, 4, 2**33]
    assert not rows.is_filtered
    assert sample(logits, rows)[0].tokens == [expected_token(row, rows, r) for r, row in enumerate(logits)]


@pytest.mark.parametrize("tall", [1, 40])
def test_cuts_far_from_the_best_and_near_it(tall: int) -> None:
    """Flat rows, where half of the vocabulary is gathered, and steep ones; cuts among equals."""
    rng = np.random.default_rng(tall)
    logits = (tall * rng.standard_normal((6, VOCABULARY))).astype(np.float32)
    logits[3:5] = 1.5
    logits[4, 77] = 1.75
    logits[5, 10:] = -np.inf
    rows = SampleRows.greedy(6)
    rows.temperature[:], rows.seed[:] = 1, 11
    rows.position[:] = range(6)
    rows.top_p[:] = [0.9, 1e-9, 0.5, 0.3, 1, 0.7]
    rows.top_k[:] = [0, 0, 3000, 0, 1234, 4000]
    found, _ = sample(logits, rows)
    assert found.tokens == [expected_token(row, rows, r) for r, row in enumerate(logits)]


# What the device can draw, each alone and all of it at once.
PARAMS = {
    "greedy": {"temperature": 0},
    "bias": {"temperature": 0, "logit_bias": {5: 100, 7: -100}},
    "repetition": {"temperature": 0, "repetition_penalty": 1.4},
    "output alone": {"temperature": 1, "repetition_penalty": 1.4, "penalty_scope": "output", "seed": 2},
    "frequency": {"temperature": 0, "frequency_penalty": 0.5, "penalty_scope": "all"},
    "presence": {"temperature": 0, "presence_penalty": 2.0},
    "allowed": {"temperature": 1, "allowed_token_ids": list(range(40, 60)), "seed": 3},
    "not yet": {"temperature": 0, "logit_bias": {0: 90, 1: 95, 2: 80}, "min_tokens": 3},
    "told": {"temperature": 1, "top_p": 0.9, "logprobs": 20, "seed": 4},
    "ranked": {"temperature": 1, "n": 1, "best_of": 2, "seed": 4},
    "everything": {
        "temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "seed": 5, "logprobs": 3, "min_tokens": 2,
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {9: 4.5, 1: 50},
    },
}  # fmt: skip


def test_whole_answers_are_the_hosts() -> None:
    """Token after token, chosen on the device and counted there, beside the host's sampler: ids, logprobs, tops."""
    rng = np.random.default_rng(6)
    prompt = rng.integers(0, 200, 60).tolist()
    samplers = [
        Sampler(resolved(**params), prompt_ids=prompt, vocab_size=VOCABULARY, end_ids=frozenset({0, 1}))
        for params in PARAMS.values()
    ]
    twins = [sampler.fork() for sampler in samplers]  # the device's: nobody wants_logprobs them what was chosen
    rows = Rows(VOCABULARY, DEVICE)
    for number, twin in enumerate(twins):
        rows.add(number, twin)
    order = list(range(len(samplers)))
    for step in range(5):
        position = len(prompt) + step
        logits = (2 * rng.standard_normal((len(samplers), VOCABULARY))).astype(np.float32)
        logits[:, :200] += 4  # so that what the prompt holds is likely
        words, mode = rows.words(order, [position] * len(order))
        found, _ = run(logits[order], words, mode, rows.slots.planes)
        for place, r in enumerate(order):
            expected = samplers[r].choose(logits[r], position)
            assert found.tokens[place] == expected.token, list(PARAMS)[r]
            params = samplers[r].params
            if params.logprobs is not None or params.best_of > params.n:
                reported = found.logprobs(place, params.logprobs or 0)
                assert reported == (expected.logprob, expected.top, expected.rank)
                assert found.rank(place) == expected.rank
            samplers[r].accept(expected.token)
        rng.shuffle(order)


def test_slots_are_set_anew_where_the_host_chose() -> None:
    sampler = Sampler(
        resolved(temperature=0, frequency_penalty=1.0), prompt_ids=[1, 2], vocab_size=50, end_ids=frozenset()
    )
    slots = Slots(50, DEVICE)
    index = slots.place(5, sampler, 2)
    assert slots.planes[index, 1].sum() == 0
    sampler.accept(7)  # by the host: the device has not counted it
    sampler.accept(7)
    assert slots.place(5, sampler, 4) == index
    assert slots.planes[index, 1].nonzero().tolist() == [[7]]
    assert slots.planes[index, 1, 7] == 2


def test_slots_are_given_back_and_grow() -> None:
    slots = Slots(50, DEVICE)
    params = resolved(temperature=0, presence_penalty=1.0, logit_bias={3: 1})
    samplers = [Sampler(params, prompt_ids=[i], vocab_size=50, end_ids=frozenset()) for i in range(40)]
    places = [slots.place(number, sampler, 1) for number, sampler in enumerate(samplers)]
    assert sorted(places) == list(range(40))
    assert all(slots.planes[place, 2].view(torch.float32)[3] == 1 for place in places), "growing keeps what there was"
    slots.release(7)
    slots.release(7)
    other = Sampler(params, prompt_ids=[9], vocab_size=50, end_ids=frozenset())
    assert slots.place(40, other, 1) == places[7]
    assert slots.place(8, samplers[8], 2) == places[8]


def test_a_number_may_come_to_mean_another_sampler() -> None:
    rows = Rows(VOCABULARY, DEVICE)
    words = []
    for seed in (1, 2):
        sampler = Sampler(resolved(seed=seed), prompt_ids=[1], vocab_size=VOCABULARY, end_ids=frozenset())
        rows.add(3, sampler)
        words.append(rows.words([3], [1])[0].copy())
        rows.remove(3)
    assert words[0][0, 5:7].view(np.uint64) == 1
    assert words[1][0, 5:7].view(np.uint64) == 2
    with pytest.raises(KeyError):
        rows.words([3], [1])


def test_rows_that_nothing_can_be_drawn_from_say_why() -> None:
    logits = np.zeros((4, VOCABULARY), np.float32)
    logits[0, 4123] = np.nan
    logits[1, 77] = np.inf
    logits[2] = -np.inf
    logits[3, 4500] = 1
    rows = SampleRows.greedy(4)
    rows.temperature[1:3] = 1
    found, next_tokens = sample(logits, rows)
    assert found.tokens == [HAS_NAN, HAS_INFINITY, NONE_LEFT, 4500]
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
        ({"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 1.0, "min_tokens": 3}, True),
        ({"temperature": 0, "repetition_penalty": 1.1, "penalty_window": 64}, False),
        ({"temperature": 0, "penalty_window": 64}, True),  # of no penalty
        ({"temperature": 0, "order": ["presence", "bias", "temperature"], "logit_bias": {1: 2}}, True),
        ({"order": ["top_p", "bias", "temperature"], "top_p": 0.9, "logit_bias": {1: 2}}, False),
        ({"temperature": 0, "no_repeat_ngram": 3}, False),
        ({"logprobs": 20}, True),
        ({"logprobs": 21}, False),
        ({"logprobs": 1, "logprobs_stage": "final"}, False),
    ],
)
def test_the_device_knows_what_it_can_draw(params: dict[str, object], can: bool) -> None:
    assert can_draw(resolved(**params)) is can


def test_draws_are_packed_like_rows() -> None:
    params = resolved(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1)
    packed = Rows(1000, DEVICE)
    packed.add(8, SimpleNamespace(params=params, seed=2**64 - 1))
    packed.add(2, SimpleNamespace(params=resolved(temperature=0), seed=3))
    words, mode = packed.words([8, 2], [2**33, 2**33 + 1])
    rows = SampleRows.greedy(2)
    rows.temperature[0], rows.top_k[0], rows.top_p[0], rows.min_p[0] = 0.7, 5, 0.9, filters.min_p_floor(0.1)
    rows.seed[:], rows.position[:] = [2**64 - 1, 3], [2**33, 2**33 + 1]
    assert mode == (True, False)
    assert (words == rows.words()).all()
    assert packed.words([8, 2], [2**33 + 1, 0])[0][0, 7] == 1, "a position is a draw's own"


def test_dependent_launch_is_for_cards_alone() -> None:
    assert has_dependent_launch() == (ON_CARD and torch.cuda.get_device_capability()[0] >= 9)

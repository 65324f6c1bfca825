"""A Sampler: choosing commits nothing, rewinding and forking equal going straight, constraints are exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from unspool.errors import RequestError, SamplingError
from unspool.params import SamplingParams
from unspool.params.rules import StageState
from unspool.sampling.pipeline import Sampler

VOCAB = 97
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EVERYTHING: dict[str, Any] = {
    "temperature": 1.3,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "dry_multiplier": 0.8,
    "no_repeat_ngram": 3,
    "top_p": 0.95,
    "xtc_probability": 0.3,
    "min_tokens": 4,
    "logprobs": 2,
}


def rows(seed: int, count: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(count, VOCAB)) * 2).astype(np.float32)


def sampler(
    *, native: bool = True, constraint: Any = None, end_ids: frozenset[int] = frozenset({0}), **fields: Any
) -> Sampler:
    params = SamplingParams(**{"seed": 11, **fields}).resolve({}, vocab_size=VOCAB)
    return Sampler(params, prompt_ids=PROMPT, vocab_size=VOCAB, end_ids=end_ids, native=native, constraint=constraint)


def run(one: Sampler, given: np.ndarray, start: int = 0) -> list[str]:
    reported = []
    for index, row in enumerate(given):
        choice = one.choose(row, len(PROMPT) + start + index)
        one.accept(choice.token)
        reported.append(repr(choice))
    return reported


def test_choosing_commits_nothing_and_writes_nothing() -> None:
    one = sampler(**EVERYTHING)
    row = rows(0, 1)[0]
    kept = row.copy()
    first = one.choose(row, 8)
    assert [one.choose(row, 8) for _ in range(3)] == [first] * 3
    assert np.array_equal(row, kept)
    assert one.num_output == 0


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("scope", ["all", "output", "mixed"])
def test_rewound_equals_straight(window: int, scope: str) -> None:
    given = rows(1, 40)
    fields = {**EVERYTHING, "penalty_window": window, "penalty_scope": scope}
    straight = run(sampler(**fields), given)
    one = sampler(**fields)
    run(one, given[:30])
    run(one, rows(2, 10), 30)
    one.rewind(30)
    one.rewind(12)
    assert run(one, given[12:], 12) == straight[12:]


def test_forked_equals_straight() -> None:
    given = rows(1, 40)
    straight = run(sampler(**EVERYTHING), given)
    one = sampler(**EVERYTHING)
    run(one, given[:15])
    twin, other = one.fork(), one.fork(seed=12)
    assert run(other, given[15:], 15) != straight[15:]
    assert run(twin, given[15:], 15) == straight[15:]
    assert run(one, given[15:], 15) == straight[15:]


def test_rewinding_too_far_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot rewind to 3"):
        sampler().rewind(3)


@pytest.mark.parametrize(
    ("scope", "window", "repeated", "frequent"),
    [
        ("all", -1, {1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 2, 9: 1}, {1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 2, 9: 1}),
        ("mixed", -1, {1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 2, 9: 1}, {7: 2}),
        ("output", -1, {7: 2}, {7: 2}),
        ("all", 4, {2: 1, 6: 1, 7: 2}, {2: 1, 6: 1, 7: 2}),
        ("mixed", 4, {2: 1, 6: 1, 7: 2}, {7: 2}),
        ("output", 1, {7: 1}, {7: 1}),
    ],
)
def test_what_penalties_count(scope: str, window: int, repeated: dict[int, int], frequent: dict[int, int]) -> None:
    one = sampler(repetition_penalty=1.1, presence_penalty=0.1, penalty_scope=scope, penalty_window=window)
    one.accept(7)
    one.accept(7)
    for counts, expected in ((one.history.repeated, repeated), (one.history.frequent, frequent)):
        assert counts is not None
        pairs = zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)
        assert {token: count for token, count in pairs if count} == expected


def test_greedy_takes_the_lowest_of_equals_and_needs_no_seed() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[5, 9]] = 2
    for seed in (1, 2):
        assert sampler(temperature=0, seed=seed).choose(row, 8).token == 5
        assert sampler(temperature=0, seed=seed, native=False).choose(row, 8).token == 5


def test_a_seed_fixes_everything_and_another_changes_it() -> None:
    given = rows(4, 30)
    assert run(sampler(seed=1), given) == run(sampler(seed=1), given)
    assert run(sampler(seed=1), given) != run(sampler(seed=2), given)


def test_the_position_is_the_sequences_not_the_outputs() -> None:
    row = rows(5, 1)[0]
    tokens = {sampler().choose(row, position).token for position in range(30)}
    assert len(tokens) > 5


@pytest.mark.parametrize("native", [True, False])
def test_end_tokens_wait_for_min_tokens(native: bool) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[0] = 50
    one = sampler(native=native, min_tokens=2)
    for _ in range(2):
        choice = one.choose(row, 8)
        assert choice.token != 0
        one.accept(choice.token)
    assert one.choose(row, 10).token == 0


@pytest.mark.parametrize("native", [True, False])
def test_bans_hold_at_their_place_only(native: bool) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[5, 6]] = 90, 60
    one = sampler(native=native, temperature=0)
    one.accept(1)
    one.ban(5)
    assert one.choose(row, 9).token == 6
    assert one.fork().choose(row, 9).token == 6
    one.accept(6)
    assert one.choose(row, 10).token == 5
    one.rewind(1)
    assert one.choose(row, 9).token == 6
    one.rewind(0)
    one.accept(1)
    assert one.choose(row, 9).token == 5


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("trace", [True, False])
def test_a_broken_row_fails_by_name_and_position(native: bool, trace: bool) -> None:
    row = np.zeros(VOCAB, np.float32)
    for bad, words in ((np.nan, "NaN logits at position 17"), (np.inf, "infinite logits at position 17")):
        row[50] = bad
        for temperature in (0, 1):
            with pytest.raises(SamplingError, match=words):
                sampler(native=native, temperature=temperature, top_p=0.9, trace=trace).choose(row, 17)
    one = sampler(native=native, allowed_token_ids=[0], min_tokens=1, trace=trace)
    with pytest.raises(RequestError, match="no token may be chosen at position 17"):
        one.choose(np.zeros(VOCAB, np.float32), 17)
    with pytest.raises(ValueError, match="expected float32"):
        sampler(native=native).choose(np.zeros(VOCAB + 1, np.float32), 17)


# Logprobs -------------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_stage_asked_for() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [0] * (VOCAB - 4), np.float32) + np.float32(1e-30))
    raw = sampler(top_k=2, logprobs=3, logprobs_stage="raw").choose(row, 8)
    final = sampler(top_k=2, logprobs=3, logprobs_stage="final").choose(row, 8)
    assert [token for token, _ in raw.top] == [0, 1, 2]
    assert [math.exp(p) for _, p in raw.top] == pytest.approx([0.4, 0.3, 0.2], rel=1e-5)
    assert [math.exp(p) for _, p in final.top] == pytest.approx([4 / 7, 3 / 7, 0], rel=1e-5)
    assert raw.token == final.token
    assert math.exp(raw.logprob) == pytest.approx([0.4, 0.3][raw.token], rel=1e-5)
    assert raw.rank == raw.token + 1


def test_logprobs_agree_with_float64() -> None:
    for row in rows(6, 20):
        choice = sampler(logprobs=5).choose(row, 8)
        wide = row.astype(np.float64)
        exact = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        assert choice.logprob == pytest.approx(exact[choice.token], abs=2e-6)
        assert [token for token, _ in choice.top] == np.argsort(-row, kind="stable")[:5].tolist()


def test_equal_alternatives_come_by_id() -> None:
    choice = sampler(logprobs=4, temperature=0).choose(np.zeros(VOCAB, np.float32), 8)
    assert [token for token, _ in choice.top] == [0, 1, 2, 3]
    assert choice.rank == 1


def test_nothing_is_told_unasked() -> None:
    choice = sampler().choose(rows(0, 1)[0], 8)
    assert math.isnan(choice.logprob)
    assert (choice.rank, choice.top, choice.trace) == (None, (), None)
    assert not math.isnan(sampler(best_of=2).choose(rows(0, 1)[0], 8).logprob)


# Custom stages --------------------------------------------------------------------------------------------------------


def test_a_custom_stage_runs_at_its_place() -> None:
    seen: list[StageState] = []

    def only_even(row: np.ndarray, state: StageState) -> np.ndarray:
        seen.append(state)
        row[1::2] = -np.inf
        return row

    given = rows(7, 20)
    for order in (["temperature", only_even, "top_k"], [only_even, "temperature", "top_k"], ["top_k", only_even]):
        one = sampler(order=order, top_k=5)
        kept = given.copy()
        tokens = [one.choose(row, 8 + i).token for i, row in enumerate(given)]
        assert all(token % 2 == 0 for token in tokens)
        assert np.array_equal(given, kept)
    assert seen[0].prompt_ids.tolist() == PROMPT
    assert seen[0].output_ids.tolist() == []
    assert seen[0].position == 8


def test_order_matters() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2] + [1e-9] * (VOCAB - 3), np.float32))
    first = sampler(order=["temperature", "top_p"], temperature=3.0, top_p=0.5, trace=True).choose(row, 8)
    last = sampler(order=["top_p", "temperature"], temperature=3.0, top_p=0.5, trace=True).choose(row, 8)
    assert first.trace is not None
    assert last.trace is not None
    assert first.trace.stages[-1].survivors > last.trace.stages[-1].survivors == 1


@pytest.mark.parametrize(
    "result",
    [
        np.zeros(3, np.float32),
        np.zeros(VOCAB),
        None,
        np.full(VOCAB, np.nan, np.float32),
        np.full(VOCAB, np.inf, np.float32),
    ],
)
def test_a_custom_stage_that_misbehaves_is_named(result: Any) -> None:
    def broken(row: np.ndarray, state: StageState) -> Any:
        return result

    with pytest.raises(RequestError, match="broken") as caught:
        sampler(order=[broken]).choose(rows(0, 1)[0], 8)
    assert caught.value.param == "order"


# Constraints ----------------------------------------------------------------------------------------------------------


class Every:
    """Allows tokens whose id has the remainder (number accepted) by `modulus`; counts what it was asked."""

    def __init__(self, modulus: int, accepted: int = 0) -> None:
        self.modulus, self.accepted = modulus, accepted
        self.checks = self.masks = 0

    def check(self, token: int) -> bool:
        self.checks += 1
        return token % self.modulus == self.accepted % self.modulus

    def mask(self) -> np.ndarray:
        self.masks += 1
        allowed = np.arange(VOCAB) % self.modulus == self.accepted % self.modulus
        bits = np.zeros(128, bool)
        bits[:VOCAB] = allowed
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % self.modulus == self.accepted % self.modulus
        self.accepted += 1

    def rollback(self, n: int) -> None:
        self.accepted -= n

    def fork(self) -> Every:
        return Every(self.modulus, self.accepted)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.5},
        {},
        {"temperature": 0.6, "logprobs": 3},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2, "logprobs": 3, "logprobs_stage": "final"},
        {"logprobs": 3, "logprobs_stage": "final"},
        {"typical_p": 0.5, "xtc_probability": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("native", [True, False])
def test_checking_first_equals_masking(fields: dict[str, Any], native: bool) -> None:
    given = rows(8, 60)
    quick = sampler(native=native, constraint=Every(2), **fields)
    masked = sampler(native=native, constraint=Every(2), **fields)
    masked._check_first = False
    assert run(quick, given) == run(masked, given)
    assert quick.constraint is not None
    lazy = not {"top_k", "top_p", "min_p", "typical_p", "logprobs_stage"} & set(fields)
    assert (quick.constraint.masks < 60) == lazy  # type: ignore[attr-defined]


def test_a_constraint_is_rewound_and_forked_with_its_sampler() -> None:
    given = rows(9, 20)
    straight = run(sampler(constraint=Every(3)), given)
    one = sampler(constraint=Every(3))
    run(one, given[:10])
    twin = one.fork()
    run(one, rows(10, 5), 10)
    one.rewind(10)
    assert run(one, given[10:], 10) == straight[10:]
    assert run(twin, given[10:], 10) == straight[10:]


@pytest.mark.parametrize("native", [True, False])
def test_tokens_beyond_the_mask_are_not_allowed(native: bool) -> None:
    class Short(Every):
        def mask(self) -> np.ndarray:
            return np.full(1, 0b100, np.uint32)  # token 2, of a vocabulary of 32

        def check(self, token: int) -> bool:
            return token == 2

    one = sampler(native=native, constraint=Short(2), top_k=5)
    assert {one.choose(row, 8).token for row in rows(12, 10)} == {2}


def test_scores_are_masked_and_penalised_logprobs() -> None:
    row = rows(11, 1)[0]
    scores = sampler(constraint=Every(2), repetition_penalty=2.0).scores(row, 8)
    wide = row.astype(np.float64)
    exact = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    assert (scores[1::2] == -np.inf).all()
    assert scores[2] == pytest.approx(2 * exact[2], rel=1e-5)  # in the prompt: a negative score is multiplied
    assert scores[8] == pytest.approx(exact[8], rel=1e-5)

"""Every stage as a table: small vectors in, exact expected vectors out."""

from __future__ import annotations

import numpy as np
import pytest

from unspool.sampling import filters, penalties

INF = np.inf


def logits(probabilities: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float32))


def probabilities(row: np.ndarray) -> list[float]:
    e = np.exp(row.astype(np.float64) - row.max())
    return [round(float(p), 4) for p in e / e.sum()]


FALLING = [0.4, 0.3, 0.2, 0.1]
MIXED = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("stage", "given", "value", "expected"),
    [
        ("temperature", FALLING, 1.0, [0.4, 0.3, 0.2, 0.1]),
        ("temperature", FALLING, 0.5, [0.5333, 0.3, 0.1333, 0.0333]),
        ("temperature", FALLING, 2.0, [0.3254, 0.2818, 0.2301, 0.1627]),
        ("top_k", FALLING, 1, [1, 0, 0, 0]),
        ("top_k", FALLING, 2, [0.5714, 0.4286, 0, 0]),
        ("top_k", MIXED, 3, [0, 0.4444, 0.2222, 0.3333]),
        ("top_k", FALLING, 4, FALLING),
        ("top_k", FALLING, 9, FALLING),
        ("top_k", [0.25, 0.25, 0.25, 0.25], 2, [0.5, 0.5, 0, 0]),
        ("top_k_ties", [0.25, 0.25, 0.25, 0.25], 2, [0.25, 0.25, 0.25, 0.25]),
        ("top_k_ties", [0.1, 0.3, 0.3, 0.3], 2, [0, 0.3333, 0.3333, 0.3333]),
        ("top_k_ties", FALLING, 2, [0.5714, 0.4286, 0, 0]),
        ("top_p", FALLING, 0.3, [1, 0, 0, 0]),
        ("top_p", FALLING, 0.4, [1, 0, 0, 0]),
        ("top_p", FALLING, 0.7, [0.5714, 0.4286, 0, 0]),
        ("top_p", FALLING, 0.71, [0.4444, 0.3333, 0.2222, 0]),
        ("top_p", FALLING, 0.9, [0.4444, 0.3333, 0.2222, 0]),
        ("top_p", MIXED, 0.7, [0, 0.5714, 0, 0.4286]),
        ("top_p", FALLING, 1.0, FALLING),
        ("top_p", FALLING, 1e-9, [1, 0, 0, 0]),
        ("top_p", [0.25, 0.25, 0.25, 0.25], 0.5, [0.5, 0.5, 0, 0]),
        ("min_p", FALLING, 0.2, FALLING),
        ("min_p", FALLING, 0.25, FALLING),
        ("min_p", FALLING, 0.26, [0.4444, 0.3333, 0.2222, 0]),
        ("min_p", FALLING, 0.5, [0.4444, 0.3333, 0.2222, 0]),
        ("min_p", FALLING, 0.76, [1, 0, 0, 0]),
        ("min_p", [0.3, 0.3, 0.4], 1.0, [0, 0, 1]),
        ("min_p", [0.25, 0.25, 0.5], 1e-9, [0.25, 0.25, 0.5]),
        ("typical_p", [0.97, 0.01, 0.01, 0.01], 0.5, [1, 0, 0, 0]),
        ("typical_p", [0.4, 0.2, 0.2, 0.2], 0.5, [0, 0.3333, 0.3333, 0.3333]),
        ("typical_p", FALLING, 1.0, FALLING),
        ("top_n_sigma", [0.25, 0.25, 0.25, 0.25], 1.0, [0.25, 0.25, 0.25, 0.25]),
        ("top_n_sigma", FALLING, 1.0, [0.5714, 0.4286, 0, 0]),
        ("top_n_sigma", FALLING, 3.0, FALLING),
        ("top_n_sigma", [0.0, 0.4, 0.6], 1.0, [0, 0, 1]),
        ("top_n_sigma", [0.0, 0.4, 0.6], 2.5, [0, 0.4, 0.6]),
        ("xtc", FALLING, 0.05, [0, 0, 0, 1]),
        ("xtc", FALLING, 0.15, [0, 0, 0.6667, 0.3333]),
        ("xtc", FALLING, 0.2, [0, 0, 0.6667, 0.3333]),
        ("xtc", FALLING, 0.25, [0, 0.5, 0.3333, 0.1667]),
        ("xtc", FALLING, 0.35, FALLING),
        ("xtc", FALLING, 0.5, FALLING),
        ("xtc", [0.3, 0.3, 0.3, 0.1], 0.2, [0.3, 0.3, 0.3, 0.1]),
    ],
)
def test_filter(stage: str, given: list[float], value: float, expected: list[float]) -> None:
    row = logits(given)
    kept = row.copy()
    result = getattr(filters, stage)(row, value)
    assert probabilities(result) == pytest.approx(expected, abs=2e-4)
    assert result.dtype == np.float32
    assert np.array_equal(row, kept), "a stage must not write its input"


@pytest.mark.parametrize(
    ("given", "counts", "penalty", "expected"),
    [
        ([2.0, -1.0, 1.0, 0.0], [1, 3, 0, 1], 2.0, [1.0, -2.0, 1.0, 0.0]),
        ([2.0, -1.0], [1, 1], 0.5, [4.0, -0.5]),
        ([-INF, 1.0], [1, 1], 2.0, [-INF, 0.5]),
    ],
)
def test_repetition(given: list[float], counts: list[int], penalty: float, expected: list[float]) -> None:
    assert penalties.repetition(np.float32(given), np.int32(counts), penalty).tolist() == expected


def test_frequency_and_presence() -> None:
    row, counts = np.float32([1, 1, 1]), np.int32([0, 1, 3])
    assert penalties.frequency(row, counts, 0.5).tolist() == [1.0, 0.5, -0.5]
    assert penalties.presence(row, counts, 0.5).tolist() == [1.0, 0.5, 0.5]
    assert penalties.presence(row, counts, -0.5).tolist() == [1.0, 1.5, 1.5]


def test_bias() -> None:
    assert penalties.bias(np.float32([1, 2]), np.float32([0.5, -INF])).tolist() == [1.5, -INF]


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([1, 2, 3, 1, 2], 3, [3]),
        ([1, 2, 3, 1, 2], 2, [3]),
        ([1, 2, 3], 1, [1, 2, 3]),
        ([1, 2, 1, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
        ([1, 1], 2, [1]),
        ([5, 5, 5], 3, [5]),
    ],
)
def test_no_repeat_ngram(tokens: list[int], n: int, expected: list[int]) -> None:
    assert penalties.ngram_followers(np.int32(tokens), n).tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "breakers", "allowed_length", "expected"),
    [
        ([1, 2, 3, 1, 2], [], 2, {3: 2}),  # "1 2" came before and 3 followed
        ([1, 2, 3, 1, 2], [], 3, {}),
        ([1, 2, 3, 9, 2], [], 1, {3: 1}),
        ([7, 1, 2, 3, 8, 2, 4, 7, 1, 2], [], 1, {3: 3, 4: 1}),
        ([1, 2, 3, 1, 2, 4, 1, 2], [], 2, {3: 2, 4: 2}),
        ([5, 5, 5, 5], [], 2, {5: 3}),
        ([1, 2, 3, 1, 2], [1], 1, {3: 1}),  # no match runs across a breaker
        ([1, 2, 3, 1, 2], [2], 1, {}),  # nor begins at one
        ([1, 2, 3, 1, 2], [3], 2, {}),  # a breaker itself is never held against a text
        ([1], [], 1, {}),
        ([], [], 1, {}),
    ],
)
def test_dry_matches(tokens: list[int], breakers: list[int], allowed_length: int, expected: dict[int, int]) -> None:
    table = np.isin(np.arange(10), breakers) if breakers else None
    ids, lengths = penalties.dry_matches(np.int32(tokens), table, 0.8, 1.75, allowed_length)
    assert dict(zip(ids.tolist(), lengths.tolist(), strict=True)) == expected


def test_dry() -> None:
    row = np.float32([1, 1, 1])
    result = penalties.dry(row, np.int32([2, 3, 5]), 0.5, 2.0, 2)
    assert result.tolist() == [0.5, 0.0, -3.0]


def test_dry_stays_finite_however_long_the_repetition() -> None:
    tokens = np.full(5000, 3, np.int32)
    ids, lengths = penalties.dry_matches(tokens, None, 0.8, 1.75, 2)
    assert ids.tolist() == [3]
    assert np.isfinite(penalties.dry(np.float32([1]), lengths, 0.8, 1.75, 2)).all()
    ids, lengths = penalties.dry_matches(tokens, None, 0.8, 1.0, 2)
    assert penalties.dry(np.float32([1]), lengths, 0.8, 1.0, 2).tolist() == [np.float32(1) - np.float32(0.8)]


def test_dry_equals_its_definition_on_random_texts() -> None:
    generator = np.random.default_rng(5)
    for _ in range(300):
        tokens = generator.integers(0, 4, generator.integers(2, 40)).astype(np.int32)
        expected: dict[int, int] = {}
        for end in range(tokens.size - 1):
            length = 0
            while length <= end and tokens[end - length] == tokens[tokens.size - 1 - length]:
                length += 1
            if length >= 2:
                follower = int(tokens[end + 1])
                expected[follower] = max(expected.get(follower, 0), length)
        ids, lengths = penalties.dry_matches(tokens, None, 0.8, 1.75, 2)
        assert dict(zip(ids.tolist(), lengths.tolist(), strict=True)) == expected


def test_the_lane_sum_is_a_sum() -> None:
    values = np.random.default_rng(0).normal(size=1003)
    assert filters.lane_sum(values) == pytest.approx(values.sum(), abs=1e-9)


def test_weights_are_shares_of_the_distribution() -> None:
    row = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 4
    weight = filters.weights(row)
    exact = np.exp(row.astype(np.float64) - row.max())
    assert np.abs(weight / filters.WEIGHT_ONE - exact).max() < 3e-7
    assert weight.max() == filters.WEIGHT_ONE

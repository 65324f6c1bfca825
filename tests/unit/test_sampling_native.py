"""Native sampling keeps, draws and reports exactly what the numpy reference does, ties and all."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from unspool.params import SamplingParams
from unspool.sampling import draw, filters, native
from unspool.sampling.logprobs import rank_of, row_stats, top_ids
from unspool.sampling.pipeline import Sampler

pytest.importorskip("unspool._native", reason="the extension is not built")
ISAS = ("plain", "avx2", "avx512")
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (1e-6, 0.01, 0.5, 0.7, 2.0, 100.0, 1e6),
    "top_k": (1, 2, 5, 50, 500, 10**6),
    "top_k_ties": (1, 2, 5, 50, 500),
    "top_p": (1e-9, 0.1, 0.5, 0.9, 0.95, 0.9999),
    "min_p": (1e-30, 1e-9, 0.01, 0.1, 0.5, 1.0),
    "typical_p": (0.1, 0.5, 0.9, 0.99),
    "top_n_sigma": (0.1, 1.0, 2.0, 5.0),
    "xtc": (0.001, 0.01, 0.1, 0.3),
}


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Any:
    try:
        return native.native_sampling(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")


def random_row(generator: np.random.Generator, vocab: int) -> np.ndarray:
    row = (generator.normal(size=vocab) * generator.choice([0, 0.1, 1, 3, 10, 100])).astype(np.float32)
    if generator.random() < 0.4:
        row = np.round(row * 2).astype(np.float32) / 2  # ties
    if generator.random() < 0.3:
        row[generator.random(vocab) < generator.random()] = -np.inf
    if row.max() == -np.inf:
        row[generator.integers(vocab)] = 0
    return row


def random_stages(generator: np.random.Generator) -> list[tuple[str, Any]]:
    names = [str(name) for name in generator.permutation(list(CHOICES))[: generator.integers(0, 6)]]
    if "top_k" in names and "top_k_ties" in names:
        names.remove("top_k")
    return [(name, CHOICES[name][generator.integers(len(CHOICES[name]))]) for name in names]


def encode(stages: list[tuple[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    values = [float(filters.min_p_floor(value)) if name == "min_p" else value for name, value in stages]
    return np.array([native.CODES[name] for name, _ in stages], np.int32), np.array(values, np.float64)


def reference(row: np.ndarray, stages: list[tuple[str, Any]]) -> np.ndarray:
    for name, value in stages:
        row = getattr(filters, name)(row, value)
    return row


def check(kernels: Any, row: np.ndarray, stages: list[tuple[str, Any]], seed: int, position: int) -> None:
    with np.errstate(over="ignore"):
        expected = reference(row, stages)
    token = draw.draw(expected, seed, position)
    final = np.empty_like(row)
    assert kernels.choose(row, *encode(stages), seed, position, final) == token, stages
    assert np.array_equal(final, expected), stages
    assert kernels.choose(row, *encode(stages), seed, position, None) == token
    assert kernels.greedy(row) == draw.greedy(row)
    count = min(row.size, 20)
    stats = row_stats(expected)
    assert kernels.describe(expected, token, count) == (
        stats.max,
        stats.total,
        rank_of(expected, token),
        top_ids(expected, count),
    )


def test_random_rows_and_random_orders(kernels: Any) -> None:
    generator = np.random.default_rng(10)
    for _ in range(1500):
        vocab = int(generator.choice([1, 2, 3, 17, 63, 64, 65, 127, 128, 500, 2000]))
        row = random_row(generator, vocab)
        seed, position = int(generator.integers(0, 2**63)), int(generator.integers(0, 2**40))
        check(kernels, row, random_stages(generator), seed, position)


def test_large_vocabularies(kernels: Any) -> None:
    generator = np.random.default_rng(11)
    for vocab in (32_000, 151_936, 200_000):
        for _ in range(6):
            check(kernels, random_row(generator, vocab), random_stages(generator), 5, 17)


def test_every_stage_alone_on_a_large_row_of_ties(kernels: Any) -> None:
    row = np.round(np.random.default_rng(12).normal(size=50_000) * 3).astype(np.float32)
    for name, values in CHOICES.items():
        for value in values:
            check(kernels, row, [(name, value)], 9, 1)


def test_all_equal(kernels: Any) -> None:
    for stages in ([], [("top_p", 0.5)], [("top_k", 7)], [("min_p", 0.1)], [("typical_p", 0.5)], [("top_n_sigma", 1)]):
        check(kernels, np.zeros(10_000, np.float32), stages, 3, 3)


def test_what_cannot_be_chosen_from(kernels: Any) -> None:
    nothing = encode([])
    for vocab in (1, 15, 64, 1000, 5000):
        row = np.zeros(vocab, np.float32)
        for bad, answer in ((np.nan, native.HAS_NAN), (np.inf, native.HAS_INFINITY)):
            for place in {0, vocab // 2, vocab - 1}:
                broken = row.copy()
                broken[place] = bad
                assert kernels.greedy(broken) == answer
                assert kernels.choose(broken, *nothing, 1, 1, None) == answer
        empty = np.full(vocab, -np.inf, np.float32)
        assert kernels.greedy(empty) == native.NONE_LEFT
        assert kernels.choose(empty, *nothing, 1, 1, None) == native.NONE_LEFT


def test_masks(kernels: Any) -> None:
    generator = np.random.default_rng(13)
    for vocab in (1, 31, 32, 33, 100, 1000):
        row = generator.normal(size=vocab).astype(np.float32)
        allowed = generator.random(vocab) < 0.5
        packed = np.packbits(allowed, bitorder="little")
        words = np.zeros((vocab + 31) // 32 * 4, np.uint8)
        words[: packed.size] = packed
        kernels.mask(row_copy := row.copy(), words.view(np.uint32))
        assert np.array_equal(row_copy, np.where(allowed, row, -np.inf).astype(np.float32))


def test_arguments_that_do_not_fit_are_refused(kernels: Any) -> None:
    row = np.zeros(100, np.float32)
    with pytest.raises(ValueError, match="mask is shorter"):
        kernels.mask(row, np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match="not as long as the row"):
        kernels.choose(row, *encode([]), 1, 1, np.zeros(99, np.float32))
    with pytest.raises(ValueError, match="no such token"):
        kernels.describe(row, 100, 0)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 3, "logprobs_stage": "final"},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "logprobs": 5},
    {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logprobs": 2, "logprobs_stage": "final"},
    {"dry_multiplier": 0.8, "no_repeat_ngram": 2, "top_k": 20, "xtc_probability": 0.5},
    {"logit_bias": {3: 5.0, 4: -np.inf}, "min_tokens": 10, "typical_p": 0.9, "top_n_sigma": 2.0},
    {"allowed_token_ids": [1, 5, 9, 200], "temperature": 1.5},
    {"order": ["temperature", "top_p", "repetition"], "top_p": 0.9, "repetition_penalty": 1.3},
    {"best_of": 2, "n": 1},
    *[{"order": name, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1}
      for name in ("transformers", "vllm", "llama.cpp", "mlx")],
]  # fmt: skip


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_whole_samplers_agree(fields: dict[str, Any]) -> None:
    generator = np.random.default_rng(14)
    vocab = 300
    params = SamplingParams(seed=99, **fields).resolve({}, vocab_size=vocab)
    prompt = generator.integers(0, 20, 30).tolist()
    make = {"prompt_ids": prompt, "vocab_size": vocab, "end_ids": frozenset({0, 7})}
    fast, slow = Sampler(params, native=True, **make), Sampler(params, native=False, **make)
    for step in range(40):
        row = random_row(generator, vocab)
        row[:20] = generator.normal(size=20) + 2  # tokens of the prompt stay likely, so that penalties matter
        one, two = fast.choose(row, 30 + step), slow.choose(row, 30 + step)
        assert repr(one) == repr(two)
        fast.accept(one.token)
        slow.accept(two.token)
        assert np.array_equal(fast.scores(row, 31 + step), slow.scores(row, 31 + step))


def test_stages_have_the_codes_that_python_gives() -> None:
    from unspool._native import Sampling

    row = np.array([3, 2, 1, 0], np.float32)
    codes, values = array("i", [1]), array("d", [1])
    for names, survivors in ((["temperature", "top_k"], 1), (["top_k", "temperature"], 4)):
        final = np.empty_like(row)
        Sampling("plain", names).choose(row, codes, values, 0, 0, final)
        assert np.isfinite(final).sum() == survivors
    with pytest.raises(ValueError, match="have no stage top_q"):
        Sampling("plain", ["top_q"])
    with pytest.raises(IndexError):
        Sampling("plain", ["top_k"]).choose(row, codes, values, 0, 0, None)

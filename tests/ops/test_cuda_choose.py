"""The device's draws against the specification's, token by token, under Triton's interpreter or on a card."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the CUDA body needs torch")
pytest.importorskip("triton", reason="the CUDA body needs triton")

from unspool.ops.cuda.choose import Chooser, words_of  # noqa: E402
from unspool.ops.cuda.launch import is_interpreted  # noqa: E402
from unspool.sampling import draw  # noqa: E402
from unspool.sampling.native import HAS_INFINITY, HAS_NAN, NONE_LEFT  # noqa: E402


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not is_interpreted() and not torch.cuda.is_available():
        pytest.skip("no GPU, and TRITON_INTERPRET is not set")
    return torch.device("cpu" if is_interpreted() else "cuda")


def a_draw(temperature: float, seed: int, position: int) -> SimpleNamespace:
    params = SimpleNamespace(temperature=temperature)
    return SimpleNamespace(sampler=SimpleNamespace(params=params, seed=seed), position=position)


@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 10_000])
def test_draws_are_the_specifications(device, vocabulary) -> None:
    rng = np.random.default_rng(vocabulary)
    rows = (4 * rng.standard_normal((12, vocabulary))).astype(np.float32)
    rows[3] = np.round(rows[3])  # ties
    rows[4, ::2] = -np.inf
    rows[5] = 0
    draws = [
        a_draw([0.0, 0.3, 1.0, 2.5][i % 4], int(rng.integers(0, 2**63)), int(rng.integers(0, 2**40))) for i in range(12)
    ]
    if vocabulary == 1:
        rows[4] = 0
    chooser = Chooser(torch.zeros(64, dtype=torch.int32, device=device), vocabulary, device)
    found = chooser.choose(torch.from_numpy(rows).to(device), draws).tokens()
    for row, one, token in zip(rows, draws, found, strict=True):
        temperature = one.sampler.params.temperature
        if temperature == 0:
            expected = draw.greedy(row)
        else:
            expected = draw.draw(row / np.float32(temperature), one.sampler.seed, one.position)
        assert token == expected
    assert chooser.sampled[:12].tolist() == found, "the next step reads them there"


def test_rows_that_nothing_can_be_drawn_from_say_why(device) -> None:
    rows = np.zeros((4, 9000), np.float32)
    rows[0, 8123] = np.nan
    rows[1, 77] = np.inf
    rows[2] = -np.inf
    rows[3, 5000] = 1
    draws = [a_draw(temperature, 1, 2) for temperature in (0.0, 1.0, 1.0, 0.0)]
    chooser = Chooser(torch.zeros(8, dtype=torch.int32, device=device), 9000, device)
    found = chooser.choose(torch.from_numpy(rows).to(device), draws).tokens()
    assert found == [HAS_NAN, HAS_INFINITY, NONE_LEFT, 5000]
    assert chooser.sampled[:4].tolist() == [0, 0, 0, 5000], "a step under way must get a token that exists"


def test_words_hold_64_bit_seeds_and_positions() -> None:
    words = words_of([a_draw(0.5, 2**64 - 1, 2**33 + 5)]).view(np.uint32)
    assert words[0].tolist() == [np.float32(0.5).view(np.uint32), 0xFFFFFFFF, 0xFFFFFFFF, 5, 2]

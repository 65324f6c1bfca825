"""The noise: Philox's published vectors, exact bits in every implementation, and accuracy against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from unspool.sampling import draw, filters


def implementations() -> list[Any]:
    native = pytest.importorskip("unspool._native", reason="the extension is not built")
    found = []
    for isa in ("plain", "avx2", "avx512"):
        try:
            found.append(native.Sampling(isa))
        except ValueError:
            continue  # this processor does not have it
    return found


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_vectors(counter: Any, key: int, expected: tuple[int, ...]) -> None:
    assert draw.philox(counter, key) == expected
    array = draw.philox((np.array([counter[0]], np.uint64), *counter[1:]), key)
    assert tuple(int(np.asarray(word).flat[0]) for word in array) == expected


def test_uniforms_are_never_zero_nor_one() -> None:
    ends = draw.uniform(np.array([0, 2**32 - 1], np.uint64))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]


def test_the_largest_noise() -> None:
    u = draw.uniform(np.array([0, 2**32 - 1], np.uint64))
    noise = -draw.log32(-draw.log32(u))
    assert noise[1] == draw.MAX_GUMBEL
    assert noise[0] == pytest.approx(-math.log(-math.log(2.0**-24)), rel=1e-6)


def test_log_and_exp_are_accurate() -> None:
    generator = np.random.default_rng(1)
    x = np.concatenate([generator.random(500_000), generator.random(500_000) * 20]).astype(np.float32)
    x = np.maximum(x, np.float32(1e-8))
    exact = np.log(x.astype(np.float64))
    unit = np.spacing(np.maximum(np.abs(exact), 1e-30).astype(np.float32))
    assert (np.abs(draw.log32(x) - exact) / unit).max() < 2
    y = -generator.random(1_000_000).astype(np.float32) * 60
    exact = np.exp(y.astype(np.float64))
    assert (np.abs(filters.exp32(y) - exact) / np.spacing(exact.astype(np.float32))).max() < 2
    assert filters.exp32(np.float32([0.0, -np.inf])).tolist() == [1.0, filters.exp32(np.float32([-64]))[0]]


def test_every_implementation_has_the_same_bits() -> None:
    generator = np.random.default_rng(2)
    words = generator.integers(0, 2**32, 1 << 20, dtype=np.uint64)
    u = draw.uniform(words)
    x = -generator.random(1 << 20).astype(np.float32) * 90
    ids = generator.integers(0, 2**31 - 1, 1 << 20).astype(np.int32)
    seed, position = 0xFEDCBA9876543210, 2**40 + 12345
    noise = draw.gumbel(seed, position, ids)
    out = np.empty_like(u)
    for native in implementations():
        native.log(u, out)
        assert np.array_equal(out.view(np.int32), draw.log32(u).view(np.int32)), native.isa
        native.exp(x, out)
        assert np.array_equal(out.view(np.int32), filters.exp32(x).view(np.int32)), native.isa
        native.gumbel(ids, seed, position, out)
        assert np.array_equal(out.view(np.int32), noise.view(np.int32)), native.isa


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    tokens = np.arange(1000)
    noise = draw.gumbel(7, 3, tokens)
    assert np.array_equal(noise[500:], draw.gumbel(7, 3, tokens[500:]))
    for other in (draw.gumbel(8, 3, tokens), draw.gumbel(7, 4, tokens), draw.gumbel(7, 3 + 2**32, tokens)):
        assert np.count_nonzero(noise == other) < 5
    assert draw.xtc_uniform(7, 3) != draw.xtc_uniform(7, 4)


def test_noise_is_gumbel() -> None:
    noise = np.sort(draw.gumbel(1, 1, np.arange(200_000)).astype(np.float64))
    expected = np.exp(-np.exp(-noise))
    steps = np.arange(noise.size) / noise.size
    assert np.abs(expected - steps).max() < 1.63 / math.sqrt(noise.size)  # Kolmogorov's 1% line

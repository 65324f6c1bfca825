"""Drawn frequencies match the exact distribution. Seeds are fixed, so the numbers never change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from unspool.params import SamplingParams
from unspool.sampling.pipeline import Sampler

VOCAB = 40
DRAWS = 20_000
ROW = (np.random.default_rng(3).normal(size=VOCAB) * 1.5).astype(np.float32)
HISTORY = [1, 1, 2, 3, 5, 8, 13, 21, 34, 1, 2]


def exact(fields: dict[str, Any]) -> np.ndarray:
    """The distribution that should be drawn from, in float64 and written a second time, by definition."""
    row = ROW.astype(np.float64)
    if "logit_bias" in fields:
        for token, amount in fields["logit_bias"].items():
            row[token] += amount
    if "allowed_token_ids" in fields:
        row[[i for i in range(VOCAB) if i not in fields["allowed_token_ids"]]] = -np.inf
    seen = sorted(set(HISTORY))
    if (r := fields.get("repetition_penalty")) is not None:
        row[seen] = np.where(row[seen] > 0, row[seen] / r, row[seen] * r)
    p = softmax(row / fields.get("temperature", 1.0))
    order = np.argsort(-p, kind="stable")
    if "top_k" in fields:
        p[order[fields["top_k"] :]] = 0
        p /= p.sum()
    if "top_p" in fields:
        count = 1 + int(np.searchsorted(np.cumsum(p[order]), fields["top_p"]))
        p[order[count:]] = 0
        p /= p.sum()
    if "min_p" in fields:
        p[p < fields["min_p"] * p.max()] = 0
        p /= p.sum()
    if "typical_p" in fields:
        with np.errstate(divide="ignore", invalid="ignore"):
            information = -np.log(p)
            entropy = np.nansum(p * information)
        typical = np.argsort(np.abs(information - entropy), kind="stable")
        count = 1 + int(np.searchsorted(np.cumsum(p[typical]), fields["typical_p"]))
        p[typical[count:]] = 0
        p /= p.sum()
    if "xtc_threshold" in fields:
        above = np.flatnonzero(p >= fields["xtc_threshold"])
        acted = p.copy()
        if above.size > 1:
            acted[acted > p[above].min()] = 0
            acted /= acted.sum()
        p = fields["xtc_probability"] * acted + (1 - fields["xtc_probability"]) * p
    return p


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp(row - row.max())
    return e / e.sum()


def chi_square_is_plausible(counts: np.ndarray, p: np.ndarray) -> bool:
    """Pearson's statistic over cells of at least five expected draws, against its 99.9% point."""
    expected = p * counts.sum()
    assert counts[p == 0].sum() == 0, "a removed token was drawn"
    order = np.argsort(expected)
    cells, cell_counts = [], []
    mass = drawn = 0.0
    for i in order[expected[order] > 0]:
        mass, drawn = mass + expected[i], drawn + counts[i]
        if mass >= 5:
            cells.append(mass)
            cell_counts.append(drawn)
            mass = drawn = 0.0
    cells[-1] += mass
    cell_counts[-1] += drawn
    if len(cells) == 1:
        return True
    statistic = sum((c - e) ** 2 / e for c, e in zip(cell_counts, cells, strict=True))
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile; 3.09 is the normal's 99.9% point.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return bool(statistic < limit)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 100.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.5, "temperature": 1.2},
    {"logit_bias": {0: 3.0, 4: -2.0}, "top_p": 0.95},
    {"allowed_token_ids": [3, 7, 11, 30]},
    {"xtc_probability": 0.4, "xtc_threshold": 0.08},
    {"top_k": 10, "xtc_probability": 1.0, "xtc_threshold": 0.1},
]


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_frequencies(fields: dict[str, Any], by: str) -> None:
    params = SamplingParams(seed=20, **fields).resolve({}, vocab_size=VOCAB)
    sampler = Sampler(params, prompt_ids=HISTORY, vocab_size=VOCAB, end_ids=frozenset())
    counts = np.zeros(VOCAB)
    for i in range(DRAWS):
        if by == "seed":
            sampler.seed = i * 0x9E3779B97F4A7C15 % 2**64
        counts[sampler.choose(ROW, i if by == "position" else 5).token] += 1
    assert chi_square_is_plausible(counts, exact(fields))

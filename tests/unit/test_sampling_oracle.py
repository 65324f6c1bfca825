"""transformers' own processors as an oracle: thousands of rows that it filtered, and we must filter alike."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.params import SamplingParams
from unspool.sampling.pipeline import Sampler
from unspool.sampling.trace import Recorded

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
FOREIGN = {"epsilon_cutoff", "eta_cutoff"}  # stages that we do not have


def _rows_module() -> Any:
    spec = importlib.util.spec_from_file_location("processor_rows", FIXTURES / "processor_rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = _rows_module()
CASES, ARRAYS = ROWS.load(FIXTURES / "processors.npz")
OURS = [i for i, case in enumerate(CASES) if not FOREIGN & set(case["stages"])]


def test_the_rows_are_the_ones_that_transformers_saw() -> None:
    assert ROWS.digest(CASES) == str(ARRAYS["digest"])
    assert sum(CASES[i]["rows"] for i in OURS) > 2500


def final_row(sampler: Sampler, row: np.ndarray) -> np.ndarray:
    recorded: list[Recorded] = []
    _, final = sampler._pick(row, 0, recorded, masked=True)
    assert final is not None
    return final


@pytest.mark.parametrize("index", OURS, ids=lambda i: " ".join(f"{k}={v}" for k, v in CASES[i]["stages"].items()))
def test_survivors_and_values_equal_transformers(index: int) -> None:
    case = CASES[index]
    kept, clear = ARRAYS[f"{index}.kept"], ARRAYS[f"{index}.clear"]
    values = ARRAYS.get(f"{index}.values")
    start = 0
    assert clear.mean() > 0.5
    for row, history, expected, is_clear in zip(ROWS.logits(case), ROWS.history(case), kept, clear, strict=True):
        given = {name: int(v) if name in ("top_k", "no_repeat_ngram") else v for name, v in case["stages"].items()}
        params = SamplingParams(order="transformers", seed=0, trace=True, **given).resolve({}, vocab_size=row.size)
        sampler = Sampler(params, prompt_ids=history, vocab_size=row.size, end_ids=frozenset(), native=False)
        final = final_row(sampler, row)
        end = start + int(expected.sum())
        if is_clear:
            assert np.array_equal(final > -np.inf, expected)
            if values is not None:
                np.testing.assert_allclose(final[expected], values[start:end], rtol=3e-7)
        start = end
